"""PT2E of torch.ao and torchao: a graph with quantize and dequantize nodes around operators."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.descriptor import QuantDescriptor
from torchq.frontends.checkpoints.makers import Grid, Layer, Layers, RefusedError
from torchq.nn import quantized_class

PACKAGE = "quantized_decomposed"
#: What commutes with rounding to a grid.
_MOVES = {
    "view",
    "reshape",
    "_unsafe_view",
    "flatten",
    "permute",
    "transpose",
    "squeeze",
}
_MOVES |= {
    "unsqueeze",
    "slice",
    "clone",
    "relu",
    "max_pool1d",
    "max_pool2d",
    "max_pool3d",
}


def read_pt2e(other: fx.GraphModule, model: nn.Module) -> Layers:
    """Return what a converted graph quantizes, by the modules that its operators come from."""
    layers: Layers = {}
    normalised: set[str] = set()
    held: set[fx.Node] = set()
    for node in other.graph.nodes:
        path = _module_path(node)
        if "batch_norm" in str(node.target):
            normalised.add(path)
        pairs = [(k, arg) for k, arg in enumerate(_tensors(node)) if _dequantizes(arg)]
        if not pairs or isinstance(layers.get(path), str):
            continue
        try:
            layer = _layer(other, node, pairs, model.get_submodule(path))
            if path in layers:
                raise RefusedError("a second quantized operator of this module")
        except (RefusedError, AttributeError, IndexError) as error:
            if not _is_idle(node, pairs, held):
                layers[path or str(node.name)] = f"{node.name}: {error}"
        else:
            layers[path] = layer
            held.add(node)
    for path, module in model.named_modules():
        if (
            isinstance(module, nn.modules.batchnorm._BatchNorm)
            and path not in normalised
        ):
            layers[path] = "folded into a layer there; run torchq.fuse_(model) first"
    return layers


def _dequantizes(node: object) -> bool:
    return isinstance(node, fx.Node) and str(node.target).startswith(
        f"{PACKAGE}.dequantize"
    )


def _moves(node: Any) -> bool:
    return str(node.target).removeprefix("aten.").partition(".")[0] in _MOVES


def _is_idle(
    node: fx.Node, pairs: list[tuple[int, fx.Node]], held: set[fx.Node]
) -> bool:
    """Return True if pairs in front of a node change nothing beside those that stay.

    ``held`` are the operators whose pairs stay: what they read is quantized for them alone.
    """
    grid = pairs[0][1].args[1:]
    behind = (
        [node] if str(node.target).startswith(PACKAGE) else [*node.users] * _moves(node)
    )
    if behind and all(
        str(user.target).startswith(f"{PACKAGE}.quantize") and user.args[1:] == grid
        for user in behind
    ):
        return True  # what it moves is rounded to the same grid there
    for _, pair in pairs:
        source = pair.args[0].args[0]  # type: ignore[union-attr]
        while _moves(source) and source not in held:
            source = source.args[0]  # type: ignore[union-attr]
        if not _moves(source):
            return False
        if source.args[0].args[1:] != pair.args[1:]:  # type: ignore[union-attr]
            return False
    return True  # what it reads is on the grid


def _tensors(node: fx.Node) -> Iterator[Any]:
    """Yield the arguments of an operator that are nodes, also from lists such as cat's."""
    for arg in node.args:
        yield from arg if isinstance(arg, (list, tuple)) else (arg,)


def _module_path(node: fx.Node) -> str:
    """Return the path of the module whose forward called an operator."""
    stack = [*(node.meta.get("nn_module_stack") or {}).values()]
    return (
        str(stack[-1][0]).removeprefix("L['self']").removeprefix(".") if stack else ""
    )


def _layer(
    other: fx.GraphModule,
    node: fx.Node,
    pairs: list[tuple[int, fx.Node]],
    module: nn.Module,
) -> Layer:
    if node.op != "call_function" or str(node.target).startswith(PACKAGE):
        raise RefusedError("a quantized result, or one quantized twice")
    cls = quantized_class(type(module))
    if cls is None:
        raise RefusedError(
            f"a quantized operator of a {type(module).__name__}; expected that of a layer, a pool, "
            "an activation, torchq.nn.Add or the like"
        )
    layer, name = Layer(), str(node.target)
    has_weight = any(kind in name for kind in ("conv", "linear"))
    for place, pair in pairs:
        if has_weight and place == 1:
            layer.grids["weight"] = _grid(other, pair)
            layer.values["weight"] = _value(other, pair)
        else:
            layer.grids[cls.input_slots[place]] = _grid(other, pair)
    tensors = [*_tensors(node)]
    if has_weight and len(tensors) > 2 and isinstance(tensors[2], fx.Node):
        layer.values["bias"] = _value(other, tensors[2])
    return layer


def _grid(other: fx.GraphModule, pair: fx.Node) -> Grid:
    """Return the parameters of a dequantize node."""
    name = str(pair.target).partition(".")[2]
    arguments: list[Any] = [
        _value(other, arg) if isinstance(arg, fx.Node) else arg for arg in pair.args[1:]
    ]
    if name.startswith("dequantize_per_channel.") and len(arguments) >= 5:
        scale, point, axis, low, high = arguments[:5]
    elif name.startswith("dequantize_per_tensor.") and len(arguments) >= 4:
        scale, point, low, high = arguments[:4]
        axis = None
    else:
        raise RefusedError(f"{name}, which torchq has no quantizer for")
    bits = (int(high) - int(low) + 1).bit_length() - 1
    narrow = int(high) - int(low) + 2 == 2 ** (bits + 1)
    bits += narrow
    half = 0 if low == 0 else 1 << (bits - 1)
    if high != (1 << bits) - 1 - half or low != narrow * (low < 0) - half:
        raise RefusedError(f"codes from {low} to {high}")
    point = torch.as_tensor(point)
    descriptor = QuantDescriptor(
        bits,
        axis=axis,
        unsigned=low == 0,
        narrow_range=narrow,
        symmetric=not bool(point.any()),
    )
    return Grid(
        descriptor, scale=torch.as_tensor(scale, dtype=torch.float32), zero_point=point
    )


def _value(other: fx.GraphModule, node: fx.Node) -> Tensor:
    """Return a stored tensor, computed from stored ones where a pair stands behind it."""
    if node.op == "get_attr":
        owner, _, name = str(node.target).rpartition(".")
        tensor: Tensor = getattr(other.get_submodule(owner), name)
        return tensor.detach()
    if not str(node.target).startswith(PACKAGE):
        raise RefusedError(f"a weight that {node.name} computes")
    arguments: list[Any] = [
        _value(other, a) if isinstance(a, fx.Node) else a for a in node.args
    ]
    with torch.no_grad():
        result: Tensor = node.target(*arguments, **node.kwargs)  # type: ignore[operator]
    return result

"""What the nodes of a traced model are, as far as chains care."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torchq.graph import forward_hook_kind
from torchq.lowering.modules.qdq import GatedSiLU

__all__ = [
    "activation_of",
    "added",
    "average_pool_of",
    "clamp_bounds",
    "concatenated",
    "drops_nothing",
    "is_check",
    "keeps_sign",
    "measures",
    "module_of",
    "moved",
    "max_pool_of",
    "part",
    "pointwise_of",
    "source_of",
    "split",
]

_INF = float("inf")

_FUNCTIONS: dict[Any, tuple[str, tuple[float, ...]]] = {
    F.relu: ("relu", ()), torch.relu: ("relu", ()), "relu": ("relu", ()), F.relu6: ("clamp", (0.0, 6.0)),
    F.silu: ("silu", ()), F.hardswish: ("hardswish", ()),
}  # fmt: skip
_IN_PLACE: dict[Any, tuple[str, tuple[float, ...]]] = {
    torch.relu_: ("relu", ()),
    "relu_": ("relu", ()),
    F.relu_: ("relu", ()),
}
_MODULES: dict[type, Callable[[Any], tuple[str, tuple[float, ...]]]] = {
    nn.ReLU: lambda m: ("relu", ()),
    nn.ReLU6: lambda m: ("clamp", (0.0, 6.0)),
    nn.Hardtanh: lambda m: ("clamp", (float(m.min_val), float(m.max_val))),
    nn.SiLU: lambda m: ("silu", ()),
    nn.Hardswish: lambda m: ("hardswish", ()),
    nn.GELU: lambda m: ("gelu_tanh" if m.approximate == "tanh" else "gelu", ()),
}

#: Functions of single values: between two qparams they are tables.
_POINTWISE_MODULES = (nn.Sigmoid, nn.Hardsigmoid, nn.Tanh, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.Mish, nn.Softplus, nn.SiLU,
                      nn.Hardswish, nn.GELU, nn.ReLU, nn.ReLU6, nn.Hardtanh, GatedSiLU)  # fmt: skip
_POINTWISE: dict[Any, Callable[..., Any]] = {
    **{f: f for f in (F.silu, F.hardswish, F.gelu, F.sigmoid, F.hardsigmoid, F.tanh, F.leaky_relu, F.elu, F.mish)},
    torch.sigmoid: torch.sigmoid, torch.tanh: torch.tanh, "sigmoid": torch.sigmoid, "tanh": torch.tanh,
}  # fmt: skip

_ADDS = {operator.add, operator.iadd, torch.add, "add", "add_"}
_ADDS_IN_PLACE = {operator.iadd, "add_"}
#: Rearrange elements, and nothing else; applied to codes they give the codes of what they give.
_MOVES_FUNCTIONS = {
    torch.flatten,
    torch.reshape,
    torch.permute,
    torch.transpose,
    torch.squeeze,
    torch.unsqueeze,
    operator.getitem,
}
_SPLITS = {
    torch.chunk: "chunk",
    torch.split: "split",
    torch.unbind: "unbind",
    "chunk": "chunk",
    "split": "split",
    "unbind": "unbind",
}
#: Functions that drop, and where their argument ``training`` is; the last one is torchvision's.
_DROPS = {
    "dropout": 2,
    "dropout1d": 2,
    "dropout2d": 2,
    "dropout3d": 2,
    "alpha_dropout": 2,
    "stochastic_depth": 3,
}
_MOVES_METHODS = {
    "flatten",
    "reshape",
    "permute",
    "transpose",
    "squeeze",
    "unsqueeze",
    "contiguous",
}
_MOVES_MODULES = (
    nn.Identity,
    nn.Flatten,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.ChannelShuffle,
    nn.PixelShuffle,
)

#: Never negative where their tensor arguments are not.
_KEEP_SIGN_FUNCTIONS = {
    F.adaptive_avg_pool2d,
    F.avg_pool2d,
    F.max_pool2d,
    torch.mean,
    torch.cat,
    operator.mul,
    torch.mul,
    *_ADDS,
}
_KEEP_SIGN_METHODS = {"mean", "mul", *(t for t in _ADDS if isinstance(t, str))}
_KEEP_SIGN_MODULES = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d,
                      nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)  # fmt: skip


_WINDOW = ("kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")
_AVERAGES: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    F.avg_pool2d: (nn.AvgPool2d, _WINDOW),
    F.adaptive_avg_pool2d: (nn.AdaptiveAvgPool2d, ("output_size",)),
}


def module_of(node: Any, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    """The module that a node calls, if it computes what its class says: no subclass with a forward of its own, no hooks."""
    module = (
        modules[str(node.target)]
        if isinstance(node, fx.Node) and node.op == "call_module"
        else None
    )
    if module is None or forward_hook_kind(module) or "forward" in vars(module):
        return None
    return (
        module
        if str(type(module).forward.__module__).partition(".")[0] in ("torch", "torchq")
        else None
    )


def source_of(node: fx.Node) -> fx.Node | None:
    """The first argument, if it is a result."""
    return node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None


def _calls(node: fx.Node, targets: Any) -> bool:
    return node.op in ("call_function", "call_method") and node.target in targets


def activation_of(
    node: fx.Node, modules: Mapping[str, nn.Module]
) -> tuple[str, tuple[float, ...]] | None:
    """Name and arguments of an activation that changes nothing else: one that works in place needs an input without other readers."""
    module = module_of(node, modules)
    if module is not None:
        make = _MODULES.get(type(module))
        return (
            None
            if make is None or (getattr(module, "inplace", False) and _shared(node))
            else make(module)
        )
    if _calls(node, _IN_PLACE):
        return None if _shared(node) else _IN_PLACE[node.target]
    in_place = node.kwargs.get("inplace", False) or len(node.args) > 1
    if _calls(node, _FUNCTIONS) and not (in_place and _shared(node)):
        return _FUNCTIONS[node.target]
    if _calls(node, {F.gelu}):
        return ("gelu_tanh" if node.kwargs.get("approximate") == "tanh" else "gelu", ())
    if _calls(node, {F.hardtanh}) and not node.kwargs.get("inplace"):
        low, high = (*node.args[1:], *([-1.0, 1.0][len(node.args) - 1 :]))[:2]
        return (
            "clamp",
            (float(node.kwargs.get("min_val", low)), float(node.kwargs.get("max_val", high))),
        )  # type: ignore[arg-type]
    return None


def pointwise_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> Callable[[Any], Any] | None:
    """What a node computes from its one tensor, value by value."""
    module = module_of(node, modules)
    if module is not None:
        return module if type(module) in _POINTWISE_MODULES else None
    function = _POINTWISE.get(node.target) if node.op in ("call_function", "call_method") else None
    if function is None or len(node.all_input_nodes) != 1:
        return None
    rest, options = node.args[1:], dict(node.kwargs)
    return lambda x: function(x, *rest, **options)


def _shared(node: fx.Node) -> bool:
    source = node.args[0]
    return isinstance(source, fx.Node) and len(source.users) > 1


def clamp_bounds(found: tuple[str, tuple[float, ...]] | None) -> tuple[float, float] | None:
    """The bounds of an activation that only clamps."""
    if found is None or found[0] not in ("relu", "clamp", "none"):
        return None
    return {"relu": (0.0, _INF), "none": (-_INF, _INF)}.get(found[0]) or (found[1][0], found[1][1])


def added(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The two tensors that a node adds."""
    if not _calls(node, _ADDS) or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return None
    return None if node.target in _ADDS_IN_PLACE and len(a.users) > 1 else (a, b)


def concatenated(node: fx.Node) -> list[fx.Node] | None:
    """The tensors that a node concatenates."""
    if not _calls(node, {torch.cat, torch.concat}):
        return None
    tensors = node.args[0] if node.args else node.kwargs.get("tensors")
    return (
        list(tensors)
        if isinstance(tensors, (list, tuple)) and all(isinstance(t, fx.Node) for t in tensors)
        else None
    )


def moved(node: fx.Node, modules: Mapping[str, nn.Module]) -> fx.Node | None:
    """The tensor whose elements a node rearranges or repeats."""
    module = module_of(node, modules)
    if _repeats(node, module):
        return source_of(node)
    moves = (
        isinstance(module, _MOVES_MODULES) and not getattr(module, "inplace", False)
        if module is not None
        else False
    )
    moves = moves or (
        node.op == "call_function" and (node.target is part or node.target in _MOVES_FUNCTIONS)
    )
    moves = moves or (node.op == "call_method" and node.target in _MOVES_METHODS)
    source = node.args[0] if moves and node.args else None
    # Taking an item of a tuple (or a size) rearranges nothing.
    if node.target is operator.getitem and not (
        isinstance(source, fx.Node) and _makes_tensor(source, modules)
    ):
        return None
    return source if isinstance(source, fx.Node) else None


def _repeats(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a node enlarges an image without computing new values."""
    mode: object = module.mode if isinstance(module, nn.Upsample) else None
    if node.op == "call_function" and node.target is F.interpolate and len(node.args) < 4:
        mode = node.kwargs.get("mode", "nearest")
    return mode in ("nearest", "nearest-exact")


def _makes_tensor(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    module = module_of(node, modules)
    return (
        isinstance(module, (nn.Conv2d, nn.Linear, nn.ReLU))
        or hasattr(module, "input_qparams")
        or hasattr(module, "qparams")
    )


def part(x: Tensor, method: str, index: int, *args: Any, **kwargs: Any) -> Tensor:
    """One of the tensors that a method which splits ``x`` returns."""
    parts: Sequence[Tensor] = getattr(x, method)(*args, **kwargs)
    return parts[index]


def split(node: object) -> tuple[fx.Node, str, tuple[Any, ...]] | None:
    """The tensor that a node splits, the method that does it, and its further arguments."""
    if (
        not isinstance(node, fx.Node)
        or not _calls(node, _SPLITS)
        or not set(node.kwargs) <= {"dim"}
    ):
        return None
    source = source_of(node)
    return None if source is None else (source, _SPLITS[node.target], node.args[1:])


def measures(node: fx.Node) -> bool:
    """Whether a node reads the shape of its tensor alone."""
    return (node.op == "call_method" and node.target in ("size", "dim")) or (
        node.target is getattr and node.args[1] in ("shape", "ndim")
    )


def drops_nothing(node: fx.Node) -> bool:
    """Whether a node is a function that drops values or branches at random in training alone, and this is not training."""
    place = _DROPS.get(getattr(node.target, "__name__", "")) if node.op == "call_function" else None
    return (
        place is not None
        and node.kwargs.get("training", node.args[place] if len(node.args) > place else None)
        is False
    )


def is_check(node: fx.Node) -> bool:
    """Whether a node raises where an argument is not None; torch.fx does not know its own check as one."""
    return node.op == "call_function" and getattr(node.target, "__name__", "") == "_assert_is_none"


def max_pool_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.MaxPool2d | None:
    """The pooling that a node does, where codes can be pooled likewise."""
    module = module_of(node, modules)
    if isinstance(module, nn.MaxPool2d):
        return None if module.return_indices or not isinstance(node.args[0], fx.Node) else module
    if not _calls(node, {F.max_pool2d}) or not isinstance(node.args[0], fx.Node):
        return None
    names = ("kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
    given = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    return None if given.pop("return_indices", False) or _any_node(given) else nn.MaxPool2d(**given)  # type: ignore[arg-type]


def average_pool_of(
    node: fx.Node, modules: Mapping[str, nn.Module]
) -> nn.AvgPool2d | nn.AdaptiveAvgPool2d | None:
    """The average pooling of images that a node does."""
    module = module_of(node, modules)
    if type(module) in (nn.AvgPool2d, nn.AdaptiveAvgPool2d):
        return cast("nn.AvgPool2d | nn.AdaptiveAvgPool2d", module)
    for function, (cls, names) in _AVERAGES.items():
        given = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
        if _calls(node, {function}) and not _any_node(given):
            return cls(**given)
    return None


def _any_node(values: Mapping[str, Any]) -> bool:
    return any(isinstance(v, fx.Node) for v in values.values())


def keeps_sign(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether the result is never negative where all tensor arguments are never negative."""
    if isinstance(module_of(node, modules), _KEEP_SIGN_MODULES) or moved(node, modules) is not None:
        return True
    if node.target is F.pad:
        return len(node.args) < 3 and node.kwargs.get("value") in (None, 0)
    numbers = [
        value for value in (*node.args, *node.kwargs.values()) if isinstance(value, (int, float))
    ]
    known = _calls(node, _KEEP_SIGN_FUNCTIONS) or _calls(node, _KEEP_SIGN_METHODS)
    return known and all(bool(number >= 0) for number in numbers)

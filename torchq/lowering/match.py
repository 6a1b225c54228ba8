"""Predicates that say what a node of a traced model computes, for the passes.

What an operator is and does is told by its row in :mod:`torchq.graph.operators`.
"""

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchq.graph import (
    Operator,
    effects_of,
    forward_hook_kind,
    operator_name,
    operator_of,
)
from torchq.lowering.traced import nth_chunk

#: The name of an activation in :data:`~torchq.lowering.kernel.ACTIVATIONS`, and its arguments.
ActivationCall = tuple[str, tuple[float, ...]]

_INF = float("inf")
#: By :attr:`torchq.graph.Operator.name`.
_ACTIVATIONS: dict[str, ActivationCall] = {
    "relu": ("relu", ()),
    "relu6": ("clamp", (0.0, 6.0)),
    "silu": ("silu", ()),
    "hardswish": ("hardswish", ()),
}
#: Functions that drop values while training, and the position of their argument ``training``.
#: The last one is torchvision's.
_DROPOUT = {
    **dict.fromkeys(
        ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"), 2
    ),
    "stochastic_depth": 3,
}
_WINDOW = ("kernel_size", "stride", "padding")
_POOLS: dict[object, tuple[str, ...]] = {
    nn.MaxPool2d: (*_WINDOW, "dilation", "ceil_mode", "return_indices"),
    nn.AvgPool2d: (*_WINDOW, "ceil_mode", "count_include_pad", "divisor_override"),
    nn.AdaptiveAvgPool2d: ("output_size",),
}


def module_of(node: object, trace: fx.GraphModule) -> nn.Module | None:
    """Return the module that ``node`` calls, if it computes what its class says.

    That excludes modules with forward hooks or a forward of their own, and subclasses defined
    outside torch and torchq.
    """
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    module = trace.get_submodule(str(node.target))
    if forward_hook_kind(module) or "forward" in vars(module):
        return None
    package = str(type(module).forward.__module__).partition(".")[0]
    return module if package in ("torch", "torchq") else None


def input_node(node: object, index: int = 0) -> fx.Node | None:
    """Return the positional argument ``index`` of ``node``, if it is the result of a node."""
    if not isinstance(node, fx.Node) or len(node.args) <= index:
        return None
    argument = node.args[index]
    return argument if isinstance(argument, fx.Node) else None


def row_of(node: fx.Node, trace: fx.GraphModule) -> Operator | None:
    """Return the operator that ``node`` computes as a function, method or module."""
    if node.op in ("call_function", "call_method"):
        return operator_of(node.target)
    module = module_of(node, trace)
    return None if module is None else operator_of(module)


def _name(node: fx.Node) -> str:
    """Return the name of the operator of a function or method; "" for other nodes."""
    row = (
        operator_of(node.target)
        if node.op in ("call_function", "call_method")
        else None
    )
    return "" if row is None else row.name


def activation_of(node: fx.Node, trace: fx.GraphModule) -> ActivationCall | None:
    """Return the activation that ``node`` computes, if nothing else can notice the call.

    An activation that works in place counts only where its input has no other reader.
    """
    module = module_of(node, trace)
    row = row_of(node, trace)
    in_place = (
        node.kwargs.get("inplace", False) or len(node.args) > 1 or _ends_in_place(node)
    )
    if module is not None:
        in_place = getattr(module, "inplace", False)
    activation = None if row is None else _ACTIVATIONS.get(row.name)
    if type(module) is nn.Hardtanh:
        activation = "clamp", (float(module.min_val), float(module.max_val))
    elif isinstance(module, nn.GELU) or node.target is F.gelu:
        tanh = getattr(module, "approximate", node.kwargs.get("approximate")) == "tanh"
        activation = "gelu_tanh" if tanh else "gelu", ()
    source = input_node(node)
    return (
        None
        if in_place and source is not None and len(source.users) > 1
        else activation
    )


def _ends_in_place(node: fx.Node) -> bool:
    return node.op != "call_module" and operator_name(node.target).endswith("_")


def clamp_bounds(found: ActivationCall | None) -> tuple[float, float] | None:
    """Return the bounds of an activation that only clamps, or None."""
    if found is None or found[0] not in ("relu", "clamp", "none"):
        return None
    name, arguments = found
    if name == "clamp":
        return arguments[0], arguments[1]
    return (0.0, _INF) if name == "relu" else (-_INF, _INF)


def is_inactive_dropout(node: fx.Node) -> bool:
    """Return True if ``node`` is a dropout function called with ``training=False``."""
    place = (
        _DROPOUT.get(operator_name(node.target)) if node.op == "call_function" else None
    )
    if place is None:
        return False
    positional = node.args[place] if len(node.args) > place else None
    return node.kwargs.get("training", positional) is False


def add_operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the two different tensors that ``node`` adds, or None."""
    if _name(node) != "add" or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return None
    in_place = node.target is operator.iadd or _ends_in_place(node)
    return None if in_place and len(a.users) > 1 else (a, b)


def concat_operands(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that ``node`` concatenates; an empty list for other nodes."""
    tensors = (
        (*node.args, node.kwargs.get("tensors"))[0] if _name(node) == "cat" else None
    )
    if not isinstance(tensors, (list, tuple)):
        return []
    nodes = [tensor for tensor in tensors if isinstance(tensor, fx.Node)]
    return nodes if len(nodes) == len(tensors) else []


def view_source(node: fx.Node, trace: fx.GraphModule) -> fx.Node | None:
    """Return the tensor whose elements ``node`` rearranges or repeats, or None.

    Such a node commutes with every function of single values, rounding included.
    """
    source = input_node(node)
    # An item of a tuple or of a size rearranges nothing.
    if node.target is operator.getitem:
        module = module_of(source, trace)
        is_one_tensor = isinstance(module, (nn.Conv2d, nn.Linear, nn.ReLU)) or hasattr(
            module, "input_qparams"
        )
        return (
            source
            if is_one_tensor or (source and activation_of(source, trace))
            else None
        )
    if node.target is nth_chunk or _repeats(node, trace) or _rearranges(node, trace):
        return source
    return None


def _rearranges(node: fx.Node, trace: fx.GraphModule) -> bool:
    if node.op == "call_module":
        row = row_of(node, trace)
        module = module_of(node, trace)
        dropout = isinstance(module, nn.Dropout | nn.Identity)
        moves = row is not None and "move" in row.effects
        return (moves or dropout) and not getattr(module, "inplace", False)
    if node.op not in ("call_function", "call_method") or views_bits(node):
        return False
    name = operator_name(node.target)
    from_torch = node.op == "call_method" or getattr(torch, name, None) is node.target
    return from_torch and "move" in effects_of(name)


def views_bits(node: fx.Node) -> bool:
    """Return True if ``node`` is ``x.view(dtype)``, which reinterprets bits."""
    arguments = (*node.args, *node.kwargs.values())
    return node.target == "view" and any(isinstance(a, torch.dtype) for a in arguments)


def _repeats(node: fx.Node, trace: fx.GraphModule) -> bool:
    """Return True if ``node`` enlarges an image by repeating its elements."""
    module = module_of(node, trace)
    mode: object = module.mode if isinstance(module, nn.Upsample) else None
    if node.target is F.interpolate and len(node.args) < 4:
        mode = node.kwargs.get("mode", "nearest")
    return mode in ("nearest", "nearest-exact")


def pool_of(node: fx.Node, trace: fx.GraphModule, *kinds: type) -> Any:
    """Return the pooling of images of one of some kinds that ``node`` computes, or None."""
    pool = module_of(node, trace)
    row = row_of(node, trace)
    kind = next((k for k in kinds if row is not None and k in row.classes), None)
    if kind is not None and node.op != "call_module":
        arguments = {
            **dict(zip(_POOLS[kind], node.args[1:], strict=False)),
            **node.kwargs,
        }
        pool = (
            None
            if any(isinstance(v, fx.Node) for v in arguments.values())
            else kind(**arguments)
        )
    fits = type(pool) in kinds and not getattr(pool, "return_indices", False)
    return pool if fits and input_node(node) is not None else None


def preserves_nonnegative(node: fx.Node, trace: fx.GraphModule) -> bool:
    """Return True if the result is never negative where no tensor argument is negative."""
    if view_source(node, trace) is not None:
        return True
    if node.target is F.pad:
        return len(node.args) < 3 and node.kwargs.get("value") in (None, 0)
    numbers = [
        v for v in (*node.args, *node.kwargs.values()) if isinstance(v, (int, float))
    ]
    row = row_of(node, trace)
    row_keeps = row is not None and row.nonnegative == "kept"
    return row_keeps and all(bool(number >= 0) for number in numbers)

"""Predicates that say what a node of a traced model computes, for the passes."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchq.graph import effects_of, forward_hook_kind, operator_name, operator_of
from torchq.lowering.codes import CodesMaxPool2d
from torchq.lowering.traced import nth_chunk

#: The name of an activation in :data:`~torchq.lowering.kernel.ACTIVATIONS`, and its arguments.
ActivationCall = tuple[str, tuple[float, ...]]

_INF = float("inf")

#: By :attr:`torchq.graph.Operator.name`, for functions and methods.
_ACTIVATION_FUNCTIONS: dict[str, ActivationCall] = {
    "relu": ("relu", ()),
    "relu6": ("clamp", (0.0, 6.0)),
    "silu": ("silu", ()),
    "hardswish": ("hardswish", ()),
}
_ACTIVATION_MODULES: dict[type, Callable[[Any], ActivationCall]] = {
    nn.ReLU: lambda m: ("relu", ()),
    nn.ReLU6: lambda m: ("clamp", (0.0, 6.0)),
    nn.Hardtanh: lambda m: ("clamp", (float(m.min_val), float(m.max_val))),
    nn.SiLU: lambda m: ("silu", ()),
    nn.Hardswish: lambda m: ("hardswish", ()),
    nn.GELU: lambda m: (_gelu(m.approximate), ()),
}

_ADD_IN_PLACE = {operator.iadd, "add_"}
_SPLIT: dict[Any, str] = {
    **{getattr(torch, name): name for name in ("chunk", "split", "unbind")},
    **{name: name for name in ("chunk", "split", "unbind")},
}
#: Functions that drop values while training, and the position of their argument ``training``.
#: The last one is torchvision's.
_DROPOUT = {
    **dict.fromkeys(("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout"), 2),
    "stochastic_depth": 3,
}
#: Modules that rearrange elements, as operators with the effect "move" do.
_REARRANGING_MODULES = (
    *(nn.Identity, nn.Flatten, nn.ChannelShuffle, nn.PixelShuffle),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)

_NONNEGATIVE_MODULES = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)

_WINDOW = ("kernel_size", "stride", "padding")
_MAX_POOL_ARGUMENTS = (*_WINDOW, "dilation", "ceil_mode", "return_indices")
_AVERAGE_POOLS: dict[Any, tuple[Callable[..., Any], tuple[str, ...]]] = {
    F.avg_pool2d: (
        nn.AvgPool2d,
        (*_WINDOW, "ceil_mode", "count_include_pad", "divisor_override"),
    ),
    F.adaptive_avg_pool2d: (nn.AdaptiveAvgPool2d, ("output_size",)),
}

Modules = Mapping[str, nn.Module]


def module_of(node: object, modules: Modules) -> nn.Module | None:
    """Return the module that ``node`` calls, if it computes what its class says.

    That excludes modules with forward hooks or a forward of their own, and subclasses defined
    outside torch and torchq.
    """
    if not isinstance(node, fx.Node) or node.op != "call_module":
        return None
    module = modules[str(node.target)]
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


def is_none_check(node: fx.Node) -> bool:
    """Return True if ``node`` raises where an argument is not None.

    ``fx.Node.is_impure`` does not know this function of torch.fx as one with an effect.
    """
    return node.op == "call_function" and operator_name(node.target) == "_assert_is_none"


def _calls(node: fx.Node, targets: Any) -> bool:
    return node.op in ("call_function", "call_method") and node.target in targets


def _operator(node: fx.Node) -> str:
    """Return the name of the operator of a function or method; "" for other nodes."""
    is_call = node.op in ("call_function", "call_method")
    row = operator_of(node.target) if is_call else None
    return "" if row is None else row.name


def _arguments(node: fx.Node, names: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a function after its first one, by name."""
    return {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}


def _has_node(values: Mapping[str, Any]) -> bool:
    return any(isinstance(value, fx.Node) for value in values.values())


def _input_is_shared(node: fx.Node) -> bool:
    source = input_node(node)
    return source is not None and len(source.users) > 1


def activation_of(node: fx.Node, modules: Modules) -> ActivationCall | None:
    """Return the activation that ``node`` computes, if nothing else can notice the call.

    An activation that works in place counts only where its input has no other reader.
    """
    module = module_of(node, modules)
    in_place = node.kwargs.get("inplace", False) or node.target in (torch.relu_, "relu_")
    found: ActivationCall | None = None
    if module is not None:
        describe = _ACTIVATION_MODULES.get(type(module))
        found = None if describe is None else describe(module)
        in_place = getattr(module, "inplace", False)
    elif (name := _operator(node)) in _ACTIVATION_FUNCTIONS:
        found, in_place = _ACTIVATION_FUNCTIONS[name], in_place or len(node.args) > 1
    elif _calls(node, {F.gelu}):
        found = _gelu(node.kwargs.get("approximate")), ()
    return None if in_place and _input_is_shared(node) else found


def _gelu(approximate: object) -> str:
    return "gelu_tanh" if approximate == "tanh" else "gelu"


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
    place = _DROPOUT.get(operator_name(node.target)) if node.op == "call_function" else None
    if place is None:
        return False
    positional = node.args[place] if len(node.args) > place else None
    return node.kwargs.get("training", positional) is False


def add_operands(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Return the two different tensors that ``node`` adds, or None."""
    if _operator(node) != "add" or node.kwargs or len(node.args) != 2:
        return None
    a, b = node.args
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or a is b:
        return None
    return None if node.target in _ADD_IN_PLACE and len(a.users) > 1 else (a, b)


def concat_operands(node: fx.Node) -> list[fx.Node]:
    """Return the tensors that ``node`` concatenates; an empty list for other nodes."""
    if not isinstance(node, fx.Node) or _operator(node) != "cat":
        return []
    tensors = node.args[0] if node.args else node.kwargs.get("tensors")
    if not isinstance(tensors, (list, tuple)):
        return []
    nodes = [tensor for tensor in tensors if isinstance(tensor, fx.Node)]
    return nodes if len(nodes) == len(tensors) else []


def split_call(node: object) -> tuple[fx.Node, str, tuple[Any, ...]] | None:
    """Return the tensor that ``node`` splits, the method that does it, and its arguments."""
    if not isinstance(node, fx.Node) or not _calls(node, _SPLIT):
        return None
    source = input_node(node)
    if source is None or not set(node.kwargs) <= {"dim"}:
        return None
    return source, _SPLIT[node.target], node.args[1:]


def view_source(node: fx.Node, modules: Modules) -> fx.Node | None:
    """Return the tensor whose elements ``node`` rearranges or repeats, or None.

    Such a node commutes with every function of single values, rounding included.
    """
    module = module_of(node, modules)
    if not (_repeats(node, module) or _rearranges(node, module)):
        return None
    source = input_node(node)
    if node.target is operator.getitem and not _returns_tensor(source, modules):
        return None  # an item of a tuple or of a size rearranges nothing
    return source


def _rearranges(node: fx.Node, module: nn.Module | None) -> bool:
    if module is not None:
        in_place = getattr(module, "inplace", False)
        return isinstance(module, _REARRANGING_MODULES) and not in_place
    if node.op == "call_method":
        return "move" in effects_of(str(node.target)) and not views_bits(node)
    if node.op != "call_function":
        return False
    name = operator_name(node.target)
    from_torch = getattr(torch, name, None) is node.target
    is_part = node.target in (nth_chunk, operator.getitem)
    return is_part or (from_torch and "move" in effects_of(name))


def views_bits(node: fx.Node) -> bool:
    """Return True if ``node`` is ``x.view(dtype)``, which reinterprets bits."""
    arguments = (*node.args, *node.kwargs.values())
    return node.target == "view" and any(isinstance(a, torch.dtype) for a in arguments)


def _repeats(node: fx.Node, module: nn.Module | None) -> bool:
    """Return True if ``node`` enlarges an image by repeating its elements."""
    mode: object = module.mode if isinstance(module, nn.Upsample) else None
    if node.op == "call_function" and node.target is F.interpolate and len(node.args) < 4:
        mode = node.kwargs.get("mode", "nearest")
    return mode in ("nearest", "nearest-exact")


def _returns_tensor(node: fx.Node | None, modules: Modules) -> bool:
    """Return True if the result of ``node`` is known to be a single tensor."""
    module = module_of(node, modules)
    return (
        isinstance(module, (nn.Conv2d, nn.Linear, nn.ReLU))
        or hasattr(module, "input_qparams")
        or hasattr(module, "qparams")
    )


def max_pool_of(node: fx.Node, modules: Modules) -> nn.MaxPool2d | None:
    """Return the max pooling of images that ``node`` computes, if codes can be pooled likewise."""
    module = module_of(node, modules)
    if input_node(node) is None:
        return None
    if isinstance(module, nn.MaxPool2d):
        return None if module.return_indices else module
    if not _calls(node, {F.max_pool2d}):
        return None
    given = _arguments(node, _MAX_POOL_ARGUMENTS)
    return None if given.pop("return_indices", False) or _has_node(given) else nn.MaxPool2d(**given)


def average_pool_of(node: fx.Node, modules: Modules) -> nn.AvgPool2d | nn.AdaptiveAvgPool2d | None:
    """Return the average pooling of images that ``node`` computes, or None."""
    module = module_of(node, modules)
    if type(module) in (nn.AvgPool2d, nn.AdaptiveAvgPool2d):
        return cast("nn.AvgPool2d | nn.AdaptiveAvgPool2d", module)
    for function, (kind, names) in _AVERAGE_POOLS.items():
        given = _arguments(node, names)
        if _calls(node, {function}) and not _has_node(given):
            return kind(**given)
    return None


def passes_codes(node: fx.Node, modules: Modules) -> bool:
    """Return True if ``node`` applied to codes gives the codes of its result for values."""
    pools = isinstance(module_of(node, modules), CodesMaxPool2d)
    return pools or view_source(node, modules) is not None


def preserves_nonnegative(node: fx.Node, modules: Modules) -> bool:
    """Return True if the result is never negative where no tensor argument is negative."""
    module = module_of(node, modules)
    if isinstance(module, _NONNEGATIVE_MODULES) or view_source(node, modules) is not None:
        return True
    if node.target is F.pad:
        return len(node.args) < 3 and node.kwargs.get("value") in (None, 0)
    arguments = (*node.args, *node.kwargs.values())
    numbers = [value for value in arguments if isinstance(value, (int, float))]
    row = operator_of(node.target) if node.op in ("call_function", "call_method") else None
    is_kept = row is not None and row.nonnegative == "kept"
    return is_kept and all(bool(number >= 0) for number in numbers)

"""Layers that a runtime runs faster in float, though it has an integer kernel for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from torchq.graph import Call, Flow, record
from torchq.nn import QuantConv2d, QuantModule, TensorQuantizer
from torchq.swap.decision import Decision
from torchq.swap.flow.calls import clips, is_depthwise, is_leaf, moves_elements
from torchq.swap.targets import Target
from torchq.utils import matches

__all__ = ["faster_in_float"]

_IMAGE_CHANNELS = 4
_SMALL_KERNEL = 3


def faster_in_float(
    model: nn.Module, decisions: Sequence[Decision], target: Target, example: Any
) -> dict[str, str]:
    """Return the modules and operators that a target runs faster in float, with the reason.

    Before: the model is quantized as ``decisions`` say. After, once the plan is made without these:
    the first convolution is float where the target names the activation behind it, which has no
    integer kernel; and so are depthwise convolutions with few channels that no padding can help.

    Args:
        model: quantized; it runs once on ``example``.
        decisions: all of them. One whose rule is the path of its module is left alone.
        target: the runtime.
        example: the arguments of one call; see :func:`torchq.graph.call_arguments`.
    """
    if not target.float_stems and not target.narrow_depthwise:
        return {}
    known = {id(d.module): d for d in decisions if not d.reason and d.rule not in d.names}
    names = {id(m): name for name, m in model.named_modules()}
    flow = record(model, example, is_leaf)
    found: dict[str, str] = {}
    for call in flow.calls:
        module = call.module
        if not isinstance(module, QuantConv2d) or id(module) not in known:
            continue
        if is_depthwise(module) and module.groups < target.narrow_depthwise:
            if not _is_chain(flow, call):
                reason = f"{target.name} runs {module.groups} channels faster in float"
                found[names[id(module)]] = reason
        elif _is_stem(module, call):
            behind = list(_layers_behind(flow, call, moves_elements))
            paths = [_float_stem(m, names, target) for m in behind]
            if paths and all(paths):
                reason = f"{target.name} runs the first convolution and {_kind(behind)} in one go"
                found |= dict.fromkeys((names[id(module)], *map(str, paths)), reason)
    return found


def _is_stem(module: QuantConv2d, call: Call) -> bool:
    """Return True for a convolution of an image with few channels and a small kernel."""
    is_small = max(module.kernel_size) <= _SMALL_KERNEL and module.groups == 1
    return is_small and module.in_channels <= _IMAGE_CHANNELS and not call.inputs


def _float_stem(module: nn.Module | None, names: dict[int, str], target: Target) -> str | None:
    """Return the path of an activation that runs in float with the convolution before it."""
    if module is None or not isinstance(module, QuantModule):
        return None
    name = names[id(module)]
    cls = type(module).float_class
    fits = any(matches(pattern, (name,), module, cls) for pattern in target.float_stems)
    return name if fits else None


def _kind(modules: Sequence[nn.Module | None]) -> str:
    (kind, *_) = {type(m).float_class.__name__ for m in modules if isinstance(m, QuantModule)}
    return str(kind)


def _is_chain(flow: Flow, call: Call) -> bool:
    """Return True if a depthwise convolution stands between other convolutions alone.

    Its channels can then be padded with zeros.
    """
    before = call
    while not (isinstance(before.module, QuantConv2d) and before is not call):
        if len(before.inputs) != 1 or (before is not call and not _is_pointwise(before)):
            return False
        before = flow.calls[before.inputs[0]]
        if len(flow.consumers(before)) != 1:
            return False
    behind = _layers_behind(flow, call, _is_pointwise)
    return all(isinstance(m, QuantConv2d) and m.groups == 1 for m in behind)


def _layers_behind(
    flow: Flow, call: Call, passes: Callable[[Call], bool]
) -> Iterator[nn.Module | None]:
    """Yield the modules behind a call and others that pass a value on; None for functions."""
    if call.index in flow.outputs:
        yield None
    for reader in flow.consumers(call):
        if passes(reader):
            yield from _layers_behind(flow, reader, passes)
        else:
            yield reader.module


def _is_pointwise(call: Call) -> bool:
    """Return True for activations and quantizers."""
    if clips(call) or isinstance(call.module, TensorQuantizer):
        return True
    library = type(call.module).__module__ == "torchq.nn.modules.input_quantized"
    return (library and "Pool" not in type(call.module).__name__) or moves_elements(call)

"""Layers that a runtime runs faster in float, though it has an integer kernel for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import nn

from torchq.graph import Call, Flow, record
from torchq.nn import QuantConv2d, TensorQuantizer
from torchq.swap.decision import Decision
from torchq.swap.flow.calls import clips, is_depthwise, is_leaf, moves_elements
from torchq.swap.targets import Target

__all__ = ["faster_in_float"]


def faster_in_float(
    model: nn.Module, decisions: Sequence[Decision], target: Target, example: Any
) -> dict[str, str]:
    """Return the modules and operators that a target runs faster in float, with the reason.

    Before: the model is quantized as ``decisions`` say. After, once the plan is made without these:
    depthwise convolutions with few channels that no padding can help are float.

    Args:
        model: quantized; it runs once on ``example``.
        decisions: all of them. One whose rule is the path of its module is left alone.
        target: the runtime.
        example: the arguments of one call; see :func:`torchq.graph.call_arguments`.
    """
    if not target.narrow_depthwise:
        return {}
    known = {id(d.module): d for d in decisions if not d.reason and d.rule not in d.names}
    names = {id(m): name for name, m in model.named_modules()}
    flow = record(model, example, is_leaf)
    found: dict[str, str] = {}
    for call in flow.calls:
        module = call.module
        if not isinstance(module, QuantConv2d) or id(module) not in known:
            continue
        is_narrow = is_depthwise(module) and module.groups < target.narrow_depthwise
        if is_narrow and not _is_chain(flow, call):
            reason = f"{target.name} runs {module.groups} channels faster in float"
            found[names[id(module)]] = reason
    return found


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

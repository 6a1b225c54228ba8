"""Results of convolutions that nothing quantizes, for runtimes that need them quantized.

An integer convolution of ONNX Runtime returns codes. Where a LayerNorm, a GELU or a learned factor
reads its result, no quantizer stands behind it, and the convolution runs in float.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from torchq.graph import REARRANGING, Call, Flow, is_torch_leaf, record
from torchq.nn import QuantConv1d, QuantConv2d, QuantConv3d, QuantModule, TensorQuantizer
from torchq.swap.decision import Decision

__all__ = ["decide_outputs"]

_RELU = frozenset(["relu", "relu_"])
_MOVING_MODULES = (nn.Identity, nn.Dropout, nn.Flatten, nn.Unflatten)
#: Multiplication by, and addition of, stored numbers: exporters fold them into the convolution.
_AFFINE = frozenset(["mul", "mul_", "add", "add_", "multiply"])


def decide_outputs(
    model: nn.Module, decisions: tuple[Decision, ...], example: Any
) -> list[Decision]:
    """Return the decisions about convolutions whose result needs a quantizer, with its descriptor.

    Before: the model is quantized, and some results of quantized convolutions are read by
    operators that quantize nothing. After: these decisions have an ``output``; it is unsigned
    where a ReLU alone reads the result. Results that the model returns stay float.

    Args:
        model: quantized as ``decisions`` say; it runs once on ``example``.
        decisions: all of them.
        example: the arguments of one call; see :func:`torchq.graph.call_arguments`.
    """
    chosen = [d for d in decisions if _may_have_output(d)]
    if not chosen:
        return []
    flow = record(model, example, _is_leaf)
    found = []
    for decision in chosen:
        calls = flow.calls_of(decision.module)
        needs = [_Readers(flow, call) for call in calls]
        if any(n.in_float for n in needs) and not any(n.returned for n in needs):
            assert decision.input is not None
            unsigned = all(n.after_relu for n in needs) and isinstance(decision.input.num_bits, int)
            output = decision.input.replace(name=None, unsigned=unsigned)
            found.append(replace(decision, output=output))
    return found


def _may_have_output(decision: Decision) -> bool:
    module = decision.module
    return (
        not decision.reason
        and decision.input is not None
        and decision.weight is not None
        and isinstance(module, (QuantConv1d, QuantConv2d, QuantConv3d))
    )


def _is_leaf(module: nn.Module) -> bool:
    if isinstance(module, QuantModule):
        return not module.is_container and bool(module.slots())
    return isinstance(module, TensorQuantizer) or is_torch_leaf(module)


class _Readers:
    """What reads the result of one call of a convolution.

    Attributes:
        in_float: something other than a quantizer reads it.
        returned: the model returns it.
        after_relu: a ReLU is all that reads it.
    """

    def __init__(self, flow: Flow, call: Call) -> None:
        self._flow = flow
        self.in_float = self.returned = False
        consumers = flow.consumers(call)
        self.after_relu = bool(consumers) and all(map(_is_relu, consumers))
        self._follow(call, moved=False, activated=False)

    def _follow(self, call: Call, *, moved: bool, activated: bool) -> None:
        if call.index in self._flow.outputs:
            self.returned = True
        for reader in self._flow.consumers(call):
            if _quantizes(reader):
                continue
            if _is_relu(reader):
                self._follow(reader, moved=moved, activated=True)
            elif _moves(reader):
                self._follow(reader, moved=True, activated=activated)
            elif not moved and not activated and self._is_affine(reader, call):
                self._follow(reader, moved=moved, activated=activated)
            else:
                self.in_float = True

    def _is_affine(self, reader: Call, operand: Call) -> bool:
        """Return True for the product or sum of a value and stored numbers."""
        others = [i for i in reader.inputs if i != operand.index]
        return reader.name in _AFFINE and all(map(self._is_stored, others))

    def _is_stored(self, index: int) -> bool:
        call = self._flow.calls[index]
        return call.module is None and not call.inputs and call.name in REARRANGING


def _is_relu(call: Call) -> bool:
    return isinstance(call.module, nn.ReLU) or (call.module is None and call.name in _RELU)


def _moves(call: Call) -> bool:
    if call.module is None:
        return call.name in REARRANGING
    return isinstance(call.module, _MOVING_MODULES) and not isinstance(call.module, QuantModule)


def _quantizes(call: Call) -> bool:
    """Return True for a quantizer, and for a layer that quantizes what it reads."""
    module = call.module
    if isinstance(module, TensorQuantizer):
        return module.quantizing
    if not isinstance(module, QuantModule):
        return False
    return all(q.quantizing for q in _input_quantizers(module))


def _input_quantizers(module: QuantModule) -> Iterator[Any]:
    for slot in module.input_slots:
        quantizer = getattr(module, f"{slot}_quantizer")
        yield quantizer if isinstance(quantizer, TensorQuantizer) else _Float()


class _Float:
    quantizing = False

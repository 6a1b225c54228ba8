"""Results of convolutions that nothing quantizes, for runtimes that need them quantized.

An integer convolution of ONNX Runtime returns codes. Where a LayerNorm, a GELU or a learned factor
reads its result, no quantizer stands behind it, and the convolution runs in float.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from torchq.graph import REARRANGING, Call, Flow, record
from torchq.nn import QuantConv1d, QuantConv2d, QuantConv3d
from torchq.swap.decision import Decision
from torchq.swap.flow.calls import (
    clips,
    is_depthwise,
    is_float_layer,
    is_leaf,
    is_relu,
    moves_elements,
    pads_with_zeros,
    quantizes,
)

_CONVOLUTIONS = (QuantConv1d, QuantConv2d, QuantConv3d)
#: Multiplication by, and addition of, stored numbers: exporters fold them into the convolution.
_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_AFFINE = frozenset(["mul", "mul_", "add", "add_", "multiply"])


def decide_outputs(
    model: nn.Module, decisions: tuple[Decision, ...], example: Any
) -> list[Decision]:
    """Return the decisions about convolutions whose result needs a quantizer, with its descriptor.

    Before: the model is quantized, and some results of quantized convolutions are read by
    operators that quantize nothing. After: these decisions have an ``output``; it is unsigned
    where a ReLU alone reads the result. Results that the model returns, or that a layer reads which
    stays float, are left alone. So are depthwise convolutions in front of a norm, say: their float
    kernel is the faster one there.
    """
    chosen = [d for d in decisions if _may_have_output(d)]
    if not chosen:
        return []
    flow = record(model, example, is_leaf)
    found = []
    for decision in chosen:
        calls = flow.calls_of(decision.module)
        needs = [_Readers(flow, call) for call in calls]
        kept = any(n.returned or n.behind_norm for n in needs)
        if any(n.in_float for n in needs) and not kept:
            assert decision.input is not None
            unsigned = all(n.after_relu for n in needs) and isinstance(decision.input.num_bits, int)
            if is_depthwise(decision.module) and not unsigned:
                continue
            output = decision.input.replace(name=None, unsigned=unsigned)
            found.append(replace(decision, output=output))
    return found


def _may_have_output(decision: Decision) -> bool:
    module = decision.module
    return (
        not decision.reason
        and decision.input is not None
        and decision.weight is not None
        and isinstance(module, _CONVOLUTIONS)
    )


class _Readers:
    """What reads the result of one call of a convolution.

    Attributes:
        in_float: something other than a quantizer reads it.
        returned: the model returns it, or a layer that stays float reads it.
        after_relu: a ReLU is all that reads it.
        behind_norm: a BatchNorm reads it, which the exporter folds into the convolution.
    """

    def __init__(self, flow: Flow, call: Call) -> None:
        self._flow = flow
        self.in_float = self.returned = self.behind_norm = False
        self.after_relu = self._is_before_relus(call)
        self._follow(call, moved=False, activated=False)

    def _is_before_relus(self, call: Call) -> bool:
        """Return True if ReLUs are all that reads a result, also behind what moves elements."""
        readers = self._flow.consumers(call)
        return bool(readers) and all(
            is_relu(reader) or (moves_elements(reader) and self._is_before_relus(reader))
            for reader in readers
        )

    def _follow(self, call: Call, *, moved: bool, activated: bool) -> None:
        if call.index in self._flow.outputs:
            self.returned = True
        for reader in self._flow.consumers(call):
            if quantizes(reader):
                continue
            if is_float_layer(reader.module):
                self.returned = True
            elif clips(reader):
                self._follow(reader, moved=moved, activated=True)
            elif moves_elements(reader):
                self._follow(reader, moved=True, activated=activated)
            elif pads_with_zeros(reader) and self._is_before_convolutions(reader):
                continue
            elif not moved and not activated and self._is_affine(reader, call):
                self.behind_norm |= isinstance(reader.module, _NORMS)
                self._follow(reader, moved=moved, activated=activated)
            else:
                self.in_float = True

    def _is_before_convolutions(self, call: Call) -> bool:
        """Return True if quantized convolutions are all that reads a result."""
        readers = self._flow.consumers(call)
        return bool(readers) and all(
            isinstance(reader.module, _CONVOLUTIONS) and quantizes(reader) for reader in readers
        )

    def _is_affine(self, reader: Call, operand: Call) -> bool:
        """Return True for BatchNorm, and the product or sum of a value and stored numbers."""
        others = [i for i in reader.inputs if i != operand.index]
        if isinstance(reader.module, _NORMS):
            return True
        return reader.name in _AFFINE and all(map(self._is_stored, others))

    def _is_stored(self, index: int) -> bool:
        call = self._flow.calls[index]
        return call.module is None and not call.inputs and call.name in REARRANGING

"""The integer types of activations: which sign, which zero point."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from torchq.formats import Format, IntFormat
from torchq.functional import QParams
from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    attribute,
    computed_by,
    is_constant,
    names,
    nodes_of,
    value_of,
)
from torchq.onnx.passes.convolutions import constant_fill
from torchq.onnx.qdq import qparams_of, set_qparams, shared_name
from torchq.runtime import ActivationTypes

#: Operators whose result is never negative, whatever they read.
_POSITIVE = names("Relu Sigmoid Softmax HardSigmoid Abs Exp Softplus ReduceL2 ReduceSumSquare")
#: Operators whose result is not negative if their first operand is not.
_FIRST_OPERAND = names(
    "MaxPool AveragePool GlobalAveragePool GlobalMaxPool ReduceMean ReduceMax ReduceSum "
    "Reshape Flatten Transpose Squeeze Unsqueeze Slice Gather Split Expand Tile Identity "
    "Dropout Cast DepthToSpace SpaceToDepth DequantizeLinear QuantizeLinear Sqrt Resize"
)
#: Operators whose result is not negative if none of their operands is.
_ALL_OPERANDS = frozenset(["Concat", "Add", "Mul", "Max"])


def nonnegative_values(model: Model) -> set[Value]:
    """Return the values of the main graph that have no negative element, by the operators alone.

    One walk in the order of the graph: a value is decided once, however many values lead to it.
    """
    found: set[Value] = set()
    for node in model.graph:
        if _is_nonnegative(node, found):
            found.update(node.outputs)
    return found


def _is_nonnegative(node: Node, known: set[Value]) -> bool:
    kind, operands = node.op_type, [value for value in node.inputs if value is not None]
    if node.domain:
        return False
    if kind in _POSITIVE or (kind == "Clip" and _clips_at_zero(node)):
        return True
    if kind == "Resize" and attribute(node, "mode", "nearest") == "cubic":
        return False
    if kind in _FIRST_OPERAND or (kind == "Pad" and _adds_nonnegative(node)):
        operands = operands[:1]
    elif kind not in _ALL_OPERANDS:
        return False
    return all(value in known for value in operands)


def _adds_nonnegative(pad: Node) -> bool:
    fill = constant_fill(pad)
    return attribute(pad, "mode", "constant") != "constant" or (fill is not None and fill >= 0)


def _clips_at_zero(node: Node) -> bool:
    low = node.inputs[1] if len(node.inputs) > 1 else None
    if low is not None:
        return is_constant(low) and bool((value_of(low) >= 0).all())
    return bool(attribute(node, "min", -1.0) >= 0)


def retype_activations(
    model: Model, types: ActivationTypes, only: Collection[str] | None = None
) -> None:
    """Write the codes of activations in the types that a runtime wants; the ranges stay.

    ``only`` are the quantizers to look at, as :func:`shared_name` names them.

    Before: QuantizeLinear to signed codes, or to unsigned codes with the zero point 0 or in the
    middle.
    After: The wanted sign. Unsigned codes of a tensor that cannot be negative have the zero point 0
    and the scale times 127/255: the same range, a finer grid of values. Signed codes have the grid
    of unsigned ones if these end below 128, and else a coarser one. Unsigned codes of other tensors
    have the zero point 128, or 128 more than before: the same grid. Activations with several scales
    stay.
    """
    nonnegative = nonnegative_values(model)
    quantizers = nodes_of(model, "QuantizeLinear")
    # All calls of one quantizer have the same parameters, so one negative tensor decides.
    signed = {shared_name(node) for node in quantizers if node.inputs[0] not in nonnegative}
    for node in quantizers:
        stored = all(is_constant(v) for v in node.inputs[1:] if v is not None)
        if not stored or node.inputs[1].const_value.size != 1:
            continue
        if only is not None and shared_name(node) not in only:
            continue
        positive, old = shared_name(node) not in signed, qparams_of(node)
        new = _retyped(old, types, positive, _highest_code(node, old))
        if new is not None:
            set_qparams(node, new)


def _highest_code(quantize: Node, qparams: QParams) -> float:
    """Return the highest code; formats that are narrower than their ONNX type are clipped."""
    clip = computed_by(quantize.inputs[0], "Clip", "Min")
    bounds = () if clip is None else clip.inputs[2:] if clip.op_type == "Clip" else clip.inputs
    for bound in bounds:
        if is_constant(bound) and bound.const_value.size == 1:
            code = value_of(bound) / qparams.scale + qparams.zero_point
            return min(round(float(code)), qparams.quant_max)
    return qparams.quant_max


def _retyped(
    old: QParams, types: ActivationTypes, positive: bool, highest: float
) -> QParams | None:
    """Return the parameters with the wanted sign; None where they stay as they are."""
    if not isinstance(old.format, IntFormat) or old.format.width not in types.widths:
        return None
    wanted = types.nonnegative if positive else types.others
    if wanted == "unsigned" and old.format.signed:
        return _unsigned(old, finer=positive and old.has_zero_point(0))
    if wanted == "signed" and types.others == "signed" and not old.format.signed:
        if old.has_zero_point(_half(old.format)):
            return _signed(old, coarser=False)
        if old.has_zero_point(0) and types.nonnegative == "signed":
            return _signed(old, coarser=not _fits_signed(old.format, highest))
    return None


def derived_qparams(own: QParams, highest: float) -> tuple[QParams, ...]:
    """Return the per-tensor parameters that some target writes for those of a model."""
    if not isinstance(own.format, IntFormat):
        return (own,)
    if own.format.signed:
        moved = own, _unsigned(own, finer=False)
        return (*moved, _unsigned(own, finer=True)) if own.has_zero_point(0) else moved
    if own.has_zero_point(0):
        return own, _signed(own, coarser=not _fits_signed(own.format, highest))
    centred = own.has_zero_point(_half(own.format))
    return (own, _signed(own, coarser=False)) if centred else (own,)


def _fits_signed(format: IntFormat, highest: float) -> bool:
    """Return True if signed codes of the same width hold all codes up to ``highest``."""
    return highest < _half(format)


def _half(format: Format) -> int:
    """Return the middle of the unsigned codes of the same width."""
    return int(2 ** (format.bits - 1))


def _share(format: Format) -> float:
    """Return the scale of unsigned codes over that of signed codes with the same range."""
    half = _half(format)
    return (half - 1) / (2 * half - 1)  # 127/255 for 8 bits.


def _unsigned(old: QParams, finer: bool) -> QParams:
    """Return unsigned codes: with the zero point 0 on a finer grid, or moved by half the codes."""
    moved = old.stored(signed=False)
    if not finer:
        return moved
    zero_point = torch.zeros_like(old.scale)
    return replace(moved, scale=old.scale * _share(old.format), zero_point=zero_point)


def _signed(old: QParams, coarser: bool) -> QParams:
    """Return signed codes with the zero point 0, on a coarser grid for codes that began at 0."""
    scale = old.scale / _share(old.format) if coarser else old.scale
    return replace(old.stored(signed=True), scale=scale, zero_point=torch.zeros_like(scale))

"""How a fake-quantize looks in ONNX: the one file of the core that knows the standard.

``torch.onnx.export`` runs the model's Python with either exporter; :func:`quantize_dequantize` is called then instead of the
arithmetic, so no flag and no translation table is needed. The TorchScript exporter takes the ``symbolic`` method below, the
default one (``torch.export`` based) takes ``torch.onnx.ops.symbolic``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchq.errors import ExportError
from torchq.formats import INT8, UINT8, Format, IntFormat, PerAxis, PerBlock, by_name
from torchq.formats.granularity import Granularity
from torchq.functional.scale import scale_from_amax
from torchq.utils import constant_while_tracing

__all__ = ["MARK", "OnnxType", "mark", "onnx_type", "opset_needed", "quantize_dequantize"]

#: Domain and name of the pass-through operator that :func:`mark` writes; :func:`torchq.export_onnx` takes it out again.
MARK = ("torchq", "Quantizer")


@dataclass(frozen=True)
class OnnxType:
    """An ONNX element type: number in ``onnx.TensorProto.DataType``, first opset whose QuantizeLinear takes it, torch dtype."""

    number: int
    opset: int
    dtype: torch.dtype


# int4 has no torch dtype; its codes fit int8 and the number tells the exporter.
_TYPES = {
    "int8": OnnxType(3, 10, torch.int8),
    "uint8": OnnxType(2, 10, torch.uint8),
    "int16": OnnxType(5, 21, torch.int16),
    "uint16": OnnxType(4, 21, torch.uint16),
    "int4": OnnxType(22, 21, torch.int8),
    "uint4": OnnxType(21, 21, torch.uint8),
    "e4m3": OnnxType(17, 19, torch.float8_e4m3fn),
    "e5m2": OnnxType(19, 19, torch.float8_e5m2),
}


def onnx_type(format: Format) -> tuple[Format, OnnxType]:
    """The smallest ONNX type that holds ``format``, and the format of that type (wider for int6, narrow int8, ...).

    Raises:
        ExportError: ONNX has none (FP6, E8M0, ...).
    """
    if format.name in _TYPES:
        return format, _TYPES[format.name]
    if isinstance(format, IntFormat):
        width = next(w for w in (4, 8, 16) if w >= format.width)
        wider = by_name(f"{'' if format.signed else 'u'}int{width}")
        return wider, _TYPES[wider.name]
    raise ExportError(
        f"format {format}: ONNX QuantizeLinear has no such type; expected one of {', '.join(_TYPES)} or another integer width"
    )


def _stored(format: Format, axis: int | None, legacy: bool) -> tuple[Format, OnnxType]:
    """The type that a tensor is written in: 4-bit ones for weights alone, which have an axis or blocks.

    TensorRT takes 4 bits for weights only, no runtime has kernels for 4-bit activations, and the TorchScript exporter has no
    4-bit constants: 8 bits, clipped to the bounds, are right everywhere.
    """
    stored, kind = onnx_type(format)
    if stored.bits == 4 and (legacy or axis is None):
        stored = INT8 if stored.signed else UINT8
        kind = _TYPES[stored.name]
    return stored, kind


def opset_needed(format: Format, granularity: Granularity) -> tuple[int, str]:
    """The first opset whose QuantizeLinear can do this, and what needs it.

    Raises:
        ExportError: no opset can.
    """
    axis, block = _axis(granularity, 1 << 16)
    _, kind = _stored(format, axis, legacy=False)
    needs = [
        (kind.opset, f"the type {format}"),
        (21 if block else 0, "blocks"),
        (13 if axis is not None else 0, "per-channel ranges"),
    ]
    return max(needs, key=lambda need: need[0])


def mark(x: Tensor, name: str) -> Tensor:
    """Write an operator around ``x`` that carries ``name`` through either exporter; call it only during an export."""
    if torch.jit.is_tracing():
        return _LegacyMark.apply(x, name)
    return torch.onnx.ops.symbolic(
        "::".join(MARK), (x,), {"name": name}, dtype=x.dtype, shape=x.shape, version=1
    )


class _LegacyMark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        return x.clone()

    @staticmethod
    def symbolic(g: Any, x: Any, name: str) -> Any:
        result = g.op("::".join(MARK), x, name_s=name)
        result.setType(x.type())
        return result


def quantize_dequantize(
    x: Tensor, amax: Tensor, format: Format, granularity: Granularity, scale_format: Format | None
) -> Tensor:
    """QuantizeLinear then DequantizeLinear of ``x``; call it only while ``torch.onnx.is_in_onnx_export()``.

    Args:
        x: float tensor; computed in fp32, returned in its dtype.
        amax: aligned with ``granularity.split(x)``. A format that is narrower than its ONNX type is clipped to its bounds first.

    Raises:
        ExportError: ONNX has no type for the format, a granularity over several axes, or an exporter too old for the type.
    """
    axis, block = _axis(granularity, x.dim())
    legacy = torch.jit.is_tracing()
    stored, kind = _stored(format, axis, legacy)
    if legacy:
        with constant_while_tracing():
            amax = torch.tensor(
                amax.tolist()
            )  # a new tensor, so the trace holds its values, not the arithmetic behind them
            scale = torch.tensor(scale_from_amax(amax, format, scale_format).tolist())
    else:
        scale = scale_from_amax(amax, format, scale_format)
    values = x if x.dtype is torch.float32 else x.to(torch.float32)
    if (stored.quant_min, stored.quant_max) != (format.quant_min, format.quant_max):
        values = _clip(
            values, scale * format.quant_min, scale * format.quant_max, granularity, legacy
        )
    if axis is not None:
        scale = scale.squeeze(axis + 1) if block else scale.reshape(-1)
    emit = _legacy if legacy else _modern
    result = emit(values, scale, kind, axis, block)
    return result if x.dtype is torch.float32 else result.to(x.dtype)


def _clip(x: Tensor, low: Tensor, high: Tensor, granularity: Granularity, legacy: bool) -> Tensor:
    if not legacy and low.dim() == 0:
        # Written as it will end up: onnxscript 0.7 loses constants where it makes Clip from Min and Max of one tensor twice.
        return torch.onnx.ops.symbolic(
            "Clip", (x, low, high), dtype=x.dtype, shape=x.shape, version=13
        )
    parts = torch.minimum(torch.maximum(granularity.split(x), low), high)
    return granularity.join(parts, x.shape)


def _axis(granularity: Granularity, ndim: int) -> tuple[int | None, int]:
    if isinstance(granularity, PerBlock):
        return granularity.axis % ndim, granularity.size
    if isinstance(granularity, PerAxis):
        if len(granularity.axes) != 1:
            raise ExportError(
                f"axis {granularity.axes}: ONNX QuantizeLinear has one axis; expected a single axis, a block size or per tensor"
            )
        return granularity.axes[0] % ndim, 0
    return None, 0


def _modern(x: Tensor, scale: Tensor, kind: OnnxType, axis: int | None, block: int) -> Tensor:
    """Standard operators written into the ``torch.export`` program by name."""
    if not hasattr(torch.onnx, "ops"):
        raise ExportError(
            f"torch {torch.__version__}: this exporter cannot write QuantizeLinear; expected torch >= 2.8, or dynamo=False"
        )
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    if block:
        attributes["block_size"] = block
    version = max(kind.opset, 21 if block else 13)
    if kind.number in (21, 22):
        zero: tuple[Tensor, ...] = ()
        typed = {**attributes, "output_dtype": kind.number}
    else:
        zero = (torch.zeros(scale.shape, dtype=kind.dtype, device=x.device),)
        typed = attributes
    codes = torch.onnx.ops.symbolic(
        "QuantizeLinear", (x, scale, *zero), typed, dtype=kind.dtype, shape=x.shape, version=version
    )
    return torch.onnx.ops.symbolic(
        "DequantizeLinear",
        (codes, scale, *zero),
        attributes,
        dtype=x.dtype,
        shape=x.shape,
        version=version,
    )


def _legacy(x: Tensor, scale: Tensor, kind: OnnxType, axis: int | None, block: int) -> Tensor:
    with constant_while_tracing():
        return _LegacyQuantizeDequantize.apply(x, scale.tolist(), kind, axis, block)


class _LegacyQuantizeDequantize(torch.autograd.Function):
    """The TorchScript exporter calls ``symbolic``; ``forward`` only gives the traced shape and dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Any, kind: OnnxType, axis: int | None, block: int
    ) -> Tensor:
        return x.clone()

    @staticmethod
    def symbolic(g: Any, x: Any, scale: Any, kind: OnnxType, axis: int | None, block: int) -> Any:
        needed = max(kind.opset, 21 if block else 13 if axis is not None else 10)
        if g.opset < needed:
            what = "blocks" if block else "per-channel ranges" if axis is not None else "this type"
            raise ExportError(
                f"opset {g.opset}: QuantizeLinear has no {what} there; expected opset_version >= {needed}"
            )
        scales = torch.tensor(scale, dtype=torch.float32)
        scale = g.op("Constant", value_t=scales)
        zero = g.op("Constant", value_t=torch.zeros(scales.shape, dtype=kind.dtype))
        attributes = {} if axis is None else {"axis_i": axis}
        if block:
            attributes["block_size_i"] = block
        codes = g.op("QuantizeLinear", x, scale, zero, **attributes)
        result = g.op("DequantizeLinear", codes, scale, zero, **attributes)
        result.setType(x.type())
        return result

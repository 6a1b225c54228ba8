"""The ONNX form of fake quantization: the one file of the core that knows the standard.

``torch.onnx.export`` runs the model's Python with either exporter; :func:`quantize_dequantize` is
called then instead of the arithmetic, so no flag and no translation table is needed. The
TorchScript exporter calls the ``symbolic`` methods below; the exporter that is based on
``torch.export`` keeps what ``torch.onnx.ops.symbolic`` wrote.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchq.errors import ExportError
from torchq.formats import (
    INT8,
    UINT8,
    Format,
    IntFormat,
    PerAxis,
    PerBlock,
    format_by_name,
)
from torchq.formats.granularity import Granularity
from torchq.functional.scale import scale_from_amax
from torchq.utils import constant_while_tracing
from torchq.utils.optional import import_optional

#: Domain and name of the operator that :func:`mark` writes; :func:`torchq.export_onnx` removes it.
MARK = ("torchq", "Quantizer")
#: The first opset with int4 and uint4.
FOUR_BITS = 21
#: What the TorchScript exporter writes for an operator from this opset on, it writes in later ones.
_FIRST_OPSET = 9


@dataclass(frozen=True)
class OnnxType:
    """An element type by its name in ``onnx_ir``, and the first opset whose QuantizeLinear has it.

    ``dtype`` holds its codes in torch, which has no int4.
    """

    name: str
    opset: int
    dtype: torch.dtype


_TYPES = {
    "int8": OnnxType("INT8", 10, torch.int8),
    "uint8": OnnxType("UINT8", 10, torch.uint8),
    "int16": OnnxType("INT16", 21, torch.int16),
    "uint16": OnnxType("UINT16", 21, torch.uint16),
    "int4": OnnxType("INT4", 21, torch.int8),
    "uint4": OnnxType("UINT4", 21, torch.uint8),
    "e4m3": OnnxType("FLOAT8E4M3FN", 19, torch.float8_e4m3fn),
    "e5m2": OnnxType("FLOAT8E5M2", 19, torch.float8_e5m2),
}


def onnx_type(format: Format) -> tuple[Format, OnnxType]:
    """Return the smallest ONNX type that holds ``format``, and the format of that type.

    An ExportError says that ONNX has none (FP6, E8M0, ...), or rounds otherwise.
    The format of the type is wider than ``format`` for int6, narrow int8, ...
    """
    if format.rounding != "half_even":
        raise ExportError(
            f"format {format} with rounding {format.rounding!r}: ONNX QuantizeLinear rounds ties "
            "to even; expected rounding='half_even'"
        )
    if format.name in _TYPES:
        return format, _TYPES[format.name]
    if isinstance(format, IntFormat):
        width = next(width for width in (4, 8, 16) if width >= format.width)
        sign = "" if format.signed else "u"
        wider = format_by_name(f"{sign}int{width}")
        return wider, _TYPES[wider.name]
    raise ExportError(
        f"format {format}: ONNX QuantizeLinear has no such type; "
        f"expected one of {', '.join(_TYPES)} or another integer width"
    )


def stored_type(
    format: Format, axis: int | None, wide: bool
) -> tuple[Format, OnnxType]:
    """Return the type that a tensor is written in, of 8 bits at least if ``wide``.

    Weights alone, which have an axis or blocks, are written in 4 bits. TensorRT takes 4 bits for
    weights only, no runtime has kernels for 4-bit activations, and the TorchScript exporter has no
    4-bit constants: 8 bits, clipped to the bounds, are right everywhere.
    """
    stored, kind = onnx_type(format)
    if stored.bits == 4 and (wide or axis is None):
        stored = INT8 if stored.signed else UINT8
        kind = _TYPES[stored.name]
    return stored, kind


def opset_needed(
    format: Format, granularity: Granularity, wide: bool = False
) -> tuple[int, str]:
    """Return the first opset whose QuantizeLinear can do this, and what needs it.

    With ``wide`` codes of 4 bits are stored as 8, which older opsets have.
    """
    axis, block = onnx_axis(granularity, 1 << 16)
    _, kind = stored_type(format, axis, wide)
    needs = [
        (kind.opset, f"the type {format}"),
        (21 if block else 0, "blocks"),
        (13 if axis is not None else 0, "per-channel ranges"),
    ]
    return max(needs, key=lambda need: need[0])


def mark(x: Tensor, name: str, axis: int) -> Tensor:
    """Write one operator in the place of a quantizer; call it only during an export.

    The exporters follow every operator several times, so that :func:`torchq.export_onnx` puts the
    pair in its place only afterwards. ``x`` is what :func:`as_stored` returns, and ``axis`` that of
    :func:`onnx_axis`, -1 for None.
    """
    if torch.jit.is_tracing():
        result: Tensor = torch.ops.torchq.quantizer(x, x.new_empty(0), name, axis)
        return result
    attributes: dict[str, Any] = {"name": name, "axis": axis}
    return torch.onnx.ops.symbolic(
        "::".join(MARK), (x,), attributes, dtype=x.dtype, shape=x.shape, version=1
    )


# An operator of a library, whose schema says what it changes: a note of its own. To the TorchScript
# exporter a call of an autograd.Function might change any tensor, so that it takes lists of tensors
# behind it, as of torch.where, for lists of unknown length: the number of regions in a level of a
# detector would become a constant. What changes nothing it computes beforehand, if it reads a
# constant, and the quantizer would be gone.
_LIBRARY = torch.library.Library("torchq", "FRAGMENT")
_LIBRARY.define("quantizer(Tensor x, Tensor(a!) note, str name, int axis) -> Tensor")
_LIBRARY.impl(
    "quantizer", lambda x, note, name, axis: x.clone(), "CompositeExplicitAutograd"
)


@contextmanager
def legacy_marks() -> Iterator[None]:
    """Let the TorchScript exporter know in the block what :func:`mark` writes."""
    # It takes a while to import, and few processes write files.
    from torch.onnx.symbolic_helper import parse_args  # noqa: PLC0415

    operator = "torchq::quantizer"
    write = parse_args("v", "v", "s", "i")(_legacy_mark)
    torch.onnx.register_custom_op_symbolic(operator, write, _FIRST_OPSET)
    try:
        yield
    finally:
        torch.onnx.unregister_custom_op_symbolic(operator, _FIRST_OPSET)


def _legacy_mark(g: Any, x: Any, note: Any, name: str, axis: int) -> object:
    result = g.op("::".join(MARK), x, name_s=name, axis_i=axis)
    result.setType(x.type())
    return result


def clip_bounds(
    scale: Tensor, point: Tensor, format: Format, stored: Format
) -> tuple[Tensor, Tensor] | None:
    """Return the outermost values of ``format``; None where ``stored`` has no wider ones."""
    if (stored.quant_min, stored.quant_max) == (format.quant_min, format.quant_max):
        return None
    return scale * (format.quant_min - point), scale * (format.quant_max - point)


def as_stored(
    x: Tensor, bounds: tuple[Tensor, Tensor] | None, granularity: Granularity
) -> Tensor:
    """Return what QuantizeLinear reads: ``x`` in float32, clipped to :func:`clip_bounds`."""
    values = x if x.dtype is torch.float32 else x.to(torch.float32)
    if bounds is None:
        return values
    if not torch.jit.is_tracing() and bounds[0].dim() == 0:
        # Written as Clip at once: onnxscript 0.7 loses constants where it makes a Clip from Min
        # and Max of one tensor twice.
        return torch.onnx.ops.symbolic(
            "Clip",
            (values, *bounds),
            dtype=values.dtype,
            shape=values.shape,
            version=13,
        )
    low, high = bounds
    with constant_while_tracing():  # whether the last block is a shorter one
        parts = granularity.split(values)
        clipped = torch.minimum(torch.maximum(parts, low), high)
        return granularity.join(clipped, values.shape)


def quantize_dequantize(
    x: Tensor,
    amax: Tensor,
    format: Format,
    granularity: Granularity,
    scale_format: Format | None,
) -> Tensor:
    """Write QuantizeLinear and DequantizeLinear of ``x``; call it only during an export.

    ``amax`` is aligned with ``granularity.split(x)``. The pair computes in float32; the result has
    the dtype of ``x``. A format that is narrower than its ONNX type is clipped to its bounds first.
    """
    with constant_while_tracing():
        scale = scale_from_amax(amax, format, scale_format)
    return quantize_dequantize_affine(x, scale, None, format, granularity)


def quantize_dequantize_affine(
    x: Tensor,
    scale: Tensor,
    zero_point: Tensor | None,
    format: Format,
    granularity: Granularity,
) -> Tensor:
    """Write QuantizeLinear and DequantizeLinear with a zero point; see :func:`quantize_dequantize`.

    Scale and zero point are aligned with ``granularity.split(x)``; a ``zero_point`` of None is 0
    everywhere. With one, formats of 4 bits and fewer are written as 8 bits, clipped.
    """
    axis, block = onnx_axis(granularity, x.dim())
    legacy = torch.jit.is_tracing()
    stored, kind = stored_type(format, axis if zero_point is None else None, legacy)
    point = torch.zeros_like(scale) if zero_point is None else zero_point
    if legacy:
        scale = _constant(scale)
        point = _constant(point)
    values = as_stored(x, clip_bounds(scale, point, format, stored), granularity)
    if axis is not None:
        scale = _without_shared_dims(scale, axis, block)
        point = _without_shared_dims(point, axis, block)
    emit = _legacy if legacy else _modern
    result = emit(values, scale, point, kind, axis, block)
    return result if x.dtype is torch.float32 else result.to(x.dtype)


def _constant(tensor: Tensor) -> Tensor:
    """Return a new tensor: a trace then holds its values, not the arithmetic behind them."""
    with constant_while_tracing():
        return torch.tensor(tensor.tolist(), dtype=tensor.dtype, device=tensor.device)


def _without_shared_dims(parameter: Tensor, axis: int, block: int) -> Tensor:
    """Return scales or zero points as QuantizeLinear reads them: a vector, or one per block."""
    # Aligned with blocks, the elements of a block are a dimension of their own, of size 1.
    return parameter.squeeze(axis + 1) if block else parameter.reshape(-1)


def onnx_axis(granularity: Granularity, ndim: int) -> tuple[int | None, int]:
    """Return the attributes ``axis`` and ``block_size`` for a tensor of ``ndim`` dimensions."""
    if isinstance(granularity, PerBlock):
        return granularity.axis % ndim, granularity.size
    if isinstance(granularity, PerAxis):
        if len(granularity.axes) != 1:
            raise ExportError(
                f"axis {granularity.axes}: ONNX QuantizeLinear has one axis; "
                "expected a single axis, a block size or per tensor"
            )
        return granularity.axes[0] % ndim, 0
    return None, 0


def _modern(
    x: Tensor,
    scale: Tensor,
    point: Tensor,
    kind: OnnxType,
    axis: int | None,
    block: int,
) -> Tensor:
    """Write standard operators into the ``torch.export`` program by name."""
    attributes: dict[str, Any] = {} if axis is None else {"axis": axis}
    if block:
        attributes["block_size"] = block
    version = max(kind.opset, 21 if block else 13)
    zero_points: tuple[Tensor, ...] = ()
    typed = attributes
    if kind.name in ("INT4", "UINT4"):
        data_type = import_optional("onnx_ir", "torch.onnx.export").DataType
        typed = {**attributes, "output_dtype": data_type[kind.name].value}
    else:
        zero_points = (point.to(dtype=kind.dtype, device=x.device),)
    codes = torch.onnx.ops.symbolic(
        "QuantizeLinear",
        (x, scale, *zero_points),
        typed,
        dtype=kind.dtype,
        shape=x.shape,
        version=version,
    )
    return torch.onnx.ops.symbolic(
        "DequantizeLinear",
        (codes, scale, *zero_points),
        attributes,
        dtype=x.dtype,
        shape=x.shape,
        version=version,
    )


def _legacy(
    x: Tensor,
    scale: Tensor,
    point: Tensor,
    kind: OnnxType,
    axis: int | None,
    block: int,
) -> Tensor:
    with constant_while_tracing():
        grid = (scale.tolist(), point.tolist())
        result: Tensor = _LegacyQuantizeDequantize.apply(x, grid, kind, axis, block)
        return result


class _LegacyQuantizeDequantize(torch.autograd.Function):
    """The pair for the TorchScript exporter; ``forward`` only gives the traced shape and dtype."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, grid: Any, kind: OnnxType, axis: int | None, block: int
    ) -> Tensor:
        return x.clone()

    @staticmethod
    def symbolic(
        g: Any, x: Any, grid: Any, kind: OnnxType, axis: int | None, block: int
    ) -> object:
        if block:
            what = "blocks"
            needed = max(kind.opset, 21)
        elif axis is not None:
            what = "per-channel ranges"
            needed = max(kind.opset, 13)
        else:
            what = "this type"
            needed = max(kind.opset, 10)
        if g.opset < needed:
            raise ExportError(
                f"opset {g.opset}: QuantizeLinear has no {what} there; "
                f"expected opset_version >= {needed}"
            )
        scale = g.op(
            "Constant", value_t=torch.tensor(grid[0], dtype=torch.float32, device="cpu")
        )
        zero_point = g.op(
            "Constant", value_t=torch.tensor(grid[1], device="cpu").to(kind.dtype)
        )
        attributes = {} if axis is None else {"axis_i": axis}
        if block:
            attributes["block_size_i"] = block
        codes = g.op("QuantizeLinear", x, scale, zero_point, **attributes)
        result = g.op("DequantizeLinear", codes, scale, zero_point, **attributes)
        result.setType(x.type())
        return result

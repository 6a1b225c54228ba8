"""Triton kernels: the forward with its gradient mask in one pass over memory, and the backward.

Only :mod:`torchq.functional.kernels.dispatch` imports this file, when it is first needed. With
``TRITON_INTERPRET=1`` in the environment before that, Triton runs the kernels on CPU tensors. The
tests do so where there is no GPU.

A tensor is read as a dense matrix of ``rows x cols`` in the order of its memory, chosen so that
the index of the amax of an element is ``(row // repeat) % groups * row_stride + col *
col_stride``. That covers per-tensor, per-axis and block ranges in any dense memory format without
a division for each element.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from torchq.formats import FloatFormat, Format, IntFormat
from torchq.functional.kernels.views import memory_order, merged_dims
from torchq.functional.scale import scale_from_amax

#: True if Triton interprets kernels on the CPU instead of compiling them.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in (
    "1",
    "true",
    "on",
    "yes",
    "y",
)

_BLOCK = 1024
_SMALLEST_NORMAL: tl.constexpr = tl.constexpr(torch.finfo(torch.float32).tiny)
_EXPONENT: tl.constexpr = tl.constexpr(0x7F800000)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class _Matrix:
    """The view of a tensor described above."""

    rows: int
    cols: int
    repeat: int = 1
    groups: int = 1
    row_stride: int = 0
    col_stride: int = 0


def _matrix(sizes: list[int], is_kept: list[bool]) -> _Matrix | None:
    """Return the view for merged dimensions; None where one division is not enough."""
    rows = 1
    for size in sizes[:-1]:
        rows *= size
    cols = sizes[-1] if sizes else 1
    cols_have_ranges = is_kept[-1] if sizes else False
    # Outside of the columns, from the inside out: rows that share ranges, then rows with ranges
    # of their own, then rows that share them again.
    outer = list(zip(sizes[:-1], is_kept[:-1], strict=True))
    repeat = outer.pop()[0] if outer and not outer[-1][1] else 1
    groups = outer.pop()[0] if outer else 1
    if any(keep for _, keep in outer):
        return None
    row_stride = cols if cols_have_ranges else 1
    return _Matrix(
        rows, cols, repeat, groups, row_stride, col_stride=int(cols_have_ranges)
    )


def supports(x: Tensor, amax: Tensor, format: Format, *, affine: bool = False) -> bool:
    """Return True if the kernels can do this case; the definition does the others."""
    if affine or format.rounding != "half_even":
        return False
    has_format = isinstance(format, IntFormat)
    has_format |= isinstance(format, FloatFormat) and format.has_zero
    has_device = x.is_cuda or (INTERPRETED and x.device.type == "cpu")
    if not (has_format and has_device and x.dtype in _DTYPES):
        return False
    return amax.device == x.device and _matrix(*merged_dims(x, amax)) is not None


@triton.jit
def _snapped(  # type: ignore[no-untyped-def]
    v,
    QUANT_MIN: tl.constexpr,
    QUANT_MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
):
    """Return the nearest grid value, ties to even; NaN passes.

    Adding and subtracting 1.5 * 2**23 spacings rounds to a whole spacing.
    """
    v = tl.where(v > QUANT_MAX, QUANT_MAX, v)
    v = tl.where(v < QUANT_MIN, QUANT_MIN, v)
    if MANTISSA < 0:
        magic = 12582912.0  # 1.5 * 2**23: the spacing is 1
    else:
        exponent = v.to(tl.int32, bitcast=True) & _EXPONENT
        exponent = tl.where(exponent < SMALLEST, SMALLEST, exponent)
        # 1.5 * 2**(23 - MANTISSA) times the power of two, assembled from its bits
        magic = (exponent + (((23 - MANTISSA) << 23) | 0x400000)).to(
            tl.float32, bitcast=True
        )
    q = (v + magic) - magic
    return tl.where(q == 0.0, v * 0.0, q)  # the sign of zero, as torch.round keeps it


@triton.jit
def _scales(  # type: ignore[no-untyped-def]
    amax_ptr, scale_ptr, group, has_range, QMAX: tl.constexpr, HAS_SCALE: tl.constexpr
):
    """Return amax, scale and divisor of each group, by the formulas of functional/scale.py."""
    amax = tl.load(amax_ptr + group, mask=has_range, other=1.0)
    if HAS_SCALE:
        scale = tl.load(scale_ptr + group, mask=has_range, other=1.0)
    else:
        scale = tl.div_rn(amax, QMAX)
        scale = tl.where(scale < _SMALLEST_NORMAL, 1.0, scale)
    is_zero = ((scale == 1.0) & (amax < 0.5)) | (scale == 0.0)
    return amax, scale, tl.where(is_zero, float("inf"), scale)


@triton.jit
def _positions(  # type: ignore[no-untyped-def]
    rows, cols, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):
    """Return row and column of each element of this program's block, and whether it exists."""
    col_blocks = tl.cdiv(cols, BLOCK_C)
    row = (tl.program_id(0) // col_blocks).to(tl.int64) * BLOCK_R + tl.arange(
        0, BLOCK_R
    )[:, None]
    col = (tl.program_id(0) % col_blocks).to(tl.int64) * BLOCK_C + tl.arange(
        0, BLOCK_C
    )[None, :]
    return row, col, (row < rows) & (col < cols)


@triton.jit
def _forward(  # type: ignore[no-untyped-def]
    x_ptr,
    amax_ptr,
    scale_ptr,
    y_ptr,
    mask_ptr,
    rows,
    cols,
    repeat,
    groups,
    row_stride,
    COL_STRIDE: tl.constexpr,
    QMAX: tl.constexpr,
    QUANT_MIN: tl.constexpr,
    QUANT_MAX: tl.constexpr,
    MANTISSA: tl.constexpr,
    SMALLEST: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    WITH_MASK: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    row, col, exists = _positions(rows, cols, BLOCK_R, BLOCK_C)
    group = (row // repeat) % groups * row_stride
    has_range = row < rows
    if COL_STRIDE:
        group = group + col
        has_range = exists
    amax, scale, divisor = _scales(
        amax_ptr, scale_ptr, group, has_range, QMAX, HAS_SCALE
    )

    x = tl.load(x_ptr + row * cols + col, mask=exists, other=0.0).to(tl.float32)
    v = tl.div_rn(x, tl.broadcast_to(divisor, (BLOCK_R, BLOCK_C)))
    y = _snapped(v, QUANT_MIN, QUANT_MAX, MANTISSA, SMALLEST) * scale
    tl.store(y_ptr + row * cols + col, y.to(y_ptr.dtype.element_ty), mask=exists)
    if WITH_MASK:
        tl.store(
            mask_ptr + row * cols + col, (tl.abs(x) <= amax).to(tl.int8), mask=exists
        )


@triton.jit
def _backward(grad_ptr, mask_ptr, out_ptr, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    exists = at < n
    grad = tl.load(grad_ptr + at, mask=exists, other=0.0)
    inside = tl.load(mask_ptr + at, mask=exists, other=0)
    tl.store(out_ptr + at, tl.where(inside != 0, grad, 0.0), mask=exists)


def fake_quantize(
    x: Tensor,
    amax: Tensor,
    format: Format,
    scale_format: Format | None,
    with_mask: bool,
) -> tuple[Tensor, Tensor | None]:
    """Compute :func:`torchq.functional.kernels.reference.fake_quantize` in one pass over memory."""
    mask = torch.empty_like(x, dtype=torch.int8) if with_mask else None
    # The interpreter truncates float32 to bfloat16, so there torch rounds. The hardware rounds to
    # nearest even.
    stored = torch.float32 if INTERPRETED else x.dtype
    y = torch.empty_like(x, dtype=stored)
    if x.numel() == 0:
        return y.to(x.dtype), mask
    if x.stride() != y.stride():
        x = torch.empty_like(x).copy_(x)  # a slice or an expanded tensor: make it dense
    view = _matrix(*merged_dims(y, amax))
    if view is None:
        raise ValueError(
            f"fake_quantize: got amax of shape {tuple(amax.shape)}; "
            "expected a case that supports() accepts"
        )
    scales = (
        None if scale_format is None else scale_from_amax(amax, format, scale_format)
    )
    order = memory_order(y)
    scales = None if scales is None else _dense(scales, order)
    _launch_forward(view, x, _dense(amax, order), scales, y, mask, format)
    return y.to(x.dtype), mask


def _dense(values: Tensor, order: tuple[int, ...]) -> Tensor:
    return values.permute(order).contiguous() if values.dim() else values


def _launch_forward(
    view: _Matrix,
    x: Tensor,
    amax: Tensor,
    scales: Tensor | None,
    y: Tensor,
    mask: Tensor | None,
    format: Format,
) -> None:
    block_c = min(triton.next_power_of_2(view.cols), _BLOCK)
    block_r = min(triton.next_power_of_2(view.rows), _BLOCK // block_c)
    grid = (triton.cdiv(view.rows, block_r) * triton.cdiv(view.cols, block_c),)
    with _on(x.device):
        _forward[grid](
            x,
            amax,
            amax if scales is None else scales,
            y,
            y if mask is None else mask,
            view.rows,
            view.cols,
            view.repeat,
            view.groups,
            view.row_stride,
            COL_STRIDE=view.col_stride,
            QMAX=format.qmax,
            QUANT_MIN=format.quant_min,
            QUANT_MAX=format.quant_max,
            MANTISSA=format.mantissa_bits if isinstance(format, FloatFormat) else -1,
            SMALLEST=(format.min_exponent + 127) << 23
            if isinstance(format, FloatFormat)
            else 0,
            HAS_SCALE=scales is not None,
            WITH_MASK=mask is not None,
            BLOCK_R=block_r,
            BLOCK_C=block_c,
            enable_fp_fusion=False,
        )


def mask_gradient(grad: Tensor, mask: Tensor) -> Tensor:
    """Compute :func:`torchq.functional.kernels.reference.mask_gradient`.

    ``grad`` and ``mask`` have the same strides and are dense.
    """
    out = torch.empty_like(grad)
    if grad.numel():
        with _on(grad.device):
            grid = (triton.cdiv(grad.numel(), _BLOCK),)
            _backward[grid](
                grad, mask, out, grad.numel(), BLOCK=_BLOCK, enable_fp_fusion=False
            )
    return out


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Make the tensor's device the current one, on which Triton launches."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()

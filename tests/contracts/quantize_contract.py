"""The results that fake quantization must give, element by element, from the scalar oracle.

Those of the block-scaled formats come from their definitions.
"""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor

from tests.contracts.format_contract import FLOAT_SPECS
from tests.reference import (
    BFLOAT16,
    E2M1,
    E4M3,
    FLOAT16,
    FLOAT32,
    FLOAT64,
    FloatSpec,
    fake_quantize,
    float_fake_quantize,
    round_to,
)
from torchq.formats import Format, Granularity, IntFormat, PerAxis, PerBlock

__all__ = [
    "STORAGE",
    "expected",
    "group_of",
    "layouts",
    "mx_expected",
    "nvfp4_expected",
    "same",
    "working",
]

STORAGE = {
    torch.float16: FLOAT16,
    torch.bfloat16: BFLOAT16,
    torch.float32: FLOAT32,
    torch.float64: FLOAT64,
}


def working(dtype: torch.dtype) -> FloatSpec:
    """What torchq computes in: binary64 for float64 tensors, else binary32."""
    return FLOAT64 if dtype is torch.float64 else FLOAT32


def group_of(index: tuple[int, ...], granularity: Granularity) -> tuple[int, ...]:
    """The index into amax for the element at ``index``."""
    if isinstance(granularity, PerAxis):
        kept = {axis % len(index) for axis in granularity.axes}
        return tuple(i if d in kept else 0 for d, i in enumerate(index))
    if isinstance(granularity, PerBlock):
        return tuple(
            i // granularity.size if d == granularity.axis % len(index) else i
            for d, i in enumerate(index)
        )
    return ()


def _scalar(x: float, amax: float, format: Format, spec: FloatSpec) -> float:
    if math.isnan(x):
        return x
    if isinstance(format, IntFormat):
        return fake_quantize(
            x, amax, format.bits, not format.signed, format.narrow, spec
        )[1]
    return float_fake_quantize(x, amax, FLOAT_SPECS[format.name], spec)


def expected(
    x: Tensor, amax: Tensor, format: Format, granularity: Granularity
) -> Tensor:
    """Apply the oracle to every element.

    ``amax`` has the granularity's shape and a dtype that torchq computes in.
    """
    out = torch.empty(x.shape, dtype=x.dtype)
    for index in itertools.product(*map(range, x.shape)):
        value = _scalar(
            x[index].item(),
            amax[group_of(index, granularity)].item(),
            format,
            working(x.dtype),
        )
        out[index] = value if math.isnan(value) else round_to(value, STORAGE[x.dtype])
    return out


def mx_expected(x: Tensor, spec: FloatSpec, size: int) -> Tensor:
    """Quantize by OCP Microscaling Formats 1.0, section 6.3, in blocks along the last axis.

    The scale is X = 2**(floor(log2 max) - emax); elements saturate.
    """
    largest_exponent = math.floor(math.log2(float(spec.max)))
    out = torch.empty_like(x)
    for row, start in itertools.product(range(x.shape[0]), range(0, x.shape[1], size)):
        block = x[row, start : start + size].tolist()
        amax = max(map(abs, block))
        scale = (
            2.0 ** max(math.floor(math.log2(amax)) - largest_exponent, -127)
            if amax >= spec.max * 2.0**-126
            else math.inf
        )
        out[row, start : start + size] = torch.tensor(
            [
                round_to(v / scale, spec, saturate=True) * scale if v else v
                for v in block
            ]
        )
        if amax < spec.max * 2.0**-126:
            out[row, start : start + size] = 0.0
    return out


def nvfp4_expected(x: Tensor) -> Tensor:
    """Quantize to E2M1 in blocks of 16 along the last axis.

    Block scales amax / 6 are stored as E4M3 times one float32 scale for the tensor.

    The tensor's scale maps the largest block scale to 448. Every operation is rounded to float32.
    """
    steps = {}
    for row, start in itertools.product(range(x.shape[0]), range(0, x.shape[1], 16)):
        steps[row, start] = round_to(
            max(map(abs, x[row, start : start + 16].tolist())) / 6.0, FLOAT32
        )
    shared = round_to(max(steps.values()) / 448.0, FLOAT32)
    out = torch.zeros_like(x)
    for (row, start), step in steps.items():
        stored = round_to(round_to(step / shared, FLOAT32), E4M3, saturate=True)
        scale = round_to(stored * shared, FLOAT32)
        if step < 2.0**-126 or scale < 2.0**-126:
            continue
        for i, value in enumerate(x[row, start : start + 16].tolist()):
            code = round_to(round_to(value / scale, FLOAT32), E2M1, saturate=True)
            out[row, start + i] = round_to(code * scale, FLOAT32)
    return out


def same(a: Tensor, b: Tensor) -> bool:
    """Equal in dtype, shape and value, NaN equal to NaN."""
    return (
        a.dtype is b.dtype
        and a.shape == b.shape
        and bool(((a == b) | (a.isnan() & b.isnan())).all())
    )


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The 4-d tensor ``x`` with the same values behind other strides."""
    wide = torch.zeros(*x.shape[:3], 2 * x.shape[3], dtype=x.dtype)
    wide[..., ::2] = x
    return {
        "contiguous": x,
        "channels_last": x.to(memory_format=torch.channels_last),
        "transposed": x.transpose(0, 3).contiguous().transpose(0, 3),
        "sliced": wide[..., ::2],
        "offset": torch.cat([x[:1], x])[1:],
        "expanded": x[:1].expand_as(x),
        "unbatched view": x.contiguous().view(-1).view(x.shape),
    }

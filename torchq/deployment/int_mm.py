"""The integer linear layer on GPUs: ``torch._int_mm``, with shapes padded to what it takes.

The arithmetic is tested on CPUs, which have the same product; no GPU has run it yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.deployment.packing import PackCache
from torchq.deployment.reference import finish

__all__ = ["linear", "obstacle"]

#: CUDA's product wants more rows than this, and inner and outer sizes that are multiples of the other.
_FEWEST_ROWS, _MULTIPLE = 17, 8
_CAPABILITY = (8, 0)
_PACKED = PackCache()


@lru_cache
def obstacle(device: torch.device) -> str:
    """Why ``device`` does not multiply integer matrices; empty if it does."""
    if device.type != "cuda" or torch.version.hip:
        return f"torch._int_mm is used on CUDA devices, not on {device.type}" + " (ROCm)" * bool(torch.version.hip)
    found = torch.cuda.get_device_capability(device)
    if found < _CAPABILITY:
        return f"torch._int_mm needs compute capability {'.'.join(map(str, _CAPABILITY))}, this GPU has {'.'.join(map(str, found))}"
    return ""


def linear(
    x: Tensor, weight: Tensor, weight_step: Tensor, bias: Tensor | None, x_step: float, x_zero: int,
    out_step: float, out_zero: int, out_dtype: torch.dtype, name: str, arguments: Sequence[float],
) -> Tensor:  # fmt: skip
    """``torchq::int8_linear`` by an integer product: exact sums in int32, as long as they fit.

    The product takes signed numbers, so that codes are shifted by 128; what that changes is the sum of the weights, made once.
    """

    def build() -> tuple[Tensor, Tensor]:
        inner, outer = (-size % _MULTIPLE for size in (weight.shape[1], weight.shape[0]))
        sums = weight.sum(1, dtype=torch.int32)
        return F.pad(weight, (0, inner, 0, outer)).t(), (128 - x_zero) * sums

    padded, shift = _PACKED.get(weight, x_zero, (), build)
    rows = x.reshape(-1, x.shape[-1])
    signed = (rows ^ 128).view(torch.int8)
    size = max(_FEWEST_ROWS, rows.shape[0])
    signed = F.pad(signed, (0, padded.shape[0] - rows.shape[1], 0, size + -size % _MULTIPLE - rows.shape[0]))
    sums = torch.ops.aten._int_mm(signed, padded)[: rows.shape[0], : weight.shape[0]] + shift
    y = sums.to(torch.float32) * (weight_step * x_step)
    y = y if bias is None else y + bias
    return finish(y, out_step, out_zero, out_dtype, name, arguments, None).view(*x.shape[:-1], weight.shape[0])

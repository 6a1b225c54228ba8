"""The integer linear layer on GPUs: ``torch._int_mm``, with shapes padded to what it takes.

The arithmetic is tested on CPUs, which have the same product, and the operands are tested against the rules of CUDA's; no GPU has run
it yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from torchq.lowering.ops.cuda import missing, padded
from torchq.lowering.ops.prepack import PackCache
from torchq.lowering.ops.reference import finish

__all__ = ["linear", "obstacle"]

#: CUDA's product wants more rows than 16, and inner and outer sizes that are multiples of 8; its fastest kernels read 16 aligned bytes.
_FEWEST_ROWS, _MULTIPLE = 17, 16
_PACKED = PackCache()


def obstacle(device: torch.device) -> str:
    """Why ``device`` does not multiply integer matrices; empty if it does."""
    return missing(device, "torch._int_mm", (8, 0))


def linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, name: str, arguments: Sequence[float],
) -> Tensor:  # fmt: skip
    """``torchq::int8_linear`` by an integer product: exact sums in int32, as long as they fit.

    The product takes signed numbers, so that codes are shifted by 128; what that changes is the sum of the weights, made once.
    """

    def build() -> tuple[Tensor | None, Tensor]:
        full = padded(weight, _MULTIPLE)
        # Not the weight itself: what is kept must not keep its key alive.
        return None if full is weight else full, (128 - x_zero_point) * weight.sum(
            1, dtype=torch.int32
        )

    full, shift = _PACKED.get(weight, x_zero_point, (), build)
    full = weight if full is None else full
    rows = x.reshape(-1, x.shape[-1])
    signed = padded((rows ^ 128).view(torch.int8), _MULTIPLE, _FEWEST_ROWS)
    sums = torch.ops.aten._int_mm(signed, full.t())[: rows.shape[0], : weight.shape[0]] + shift
    y = sums.to(torch.float32) * (weight_scale * x_scale)
    y = y if bias is None else y + bias
    return finish(y, out_scale, out_zero_point, out_dtype, name, arguments, None).view(
        *x.shape[:-1], weight.shape[0]
    )

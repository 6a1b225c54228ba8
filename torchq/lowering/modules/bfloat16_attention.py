"""Attention whose two products are computed in bfloat16."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = ["BFloat16Attention", "attend_in_bfloat16"]

#: The number of attention weights up to which they are kept, as the two products need: 32 MiB. More
#: are computed by torch's kernel, block by block.
_MAX_WEIGHTS = 2**24


def attend_in_bfloat16(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float | None = None,
    *,
    flash: bool = False,
) -> Tensor:
    """Return the attention of ``query`` to ``key``, with products of bfloat16 numbers.

    CPUs with AVX512_BF16 or AMX multiply these faster than float32. Which of the two forms is the
    faster one depends on the CPU and on the number of tokens.

    Args:
        query: float32, (..., L, width). Anything but float32 is left to torch's kernel.
        key: float32, (..., S, width).
        value: float32, (..., S, width of the values).
        scale: multiplies the scores; default: 1 / sqrt(width).
        flash: call torch's own attention, which computes the softmax in float32, block by block;
            else two products with a softmax in bfloat16 between them.

    Returns:
        (..., L, width of the values), float32.
    """
    half = torch.bfloat16
    if query.dtype is not torch.float32:
        return F.scaled_dot_product_attention(query, key, value, scale=scale)
    size = query.shape[:-1].numel() * key.shape[-2]
    if flash or size > _MAX_WEIGHTS or query.shape[:-2] != key.shape[:-2]:
        y = F.scaled_dot_product_attention(
            query.to(half), key.to(half), value.to(half), scale=scale
        )
        return y.to(query.dtype)
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query * factor).to(half) @ key.to(half).transpose(-2, -1)
    return (scores.softmax(-1) @ value.to(half)).to(query.dtype)


class BFloat16Attention(nn.Module):
    """Scaled dot product attention in bfloat16; see :func:`attend_in_bfloat16`.

    Args:
        scale: multiplies the scores; None: 1 / sqrt(width).
        flash: call torch's own attention.
    """

    def __init__(self, scale: float | None = None, *, flash: bool = False) -> None:
        super().__init__()
        self.scale, self.flash = scale, flash

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Return the attention of ``query`` to ``key``."""
        return attend_in_bfloat16(query, key, value, self.scale, flash=self.flash)

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`."""
        kernel = "torch's own attention" if self.flash else "both products"
        return "bfloat16", 0, f"{kernel}, because that was faster for the example"

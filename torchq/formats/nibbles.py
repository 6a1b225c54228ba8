"""Numbers of four bits, two in a byte."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_nibbles", "unpack_nibbles"]


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """Return numbers of four bits two in a byte, the first of a pair in the low half.

    This is the order of ONNX's INT4 and UINT4.

    Args:
        nibbles: uint8, (..., n) with an even n; values 0 to 15.

    Returns:
        uint8, (..., n / 2).

    Example:
        >>> pack_nibbles(torch.tensor([1, 15], dtype=torch.uint8))
        tensor([241], dtype=torch.uint8)
    """
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return what :func:`pack_nibbles` packed.

    Args:
        packed: uint8, (..., n).

    Returns:
        uint8, (..., 2 n); values 0 to 15.
    """
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)

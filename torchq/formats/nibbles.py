"""Numbers of four bits, two in a byte."""

from __future__ import annotations

import torch
from torch import Tensor


def pack_nibbles(nibbles: Tensor) -> Tensor:
    """Return numbers of four bits two in a byte, the first of a pair in the low half.

    This is the order of ONNX's INT4 and UINT4.

    Example:
        >>> pack_nibbles(torch.tensor([1, 15], dtype=torch.uint8))
        tensor([241], dtype=torch.uint8)
    """
    return nibbles[..., ::2] | (nibbles[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Return what :func:`pack_nibbles` packed."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)

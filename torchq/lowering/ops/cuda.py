"""What the products of 8-bit matrices on GPUs share: which devices have them, and their shapes."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["missing", "padded"]


@lru_cache
def missing(device: torch.device, product: str, capability: tuple[int, int]) -> str:
    """Return why ``device`` does not have one of torch's products; empty if it has.

    Args:
        device: where the matrices are.
        product: the name of the product, for the reason.
        capability: the CUDA compute capability that it needs.
    """
    if device.type != "cuda" or torch.version.hip:
        platform = f"{device.type} (ROCm)" if torch.version.hip else device.type
        return f"{product} is used on CUDA devices, not on {platform}"
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        need, has = (".".join(map(str, version)) for version in (capability, found))
        return f"{product} needs compute capability {need}, this GPU has {has}"
    return ""


def padded(matrix: Tensor, multiple: int, min_rows: int = 0) -> Tensor:
    """Return a matrix with zeros below and to the right, row after row in memory.

    Args:
        matrix: 2-d.
        multiple: both sizes of the result are multiples of it.
        min_rows: the result has at least that many rows.

    Returns:
        ``matrix`` itself where nothing is missing.
    """
    rows, columns = max(matrix.shape[0], min_rows), matrix.shape[1]
    below, right = rows + -rows % multiple - matrix.shape[0], -columns % multiple
    if below or right:
        matrix = F.pad(matrix, (0, right, 0, below))
    return matrix.contiguous()

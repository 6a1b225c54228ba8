"""What the matrix products of 8-bit numbers on GPUs have in common: which devices have them, and the shapes that they take."""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["missing", "padded"]


@lru_cache
def missing(device: torch.device, product: str, capability: tuple[int, int]) -> str:
    """Why ``device`` does not have a product of torch's that needs a compute capability; empty if it has."""
    if device.type != "cuda" or torch.version.hip:
        return f"{product} is used on CUDA devices, not on {device.type}" + " (ROCm)" * bool(
            torch.version.hip
        )
    found = torch.cuda.get_device_capability(device)
    if found < capability:
        return f"{product} needs compute capability {'.'.join(map(str, capability))}, this GPU has {'.'.join(map(str, found))}"
    return ""


def padded(matrix: Tensor, multiple: int, fewest: int = 0) -> Tensor:
    """A matrix with zeros below and to the right, row after row in memory.

    Args:
        matrix: 2-d.
        multiple: both sizes become multiples of it.
        fewest: and the number of rows at least this.

    Returns:
        ``matrix`` itself where nothing is missing.
    """
    rows, columns = max(matrix.shape[0], fewest), matrix.shape[1]
    below, right = rows + -rows % multiple - matrix.shape[0], -columns % multiple
    if below or right:
        matrix = F.pad(matrix, (0, right, 0, below))
    return matrix.contiguous()

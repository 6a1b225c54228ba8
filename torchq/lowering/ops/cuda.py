"""Products of 8-bit matrices on GPUs: devices and shapes, and the integer linear layer.

The layer computes by ``torch._int_mm``, with shapes padded to what it takes. Its arithmetic is
tested on CPUs, which have the same product; the operands are tested against the rules of CUDA's.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.lowering.ops.kernel_cache import KERNELS
from torchq.lowering.ops.params import Epilogue, Int8Weights
from torchq.lowering.ops.reference import finish

__all__ = ["linear", "missing", "obstacle", "padded"]

#: CUDA's product takes more rows than 16.
_MIN_ROWS = 17
#: Its inner and outer sizes are multiples of 8; the fastest kernels read 16 aligned bytes.
_MULTIPLE = 16


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


def obstacle(device: torch.device) -> str:
    """Return why ``device`` does not multiply integer matrices; empty if it does."""
    return missing(device, "torch._int_mm", (8, 0))


def linear(x: Tensor, weights: Int8Weights, epilogue: Epilogue) -> Tensor:
    """Return ``x @ weight.T + bias`` for uint8 codes; see ``torchq::int8_linear``.

    Sums are exact in int32 as long as they fit. The product takes signed numbers, so codes are
    shifted by 128, and ``(128 - x_zero_point)`` times the sum of the weights is added again.
    """
    codes, scale, bias, x_scale, x_zero_point = weights

    def build() -> tuple[Tensor | None, Tensor]:
        full = padded(codes, _MULTIPLE)
        shift = (128 - x_zero_point) * codes.sum(1, dtype=torch.int32)
        # Not the weight itself: what is kept must not keep its key alive.
        return None if full is codes else full, shift

    full, shift = KERNELS.get(codes, ("int_mm", x_zero_point), (), build)
    full = codes if full is None else full
    rows = x.reshape(-1, x.shape[-1])
    signed = padded((rows ^ 128).view(torch.int8), _MULTIPLE, _MIN_ROWS)
    sums = torch.ops.aten._int_mm(signed, full.t())[: rows.shape[0], : codes.shape[0]] + shift
    y = sums.to(torch.float32) * (scale * x_scale)
    y = y if bias is None else y + bias
    return finish(y, epilogue).view(*x.shape[:-1], codes.shape[0])

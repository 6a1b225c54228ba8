"""The range of a tensor that exists as a whole: its largest magnitude, or both ends."""

from __future__ import annotations

from torch import Tensor

from torchq.formats import PerTensor
from torchq.formats.granularity import Granularity
from torchq.functional.kernels import is_plain, largest_magnitude
from torchq.functional.scale import compute_dtype


def reduce_amax(x: Tensor, granularity: Granularity | None = None) -> Tensor:
    """Return the largest magnitude of each group of ``x``, without gradient.

    The definition is :meth:`torchq.formats.Granularity.amax`, which compiled and transformed code
    sees. On plain CPU tensors a faster way gives the same result.

    Args:
        x: floating point, any shape. An empty tensor gives 0; NaN propagates.
        granularity: default per tensor.

    Returns:
        float32, or float64 for float64, of shape ``granularity.amax_shape(x.shape)``.

    Example:
        >>> from torchq.formats import PerAxis
        >>> reduce_amax(torch.tensor([[1.0, -2.0], [0.5, 0.25]]), PerAxis((0,)))
        tensor([[2.0000],
                [0.5000]])
    """
    granularity = granularity or PerTensor()
    parts = granularity.split(x.detach())
    dims = granularity.reduce_dims(parts.dim())
    if dims and is_plain(x) and x.device.type == "cpu" and x.numel():
        amax = largest_magnitude(parts, dims).view(granularity.amax_shape(x.shape))
    else:
        amax = granularity.amax(x)
    return amax.to(compute_dtype(x.dtype))


def reduce_range(x: Tensor, granularity: Granularity | None = None) -> tuple[Tensor, Tensor]:
    """Return the smallest range that contains each group of ``x`` and 0, without gradient.

    Args:
        x: floating point, any shape. An empty tensor gives zeros; NaN propagates.
        granularity: default per tensor.

    Returns:
        ``(amin, amax)`` with ``amin <= 0 <= amax``, float32, or float64 for float64, each of shape
        ``granularity.amax_shape(x.shape)``.

    Example:
        >>> reduce_range(torch.tensor([0.5, -0.25, 2.0]))
        (tensor(-0.2500), tensor(2.))
    """
    granularity = granularity or PerTensor()
    shape = granularity.amax_shape(x.shape)
    dtype = compute_dtype(x.dtype)
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=dtype), x.new_zeros(shape, dtype=dtype)
    parts = granularity.split(x.detach())
    dims = granularity.reduce_dims(parts.dim())
    low, high = (parts, parts) if not dims else (parts.amin(dims), parts.amax(dims))
    low, high = low.reshape(shape).to(dtype), high.reshape(shape).to(dtype)
    return low.clamp(max=0), high.clamp(min=0)

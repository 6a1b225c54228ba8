"""Ranges of tensors: one value, whether it reaches as far below 0 as above or has two ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from torchq.formats import Format, IntFormat, PerTensor
from torchq.formats.granularity import Granularity
from torchq.functional.kernels.dispatch import is_plain
from torchq.functional.kernels.tiled import largest_magnitude
from torchq.functional.qparams import QParams
from torchq.functional.scale import (
    compute_dtype,
    is_dead,
    scale_and_zero_point,
    scale_from_amax,
    unrounded_scale,
)

# Keeps these calls whole when a model is traced with torch.fx.
torch.fx.wrap("reduce_amax")
torch.fx.wrap("_both_ends")


#: How near to halfway the zero point of pixels is, whose range is float32.
_HALFWAY = 1e-3
#: Steps that are so much longer than the distance of pixels round as many of them up as down.
_WIDER = 1 + 1 / 32


class Range(NamedTuple):
    """The values that codes represent: ``[low, high]``, or ``[-high, high]`` without ``low``.

    Args:
        high: float32 or float64, >= 0, of a granularity's
            :meth:`~torchq.formats.Granularity.amax_shape`; without elements while it is unknown.
        low: the same shape and dtype, <= 0; None for a symmetric range. Unsigned codes represent
            ``[0, high]`` then.

    Example:
        >>> from torchq.formats import UINT8
        >>> ends = Range.of(torch.tensor([0.5, -1.0, 4.1]), symmetric=False)
        >>> ends.map(float)
        Range(high=4.099999904632568, low=-1.0)
        >>> ends.qparams(UINT8).zero_point
        tensor(50, dtype=torch.int32)
    """

    high: Tensor
    low: Tensor | None = None

    @classmethod
    def of(
        cls,
        x: Tensor,
        granularity: Granularity | None = None,
        *,
        symmetric: bool = True,
    ) -> Range:
        """Return the smallest range that contains each group of ``x`` and 0, without gradient.

        Args:
            x: floating point, any shape. An empty tensor gives zeros; NaN propagates.
            granularity: default per tensor.
            symmetric: True takes the largest magnitudes, False both ends.
        """
        if symmetric:
            return cls(reduce_amax(x, granularity))
        low, high = _both_ends(x, granularity)
        return cls(high, low)

    @classmethod
    def of_qparams(cls, qparams: QParams, *, symmetric: bool = True) -> Range:
        """Return the values of the outermost codes, rounded to the dtype of the scale.

        A scale that is computed from them may be a last bit off. A symmetric range takes no notice
        of the zero point.
        """
        scale = qparams.scale
        format = qparams.format
        if symmetric:
            return cls(scale * format.qmax)
        point = qparams.zero_point.to(scale.dtype)
        high = scale * (format.quant_max - point)
        low = scale * (format.quant_min - point)
        return cls(high, low)

    def ends(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the ends under the names that state dicts have: amin if there is one, and amax."""
        if self.low is not None:
            yield "amin", self.low
        yield "amax", self.high

    def map(self, function: Callable[[Tensor], Tensor]) -> Range:
        """Return a range of ``function`` of each end."""
        return Range(
            function(self.high), None if self.low is None else function(self.low)
        )

    def qparams(self, format: Format, scale_format: Format | None = None) -> QParams:
        """Return the scale and zero point of each range; see :func:`scale_from_amax`.

        The scale of an asymmetric range is its length over the number of steps of its codes.
        """
        if self.low is None:
            scale = scale_from_amax(self.high, format, scale_format)
            return QParams(scale, torch.zeros_like(scale, dtype=torch.int32), format)
        scale, point = scale_and_zero_point(self.low, self.high, format, scale_format)
        return QParams(scale, point.to(torch.int32), format)

    def dead(self, format: Format) -> Tensor:
        """Return where everything is quantized to 0: bool, the shape of ``high``.

        There the scale is no normal number of the dtype. False for infinity and NaN.
        """
        if self.low is None:
            return is_dead(self.high, format)
        return (
            unrounded_scale(self.low, self.high, format)
            < torch.finfo(self.high.dtype).tiny
        )

    def without_dead(self, format: Format) -> Range:
        """Return ranges of which dead ones reach as far as the others; all dead ones stay."""
        dead = self.dead(format)
        if bool(dead.all()):
            return self
        high = torch.where(dead, self.high.amax(), self.high)
        if self.low is None:
            return Range(high)
        return Range(high, torch.where(dead, self.low.amin(), self.low))

    def off_ties(self, format: Format) -> Range:
        """Return a range whose 0 is not halfway between two codes; symmetric ones as they are.

        Pixels of 8 bits in [-1, 1] lie at whole steps from the ends of their range, and 0 halfway
        between two of them. Rounding the zero point would put every pixel at a tie: two would share
        a code, and another machine would choose others. So the lower end goes down by half a step,
        and both ends go out by a thirty-second: else all pixels would be rounded towards 0, by half
        a step near it, which adds up in sums.
        """
        if self.low is None or not isinstance(format, IntFormat):
            return self
        steps = -self.low / unrounded_scale(self.low, self.high, format)
        is_halfway = ((steps % 1) - 0.5).abs() < _HALFWAY
        above = format.quant_max - format.quant_min - steps.ceil()
        moves = is_halfway & (above > 0)
        high = self.high * _WIDER
        low = -steps.ceil() * high / above
        return Range(
            torch.where(moves, high, self.high), torch.where(moves, low, self.low)
        )

    def joined(self, other: Range) -> Range:
        """Return the range that contains both, which are of one kind and shape."""
        high = torch.maximum(self.high, other.high)
        if self.low is None or other.low is None:
            return Range(high)
        return Range(high, torch.minimum(self.low, other.low))


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
    on_plain_cpu = is_plain(x) and x.device.type == "cpu"
    if dims and on_plain_cpu and x.numel():
        amax = largest_magnitude(parts, dims).view(granularity.amax_shape(x.shape))
    else:
        amax = granularity.amax(x)
    return amax.to(compute_dtype(x.dtype))


def _both_ends(x: Tensor, granularity: Granularity | None) -> tuple[Tensor, Tensor]:
    """Return ``amin <= 0 <= amax`` of each group of ``x``; see :func:`reduce_amax`."""
    granularity = granularity or PerTensor()
    shape = granularity.amax_shape(x.shape)
    dtype = compute_dtype(x.dtype)
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=dtype), x.new_zeros(shape, dtype=dtype)
    parts = granularity.split(x.detach())
    dims = granularity.reduce_dims(parts.dim())
    # Without dimensions to reduce, each element is a group.
    low = parts.amin(dims) if dims else parts
    high = parts.amax(dims) if dims else parts
    low = low.reshape(shape).to(dtype)
    high = high.reshape(shape).to(dtype)
    return low.clamp(max=0), high.clamp(min=0)

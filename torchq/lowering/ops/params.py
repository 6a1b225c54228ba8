"""The arguments of kernels, grouped.

Operators of :mod:`torch.library` take plain tensors and numbers; everything else in this package
passes these tuples. They are named tuples rather than dataclasses because kernels are cached under
them: making and hashing one takes a fraction of a microsecond.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["ConvParams", "Epilogue", "Int8Weights"]


class Int8Weights(NamedTuple):
    """The weights of an integer layer, for input codes of one scale and zero point.

    Attributes:
        codes: int8, (out, in / groups, ...).
        scale: float32, (out,) or (1,): real weight = code * scale.
        bias: float32, (out,), or None.
        x_scale: real input = (code - x_zero_point) * x_scale.
        x_zero_point: 0 to 255.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    x_scale: float
    x_zero_point: int


class ConvParams(NamedTuple):
    """The numbers of a convolution; one of each per spatial dimension.

    Attributes:
        stride: steps of the window.
        padding: zeros on both sides.
        dilation: distance of the window's elements.
        groups: parts of the channels that are convolved separately.
    """

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1

    def output_shape(self, image: Sequence[int], weight: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the result for the shapes of an image and a weight."""
        axes = zip(image[2:], weight[2:], self.stride, self.padding, self.dilation, strict=True)
        sizes = ((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in axes)
        return (image[0], weight[0], *sizes)

    def is_pointwise(self, weight: Sequence[int]) -> bool:
        """Return True if each pixel of the result depends on one pixel, and all its channels.

        Args:
            weight: the shape of the weight, (out, in / groups, ...).
        """
        single = all(size == 1 for size in (*weight[2:], *self.stride))
        return single and not any(self.padding) and self.groups == 1

    def unpadded(self) -> ConvParams:
        """Return the same convolution without padding."""
        return self._replace(padding=(0,) * len(self.padding))

    def widened(self) -> ConvParams:
        """Return the convolution with a first spatial dimension of size 1 added."""
        return ConvParams((1, *self.stride), (0, *self.padding), (1, *self.dilation), self.groups)


class Epilogue(NamedTuple):
    """The last steps of a kernel: add a residual, apply an activation, round to codes.

    Attributes:
        scale: of the resulting codes; 1.0 for floating-point results.
        zero_point: of the resulting codes; 0 for floating-point results.
        dtype: of the result; uint8 for codes.
        activation: a name in :data:`torchq.lowering.ACTIVATIONS`.
        arguments: of the activation.
        residual_scale: of the codes of a residual; 1.0 where it is floating point.
        residual_zero_point: of the codes of a residual; 0 where it is floating point.
    """

    scale: float = 1.0
    zero_point: int = 0
    dtype: torch.dtype = torch.float32
    activation: str = "none"
    arguments: tuple[float, ...] = ()
    residual_scale: float = 1.0
    residual_zero_point: int = 0

    def residual_values(self, residual: Tensor) -> Tensor:
        """Return the real values of a residual: codes, or floating point as it is."""
        if residual.dtype is not torch.uint8:
            return residual
        return (residual.float() - self.residual_zero_point) * self.residual_scale

    def in_codes(self) -> Epilogue | None:
        """Return the epilogue of sums that are divided by :attr:`scale` already.

        Its bounds are codes: rounding is monotone, so bounds can be rounded first. Bounds that a
        kernel has anyway, since results are between 0 and 255, are left out.

        Returns:
            None where results are floating point, or the activation does more than set bounds.
        """
        bounds = {"none": (-math.inf, math.inf), "relu": (0.0, math.inf), "clamp": self.arguments}
        if self.dtype is not torch.uint8 or self.activation not in bounds:
            return None
        limits = first, last = -float(self.zero_point), 255.0 - self.zero_point
        codes = tuple(
            float(round(min(max(v / self.scale, first), last))) for v in bounds[self.activation]
        )
        activation = ("none", ()) if codes == limits else ("clamp", codes)
        return Epilogue(1.0, self.zero_point, torch.uint8, *activation)

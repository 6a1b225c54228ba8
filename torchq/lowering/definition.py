"""The integer operators: their arguments, their activations and what they compute, in plain torch.

Arguments are named tuples because kernels are cached under them. The definition is exact on any
device: sums of products of integers stay below 2**53 and are computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


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
        """Return True if each pixel of the result depends on one pixel, and all its channels."""
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
        activation: a name in :data:`~torchq.lowering.definition.ACTIVATIONS`.
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

    def in_codes(self) -> Epilogue | None:
        """Return the epilogue of sums that are divided by :attr:`scale` already.

        Its bounds are codes: rounding is monotone, so bounds can be rounded first. Bounds that a
        kernel has anyway, since results are between 0 and 255, are left out.
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


@dataclass(frozen=True)
class Activation:
    """An activation of an epilogue.

    Attributes:
        function: ``(x, *arguments) -> y`` in plain torch.
        onednn: the name of oneDNN's post-op.
        algorithm: the variant of the post-op.
        on_conv: True where torch's convolution operator takes it; its linear operator takes all.
    """

    function: Callable[..., Tensor]
    onednn: str
    algorithm: str = ""
    on_conv: bool = True


#: Name -> activation.
ACTIVATIONS: dict[str, Activation] = {
    "none": Activation(lambda x: x, "none"),
    "relu": Activation(F.relu, "relu"),
    "clamp": Activation(lambda x, low, high: x.clamp(low, high), "hardtanh"),
    "gelu": Activation(F.gelu, "gelu", "none", on_conv=False),
    "gelu_tanh": Activation(partial(F.gelu, approximate="tanh"), "gelu", "tanh", on_conv=False),
    "silu": Activation(F.silu, "swish"),
    "hardswish": Activation(F.hardswish, "hardswish"),
}
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def conv(
    x: Tensor,
    weights: Int8Weights,
    params: ConvParams,
    epilogue: Epilogue,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the convolution of ``x`` (uint8 codes); see ``torchq::int8_conv``."""
    spatial_dims = weights.codes.dim() - 2
    codes = x.double() - weights.x_zero_point
    sums = _CONV[spatial_dims](codes, weights.codes.double(), None, *params)
    real = _scale(sums, weights, (1, -1, *[1] * spatial_dims))
    return finish(real, epilogue, residual)


def linear(x: Tensor, weights: Int8Weights, epilogue: Epilogue) -> Tensor:
    """Return ``x @ weight.T + bias`` for uint8 codes; see ``torchq::int8_linear``."""
    sums = F.linear(x.double() - weights.x_zero_point, weights.codes.double())
    return finish(_scale(sums, weights, (-1,)), epilogue)


def finish(real: Tensor, epilogue: Epilogue, residual: Tensor | None = None) -> Tensor:
    """Return the epilogue of real-valued float32 sums."""
    if residual is not None:
        if residual.dtype is torch.uint8:
            residual = residual.float() - epilogue.residual_zero_point
            residual = residual * epilogue.residual_scale
        real = real + residual
    y = ACTIVATIONS[epilogue.activation].function(real, *epilogue.arguments)
    if epilogue.dtype is not torch.uint8:
        return y.to(epilogue.dtype)
    codes = torch.round(y / epilogue.scale).add_(epilogue.zero_point)
    return codes.clamp_(0, 255).to(torch.uint8)


def _scale(sums: Tensor, weights: Int8Weights, shape: tuple[int, ...]) -> Tensor:
    y = sums.float() * (weights.scale * weights.x_scale).view(shape)
    return y if weights.bias is None else y + weights.bias.view(shape)

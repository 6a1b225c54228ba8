"""Transposed convolutions on integers: ordinary ones with more channels, whose results are interleaved.

With stride s the results at positions o = s m + r are, for each of the s phases r, an ordinary convolution with every s-th tap of the
kernel. All phases together are one convolution with s times as many channels (in d dimensions s ** d times); a kernel of size s without
padding becomes one of size 1.
Source: Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016, https://arxiv.org/abs/1609.07009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.qparams import QParams
from torchq.lowering.registry import LOWERINGS, static_arguments
from torchq.nn import QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d, QuantModule

__all__ = ["Int8ConvTranspose"]


@dataclass(frozen=True)
class _Axis:
    """One spatial dimension of a transposed convolution.

    Attributes:
        stride, output_padding: its own.
        width: of its kernel with the holes of dilation, without the padding of both sides.
        taps: of the kernel of a phase.
        padding: of the ordinary convolution, on both sides.
        start: the first of the interleaved results that counts.
    """

    stride: int
    output_padding: int
    width: int
    taps: int
    padding: int
    start: int

    @classmethod
    def of(
        cls, kernel: int, stride: int, padding: int, output_padding: int, dilation: int
    ) -> _Axis:
        """From the arguments of :class:`torch.nn.ConvTranspose1d`."""
        kernel = dilation * (kernel - 1) + 1
        taps = math.ceil(kernel / stride)
        skipped = min(
            padding // stride, taps - 1
        )  # whole strides that the crop in front would take away again
        return cls(
            stride,
            output_padding,
            kernel - 2 * padding,
            taps,
            taps - 1 - skipped,
            padding - stride * skipped,
        )

    def smallest(self, length: int) -> int:
        """The size of the result without output padding."""
        return (length - 1) * self.stride + self.width

    def missing(self, output_padding: int) -> int:
        """How much longer the input must be at its end, so that results reach as far as they should."""
        blocks = (self.start + self.width + output_padding + self.stride - 1) // self.stride
        return max(0, blocks - 2 * self.padding + self.taps - 2)


class Int8ConvTranspose(Int8Conv):
    """An integer transposed convolution in 1, 2 or 3 dimensions.

    Its weight, scales and bias are those of the ordinary convolution that computes all phases, (groups * phases * out / groups, ...).

    Args:
        conv: the float layer.
        codes: its weight, int8, (in, out / groups, ...).
        scale: float32, (out / groups,).
        bias: floating point (out,) or None.
        rest: the further arguments of :class:`Int8Layer`.

    Shape:
        (N, C, ...) or (C, ...), float or uint8 codes -> (N, out, ...) or (out, ...), channels last in memory for 2 and 3 dimensions.
    """

    def __init__(
        self,
        conv: Any,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        *rest: QParams | torch.dtype | Tensor | None,
    ) -> None:
        sizes = (conv.kernel_size, conv.stride, conv.padding, conv.output_padding, conv.dilation)
        axes = [_Axis.of(*values) for values in zip(*sizes, strict=True)]
        phases = math.prod(axis.stride for axis in axes)
        ones = [1] * len(axes)
        ordinary = SimpleNamespace(
            kernel_size=[axis.taps for axis in axes], stride=ones, dilation=ones, groups=conv.groups, padding_mode="zeros",
            padding=[axis.padding for axis in axes],
        )  # fmt: skip
        weight = _arranged(codes, axes, conv.dilation, conv.groups)
        scales = _per_row(scale.repeat(conv.groups), conv.groups, phases)
        super().__init__(
            ordinary,
            weight,
            scales,
            None if bias is None else _per_row(bias, conv.groups, phases),
            *rest,
        )
        self.axes, self.phases = axes, phases

    @property
    def adds(self) -> bool:
        """False: what is added would have to be taken apart like the result."""
        return False

    def per_row(self, channels: Tensor) -> Tensor:
        """A value for each output channel as one for each row of the weight."""
        return _per_row(channels, self.params.groups, self.phases)

    def forward(self, x: Tensor, output_size: Sequence[int] | None = None) -> Tensor:  # type: ignore[override]
        """The transposed convolution; ``output_size`` as in :class:`torch.nn.ConvTranspose2d`.

        Raises:
            ConfigError: there is no result of ``output_size``.
        """
        if x.dtype is not torch.uint8:
            if (twin := self.unsigned_twin(x)) is not None:
                return twin(x, output_size)
            x = self.codes(x)
        lengths = x.shape[-len(self.axes) :]
        smallest = [axis.smallest(length) for axis, length in zip(self.axes, lengths, strict=True)]
        added = (
            [axis.output_padding for axis in self.axes]
            if output_size is None
            else self._added(output_size, smallest, x.dim())
        )
        missing = [axis.missing(more) for axis, more in zip(self.axes, added, strict=True)]
        if any(missing):
            x = F.pad(
                x,
                [side for more in reversed(missing) for side in (0, more)],
                value=float(self.input_qparams.zero_point),
            )
        batched = x.dim() == len(self.axes) + 2
        y = super().forward(x if batched else x.unsqueeze(0))
        y = self._interleave(y, [size + more for size, more in zip(smallest, added, strict=True)])
        return y if batched else y.squeeze(0)

    def _added(self, output_size: Sequence[int], smallest: list[int], dims: int) -> list[int]:
        """The output padding that gives ``output_size``."""
        sizes = list(output_size)[-len(smallest) :]
        largest = [size + axis.stride - 1 for size, axis in zip(smallest, self.axes, strict=True)]
        fits = all(
            low <= size <= high for low, size, high in zip(smallest, sizes, largest, strict=False)
        )
        if len(output_size) not in (len(smallest), dims) or not fits:
            raise ConfigError(
                f"Int8ConvTranspose: got output_size {list(output_size)}; expected one from {smallest} to {largest}"
            )
        return [size - low for size, low in zip(sizes, smallest, strict=True)]

    def _interleave(self, y: Tensor, sizes: list[int]) -> Tensor:
        """(N, groups * phases * out / groups, ...) -> (N, out, ...) of ``sizes``: depth to space, cropped."""
        spatial = len(self.axes)
        if self.phases > 1:
            strides = [axis.stride for axis in self.axes]
            y = y.movedim(1, -1)  # the layout of convolutions: channels stay together
            lengths = [
                length * stride for length, stride in zip(y.shape[1:-1], strides, strict=True)
            ]
            apart = y.unflatten(-1, (self.params.groups, *strides, -1))
            pairs = [axis for i in range(spatial) for axis in (1 + i, 2 + spatial + i)]
            together = apart.permute(0, *pairs, 1 + spatial, -1)
            y = together.reshape(y.shape[0], *lengths, y.shape[-1] // self.phases).movedim(-1, 1)
        for i, (axis, size) in enumerate(zip(self.axes, sizes, strict=True)):
            if size != y.shape[2 + i]:
                y = y.narrow(2 + i, axis.start, size)
        return y


def _per_row(channels: Tensor, groups: int, phases: int) -> Tensor:
    """(groups * n,) -> (groups * phases * n,)."""
    return channels.view(groups, 1, -1).expand(-1, phases, -1).reshape(-1)


def _arranged(codes: Tensor, axes: Sequence[_Axis], dilation: Sequence[int], groups: int) -> Tensor:
    """The kernels of all phases, zeros where one is shorter, as the weight of one convolution: groups, phases, out / groups on axis 0."""
    spatial = len(axes)
    whole = codes.new_zeros(*codes.shape[:2], *(axis.taps * axis.stride for axis in axes))
    holes = [slice(0, d * size, d) for d, size in zip(dilation, codes.shape[2:], strict=True)]
    everywhere = slice(None)
    places = (everywhere, everywhere, *holes)
    whole[places] = codes
    for i, axis in enumerate(axes):  # tap = stride * number + phase
        whole = whole.unflatten(2 + 2 * i, (axis.taps, axis.stride))
    whole = whole.unflatten(0, (groups, -1))  # groups, in, out, then taps and phases by turns
    taps, phases = ([3 + 2 * i + second for i in range(spatial)] for second in (0, 1))
    arranged = whole.flip(taps).permute(0, *phases, 2, 1, *taps)
    return arranged.reshape(
        -1, codes.shape[0] // groups, *(axis.taps for axis in axes)
    ).contiguous()


@LOWERINGS.register(QuantConvTranspose1d)
@LOWERINGS.register(QuantConvTranspose2d)
@LOWERINGS.register(QuantConvTranspose3d)
def _conv_transpose(module: QuantModule, reduce_range: bool) -> nn.Module | str:
    arguments = static_arguments(module, reduce_range)
    return arguments if isinstance(arguments, str) else Int8ConvTranspose(module, *arguments)

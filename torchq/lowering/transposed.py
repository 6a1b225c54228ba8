"""The integer transposed convolution: an ordinary one, whose results are interleaved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from torchq.errors import ConfigError
from torchq.lowering.layer import Int8Conv
from torchq.lowering.qparams import ByteQParams


@dataclass(frozen=True)
class _Axis:
    """One spatial dimension of a transposed convolution.

    Attributes:
        stride: of the transposed convolution.
        output_padding: of the transposed convolution.
        width: of its kernel with the holes of dilation, without the padding of both sides.
        taps: of the kernel of one phase.
        padding: of the ordinary convolution, on both sides.
        start: the first of the interleaved results that is part of the output.
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
        """Return the axis for arguments of :class:`torch.nn.ConvTranspose1d`."""
        kernel = dilation * (kernel - 1) + 1
        taps = math.ceil(kernel / stride)
        # Whole strides that the crop in front would take away again are not computed.
        skipped = min(padding // stride, taps - 1)
        return cls(
            stride,
            output_padding,
            width=kernel - 2 * padding,
            taps=taps,
            padding=taps - 1 - skipped,
            start=padding - stride * skipped,
        )

    def smallest(self, length: int) -> int:
        """Return the size of the output without output padding."""
        return (length - 1) * self.stride + self.width

    def missing(self, output_padding: int) -> int:
        """Return how much longer the input must be at its end to reach the whole output."""
        blocks = (self.start + self.width + output_padding + self.stride - 1) // self.stride
        return max(0, blocks - 2 * self.padding + self.taps - 2)


class Int8ConvTranspose(Int8Conv):
    """An integer transposed convolution in 1, 2 or 3 dimensions: an ordinary one, interleaved.

    With stride s the results at positions o = s m + r are, for each of the s phases r, an ordinary
    convolution with every s-th tap of the kernel. All phases together are one convolution with s
    times as many channels (in d dimensions s ** d times), whose weight, scales and bias the layer
    has: (groups * phases * out / groups, ...).

    Source: Shi et al., "Is the deconvolution layer the same as a convolutional layer?", 2016,
    https://arxiv.org/abs/1609.07009.

    Args:
        conv: a transposed convolution that says everything but the weight and the bias.
        codes: its weight, int8, (in, out / groups, ...).
        scale: float32, (out / groups,).
        bias: floating point (out,) or None.
        rest: the further arguments of :class:`Int8Layer`.

    Shape:
        (N, C, ...) or (C, ...), float or uint8 codes -> (N, out, ...) or (out, ...), channels last
        in memory for 2 and 3 dimensions.
    """

    def __init__(
        self,
        conv: Any,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        *rest: Any,
    ) -> None:
        sizes = (conv.kernel_size, conv.stride, conv.padding, conv.output_padding, conv.dilation)
        axes = [_Axis.of(*values) for values in zip(*sizes, strict=True)]
        phases = math.prod(axis.stride for axis in axes)
        ordinary = SimpleNamespace(
            kernel_size=[axis.taps for axis in axes],
            stride=[1] * len(axes),
            dilation=[1] * len(axes),
            groups=conv.groups,
            padding_mode="zeros",
            padding=[axis.padding for axis in axes],
        )
        weight = _phase_kernels(codes, axes, conv.dilation, conv.groups)
        scales = _per_row(scale.repeat(conv.groups), conv.groups, phases)
        biases = None if bias is None else _per_row(bias, conv.groups, phases)
        super().__init__(ordinary, weight, scales, biases, *rest)
        self.axes, self.phases = axes, phases

    @property
    def adds(self) -> bool:  # type: ignore[override]
        """False, because a residual would have to be taken apart like the result."""
        return False

    def per_row(self, channels: Tensor) -> Tensor:
        """Return a value for each output channel, (out,), as one for each row of the weight."""
        return _per_row(channels, self.params.groups, self.phases)

    def forward(  # type: ignore[override]
        self, x: Tensor, output_size: Sequence[int] | None = None
    ) -> Tensor:
        """Return the transposed convolution of ``x``.

        Args:
            x: floating point, or codes where the layer reads codes.
            output_size: as in :class:`torch.nn.ConvTranspose2d`.

        Raises:
            ConfigError: there is no result of ``output_size``.
            TypeError: see :meth:`Int8Layer.forward`.
            QuantizationError: see :meth:`Int8Layer.forward`.
        """
        return super().forward(x, output_size)  # type: ignore[arg-type]

    def _compute(  # type: ignore[override]
        self, x: Tensor, qparams: ByteQParams, output_size: Sequence[int] | None = None
    ) -> Tensor:
        lengths = x.shape[-len(self.axes) :]
        smallest = [axis.smallest(length) for axis, length in zip(self.axes, lengths, strict=True)]
        if output_size is None:
            added = [axis.output_padding for axis in self.axes]
        else:
            added = self._output_padding(output_size, smallest, x.dim())
        missing = [axis.missing(more) for axis, more in zip(self.axes, added, strict=True)]
        if any(missing):
            border = [side for more in reversed(missing) for side in (0, more)]
            x = F.pad(x, border, value=float(qparams.zero_point))
        batched = x.dim() == len(self.axes) + 2
        y = super()._compute(x if batched else x.unsqueeze(0), qparams)
        y = self._interleave(y, [size + more for size, more in zip(smallest, added, strict=True)])
        return y if batched else y.squeeze(0)

    def _output_padding(
        self, output_size: Sequence[int], smallest: list[int], ndim: int
    ) -> list[int]:
        """Return the output padding that gives ``output_size``."""
        sizes = list(output_size)[-len(smallest) :]
        largest = [size + axis.stride - 1 for size, axis in zip(smallest, self.axes, strict=True)]
        bounds = zip(smallest, sizes, largest, strict=False)
        fits = all(low <= size <= high for low, size, high in bounds)
        if len(output_size) not in (len(smallest), ndim) or not fits:
            raise ConfigError(
                f"Int8ConvTranspose: got output_size {list(output_size)}; "
                f"expected one from {smallest} to {largest}"
            )
        return [size - low for size, low in zip(sizes, smallest, strict=True)]

    def _interleave(self, y: Tensor, sizes: list[int]) -> Tensor:
        """Return (N, groups * phases * out / groups, ...) as (N, out, ...) of ``sizes``.

        This is depth to space, cropped.
        """
        spatial_dims = len(self.axes)
        if self.phases > 1:
            strides = [axis.stride for axis in self.axes]
            y = y.movedim(1, -1)  # the layout of convolutions: channels stay together
            lengths = [
                length * stride for length, stride in zip(y.shape[1:-1], strides, strict=True)
            ]
            apart = y.unflatten(-1, (self.params.groups, *strides, -1))
            pairs = [axis for i in range(spatial_dims) for axis in (1 + i, 2 + spatial_dims + i)]
            together = apart.permute(0, *pairs, 1 + spatial_dims, -1)
            y = together.reshape(y.shape[0], *lengths, y.shape[-1] // self.phases).movedim(-1, 1)
        for i, (axis, size) in enumerate(zip(self.axes, sizes, strict=True)):
            if size != y.shape[2 + i]:
                y = y.narrow(2 + i, axis.start, size)
        return y


def _per_row(channels: Tensor, groups: int, phases: int) -> Tensor:
    """Return (groups * n,) repeated for each phase, (groups * phases * n,)."""
    return channels.view(groups, 1, -1).expand(-1, phases, -1).reshape(-1)


def _phase_kernels(
    codes: Tensor, axes: Sequence[_Axis], dilation: Sequence[int], groups: int
) -> Tensor:
    """Return the kernels of all phases as the weight of one convolution.

    Zeros fill up the kernels of phases with fewer taps. Axis 0 runs over groups, phases and
    out / groups.
    """
    spatial_dims = len(axes)
    whole = codes.new_zeros(*codes.shape[:2], *(axis.taps * axis.stride for axis in axes))
    holes = [slice(0, d * size, d) for d, size in zip(dilation, codes.shape[2:], strict=True)]
    everywhere = (slice(None), slice(None))
    whole[everywhere + tuple(holes)] = codes
    for i, axis in enumerate(axes):  # tap = stride * number + phase
        whole = whole.unflatten(2 + 2 * i, (axis.taps, axis.stride))
    whole = whole.unflatten(0, (groups, -1))  # groups, in, out, then taps and phases in turn
    taps, phases = ([3 + 2 * i + second for i in range(spatial_dims)] for second in (0, 1))
    arranged = whole.flip(taps).permute(0, *phases, 2, 1, *taps)
    sizes = (axis.taps for axis in axes)
    return arranged.reshape(-1, codes.shape[0] // groups, *sizes).contiguous()

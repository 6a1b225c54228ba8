"""Pooling of uint8 codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq.lowering import onednn
from torchq.lowering.definition import ConvParams, Int8Weights
from torchq.lowering.layer import IntegerModule, KernelCacheMixin, QParamsStateMixin, eager, guarded
from torchq.lowering.onednn import Run
from torchq.lowering.operators import max_pool2d
from torchq.lowering.qparams import QParams

AveragePooling = nn.AvgPool2d | nn.AdaptiveAvgPool2d


class CodesMaxPool2d(IntegerModule, nn.MaxPool2d):
    """Max pooling of uint8 codes; rounding keeps the order of values, so this is exact.

    Shape:
        (N, C, H, W) or (C, H, W), uint8 -> the same with pooled images.
    """

    def propagate_qparams(self, inputs: Sequence[QParams | None]) -> QParams | None:
        """See :meth:`IntegerModule.propagate_qparams`; the output is on those of the input."""
        return inputs[0]

    def forward(self, input: Tensor) -> Tensor:
        """Return the largest code of each window."""
        window = (self.kernel_size, self.stride, self.padding, self.dilation)
        return max_pool2d(input, [_pair(size) for size in window], self.ceil_mode)


class CodesAvgPool2d(KernelCacheMixin, QParamsStateMixin, IntegerModule):
    """Average pooling of uint8 codes to codes of other quantization parameters.

    Computed as a depthwise convolution with weights of one: one kernel adds integers and rounds
    once, where floating point takes three passes over memory. What a convolution cannot express
    (windows of different sizes, padding that is not counted) is computed in floating point.

    Shape:
        (N, C, H, W) or (C, H, W), uint8 -> the same with pooled images.
    """

    qparams_names = ("input_qparams", "output_qparams")

    def __init__(
        self, pool: AveragePooling, input_qparams: QParams, output_qparams: QParams
    ) -> None:
        super().__init__()
        self.pool, self.input_qparams, self.output_qparams = pool, input_qparams, output_qparams

    def propagate_qparams(self, inputs: Sequence[QParams | None]) -> QParams | None:
        """See :meth:`IntegerModule.propagate_qparams`."""
        if inputs[0] is not None:
            self.input_qparams = inputs[0]
        return self.output_qparams

    def forward(self, codes: Tensor) -> Tensor:
        """Return the code of each window's average."""
        if not eager(codes):
            return self._float(codes)
        return self._run(codes.shape)(codes)

    def _run(self, shape: torch.Size) -> Run:
        run: Run = self._kernel(shape, lambda: self._bind(shape))
        return run

    def bound(self, *inputs: Tensor) -> Run | None:
        """See :meth:`KernelCacheMixin.bound`."""
        return guarded(self._run(inputs[0].shape), self, inputs)

    def _float(self, codes: Tensor) -> Tensor:
        return self.output_qparams.quantize(self.pool(self.input_qparams.dequantize(codes)))

    def _bind(self, shape: torch.Size) -> Run:
        fits = len(shape) == 4 and shape.numel() and onednn.available()
        window = _window(self.pool, shape[2:]) if fits else None
        if window is None:
            return self._float
        size, stride, padding = window
        before, after, channels = self.input_qparams, self.output_qparams, shape[1]
        ones = torch.ones(channels, 1, *size, dtype=torch.int8, device="cpu")
        mean = 1 / (size[0] * size[1])
        scale = torch.full((channels,), mean, dtype=torch.float32, device="cpu")
        weights = Int8Weights(ones, scale, None, before.scale, before.zero_point)
        params = ConvParams(tuple(stride), tuple(padding), (1, 1), channels)
        return onednn.bind_conv(shape, weights, params, after.epilogue())

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        return f"{self.input_qparams} -> {self.output_qparams}"


def _window(
    pool: AveragePooling, sizes: Sequence[int]
) -> tuple[list[int], list[int], list[int]] | None:
    """Return size, stride and padding of windows that are all alike, or None."""
    if isinstance(pool, nn.AdaptiveAvgPool2d):
        return _adaptive_window(_pair(pool.output_size), sizes)
    size, stride, padding = _pair(pool.kernel_size), _pair(pool.stride), _pair(pool.padding)
    counts_all = pool.count_include_pad or not any(padding)
    if pool.ceil_mode or pool.divisor_override is not None or not counts_all:
        return None
    return size, stride, padding


def _adaptive_window(
    wanted: list[Any], sizes: Sequence[int]
) -> tuple[list[int], list[int], list[int]] | None:
    """Return size, stride and padding of the windows of adaptive pooling, or None."""
    out = [size if want is None else want for size, want in zip(sizes, wanted, strict=True)]
    if any(not want or size % want for size, want in zip(sizes, out, strict=True)):
        return None
    window = [size // want for size, want in zip(sizes, out, strict=True)]
    return window, window, [0, 0]


def _pair(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value, value]

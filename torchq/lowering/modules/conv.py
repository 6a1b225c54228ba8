"""The integer convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.lowering.modules.base import Int8Layer, eager
from torchq.lowering.ops import onednn
from torchq.lowering.ops.onednn import Run

__all__ = ["Int8Conv"]


class Int8Conv(Int8Layer):
    """An integer convolution in 1, 2 or 3 dimensions; the arguments beyond :class:`Int8Layer`'s are those of a float one.

    Attributes:
        overwrites_residual: nothing reads the residual afterwards, so that the result may take its place in memory.

    Shape:
        (N, C, ...) or (C, ...), float or uint8 codes -> (N, out, ...) or (out, ...), channels last in memory for 2 and 3 dimensions.
    """

    kind = "conv"

    def __init__(self, conv: Any, *args: Any) -> None:
        super().__init__(*args)
        self.stride, self.dilation = list[int](conv.stride), list[int](conv.dilation)
        self.groups: int = conv.groups
        self.padding, self.border = _split_padding(conv)
        self.border_mode: str = conv.padding_mode
        self.overwrites_residual = False

    @property
    def adds(self) -> bool:
        """Whether the kernel adds a second tensor to its result."""
        return self.weight_codes.dim() < 5

    def per_row(self, channels: Tensor) -> Tensor:
        """A value for each output channel as one for each row of the weight."""
        return channels

    def codes(self, x: Tensor) -> Tensor:
        """``x`` as codes of the input qparams; many images a few at a time."""
        many = (
            eager(x)
            and x.dim() == 4
            and len(x) > 1
            and x.dtype is not torch.uint8
            and self.pre_quant_scale is None
        )
        return self.input_qparams.quantize_images(x) if many else super().codes(x)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Convolve. ``residual`` is added before the activation: float, or codes of :attr:`residual_qparams`."""
        if x.dtype is not torch.uint8:
            if (twin := self.unsigned_twin(x)) is not None:
                return twin(x, residual)
            x = self.codes(x)
        if eager(x):
            key = x.shape if residual is None else (x.shape, residual.shape, residual.dtype)
            run: Run = self._kernels.get(key) or self._kernel(key, lambda: self._bind(x, residual))
            return run(x) if residual is None else run(x, residual)
        return self._dispatched(x, residual)

    def _bind(self, x: Tensor, residual: Tensor | None) -> Run:
        simple = self.border is None and x.dim() == self.weight_codes.dim()
        if not simple or not x.numel() or not onednn.available():
            return self._dispatched
        arguments: tuple[Any, ...] = (
            *self._layer(),
            *self.output_arguments(),
            *self._residual(),
            self.overwrites_residual,
        )
        run = onednn.bind_conv(x.shape, residual, *arguments)
        return run if self.finished else lambda *tensors: self.finish(run(*tensors))

    def _layer(self) -> tuple[Any, ...]:
        qparams, static = (
            self.input_qparams,
            (self.stride, self.padding, self.dilation, self.groups),
        )
        return (
            self.weight_codes,
            self.weight_scale,
            self.bias,
            qparams.scale,
            qparams.zero_point,
            *static,
        )

    def _residual(self) -> tuple[float, int]:
        return (
            (1.0, 0)
            if self.residual_qparams is None
            else (self.residual_qparams.scale, self.residual_qparams.zero_point)
        )

    def _dispatched(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        single = x.dim() == self.weight_codes.dim() - 1
        x = x.unsqueeze(0) if single else x
        if self.border is not None:
            x = self._pad(x, self.border)
        y = self.finish(
            torch.ops.torchq.int8_conv(
                x, *self._layer(), *self.output_arguments(), residual, *self._residual()
            )
        )
        return y.squeeze(0) if single else y

    def _pad(self, x: Tensor, border: list[int]) -> Tensor:
        if self.border_mode == "zeros":
            return F.pad(x, border, value=float(self.input_qparams.zero_point))
        # Not implemented for integers; exact in float32.
        return F.pad(x.float(), border, mode=self.border_mode).to(torch.uint8)


def _split_padding(conv: Any) -> tuple[list[int], list[int] | None]:
    """Symmetric zero padding for the kernel, and what has to be padded before it, in the order of ``F.pad``."""
    spatial = len(conv.kernel_size)
    if conv.padding == "valid":
        return [0] * spatial, None
    if conv.padding == "same":
        total = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        before_after = [(t // 2, t - t // 2) for t in total]
    else:
        before_after = [(p, p) for p in conv.padding]
    if conv.padding_mode == "zeros" and all(a == b for a, b in before_after):
        return [a for a, _ in before_after], None
    return [0] * spatial, [side for pair in reversed(before_after) for side in pair]

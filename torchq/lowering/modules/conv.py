"""The integer convolution."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.modules.input_checks import eager
from torchq.lowering.ops import onednn
from torchq.lowering.ops.onednn import Run
from torchq.lowering.ops.params import ConvParams
from torchq.lowering.ops.schemas import int8_conv

__all__ = ["Int8Conv"]


class Int8Conv(Int8Layer):
    """An integer convolution in 1, 2 or 3 dimensions.

    Args:
        conv: a convolution, or an object with the same attributes, that says everything but the
            weight and the bias.
        args: the arguments of :class:`Int8Layer`.

    Attributes:
        params: the numbers of the kernel's convolution, whose padding is symmetric zeros.
        border: the padding that is added before the kernel, in the order of ``F.pad``; None where
            the kernel does all of it.
        border_mode: the mode of that padding.

    Shape:
        (N, C, ...) or (C, ...), float or uint8 codes -> (N, out, ...) or (out, ...), channels last
        in memory for 2 and 3 dimensions.
    """

    def __init__(self, conv: Any, *args: Any) -> None:
        super().__init__(*args)
        padding, self.border = _split_padding(conv)
        self.params = ConvParams(tuple(conv.stride), padding, tuple(conv.dilation), conv.groups)
        self.border_mode: str = conv.padding_mode

    @property
    def _ndim(self) -> int:
        """The dimensions of batches; the plain weight, which has as many, may be packed."""
        return len(self.params.stride) + 2

    @property
    def adds(self) -> bool:
        """True where the kernel can add a second tensor to its result."""
        return self._ndim < 5

    @property
    def is_pointwise(self) -> bool:
        """True where each pixel of the result depends on one pixel alone."""
        return self.border is None and self.params.is_pointwise(self.weight_codes.shape)

    def per_row(self, channels: Tensor) -> Tensor:
        """Return a value for each output channel, (out,), as one for each row of the weight."""
        return channels

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the convolution of ``x``.

        Args:
            x: floating point, or codes where the layer reads codes.
            residual: added before the activation: floating point, or codes of
                :attr:`residual_qparams`.

        Raises:
            TypeError: see :meth:`Int8Layer.input_codes`.
            QuantizationError: see :meth:`Int8Layer.input_codes`.
        """
        if x.dtype is torch.uint8 and self.reads_codes:
            return self._convolve(x, residual)
        layer, codes = self.input_codes(x)
        assert isinstance(layer, Int8Conv)
        return layer._convolve(codes, residual)  # noqa: SLF001

    def _convolve(self, codes: Tensor, residual: Tensor | None = None) -> Tensor:
        if not eager(codes):
            return self._dispatched(codes, residual)
        key = codes.shape if residual is None else (codes.shape, residual.shape, residual.dtype)
        run: Run = self._kernels.get(key) or self._kernel(key, lambda: self._bind(codes, residual))
        return run(codes) if residual is None else run(codes, residual)

    def bound(self, *inputs: Tensor) -> Run | None:
        """See :meth:`KernelCacheMixin.bound`; only codes are read without a check."""
        x, shape = inputs[0], inputs[0].shape
        if len(inputs) > 2 or x.dtype is not torch.uint8 or not self.reads_codes:
            return None
        if len(inputs) == 1:
            run: Run = self._kernel(shape, lambda: self._bind(x, None))

            def convolve(codes: Tensor) -> Tensor:
                return run(codes) if codes.shape == shape else self(codes)

            return convolve
        added = inputs[1]
        key = added_shape, added_dtype = added.shape, added.dtype
        add: Run = self._kernel((shape, *key), lambda: self._bind(x, added))

        def convolve_and_add(codes: Tensor, residual: Tensor) -> Tensor:
            alike = codes.shape == shape and residual.shape == added_shape
            if alike and residual.dtype is added_dtype:
                return add(codes, residual)
            return self(codes, residual)

        return convolve_and_add

    def _bind(self, x: Tensor, residual: Tensor | None) -> Run:
        """Return the layer as a function of codes, and residuals, like these."""
        simple = self.border is None and x.dim() == self._ndim
        if not simple or not x.numel() or not onednn.available():
            return self._dispatched
        layer = (self.int8_weights(), self.params, self.epilogue())
        return self._bound(onednn.bind_conv(x.shape, *layer, residual))

    def _dispatched(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        single = x.dim() == self._ndim - 1
        x = x.unsqueeze(0) if single else x
        if self.border is not None:
            x = self._pad(x, self.border)
        y = int8_conv(x, self.int8_weights(), self.params, self.epilogue(), residual)
        y = self.finish(y)
        return y.squeeze(0) if single else y

    def _pad(self, x: Tensor, border: list[int]) -> Tensor:
        if self.border_mode == "zeros":
            return F.pad(x, border, value=float(self.input_qparams.zero_point))
        # Not implemented for integers; exact in float32.
        return F.pad(x.float(), border, mode=self.border_mode).to(torch.uint8)


def _split_padding(conv: Any) -> tuple[tuple[int, ...], list[int] | None]:
    """Return the symmetric zero padding of the kernel, and what is padded before it.

    The second is None, or in the order of ``F.pad``.
    """
    none = (0,) * len(conv.kernel_size)
    if conv.padding == "valid":
        return none, None
    if conv.padding == "same":
        total = [d * (k - 1) for d, k in zip(conv.dilation, conv.kernel_size, strict=True)]
        before_after = [(t // 2, t - t // 2) for t in total]
    else:
        before_after = [(p, p) for p in conv.padding]
    if conv.padding_mode == "zeros" and all(a == b for a, b in before_after):
        return tuple(a for a, _ in before_after), None
    return none, [side for pair in reversed(before_after) for side in pair]

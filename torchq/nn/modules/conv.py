"""Quantized convolutions: they quantize input and weight, then run torch's own code."""

from typing import ClassVar, cast

import torch.nn.functional as F
from torch import Tensor, nn

from torchq.nn.batchnorm_folding import OutputScaling
from torchq.nn.convert import QuantModule, register
from torchq.nn.correction import Corrected
from torchq.nn.integer_kernel import SimulatedProduct, integer_product
from torchq.utils import constant_while_tracing


class _QuantConv(SimulatedProduct, Corrected, OutputScaling, QuantModule):
    """Base of the convolutions: ``conv(input_quantizer(x), weight_quantizer(weight)) + bias``.

    Only ``_conv_forward`` is overridden, so ``padding_mode``, padding ``"same"``, groups and
    dilation are handled by torch. The bias stays float, or is rounded as a kernel of the target
    does: see :mod:`torchq.nn.integer_bias`. A runtime that computes on integers between
    quantizers alone may want the result quantized too; see :meth:`QuantModule.quantize_output_`.
    """

    may_quantize_output = True

    def _conv_forward(
        self, input: Tensor, weight: Tensor, bias: Tensor | None
    ) -> Tensor:
        convolve = super()._conv_forward  # type: ignore[misc]
        result = integer_product(self, input, convolve)
        if result is None:
            x, weight = self.input_quantizer(input), self.weight_quantizer(weight)
            result = self.simulated(x, weight, bias, convolve)
        return self.quantized_result(result, getattr(self, "output_quantizer", None))


@register(nn.Conv1d)
class QuantConv1d(_QuantConv, nn.Conv1d):
    """Quantized :class:`torch.nn.Conv1d`; input (N, C, L) or (C, L)."""


@register(nn.Conv2d)
class QuantConv2d(_QuantConv, nn.Conv2d):
    """Quantized :class:`torch.nn.Conv2d`; input (N, C, H, W) or (C, H, W)."""


@register(nn.Conv3d)
class QuantConv3d(_QuantConv, nn.Conv3d):
    """Quantized :class:`torch.nn.Conv3d`; input (N, C, D, H, W) or (C, D, H, W)."""


_CONVOLVE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}


class _QuantConvTranspose(SimulatedProduct, Corrected, OutputScaling, QuantModule):
    """Base of the transposed convolutions; their weight is (in, out / groups, ...)."""

    channel_axis: ClassVar[int] = 1

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        # Only zeros are padded: the constructor of the float class refuses other padding modes.
        dims = len(cast("tuple[int, ...]", self.kernel_size))
        sizes = (self.stride, self.padding, self.kernel_size, dims, self.dilation)
        with constant_while_tracing():
            padding = self._output_padding(input, output_size, *sizes)  # type: ignore[operator]
        options = (self.stride, self.padding, padding, self.groups, self.dilation)

        def convolve(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _CONVOLVE[dims](x, weight, bias, *options)  # type: ignore[arg-type]

        result = integer_product(
            self,
            input,
            lambda x, weight, bias: convolve(x, self.by_output(weight), bias),
        )
        if result is None:
            x, weight = self.input_quantizer(input), self.weight_quantizer(self.weight)
            result = self.simulated(x, weight, cast(Tensor | None, self.bias), convolve)
        return result


@register(nn.ConvTranspose1d)
class QuantConvTranspose1d(_QuantConvTranspose, nn.ConvTranspose1d):
    """Quantized :class:`torch.nn.ConvTranspose1d`; input (N, C, L) or (C, L)."""


@register(nn.ConvTranspose2d)
class QuantConvTranspose2d(_QuantConvTranspose, nn.ConvTranspose2d):
    """Quantized :class:`torch.nn.ConvTranspose2d`; input (N, C, H, W) or (C, H, W)."""


@register(nn.ConvTranspose3d)
class QuantConvTranspose3d(_QuantConvTranspose, nn.ConvTranspose3d):
    """Quantized :class:`torch.nn.ConvTranspose3d`; input (N, C, D, H, W) or (C, D, H, W)."""

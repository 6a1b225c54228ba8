"""Quantized convolutions."""

from __future__ import annotations

from torchq import nn as core
from torchq.compat.pytorch_quantization import tensor_quant
from torchq.compat.pytorch_quantization.nn.modules._utils import QuantMixin
from torchq.compat.pytorch_quantization.nn.modules.layer import LegacyLayer

__all__ = [
    "Conv1d",
    "QuantConv1d",
    "Conv2d",
    "QuantConv2d",
    "Conv3d",
    "QuantConv3d",
    "ConvTranspose1d",
    "QuantConvTranspose1d",
    "ConvTranspose2d",
    "QuantConvTranspose2d",
    "ConvTranspose3d",
    "QuantConvTranspose3d",
]


class _QuantConvNd(QuantMixin, LegacyLayer):
    """What the convolutions share."""


class _QuantConvTransposeNd(QuantMixin, LegacyLayer):
    """What the transposed convolutions share."""


class QuantConv1d(_QuantConvNd, core.QuantConv1d):
    """Quantized :class:`torch.nn.Conv1d`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL


class QuantConv2d(_QuantConvNd, core.QuantConv2d):
    """Quantized :class:`torch.nn.Conv2d`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL


class QuantConv3d(_QuantConvNd, core.QuantConv3d):
    """Quantized :class:`torch.nn.Conv3d`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL


class QuantConvTranspose1d(_QuantConvTransposeNd, core.QuantConvTranspose1d):
    """Quantized :class:`torch.nn.ConvTranspose1d`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL


class QuantConvTranspose2d(_QuantConvTransposeNd, core.QuantConvTranspose2d):
    """Quantized :class:`torch.nn.ConvTranspose2d`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL


class QuantConvTranspose3d(_QuantConvTransposeNd, core.QuantConvTranspose3d):
    """Quantized :class:`torch.nn.ConvTranspose3d`."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL


Conv1d = QuantConv1d
Conv2d = QuantConv2d
Conv3d = QuantConv3d
ConvTranspose1d = QuantConvTranspose1d
ConvTranspose2d = QuantConvTranspose2d
ConvTranspose3d = QuantConvTranspose3d

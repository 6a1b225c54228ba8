"""Quantized convolutions."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.conv import _ConvNd, _ConvTransposeNd

from torchq import nn as core
from torchq.compat.pytorch_quantization import tensor_quant
from torchq.compat.pytorch_quantization.nn.modules import _utils
from torchq.compat.pytorch_quantization.nn.modules.layer import LegacyLayer
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor

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


class _ConstructorOfConvNd(_utils.QuantMixin):
    """The constructor of the original's base classes, and :meth:`_quant`.

    Args:
        *args: the eleven arguments of torch's ``_ConvNd``, from ``in_channels`` to
            ``padding_mode``, then ``quant_desc_input`` and ``quant_desc_weight``.
        quant_desc_input: the descriptor of the input; default: that of the class.
        quant_desc_weight: the descriptor of the weight; default: that of the class.
        **kwargs: arguments of ``_ConvNd`` by name.
    """

    def __init__(
        self,
        *args: Any,
        quant_desc_input: QuantDescriptor | None = None,
        quant_desc_weight: QuantDescriptor | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args[:11], **kwargs)
        given = [*args[11:13], None, None]
        self.init_quantizer(
            quant_desc_input or given[0] or self.default_quant_desc_input,
            quant_desc_weight or given[1] or self.default_quant_desc_weight,
        )

    _quant = LegacyLayer._quant  # noqa: SLF001


class _QuantConvNd(_ConstructorOfConvNd, _ConvNd):
    """Base that scripts derive their own convolutions from; they define ``forward``."""


class _QuantConvTransposeNd(_ConstructorOfConvNd, _ConvTransposeNd):
    """Base that scripts derive their own transposed convolutions from."""


class QuantConv1d(_QuantConvNd, LegacyLayer, core.QuantConv1d):
    """Quantized :class:`torch.nn.Conv1d`."""

    __init__ = LegacyLayer.__init__
    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL


class QuantConv2d(_QuantConvNd, LegacyLayer, core.QuantConv2d):
    """Quantized :class:`torch.nn.Conv2d`."""

    __init__ = LegacyLayer.__init__
    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL


class QuantConv3d(_QuantConvNd, LegacyLayer, core.QuantConv3d):
    """Quantized :class:`torch.nn.Conv3d`."""

    __init__ = LegacyLayer.__init__
    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL


class QuantConvTranspose1d(_QuantConvTransposeNd, LegacyLayer, core.QuantConvTranspose1d):
    """Quantized :class:`torch.nn.ConvTranspose1d`."""

    __init__ = LegacyLayer.__init__
    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL


class QuantConvTranspose2d(_QuantConvTransposeNd, LegacyLayer, core.QuantConvTranspose2d):
    """Quantized :class:`torch.nn.ConvTranspose2d`."""

    __init__ = LegacyLayer.__init__
    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL


class QuantConvTranspose3d(_QuantConvTransposeNd, LegacyLayer, core.QuantConvTranspose3d):
    """Quantized :class:`torch.nn.ConvTranspose3d`."""

    __init__ = LegacyLayer.__init__
    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL


Conv1d = QuantConv1d
Conv2d = QuantConv2d
Conv3d = QuantConv3d
ConvTranspose1d = QuantConvTranspose1d
ConvTranspose2d = QuantConvTranspose2d
ConvTranspose3d = QuantConvTranspose3d

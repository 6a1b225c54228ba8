"""Pooling with a quantized input."""

from __future__ import annotations

from torchq import nn as core
from torchq.compat.pytorch_quantization.nn.modules import _utils
from torchq.compat.pytorch_quantization.nn.modules.layer import LegacyLayer

__all__ = [
    "MaxPool1d",
    "QuantMaxPool1d",
    "MaxPool2d",
    "QuantMaxPool2d",
    "MaxPool3d",
    "QuantMaxPool3d",
    "AvgPool1d",
    "QuantAvgPool1d",
    "AvgPool2d",
    "QuantAvgPool2d",
    "AvgPool3d",
    "QuantAvgPool3d",
    "AdaptiveAvgPool1d",
    "QuantAdaptiveAvgPool1d",
    "AdaptiveAvgPool2d",
    "QuantAdaptiveAvgPool2d",
    "AdaptiveAvgPool3d",
    "QuantAdaptiveAvgPool3d",
]


class QuantMaxPool1d(_utils.QuantInputMixin, LegacyLayer, core.QuantMaxPool1d):
    """Quantized-input :class:`torch.nn.MaxPool1d`."""


class QuantMaxPool2d(_utils.QuantInputMixin, LegacyLayer, core.QuantMaxPool2d):
    """Quantized-input :class:`torch.nn.MaxPool2d`."""


class QuantMaxPool3d(_utils.QuantInputMixin, LegacyLayer, core.QuantMaxPool3d):
    """Quantized-input :class:`torch.nn.MaxPool3d`."""


class QuantAvgPool1d(_utils.QuantInputMixin, LegacyLayer, core.QuantAvgPool1d):
    """Quantized-input :class:`torch.nn.AvgPool1d`."""


class QuantAvgPool2d(_utils.QuantInputMixin, LegacyLayer, core.QuantAvgPool2d):
    """Quantized-input :class:`torch.nn.AvgPool2d`."""


class QuantAvgPool3d(_utils.QuantInputMixin, LegacyLayer, core.QuantAvgPool3d):
    """Quantized-input :class:`torch.nn.AvgPool3d`."""


class QuantAdaptiveAvgPool1d(_utils.QuantInputMixin, LegacyLayer, core.QuantAdaptiveAvgPool1d):
    """Quantized-input :class:`torch.nn.AdaptiveAvgPool1d`."""


class QuantAdaptiveAvgPool2d(_utils.QuantInputMixin, LegacyLayer, core.QuantAdaptiveAvgPool2d):
    """Quantized-input :class:`torch.nn.AdaptiveAvgPool2d`."""


class QuantAdaptiveAvgPool3d(_utils.QuantInputMixin, LegacyLayer, core.QuantAdaptiveAvgPool3d):
    """Quantized-input :class:`torch.nn.AdaptiveAvgPool3d`."""


MaxPool1d = QuantMaxPool1d
MaxPool2d = QuantMaxPool2d
MaxPool3d = QuantMaxPool3d
AvgPool1d = QuantAvgPool1d
AvgPool2d = QuantAvgPool2d
AvgPool3d = QuantAvgPool3d
AdaptiveAvgPool1d = QuantAdaptiveAvgPool1d
AdaptiveAvgPool2d = QuantAdaptiveAvgPool2d
AdaptiveAvgPool3d = QuantAdaptiveAvgPool3d

"""InstanceNorm with a quantized input."""

from __future__ import annotations

from torchq import nn as core
from torchq.compat.pytorch_quantization.nn.modules import _utils
from torchq.compat.pytorch_quantization.nn.modules.layer import LegacyLayer

__all__ = [
    "InstanceNorm1d",
    "QuantInstanceNorm1d",
    "InstanceNorm2d",
    "QuantInstanceNorm2d",
    "InstanceNorm3d",
    "QuantInstanceNorm3d",
]


class QuantInstanceNorm1d(_utils.QuantInputMixin, LegacyLayer, core.QuantInstanceNorm1d):
    """Quantized-input :class:`torch.nn.InstanceNorm1d`."""


class QuantInstanceNorm2d(_utils.QuantInputMixin, LegacyLayer, core.QuantInstanceNorm2d):
    """Quantized-input :class:`torch.nn.InstanceNorm2d`."""


class QuantInstanceNorm3d(_utils.QuantInputMixin, LegacyLayer, core.QuantInstanceNorm3d):
    """Quantized-input :class:`torch.nn.InstanceNorm3d`."""


InstanceNorm1d = QuantInstanceNorm1d
InstanceNorm2d = QuantInstanceNorm2d
InstanceNorm3d = QuantInstanceNorm3d

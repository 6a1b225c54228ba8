"""Modules whose input alone is quantized: pooling, InstanceNorm, Identity."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchq.nn.convert import QuantModule, register

__all__ = [
    "QuantAdaptiveAvgPool1d",
    "QuantAdaptiveAvgPool2d",
    "QuantAdaptiveAvgPool3d",
    "QuantAvgPool1d",
    "QuantAvgPool2d",
    "QuantAvgPool3d",
    "QuantIdentity",
    "QuantInstanceNorm1d",
    "QuantInstanceNorm2d",
    "QuantInstanceNorm3d",
    "QuantMaxPool1d",
    "QuantMaxPool2d",
    "QuantMaxPool3d",
]


class _QuantInput(QuantModule):
    """``float_class.forward(input_quantizer(x))``."""

    quantizers = ("input",)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.input_quantizer(input), *args, **kwargs)


@register(nn.MaxPool1d)
class QuantMaxPool1d(_QuantInput, nn.MaxPool1d):
    """Quantized-input :class:`torch.nn.MaxPool1d`."""


@register(nn.MaxPool2d)
class QuantMaxPool2d(_QuantInput, nn.MaxPool2d):
    """Quantized-input :class:`torch.nn.MaxPool2d`."""


@register(nn.MaxPool3d)
class QuantMaxPool3d(_QuantInput, nn.MaxPool3d):
    """Quantized-input :class:`torch.nn.MaxPool3d`."""


@register(nn.AvgPool1d)
class QuantAvgPool1d(_QuantInput, nn.AvgPool1d):
    """Quantized-input :class:`torch.nn.AvgPool1d`."""


@register(nn.AvgPool2d)
class QuantAvgPool2d(_QuantInput, nn.AvgPool2d):
    """Quantized-input :class:`torch.nn.AvgPool2d`."""


@register(nn.AvgPool3d)
class QuantAvgPool3d(_QuantInput, nn.AvgPool3d):
    """Quantized-input :class:`torch.nn.AvgPool3d`."""


@register(nn.AdaptiveAvgPool1d)
class QuantAdaptiveAvgPool1d(_QuantInput, nn.AdaptiveAvgPool1d):
    """Quantized-input :class:`torch.nn.AdaptiveAvgPool1d`."""


@register(nn.AdaptiveAvgPool2d)
class QuantAdaptiveAvgPool2d(_QuantInput, nn.AdaptiveAvgPool2d):
    """Quantized-input :class:`torch.nn.AdaptiveAvgPool2d`."""


@register(nn.AdaptiveAvgPool3d)
class QuantAdaptiveAvgPool3d(_QuantInput, nn.AdaptiveAvgPool3d):
    """Quantized-input :class:`torch.nn.AdaptiveAvgPool3d`."""


@register(nn.InstanceNorm1d)
class QuantInstanceNorm1d(_QuantInput, nn.InstanceNorm1d):
    """Quantized-input :class:`torch.nn.InstanceNorm1d`."""


@register(nn.InstanceNorm2d)
class QuantInstanceNorm2d(_QuantInput, nn.InstanceNorm2d):
    """Quantized-input :class:`torch.nn.InstanceNorm2d`."""


@register(nn.InstanceNorm3d)
class QuantInstanceNorm3d(_QuantInput, nn.InstanceNorm3d):
    """Quantized-input :class:`torch.nn.InstanceNorm3d`."""


@register(nn.Identity)
class QuantIdentity(_QuantInput, nn.Identity):
    """Returns ``input_quantizer(x)``: a quantization point to place in a model."""

    is_marker = True

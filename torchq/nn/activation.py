"""Activations with a quantized input: the output of the layer before them, where a runtime needs that on integers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from torchq.nn.convert import QuantModule, register

__all__ = ["QuantELU", "QuantHardsigmoid", "QuantHardswish", "QuantLeakyReLU", "QuantMish", "QuantSiLU", "QuantSigmoid"]


class _QuantActivation(QuantModule):
    """``float_class.forward(input_quantizer(x))``."""

    quantizers = ("input",)

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        return super().forward(self.input_quantizer(input), *args, **kwargs)


@register(nn.ELU)
class QuantELU(_QuantActivation, nn.ELU):
    """Quantized-input :class:`torch.nn.ELU`."""


@register(nn.Hardsigmoid)
class QuantHardsigmoid(_QuantActivation, nn.Hardsigmoid):
    """Quantized-input :class:`torch.nn.Hardsigmoid`."""


@register(nn.Hardswish)
class QuantHardswish(_QuantActivation, nn.Hardswish):
    """Quantized-input :class:`torch.nn.Hardswish`."""


@register(nn.LeakyReLU)
class QuantLeakyReLU(_QuantActivation, nn.LeakyReLU):
    """Quantized-input :class:`torch.nn.LeakyReLU`."""


@register(nn.Mish)
class QuantMish(_QuantActivation, nn.Mish):
    """Quantized-input :class:`torch.nn.Mish`."""


@register(nn.SiLU)
class QuantSiLU(_QuantActivation, nn.SiLU):
    """Quantized-input :class:`torch.nn.SiLU`."""


@register(nn.Sigmoid)
class QuantSigmoid(_QuantActivation, nn.Sigmoid):
    """Quantized-input :class:`torch.nn.Sigmoid`."""

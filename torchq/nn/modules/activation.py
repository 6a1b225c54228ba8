"""Activations with a quantized input: the output of the layer before them, where a runtime needs that on integers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.nn.convert import QuantModule, register
from torchq.nn.tensor_quantizer import TensorQuantizer

__all__ = [
    "QuantELU",
    "QuantHardsigmoid",
    "QuantHardswish",
    "QuantLeakyReLU",
    "QuantMish",
    "QuantSiLU",
    "QuantSigmoid",
]


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
    """Quantized-input :class:`torch.nn.SiLU`.

    Runtimes compute ``x * sigmoid(x)``, and on integers only where the sigmoid is quantized too. Its ``gate_quantizer`` has the fixed
    range 0..1, unsigned; it is off until :meth:`quantize_gate`, which ``quantize_(..., target="onnxruntime")`` calls.
    """

    def _attach(self, **descriptors: QuantDescriptor | None) -> None:
        given = descriptors["input"]
        gate = given and QuantDescriptor(
            given.num_bits, unsigned=isinstance(given.num_bits, int), amax=1.0
        )
        super()._attach(**descriptors, gate=gate)
        self.quantize_gate(False)

    def _detach(self) -> None:
        super()._detach()
        del self.gate_quantizer

    def quantize_gate(self, enabled: bool = True) -> None:
        """Switch the quantizer of the sigmoid on or off."""
        if isinstance(self.gate_quantizer, TensorQuantizer):
            self.gate_quantizer.mode = "quantize" if enabled else "off"

    def forward(self, input: Tensor) -> Tensor:
        gate = self.gate_quantizer
        if not isinstance(gate, TensorQuantizer) or gate.mode == "off":
            return super().forward(input)
        x = self.input_quantizer(input)
        return x * gate(torch.sigmoid(x))


@register(nn.Sigmoid)
class QuantSigmoid(_QuantActivation, nn.Sigmoid):
    """Quantized-input :class:`torch.nn.Sigmoid`."""

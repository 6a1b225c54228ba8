"""Modules of which only the input is quantized: activations, pooling, InstanceNorm, Identity.

A quantized input of an activation is the quantized output of the layer before it, which some
runtimes need to keep that layer on integers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.nn.convert import QuantModule, register
from torchq.nn.tensor_quantizer import TensorQuantizer


class InputQuantized(QuantModule):
    """Base of modules that quantize their first argument and then run the float forward on it."""

    weight_slots = ()

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the float forward on the quantized input."""
        return super().forward(self.input_quantizer(input), *args, **kwargs)


@register(nn.MaxPool1d)
class QuantMaxPool1d(InputQuantized, nn.MaxPool1d):
    """Quantized-input :class:`torch.nn.MaxPool1d`."""


@register(nn.MaxPool2d)
class QuantMaxPool2d(InputQuantized, nn.MaxPool2d):
    """Quantized-input :class:`torch.nn.MaxPool2d`."""


@register(nn.MaxPool3d)
class QuantMaxPool3d(InputQuantized, nn.MaxPool3d):
    """Quantized-input :class:`torch.nn.MaxPool3d`."""


@register(nn.AvgPool1d)
class QuantAvgPool1d(InputQuantized, nn.AvgPool1d):
    """Quantized-input :class:`torch.nn.AvgPool1d`."""


@register(nn.AvgPool2d)
class QuantAvgPool2d(InputQuantized, nn.AvgPool2d):
    """Quantized-input :class:`torch.nn.AvgPool2d`."""


@register(nn.AvgPool3d)
class QuantAvgPool3d(InputQuantized, nn.AvgPool3d):
    """Quantized-input :class:`torch.nn.AvgPool3d`."""


@register(nn.AdaptiveAvgPool1d)
class QuantAdaptiveAvgPool1d(InputQuantized, nn.AdaptiveAvgPool1d):
    """Quantized-input :class:`torch.nn.AdaptiveAvgPool1d`."""


@register(nn.AdaptiveAvgPool2d)
class QuantAdaptiveAvgPool2d(InputQuantized, nn.AdaptiveAvgPool2d):
    """Quantized-input :class:`torch.nn.AdaptiveAvgPool2d`."""


@register(nn.AdaptiveAvgPool3d)
class QuantAdaptiveAvgPool3d(InputQuantized, nn.AdaptiveAvgPool3d):
    """Quantized-input :class:`torch.nn.AdaptiveAvgPool3d`."""


@register(nn.InstanceNorm1d)
class QuantInstanceNorm1d(InputQuantized, nn.InstanceNorm1d):
    """Quantized-input :class:`torch.nn.InstanceNorm1d`."""


@register(nn.InstanceNorm2d)
class QuantInstanceNorm2d(InputQuantized, nn.InstanceNorm2d):
    """Quantized-input :class:`torch.nn.InstanceNorm2d`."""


@register(nn.InstanceNorm3d)
class QuantInstanceNorm3d(InputQuantized, nn.InstanceNorm3d):
    """Quantized-input :class:`torch.nn.InstanceNorm3d`."""


@register(nn.Identity)
class QuantIdentity(InputQuantized, nn.Identity):
    """Identity that quantizes its input: a quantization point to place in a model."""

    is_marker = True


@register(nn.ELU)
class QuantELU(InputQuantized, nn.ELU):
    """Quantized-input :class:`torch.nn.ELU`."""


@register(nn.Hardsigmoid)
class QuantHardsigmoid(InputQuantized, nn.Hardsigmoid):
    """Quantized-input :class:`torch.nn.Hardsigmoid`."""


@register(nn.Hardswish)
class QuantHardswish(InputQuantized, nn.Hardswish):
    """Quantized-input :class:`torch.nn.Hardswish`."""


@register(nn.LeakyReLU)
class QuantLeakyReLU(InputQuantized, nn.LeakyReLU):
    """Quantized-input :class:`torch.nn.LeakyReLU`."""


@register(nn.Mish)
class QuantMish(InputQuantized, nn.Mish):
    """Quantized-input :class:`torch.nn.Mish`."""


@register(nn.SiLU)
class QuantSiLU(InputQuantized, nn.SiLU):
    """Quantized-input :class:`torch.nn.SiLU`.

    Runtimes compute ``x * sigmoid(x)``, on integers only where the sigmoid is quantized too. Its
    ``gate_quantizer`` is unsigned with the fixed range 0..1. It is off until
    :meth:`quantize_gate`, which ``quantize_(..., target="onnxruntime")`` calls.
    """

    input_slots = ("input", "gate")

    gate_quantizer: nn.Module

    @classmethod
    def slot_descriptors(
        cls, input: QuantDescriptor | None, weight: QuantDescriptor | None
    ) -> dict[str, QuantDescriptor | None]:
        """Return the rule's descriptor for the input, and the fixed range 0..1 for the gate."""
        if input is None:
            return {"input": None, "gate": None}
        unsigned = isinstance(input.num_bits, int)
        return {
            "input": input,
            "gate": QuantDescriptor(input.num_bits, unsigned=unsigned, amax=1.0),
        }

    def on_convert(self) -> None:
        """Switch the gate's quantizer off."""
        self.quantize_gate(False)

    def quantize_gate(self, enabled: bool = True) -> None:
        """Switch the quantizer of the sigmoid on or off."""
        if isinstance(self.gate_quantizer, TensorQuantizer):
            self.gate_quantizer.mode = "quantize" if enabled else "off"

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x * sigmoid(x)`` of the quantized input; see :meth:`quantize_gate`."""
        gate = self.gate_quantizer
        if not isinstance(gate, TensorQuantizer) or gate.mode == "off":
            return super().forward(input)
        x = self.input_quantizer(input)
        return x * gate(torch.sigmoid(x))


@register(nn.Sigmoid)
class QuantSigmoid(InputQuantized, nn.Sigmoid):
    """Quantized-input :class:`torch.nn.Sigmoid`."""

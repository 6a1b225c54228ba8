"""Modules of which only the input is quantized: activations, pooling, InstanceNorm, Identity.

A quantized input of an activation is the quantized output of the layer before it, which some
runtimes need to keep that layer on integers.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.functional.windows import windows_of_module
from torchq.graph import operator_of
from torchq.nn.convert import QuantModule, register
from torchq.nn.integer_kernel import (
    integer_average,
    integer_gated,
    integer_sigmoid,
)
from torchq.nn.kept_numbers import are_plain_numbers
from torchq.nn.tensor_quantizer import TensorQuantizer


class InputQuantized(QuantModule):
    """Base of modules that quantize their first argument and then run the float forward on it."""

    weight_slots = ()

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the float forward on the quantized input."""
        return super().forward(self.input_quantizer(input), *args, **kwargs)


class AveragingQuantized(InputQuantized):
    """Base of average pools, whose means an integer kernel may compute."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the averages of the quantized input."""
        result = None
        if self.integer_kernel is not None and are_plain_numbers(input):
            row = operator_of(self)
            assert row is not None
            windows = windows_of_module(row.name, self, input.shape)
            pool = super(InputQuantized, self).forward
            result = integer_average(self, input, windows, pool)
        return super().forward(input) if result is None else result


class SigmoidQuantized(InputQuantized):
    """Base of the sigmoid, which an integer kernel may look up in a table."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the sigmoid of the quantized input."""
        result = integer_sigmoid(self, input)
        return super().forward(input) if result is None else result


def _twin(
    float_class: type[nn.Module], base: type[InputQuantized] = InputQuantized
) -> type[InputQuantized]:
    """Make and register the twin of a class of one tensor, where pickles look it up."""
    name = float_class.__name__
    doc = f"Quantized-input :class:`torch.nn.{name}`."
    body = {"__doc__": doc, "__module__": __name__}
    return register(float_class)(type(f"Quant{name}", (base, float_class), body))


QuantMaxPool1d = _twin(nn.MaxPool1d)
QuantMaxPool2d = _twin(nn.MaxPool2d)
QuantMaxPool3d = _twin(nn.MaxPool3d)
QuantAvgPool1d = _twin(nn.AvgPool1d, AveragingQuantized)
QuantAvgPool2d = _twin(nn.AvgPool2d, AveragingQuantized)
QuantAvgPool3d = _twin(nn.AvgPool3d, AveragingQuantized)
QuantAdaptiveAvgPool1d = _twin(nn.AdaptiveAvgPool1d, AveragingQuantized)
QuantAdaptiveAvgPool2d = _twin(nn.AdaptiveAvgPool2d, AveragingQuantized)
QuantAdaptiveAvgPool3d = _twin(nn.AdaptiveAvgPool3d, AveragingQuantized)
QuantInstanceNorm1d = _twin(nn.InstanceNorm1d)
QuantInstanceNorm2d = _twin(nn.InstanceNorm2d)
QuantInstanceNorm3d = _twin(nn.InstanceNorm3d)
QuantELU = _twin(nn.ELU)
QuantHardsigmoid = _twin(nn.Hardsigmoid)
QuantHardswish = _twin(nn.Hardswish)
QuantLeakyReLU = _twin(nn.LeakyReLU)
QuantMish = _twin(nn.Mish)
QuantSigmoid = _twin(nn.Sigmoid, SigmoidQuantized)


@register(nn.Identity)
class QuantIdentity(InputQuantized, nn.Identity):
    """Identity that quantizes its input: a quantization point to place in a model."""

    is_marker = True


@register(nn.ReLU)
class QuantReLU(InputQuantized, nn.ReLU):
    """Quantized-input :class:`torch.nn.ReLU`; codes that begin at 0 make it their result's too."""

    is_marker = True


@register(nn.SiLU)
class QuantSiLU(InputQuantized, nn.SiLU):
    """Quantized-input :class:`torch.nn.SiLU`.

    Runtimes compute ``x * sigmoid(x)``, on integers only where the sigmoid is quantized too. Its
    ``gate_quantizer`` is unsigned with the fixed range 0..1. It is off unless
    ``quantize_(..., target="onnxruntime")`` turns it on.
    """

    input_slots = ("input", "gate")
    optional_slots: ClassVar[Mapping[str, str]] = {"gate": "activation"}

    gate_quantizer: nn.Module

    @classmethod
    def slot_descriptors(
        cls, input: QuantDescriptor | None, weight: QuantDescriptor | None
    ) -> dict[str, QuantDescriptor | None]:
        """Return the rule's descriptor for the input, and the fixed range 0..1 for the gate."""
        if input is None:
            return {"input": None, "gate": None}
        unsigned = isinstance(input.num_bits, int)
        gate = QuantDescriptor(input.num_bits, unsigned=unsigned, amax=1.0)
        return {"input": input, "gate": gate}

    def forward(self, input: Tensor) -> Tensor:
        """Return ``x * sigmoid(x)`` of the quantized input."""
        gate = self.gate_quantizer
        if not isinstance(gate, TensorQuantizer) or gate.mode == "off":
            in_float: Tensor = super().forward(input)
            return in_float
        result = integer_gated(self, input)
        if result is not None:
            return result
        x = self.input_quantizer(input)
        simulated: Tensor = x * gate(torch.sigmoid(x))
        return simulated

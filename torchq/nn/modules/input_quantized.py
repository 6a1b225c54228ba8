"""Modules of which only the input is quantized: activations, pooling, InstanceNorm, Identity.

A quantized input of an activation is the quantized output of the layer before it, which some
runtimes need to keep that layer on integers.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.nn.convert import QuantModule, register
from torchq.nn.integer_kernel import (
    integer_gated,
    integer_mean,
    integer_sigmoid,
    integer_window_means,
)
from torchq.nn.kept_numbers import are_plain_numbers
from torchq.nn.tensor_quantizer import TensorQuantizer

_IMAGE_DIMS = 4


class InputQuantized(QuantModule):
    """Base of modules that quantize their first argument and then run the float forward on it."""

    weight_slots = ()

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the float forward on the quantized input."""
        return super().forward(self.input_quantizer(input), *args, **kwargs)


class AveragingQuantized(InputQuantized):
    """Base of pools that an integer kernel may compute where they give one mean an image."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the averages of the quantized input."""
        result = integer_mean(self, input)
        return super().forward(input) if result is None else result


class WindowsAveraged(InputQuantized):
    """Base of the average pool of images, whose windows an integer kernel may compute."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the averages of the quantized input."""
        result = None
        pool: Any = self
        if are_plain_numbers(input) and _has_equal_windows(pool, input):
            size = _pair(pool.kernel_size)
            add = partial(_window_sums, pool)
            result = integer_window_means(self, input, size[0] * size[1], add)
        return super().forward(input) if result is None else result


def _has_equal_windows(pool: Any, x: Tensor) -> bool:
    """Return True if every result is a sum over a whole window, divided by its area."""
    if x.dim() != _IMAGE_DIMS or pool.divisor_override:
        return False
    padding = _pair(pool.padding)
    if any(padding) and not pool.count_include_pad:
        return False
    # The last window may stand over the edge, unless the others fill the image.
    return not pool.ceil_mode or all(
        (length + 2 * pad - size) % stride == 0
        for length, pad, size, stride in zip(
            x.shape[2:],
            padding,
            _pair(pool.kernel_size),
            _pair(pool.stride),
            strict=True,
        )
    )


def _window_sums(pool: Any, x: Tensor) -> Tensor:
    # Divided by 1, averages are sums.
    return F.avg_pool2d(
        x, pool.kernel_size, pool.stride, pool.padding, divisor_override=1
    )


def _pair(value: Any) -> tuple[int, int]:
    return tuple(value) if isinstance(value, (tuple, list)) else (value, value)


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
QuantAvgPool1d = _twin(nn.AvgPool1d)
QuantAvgPool2d = _twin(nn.AvgPool2d, WindowsAveraged)
QuantAvgPool3d = _twin(nn.AvgPool3d)
QuantAdaptiveAvgPool1d = _twin(nn.AdaptiveAvgPool1d)
QuantAdaptiveAvgPool2d = _twin(nn.AdaptiveAvgPool2d, AveragingQuantized)
QuantAdaptiveAvgPool3d = _twin(nn.AdaptiveAvgPool3d)
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
            return super().forward(input)
        result = integer_gated(self, input)
        if result is not None:
            return result
        x = self.input_quantizer(input)
        return x * gate(torch.sigmoid(x))

"""Biases as integer kernels add them: int32, in units of the scale of the input times the weight's.

The rule is that of ONNX Runtime's QLinearConv and QGemm, in float32 throughout: ``step = scale of
the input * scale of the weight``, ``code = rint(bias / step)``.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchq.nn.tensor_quantizer import TensorQuantizer

#: A bias takes at most half of int32, the products take the rest: files raise the step to this.
_LEAST_STEP = 2.0**-30


def kernel_bias(layer: object, bias: Tensor | None) -> Tensor | None:
    """Return the bias that a kernel adds where ``layer.bias_format`` is "int32"; else ``bias``.

    It is straight-through in training. Without fixed ranges there are no steps to round to.
    """
    step = bias_steps(layer, bias)
    if bias is None or step is None:
        return bias
    with torch.no_grad():
        exact = bias.detach().to(torch.float32)
        change = (torch.round(exact / step) * step).to(bias.dtype) - bias.detach()
    # Exact, as the change is no larger than the bias or the rounded one.
    return bias + change


def bias_steps(layer: object, bias: Tensor | None) -> Tensor | None:
    """Return the steps that a kernel rounds a bias to, float32 ``(channels,)`` or one number.

    None where it is not rounded.
    """
    step = _products_step(layer, bias)
    if step is None or bias is None:
        return None
    with torch.no_grad():
        return torch.maximum(step, _least_step(bias))


def raises_step(layer: Any, bias: Tensor | None) -> Tensor:
    """Return where a bias is so large that its step is larger than that of the products.

    Files then raise the scale of the weight, and round its codes to it.
    """
    step = _products_step(layer, bias)
    if step is None or bias is None:
        return torch.zeros(0, dtype=torch.bool, device=layer.weight.device)
    return _least_step(bias) > step


def exceeds(bias: Tensor, step: Tensor) -> bool:
    """Return True if a bias is too large for one of the steps, in which a kernel counts it."""
    return bool((_least_step(bias) > step).any())


def _products_step(layer: Any, bias: Tensor | None) -> Tensor | None:
    """Return the scale of the input times those of the weight where a bias is rounded."""
    if bias is None or not layer.bias_format:
        return None
    of_input, of_weight = layer.input_quantizer, layer.weight_quantizer
    if not (is_fixed(of_input) and is_fixed(of_weight)):
        return None
    with torch.no_grad():
        scale: Tensor = of_weight.kept_scale()
        # Modules with a forward of their own correct no results.
        if hasattr(layer, "corrected_weight"):
            scale = layer.corrected_weight(scale)
        result: Tensor | None = of_input.kept_scale().reshape(()) * scale.flatten()
        return result


def _least_step(bias: Tensor) -> Tensor:
    exact = bias.detach().to(torch.float32)
    return (exact.abs() * _LEAST_STEP).clamp_min(1e-38)


def is_fixed(quantizer: object) -> bool:
    """Return True for a quantizer that is on and whose range does not depend on the input."""
    if not isinstance(quantizer, TensorQuantizer) or not quantizer.quantizing:
        return False
    return quantizer.calibrated and not quantizer.descriptor.dynamic


@contextmanager
def rounded_biases(model: nn.Module) -> Iterator[None]:
    """Let the layers of a model hold the biases that kernels add, inside the ``with`` block."""
    held: list[tuple[Any, Any, str]] = []
    try:
        layer: Any
        for layer in model.modules():
            bias = getattr(layer, "bias", None)
            if getattr(layer, "bias_format", "") and isinstance(bias, nn.Parameter):
                rounded = kernel_bias(layer, bias)
                assert rounded is not None
                held.append((layer, bias, layer.bias_format))
                layer.bias = nn.Parameter(rounded.detach(), requires_grad=False)
                layer.bias_format = ""
        yield
    finally:
        for layer, bias, form in held:
            layer.bias, layer.bias_format = bias, form

"""Biases as integer kernels hold them."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from torchq.formats import IntFormat
from torchq.nn import QuantConv1d, QuantConv2d, QuantConv3d, TensorQuantizer

#: The number that a bias is stored as stays below this in size: int32.
_LIMIT = 2.0**31


def round_biases_(model: nn.Module) -> tuple[str, ...]:
    """Round the biases of convolutions as ONNX Runtime does, in place.

    Its integer convolution adds the bias as int32, in steps of the scale of the input times that of
    the weight. The simulation adds a float, and about one code in ten thousand falls the other
    way. With rounded biases both compute the same. They change by half such a step at most, a small
    part of a code of the result.

    Call it behind calibration, and quantize with ``recipes.integer(unsigned="auto")``, so that
    files hold the scales of the simulation.

    Args:
        model: calibrated. Layers without integer ranges for input and weight stay as they are.

    Returns:
        The paths of the layers whose biases were rounded.

    Example:
        >>> x = torch.randn(1, 3, 8, 8)
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3)).eval()
        >>> report = torchq.quantize_(model)
        >>> report = torchq.calibrate(model, [x], progress=False)
        >>> torchq.onnx.round_biases_(model)
        ('0',)
    """
    rounded = []
    for name, module in model.named_modules():
        if isinstance(module, (QuantConv1d, QuantConv2d, QuantConv3d)) and _round(module):
            rounded.append(name)
    return tuple(rounded)


def _round(layer: QuantConv1d | QuantConv2d | QuantConv3d) -> bool:
    """Round the bias of one layer; return False where it has no integer steps."""
    of_input, of_weight = _scale(layer.input_quantizer), _scale(layer.weight_quantizer)
    if of_input is None or of_weight is None:
        return False
    if layer.bias is None or of_input.numel() != 1:
        return False
    if of_weight.numel() not in (1, len(layer.bias)):
        return False
    with torch.no_grad():
        steps = (of_input.reshape(()) * of_weight.flatten()).expand(len(layer.bias))
        numbers = torch.round(layer.bias.double() / steps)
        fits = torch.isfinite(numbers) & (numbers.abs() < _LIMIT)
        layer.bias.copy_(torch.where(fits, numbers * steps, layer.bias.double()))
    return True


def _scale(quantizer: nn.Module) -> Tensor | None:
    """Return the scale of a calibrated quantizer to integers, float64; else None."""
    if not isinstance(quantizer, TensorQuantizer) or quantizer.mode != "quantize":
        return None
    if not quantizer.calibrated or not isinstance(quantizer.descriptor.format, IntFormat):
        return None
    return quantizer.scale.detach().double()

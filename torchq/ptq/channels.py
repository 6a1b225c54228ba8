"""The input and output channels of layers: their ranges, and factors that change them in place."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from torchq.fusion.modules import CONVOLUTIONS, TRANSPOSED
from torchq.graph import Call, Forward, call_model, tensors_in
from torchq.utils import device_of
from torchq.workflow.layer_matrices import by_groups

#: Layers with a weight of two or more dimensions that are channels.
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)

# What factors may change of 16-bit weights, in units in the last place.
_ULPS = 8


def largest_change(least: float, dtype: torch.dtype) -> float:
    """Return the relative change of a float output that rounding of the new weights explains.

    ``least`` is that for float32.
    """
    return max(least, _ULPS * torch.finfo(dtype).eps)


def float_outputs(model: nn.Module, batch: Any, forward: Forward | None = None) -> list[Tensor]:
    """Return the floating-point outputs of a model, in float64."""
    out = call_model(model, batch, forward=forward, device=device_of(model))
    return [tensor.double() for tensor in tensors_in(out) if tensor.is_floating_point()]


def relative_change(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative change of a tensor; NaN if there is one."""
    pairs = zip(found, expected, strict=True)
    errors = [(f - e).norm() / e.norm().clamp(min=1e-30) for f, e in pairs]
    return torch.stack(errors).max().item() if errors else 0.0


def input_ranges(layer: Any) -> Tensor:
    """Return the largest magnitude of each input channel of the weight, (in,)."""
    weight: Tensor = layer.weight
    if isinstance(layer, nn.Linear):
        return weight.abs().amax(0)
    if isinstance(layer, TRANSPOSED):
        return weight.abs().flatten(1).amax(1)
    return by_groups(layer).abs().flatten(3).amax((1, 3)).flatten()


def scale_outputs_(layer: Any, factor: Tensor) -> None:
    """Multiply the output channels of a layer, weight and bias, by factors (out,) in place."""
    factor = factor.to(layer.weight.dtype)
    if layer.bias is not None:
        layer.bias.mul_(factor)
    if isinstance(layer, TRANSPOSED):
        _multiply_(by_groups(layer), factor.view(layer.groups, 1, -1))
    else:
        _multiply_(layer.weight, factor)


def scale_inputs_(layer: Any, factor: Tensor) -> None:
    """Multiply the input channels of a layer's weight by factors (in,) in place."""
    factor = factor.to(layer.weight.dtype)
    if isinstance(layer, nn.Linear):
        layer.weight.mul_(factor)
    elif isinstance(layer, TRANSPOSED):
        _multiply_(layer.weight, factor)
    else:
        _multiply_(by_groups(layer), factor.view(layer.groups, 1, -1))


def _multiply_(weight: Tensor, factor: Tensor) -> None:
    """Multiply ``weight`` in place by a factor over its leading dimensions."""
    weight.mul_(factor.view(*factor.shape, *[1] * (weight.dim() - factor.dim())))


# Element by element.
_HOMOGENEOUS = (
    *(nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.Identity),
    *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d),
)
_HOMOGENEOUS_FUNCTIONS = frozenset(["relu", "relu_", "leaky_relu", "leaky_relu_", "dropout"])
# The same for the pixels of one channel.
_POOLING = (
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
)
_POOLING_FUNCTIONS = frozenset(
    f"{kind}_pool{d}d" for kind in ("max", "avg", "adaptive_avg") for d in (1, 2, 3)
)


def keeps_factors(call: Call, is_convolution: bool) -> bool:
    """Return True if a call on channels times positive factors gives its output times these.

    Pooling keeps the channels of images apart, after a convolution.
    """
    modules = (*_HOMOGENEOUS, *_POOLING) if is_convolution else _HOMOGENEOUS
    names = _HOMOGENEOUS_FUNCTIONS
    if is_convolution:
        names = names | _POOLING_FUNCTIONS
    return isinstance(call.module, modules) if call.module is not None else call.name in names

"""The input and output channels of layers: their ranges, and factors that change them in place."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "CONVOLUTIONS",
    "LAYERS",
    "TRANSPOSED",
    "input_ranges",
    "largest_change",
    "output_ranges",
    "scale_inputs_",
    "restored_on_error",
    "scale_outputs_",
    "spread",
    "tensors_restored_on_error",
]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
#: Layers with a weight of two or more dimensions that are channels.
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)


# What factors may change of 16-bit weights, in units in the last place.
_ULPS = 8


def largest_change(least: float, dtype: torch.dtype) -> float:
    """Return the relative change of a float output that rounding of the new weights explains.

    Args:
        least: that for float32.
        dtype: of the weights.
    """
    return max(least, _ULPS * torch.finfo(dtype).eps)


def _by_groups(layer: Any) -> Tensor:
    """Return a view of a convolution's weight as (groups, ..., ..., kernel)."""
    weight: Tensor = layer.weight
    return weight.unflatten(0, (layer.groups, -1))


def output_ranges(layer: Any) -> Tensor:
    """Return the largest magnitude of each output channel of the weight, (out,)."""
    if isinstance(layer, TRANSPOSED):
        return _by_groups(layer).abs().flatten(3).amax((1, 3)).flatten()
    weight: Tensor = layer.weight
    return weight.abs().flatten(1).amax(1)


def input_ranges(layer: Any) -> Tensor:
    """Return the largest magnitude of each input channel of the weight, (in,)."""
    weight: Tensor = layer.weight
    if isinstance(layer, nn.Linear):
        return weight.abs().amax(0)
    if isinstance(layer, TRANSPOSED):
        return weight.abs().flatten(1).amax(1)
    return _by_groups(layer).abs().flatten(3).amax((1, 3)).flatten()


def scale_outputs_(layer: Any, factor: Tensor) -> None:
    """Multiply the output channels of a layer, weight and bias, in place.

    Args:
        layer: one of :data:`LAYERS`.
        factor: (out,).
    """
    factor = factor.to(layer.weight.dtype)
    if layer.bias is not None:
        layer.bias.mul_(factor)
    if isinstance(layer, TRANSPOSED):
        _multiply_(_by_groups(layer), factor.view(layer.groups, 1, -1))
    else:
        _multiply_(layer.weight, factor)


def scale_inputs_(layer: Any, factor: Tensor) -> None:
    """Multiply the input channels of a layer's weight in place.

    Args:
        layer: one of :data:`LAYERS`.
        factor: (in,).
    """
    factor = factor.to(layer.weight.dtype)
    if isinstance(layer, nn.Linear):
        layer.weight.mul_(factor)
    elif isinstance(layer, TRANSPOSED):
        _multiply_(layer.weight, factor)
    else:
        _multiply_(_by_groups(layer), factor.view(layer.groups, 1, -1))


def _multiply_(weight: Tensor, factor: Tensor) -> None:
    """Multiply ``weight`` in place by a factor over its leading dimensions."""
    weight.mul_(factor.view(*factor.shape, *[1] * (weight.dim() - factor.dim())))


def spread(largest: Tensor) -> float:
    """Return the largest over the median magnitude of the channels that are not zero."""
    live = largest[largest > 0]
    return (live.max() / live.median()).item() if live.numel() else 1.0


def tensors_restored_on_error(modules: Iterable[nn.Module]) -> AbstractContextManager[None]:
    """Bring the modules' own parameters and buffers back if anything ends the block early."""
    return restored_on_error(
        tensor
        for module in modules
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    )


@contextmanager
def restored_on_error(tensors: Iterable[Tensor]) -> Iterator[None]:
    """Bring the values of tensors back if anything ends the block early."""
    own = {id(tensor): tensor for tensor in tensors}
    before = [(tensor, tensor.detach().clone()) for tensor in own.values()]
    try:
        yield
    except BaseException:
        with torch.no_grad():
            for tensor, value in before:
                tensor.copy_(value)
        raise

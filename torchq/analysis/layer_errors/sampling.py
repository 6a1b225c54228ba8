"""Which part of a batch is compared: the first images, where all of them would be very many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from torchq.analysis.layers import QuantizedLayer
from torchq.graph import tensors_in

__all__ = ["SAMPLE", "compared", "leading", "part_of_call"]

#: Elements of an output that are compared in one batch; more of them change the figures little.
SAMPLE = 1 << 18
#: Images that are compared at least, whatever their size.
_IMAGES = 4

_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def compared(value: Any, sample: int | None) -> list[Tensor]:
    """Return the part of each floating-point tensor in a value that is compared.

    Args:
        value: an output of a module.
        sample: about how many elements; None compares all.
    """
    floats = (tensor for tensor in tensors_in(value) if tensor.is_floating_point())
    return [tensor[: leading(tensor, sample)] if tensor.dim() else tensor for tensor in floats]


def leading(tensor: Tensor, sample: int | None) -> int:
    """Return how many of the first indices of a tensor hold about ``sample`` elements."""
    length = tensor.shape[0] if tensor.dim() else 1
    if sample is None or tensor.numel() <= sample:
        return length
    each = max(1, tensor.numel() // length)
    return min(length, max(_IMAGES, -(-sample // each)))


def part_of_call(
    layer: QuantizedLayer, args: Sequence[Any], output: Any, sample: int | None
) -> Sequence[Any]:
    """Return arguments with which a layer computes the part of its output that is compared.

    Convolutions and linear layers treat every image by itself, so the first images give the first
    results. Other layers get all of their arguments, and so do those that take the range of each
    call.

    Args:
        layer: the layer.
        args: positional arguments of its call.
        output: what it returned.
        sample: see :func:`compared`.
    """
    if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
        return args
    if not _is_batched(layer.module, args[0]) or args[0].shape[0] != output.shape[0]:
        return args
    if any(q.descriptor.dynamic or not q.calibrated for q in layer.inputs.values()):
        return args
    return (args[0][: leading(output, sample)], *args[1:])


def _is_batched(module: nn.Module, x: Tensor) -> bool:
    """Return True where the first dimension of the input of a module counts images."""
    if isinstance(module, nn.Linear):
        return x.dim() > 1
    return isinstance(module, _CONVOLUTIONS) and x.dim() == len(module.kernel_size) + 2

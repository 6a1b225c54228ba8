"""Rotations that run with the model, where no layer before can take them.

Reference: Ashkboos et al., QuaRot (NeurIPS 2024), section 4, stage 1c.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn

from torchq.ptq.rotation.orthogonal import hadamard_matrix

__all__ = ["BlockRotation", "rotate_online"]

# A larger block would cost more than it spreads.
_LARGEST_BLOCK = 512


class BlockRotation(nn.Module):
    """Multiplies each run of channels by a Hadamard matrix; its own inverse.

    The runs are as long as the largest power of two, up to 512, that divides the channels.

    Args:
        size: channels, the last dimension of the input.
        weight: whose dtype and device the matrix has.
    """

    matrix: Tensor

    def __init__(self, size: int, weight: Tensor) -> None:
        super().__init__()
        block = min(size & -size, _LARGEST_BLOCK)
        matrix = hadamard_matrix(block)
        assert matrix is not None
        matrix = (matrix / block**0.5).to(weight.device, weight.dtype)
        # The size of the layer determines it, so files do not hold it.
        self.register_buffer("matrix", matrix, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` with its last dimension rotated."""
        return (x.unflatten(-1, (-1, len(self.matrix))) @ self.matrix).flatten(-2)

    def extra_repr(self) -> str:
        """Return the length of a run."""
        return f"blocks of {len(self.matrix)}"


def rotate_online(model: nn.Module, names: Iterable[str], undo: ExitStack) -> tuple[str, ...]:
    """Put a rotation before Linear layers, and its inverse into their weights.

    A layer ``name`` becomes ``Sequential(rotation, layer)``.

    Args:
        model: changed in place.
        names: paths of the layers.
        undo: gets what brings the layers back; their weights are the caller's business.

    Returns:
        The paths of the layers that have a rotation now; those with an odd number of inputs have
        none.
    """
    found = []
    for name in names:
        layer: Any = model.get_submodule(name)
        if layer.in_features % 2:
            continue
        rotation = BlockRotation(layer.in_features, layer.weight)
        exact = BlockRotation(layer.in_features, layer.weight.double())
        layer.weight.copy_(exact(layer.weight.double()).to(layer.weight.dtype))
        parent_name, _, child = name.rpartition(".")
        parent = model.get_submodule(parent_name)
        undo.callback(setattr, parent, child, layer)
        setattr(parent, child, nn.Sequential(rotation, layer).train(layer.training))
        found.append(name)
    return tuple(found)

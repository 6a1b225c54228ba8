"""What a name in an ONNX file stands for while the file is converted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Union

import torch
from torch import Tensor, fx

__all__ = ["Constant", "Ints", "Quantization", "Value"]


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that is known at conversion.

    Attributes:
        tensor: the values; never changed in place.
        name: of the initializer that holds the tensor, ``""`` for a computed one.
        origin: the initializer that the tensor was made from, which names modules.
    """

    tensor: Tensor
    name: str = ""
    origin: str = ""


@dataclass(frozen=True)
class Ints:
    """An int64 tensor that is computed from shapes, kept as its elements.

    Keeping the elements apart keeps a dynamic size symbolic through chains such as Shape, Gather,
    Concat, Reshape.

    Attributes:
        items: numbers, and nodes that compute one number.
        scalar: True for a tensor without dimensions, False for a vector.
    """

    items: tuple[int | fx.Node, ...]
    scalar: bool = False


@dataclass(frozen=True, eq=False)
class Quantization:
    """How a tensor of a file is quantized.

    Attributes:
        scale: float32, one number or one for each index of ``axis``.
        zero_point: of the element type of the codes, the shape of ``scale``.
        axis: of the scales.
    """

    scale: Tensor
    zero_point: Tensor
    axis: int

    def equals(self, other: Quantization) -> bool:
        """Return True if both give the same codes."""
        same = (
            self.zero_point.dtype == other.zero_point.dtype
            and self.scale.shape == other.scale.shape
        )
        same = same and (self.axis == other.axis or self.scale.numel() == 1)
        return (
            same
            and torch.equal(self.scale, other.scale)
            and torch.equal(self.zero_point, other.zero_point)
        )


#: A node computes a tensor in every call. None is an optional input or output that is left out.
Value = Union[fx.Node, Constant, Ints, None]

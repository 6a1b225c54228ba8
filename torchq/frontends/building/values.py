"""What a name in a file stands for while the file is converted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Union

import torch
from torch import Tensor, fx


@dataclass(frozen=True, eq=False)
class Constant:
    """A tensor that is known at conversion.

    Attributes:
        tensor: the values; never changed in place.
        name: of the tensor in the file, ``""`` for a computed one.
        origin: the tensor of the file that this one was made from, which names modules.
        trainable: nodes that read the tensor itself read a parameter, not a buffer.
    """

    tensor: Tensor
    name: str = ""
    origin: str = ""
    trainable: bool = False


@dataclass(frozen=True)
class Ints:
    """A tensor that is computed from shapes, kept as its elements.

    Keeping the elements apart keeps a dynamic size symbolic through chains such as Shape, Gather,
    Concat, Reshape, and lets a condition on sizes be decided without a tensor.

    Attributes:
        items: numbers, and nodes that compute one number or flag.
        scalar: True for a tensor without dimensions, False for a vector.
        dtype: int64 or int32; bool for comparisons of sizes; float32 or float64 for sizes that were
            cast and nothing else, so that the items are whole numbers.
    """

    items: tuple[int | fx.Node, ...]
    scalar: bool = False
    dtype: torch.dtype = torch.int64


#: A node computes a tensor in every call. None is an optional input or output that is left out.
Value = Union[fx.Node, Constant, Ints, None]


def stack_ints(items: Sequence[int], scalar: bool, dtype: torch.dtype = torch.int64) -> Tensor:
    """Return sizes as one tensor: a vector, or a number without dimensions."""
    return torch.tensor(items[0] if scalar else list(items), dtype=dtype)

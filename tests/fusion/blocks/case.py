"""What a test of a family builds and expects."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

__all__ = ["Case"]


@dataclass(frozen=True)
class Case:
    """A block in its training form.

    Attributes:
        make: builds it.
        in_channels: channels of its input, which has two spatial dimensions.
        family: the family that the report names.
        attribute: holds the merged layer; None where the layer replaces the block.
    """

    make: Callable[[], nn.Module]
    in_channels: int
    family: str
    attribute: str | None

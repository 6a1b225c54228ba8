"""Base class of the calibrators of pytorch-quantization."""

from __future__ import annotations

from typing import Any

from torch import Tensor


class _Calibrator:
    """Base that scripts derive their own calibrators from.

    Args:
        num_bits: integer width, or (4, 3).
        axis: the axes that keep their own range.
        unsigned: whether codes start at 0.
    """

    def __init__(
        self, num_bits: int | tuple[int, int], axis: int | tuple[int, ...] | None, unsigned: bool
    ) -> None:
        self._num_bits = num_bits
        self._axis = axis
        self._unsigned = unsigned

    def collect(self, x: Tensor) -> None:
        """Add one tensor to the statistics."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything."""
        raise NotImplementedError

    def compute_amax(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """Return the range for everything collected, or None if nothing was."""
        raise NotImplementedError

    def __repr__(self) -> str:
        settings = f"num_bits={self._num_bits} axis={self._axis} unsigned={self._unsigned}"
        return f"{type(self).__name__}({settings})"

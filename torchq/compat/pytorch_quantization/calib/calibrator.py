"""What every calibrator of pytorch-quantization has."""

from __future__ import annotations

from typing import Any

from torch import Tensor

__all__ = ["_Calibrator"]


class _Calibrator:
    """Base to derive calibrators from.

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
        """Take the statistics of one tensor."""
        raise NotImplementedError

    def reset(self) -> None:
        """Forget everything."""
        raise NotImplementedError

    def compute_amax(self, *args: Any, **kwargs: Any) -> Tensor | None:
        """The range for what was collected; None where nothing was."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return f"{type(self).__name__}(num_bits={self._num_bits} axis={self._axis} unsigned={self._unsigned})"

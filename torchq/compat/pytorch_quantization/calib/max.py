"""The absolute maximum of everything collected."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.calib import MaxCalibrator as CoreMaxCalibrator
from torchq.compat.pytorch_quantization.calib.calibrator import _Calibrator
from torchq.errors import CalibrationError
from torchq.functional import reduce_amax

__all__ = ["MaxCalibrator"]


class MaxCalibrator(_Calibrator):
    """:class:`torchq.calib.MaxCalibrator` with the names of the original; collects integers too.

    Args:
        num_bits: see :class:`_Calibrator`, as are axis and unsigned.
        axis: the axes that keep their own range.
        unsigned: has no effect: magnitudes are collected for unsigned formats too.
        track_amax: keep the range of every batch in :attr:`amaxs`.
    """

    def __init__(
        self,
        num_bits: int | tuple[int, int],
        axis: int | tuple[int, ...] | None,
        unsigned: bool,
        track_amax: bool = False,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        self._track_amax = track_amax
        self._amaxs: list[Any] = []
        self._core = CoreMaxCalibrator(axis=axis)

    @property
    def amaxs(self) -> list[Any]:
        """A float32 ndarray for each collected tensor; empty without ``track_amax``."""
        return self._amaxs

    @property
    def _calib_amax(self) -> Tensor | None:
        """The range so far, which scripts read and assign."""
        return self.compute_amax()

    @_calib_amax.setter
    def _calib_amax(self, value: Tensor | None) -> None:
        self._core.reset()
        if value is not None:
            amax = torch.as_tensor(value).detach().abs().float()
            self._core.observer.observe(amax)

    def collect(self, x: Tensor) -> None:
        """Add one tensor to the statistics; waits for the device only with ``track_amax``.

        Raises:
            CalibrationError: the shape of the range is not that of the tensors before.
        """
        if not x.is_floating_point():
            x = x.float()
        shape, before = self._core.granularity.amax_shape(x.shape), self._core.observer.shape
        if before not in (None, shape):
            raise CalibrationError(
                f"MaxCalibrator: amax shape changed: got {shape}; expected {before} as before"
            )
        self._core.collect(x)
        if self._track_amax:
            # float() and cpu() may return their argument, but reduce_amax returned a new tensor.
            self._amaxs.append(reduce_amax(x, self._core.granularity).float().cpu().numpy())

    def reset(self) -> None:
        """Forget everything collected."""
        self._core.reset()

    def compute_amax(self) -> Tensor | None:
        """Return the largest magnitude of each group, or None if nothing was collected.

        Raises:
            CalibrationError: NaN or infinite values were collected.
        """
        return self._core.compute_amax() if self._core.seen else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if "_core" not in state:
            # An object that the original pickled keeps its settings and loses its statistics.
            self.__dict__.pop("_calib_amax", None)
            self._amaxs = list(state.get("_amaxs", ()))
            self._core = CoreMaxCalibrator(axis=self._axis)

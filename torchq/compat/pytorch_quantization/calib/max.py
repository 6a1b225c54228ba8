"""The absolute maximum of everything collected."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.compat.pytorch_quantization.calib.calibrator import _Calibrator
from torchq.errors import CalibrationError
from torchq.formats import PerAxis, PerTensor
from torchq.functional import reduce_amax


class MaxCalibrator(_Calibrator):
    """The largest magnitude of each group; integers are collected too.

    Args:
        num_bits: has no effect, as in the original.
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
        #: The range so far, which scripts read and assign.
        self._calib_amax: Tensor | None = None

    @property
    def amaxs(self) -> list[Any]:
        """A float32 ndarray for each collected tensor; empty without ``track_amax``."""
        return self._amaxs

    def collect(self, x: Tensor) -> None:
        """Add one tensor to the statistics; waits for the device only with ``track_amax``.

        Raises:
            CalibrationError: the shape of the range is not that of the tensors before.
        """
        if not x.numel():
            return
        axis = (self._axis,) if isinstance(self._axis, int) else self._axis
        granularity = PerTensor() if axis is None else PerAxis(tuple(axis))
        x = x.detach()
        amax = reduce_amax(x if x.is_floating_point() else x.float(), granularity).float()
        known = self._calib_amax
        if known is not None and known.shape != amax.shape:
            raise CalibrationError(
                f"MaxCalibrator: amax shape changed: got {tuple(amax.shape)}; "
                f"expected {tuple(known.shape)} as before"
            )
        self._calib_amax = amax if known is None else torch.maximum(known.to(amax.device), amax)
        if self._track_amax:
            self._amaxs.append(amax.cpu().numpy().copy())

    def reset(self) -> None:
        """Forget everything collected."""
        self._calib_amax = None

    def compute_amax(self) -> Tensor | None:
        """Return the largest magnitude of each group, or None if nothing was collected.

        Raises:
            CalibrationError: NaN or infinite values were collected.
        """
        if self._calib_amax is None:
            return None
        if not self._calib_amax.isfinite().all():
            raise CalibrationError(
                "MaxCalibrator: got NaN or infinite values; expected finite data. "
                "Check the layers before"
            )
        return self._calib_amax.clone()

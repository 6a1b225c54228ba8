"""The absolute maximum of everything collected."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from torchq.calib import MaxCalibrator as CoreMaxCalibrator
from torchq.compat.pytorch_quantization.calib.calibrator import _Calibrator
from torchq.errors import CalibrationError
from torchq.functional import reduce_amax

__all__ = ["MaxCalibrator"]


class MaxCalibrator(_Calibrator):
    """:class:`torchq.calib.MaxCalibrator` with the names of the original; collects integers too.

    Args:
        num_bits, axis, unsigned: as in a descriptor; the magnitude counts also where ``unsigned``.
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
        """The range of each collected tensor, as float32 ndarrays of their own; empty without ``track_amax``."""
        return self._amaxs

    @property
    def _calib_amax(self) -> Tensor | None:
        return self.compute_amax()

    def collect(self, x: Tensor) -> None:
        """Take in one tensor. Does not wait for the device, unless ``track_amax``.

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
            self._amaxs.append(
                reduce_amax(x, self._core.granularity).float().cpu().numpy()
            )  # a tensor of its own

    def reset(self) -> None:
        self._core.reset()

    def compute_amax(self) -> Tensor | None:
        """The largest magnitude of each group; None where nothing was collected.

        Raises:
            CalibrationError: NaN or infinite values were collected.
        """
        return self._core.compute_amax() if self._core.seen else None

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if (
            "_core" not in state
        ):  # pickled by the original: its settings are taken over, its statistics are not
            self.__dict__.pop("_calib_amax", None)
            self._amaxs = list(state.get("_amaxs", ()))
            self._core = CoreMaxCalibrator(axis=self._axis)

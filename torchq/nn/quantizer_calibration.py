"""Calibration of one quantizer: observing tensors, and the range that follows."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from torch import Tensor

from torchq.calib import (
    Calibrator,
    RangeCalibrator,
    find_range_search,
    find_search,
    make_calibrator,
)
from torchq.errors import CalibrationError, ConfigError
from torchq.nn.quantizer_range import QuantizerRange

__all__ = ["QuantizerCalibration"]


class QuantizerCalibration(QuantizerRange):
    """Mixin of a quantizer: a calibrator while it observes, then a range."""

    calibrator: Calibrator | RangeCalibrator | None
    observing: bool

    @property
    def calibrators(self) -> tuple[Calibrator, ...]:
        """The calibrators at work, one or one for each side of zero; none if it does not observe.

        :func:`torchq.calib.sync` gives them the statistics of all ranks.
        """
        if isinstance(self.calibrator, RangeCalibrator):
            return self.calibrator.sides
        return () if self.calibrator is None else (self.calibrator,)

    def observe(self, x: Tensor) -> None:
        """Give ``x`` to the calibrator.

        Raises:
            CalibrationError: x is not floating point, or its amax has another shape than before.
        """
        if self.calibrator is None:
            self.calibrator = self._make_calibrator()
        try:
            self.calibrator.collect(x.detach())
        except CalibrationError as error:
            raise CalibrationError(f"{self._label}: {error}") from None

    def _make_calibrator(
        self, method: str | None = None, **options: Any
    ) -> Calibrator | RangeCalibrator:
        d = self.given_descriptor
        if method in (None, d.calib_method):
            options = {**dict(d.calib_options), **options}
        make = make_calibrator if d.symmetric else RangeCalibrator
        try:
            calibrator = make(
                method or d.calib_method, format=d.format, granularity=d.granularity, **options
            )
        except ConfigError as error:
            raise ConfigError(f"{self._label}: {error}") from None
        calibrator.scale_format = d.block_scale_format
        if self._chooses_sign and isinstance(calibrator, Calibrator):
            calibrator.track_negative()
        return calibrator

    @property
    def _search(self) -> Callable[..., Any] | None:
        """The range search for tensors that exist as a whole, or None for a calibrator."""
        return self._search_of(None)

    def _search_of(self, method: str | None) -> Callable[..., Any] | None:
        d = self.descriptor
        find = find_search if d.symmetric else find_range_search
        is_own = method in (None, d.calib_method)
        return find(method or d.calib_method, d.calib_options if is_own else ())

    def start_calibration(self, method: str | None = None, **options: Any) -> None:
        """Observe from now on, with a fresh calibrator; ``method`` None is the descriptor's."""
        self.calibrator = self._make_calibrator(method, **options)
        self.observing = True

    def finish_calibration(self, **options: Any) -> None:
        """Set the range from the statistics, and drop the calibrator.

        Args:
            options: go to ``compute_amax`` or ``compute_range``.

        Raises:
            CalibrationError: nothing was observed, or NaN or infinite values were; the range stays
                as it was.
        """
        where, calibrator = self._label, self.calibrator
        if calibrator is None or not calibrator.seen:
            raise CalibrationError(
                f"{where}: has not seen any tensor; expected at least one batch in mode 'observe'"
            )
        try:
            if isinstance(calibrator, RangeCalibrator):
                self.set_range(*calibrator.compute_range(**options))
            else:
                self._finish_symmetric(calibrator, options)
        except CalibrationError as error:
            raise CalibrationError(f"{where}: {error}") from None
        self.calibrator, self.observing = None, False

    def _finish_symmetric(self, calibrator: Calibrator, options: dict[str, Any]) -> None:
        """Set amax, and the sign if calibration chooses it."""
        unsigned = calibrator.negative_batches == 0
        if self._chooses_sign:
            calibrator.format = self.given_descriptor.replace(unsigned=unsigned).format
        self.set_amax(calibrator.compute_amax(**options))
        if self._chooses_sign:
            self.set_unsigned(unsigned)
        else:
            self._warn_of_negatives(calibrator)

    def _warn_of_negatives(self, calibrator: Calibrator) -> None:
        seen = calibrator.negative_batches
        if seen:
            warnings.warn(
                f"{self._label}: got negative values in {seen} of {calibrator.batches} batches; "
                f"{self.descriptor.format} makes them 0. "
                "Use unsigned=False or 'auto', or leave it if that is meant",
                stacklevel=4,
            )

    def calibrate_on(self, x: Tensor, method: str | None = None) -> None:
        """Set the range from one tensor, such as a weight.

        A method with a search, such as ``"mse"``, tries ranges on the tensor itself.

        Args:
            x: the tensor.
            method: in place of the descriptor's.

        Raises:
            CalibrationError: NaN or infinite values; the range stays as it was.
        """
        d = self.descriptor
        search = self._search_of(method)
        if search is not None:
            try:
                found = search(x, d.format, d.granularity, scale_format=d.block_scale_format)
            except CalibrationError as error:
                raise CalibrationError(f"{self._label}: {error}") from None
            if d.symmetric:
                self.set_amax(found)
            else:
                self.set_range(*found)
            return
        observing, pending = self.observing, self.calibrator
        self.start_calibration(method)
        try:
            self.observe(x)
            self.finish_calibration()
        finally:
            self.observing, self.calibrator = observing, pending

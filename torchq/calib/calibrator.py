"""Calibrators: an observer and the estimators that read it, behind one interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchq.calib import estimators
from torchq.calib.histogram import Histogram, HistogramObserver
from torchq.calib.observer import MaxObserver, MovingAverageObserver, Observer
from torchq.calib.statistics import whole
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import Format, Granularity, PerAxis, PerTensor, by_bits
from torchq.utils import Registry

__all__ = ["ESTIMATORS", "Calibrator", "HistogramCalibrator", "MaxCalibrator"]


class Calibrator(ABC):
    """Finds the amax of one quantizer from the tensors that pass it.

    Args:
        num_bits: integer width, or ``(exponent, mantissa)`` bits of a float format.
        axis: the axis or axes that keep their own amax; None for one amax.
        unsigned: calibrate for an unsigned format: negative values count as the zeros it makes of them.
        format: use this instead of ``num_bits`` and ``unsigned``.
        granularity: use this instead of ``axis``.

    Statistics are float32 and int64 tensors on the data's device. Calibrators are plain objects: picklable, copyable,
    and no part of any state_dict.
    """

    observer: Observer

    def __init__(
        self,
        num_bits: int | tuple[int, int] = 8,
        axis: int | tuple[int, ...] | None = None,
        unsigned: bool = False,
        *,
        format: Format | None = None,
        granularity: Granularity | None = None,
    ) -> None:
        self.format = format or by_bits(num_bits, unsigned=unsigned)
        if granularity is None:
            granularity = (
                PerTensor()
                if axis is None
                else PerAxis((axis,) if isinstance(axis, int) else tuple(axis))
            )
        self.granularity = granularity

    @property
    def batches(self) -> int:
        """How many non-empty tensors were collected. A host number."""
        return self.observer.batches

    @property
    def seen(self) -> bool:
        """Whether any data was collected. Reads no device memory."""
        return self.observer.batches > 0

    def collect(self, x: Tensor) -> None:
        """Take the statistics of one tensor. Never waits for the device. An empty tensor changes nothing.

        Args:
            x: float16, bfloat16, float32 or float64; any shape with the same amax shape each time. No reference is kept. A
                DTensor (a weight under FSDP2) is gathered first, so every rank of its mesh must collect it.

        Raises:
            CalibrationError: not floating point, or another amax shape than before.
        """
        if not x.is_floating_point():
            raise CalibrationError(
                f"{type(self).__name__}.collect: got a tensor of {x.dtype}; expected floating point. Convert it with x.float()"
            )
        if x.numel():
            self.observer.observe(whole(x.detach()))

    def merge(self, other: Calibrator) -> None:
        """Add what ``other`` collected, as if it had been collected here afterwards. Associative; ``other`` is unchanged.

        Raises:
            CalibrationError: the other gathers different statistics or amax shapes.
        """
        self.observer.merge(other.observer)

    def reset(self) -> None:
        """Forget everything collected."""
        self.observer.reset()

    def compute_amax(self, method: str | None = None, **options: Any) -> Tensor:
        """The amax for everything collected so far. Waits for the device; collecting may go on afterwards.

        Args:
            method: one of the calibrator's methods; default the one it was made for.
            options: of that method, such as ``percentile=99.9``.

        Returns:
            float32 of ``granularity.amax_shape(x.shape)``, >= 0 and finite, on the data's device; never an inference tensor.

        Raises:
            CalibrationError: nothing was collected, or a batch held a NaN or an infinity.
            ConfigError: a method or option that this calibrator does not have.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._check()
            return self._compute(method, options)

    def _check(self) -> None:
        where, observer = type(self).__name__, self.observer
        if observer.nonfinite is None:
            raise CalibrationError(
                f"{where}: got no data; expected at least one collected tensor. Run a batch that reaches this quantizer, or disable it"
            )
        bad = int(observer.nonfinite)
        if bad:
            raise CalibrationError(
                f"{where}: got NaN or infinite values in {bad} of {observer.batches} batches; expected finite data. "
                "Check the input and the layers before, then reset() and collect again"
            )

    @abstractmethod
    def _compute(self, method: str | None, options: dict[str, Any]) -> Tensor:
        """The amax, after the common checks."""


class MaxCalibrator(Calibrator):
    """The largest magnitude, or with ``momentum`` the moving average of each batch's largest. Any granularity.

    Args:
        momentum: None for the maximum; else the weight of the past, 0 <= momentum < 1, in
            ``average = momentum * average + (1 - momentum) * batch``, started by the first batch.

    Example:
        >>> calibrator = MaxCalibrator(axis=0)
        >>> calibrator.collect(torch.tensor([[1.0, -3.0], [0.5, 0.25]]))
        >>> calibrator.compute_amax()
        tensor([[3.0000],
                [0.5000]])
    """

    observer: MaxObserver | MovingAverageObserver

    def __init__(
        self,
        num_bits: int | tuple[int, int] = 8,
        axis: int | tuple[int, ...] | None = None,
        unsigned: bool = False,
        *,
        momentum: float | None = None,
        format: Format | None = None,
        granularity: Granularity | None = None,
    ) -> None:
        super().__init__(num_bits, axis, unsigned, format=format, granularity=granularity)
        if momentum is None:
            self.observer = MaxObserver(self.granularity, signed=self.format.signed)
        else:
            self.observer = MovingAverageObserver(
                self.granularity, signed=self.format.signed, momentum=momentum
            )

    def _compute(self, method: str | None, options: dict[str, Any]) -> Tensor:
        own = "max" if isinstance(self.observer, MaxObserver) else "moving_average"
        if method not in (None, own) or options:
            raise ConfigError(
                f"MaxCalibrator.compute_amax: got method={method!r} with options {options}; expected method={own!r} without options. "
                "Collect with a HistogramCalibrator for other methods"
            )
        return (
            self.observer.amax.clone()
            if isinstance(self.observer, MaxObserver)
            else self.observer.average()
        )


#: What a histogram can be read by: ``function(histogram, format, *, option=default, ..) -> amax``.
ESTIMATORS: Registry[str, Callable[..., Tensor]] = Registry("histogram method")
ESTIMATORS.add("max", estimators.largest)
ESTIMATORS.add("percentile", estimators.percentile)
ESTIMATORS.add("mse", estimators.mse)
ESTIMATORS.add("entropy", estimators.entropy)


class HistogramCalibrator(Calibrator):
    """A histogram of magnitudes, read by percentile, mse, entropy or max. Per tensor or per axis.

    The histogram is exact: it does not depend on how the data was cut into batches or spread over ranks (see
    :mod:`torchq.calib.histogram`). At most 32 MiB per calibrator.

    Args:
        num_bins: bins of each group, at least 16; at least half of them lie within the range seen.
        skip_zeros: leave exact zeros out, for example those that ReLU makes.
        method: what :meth:`compute_amax` does by default.
        options: of that method, used whenever it runs without options of its own.

    Example:
        >>> calibrator = HistogramCalibrator(method="percentile", percentile=50.0)
        >>> calibrator.collect(torch.arange(1025.0))
        >>> calibrator.compute_amax()
        tensor(512.5000)
        >>> calibrator.compute_amax("max")
        tensor(1024.)
    """

    observer: HistogramObserver

    def __init__(
        self,
        num_bits: int | tuple[int, int] = 8,
        axis: int | tuple[int, ...] | None = None,
        unsigned: bool = False,
        *,
        num_bins: int = 2048,
        skip_zeros: bool = False,
        method: str = "entropy",
        format: Format | None = None,
        granularity: Granularity | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_bits, axis, unsigned, format=format, granularity=granularity)
        _check_options(method, options)
        self.method = method
        self.options = options
        self.observer = HistogramObserver(
            self.granularity, signed=self.format.signed, num_bins=num_bins, skip_zeros=skip_zeros
        )

    def histogram(self) -> Histogram:
        """The statistics collected so far.

        Raises:
            CalibrationError: nothing was collected, or a batch held a NaN or an infinity.
        """
        self._check()
        return self.observer.histogram()

    def _compute(self, method: str | None, options: dict[str, Any]) -> Tensor:
        method = method or self.method
        _check_options(method, options)
        if method == self.method:
            options = {**self.options, **options}
        histogram = self.observer.histogram()
        # On the CPU whatever the device: float64 is not everywhere, and every device and rank gets the same bits.
        return ESTIMATORS[method](histogram.to("cpu"), self.format, **options).to(
            histogram.counts.device
        )


def _check_options(method: str, options: dict[str, Any]) -> None:
    known = ESTIMATORS[method].__kwdefaults__ or {}
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise ConfigError(
            f"calibration method {method!r}: got options {unknown}; expected {sorted(known) or 'none'}"
        )

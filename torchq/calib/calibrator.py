"""Calibrators: an observer, and the computation of an amax from its statistics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchq.calib import estimators
from torchq.calib.estimators import least_error_power_of_two
from torchq.calib.histogram import Histogram, HistogramObserver, merge_bins
from torchq.calib.observer import MaxObserver, MovingAverageObserver, Observer, gather_full_tensor
from torchq.calib.search import minimize_range, search_amax, search_range, total_error
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import (
    POWER_OF_TWO,
    Format,
    Granularity,
    IntFormat,
    PerAxis,
    PerTensor,
    by_bits,
    integer_format,
)
from torchq.functional import reduce_amax, reduce_range
from torchq.utils import Registry, short_repr


class Calibrator(ABC):
    """Base class of all calibrators: finds the amax of one quantizer from the tensors it is given.

    The statistics are float32 and int64 tensors on the device of the data. Calibrators are plain
    objects: they can be pickled and copied, and they are no part of a state_dict.

    Args:
        num_bits: the integer width, or ``(exponent, mantissa)`` bits of a float format.
        axis: the axis or axes that keep their own amax; None for one amax.
        unsigned: True calibrates for an unsigned format, for which negative values are zeros.
        format: used in place of ``num_bits`` and ``unsigned``.
        granularity: used in place of ``axis``.

    Attributes:
        scale_format: the format of scales, if they are rounded; only
            :data:`torchq.formats.POWER_OF_TWO` changes what is computed, and only for mse and lp.
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
        self.granularity = granularity or _granularity(axis)
        self.scale_format: Format | None = None

    @property
    def batches(self) -> int:
        """The number of non-empty tensors collected, known on the host."""
        return self.observer.batches

    @property
    def seen(self) -> bool:
        """True if any data was collected; reads no device memory."""
        return self.observer.batches > 0

    def track_negative(self) -> None:
        """Look for negative values from now on, to choose between signed and unsigned codes."""
        self.observer.tracks_negative = True

    @property
    def negative_batches(self) -> int:
        """The number of tensors with negative values, if they are counted; waits for the device."""
        return 0 if self.observer.negative is None else int(self.observer.negative)

    def collect(self, x: Tensor) -> None:
        """Add one tensor to the statistics, without waiting for its device.

        No reference to the tensor is kept. An empty tensor changes nothing.

        Args:
            x: float16, bfloat16, float32 or float64, any shape that gives the same amax shape
                each time. A DTensor (a weight under FSDP2) is gathered first, so every rank of
                its mesh must collect it.

        Raises:
            CalibrationError: ``x`` is not floating point, or its amax has another shape.
        """
        if not x.is_floating_point():
            raise CalibrationError(
                f"{type(self).__name__}.collect: got a tensor of {x.dtype}; "
                "expected floating point. Convert it with x.float()"
            )
        if x.numel():
            self.observer.observe(gather_full_tensor(x.detach()))

    def reset(self) -> None:
        """Forget everything collected."""
        self.observer.reset()

    def compute_amax(self, method: str | None = None, **options: Any) -> Tensor:
        """Return the amax for everything collected so far; waits for the device.

        Collecting may go on afterwards.

        Args:
            method: one of the calibrator's methods; default: the one it was made for.
            options: options of that method, such as ``percentile=99.9``.

        Returns:
            float32 of ``granularity.amax_shape(x.shape)``, finite and >= 0, on the data's device;
            never an inference tensor.

        Raises:
            CalibrationError: nothing was collected, or a batch held a NaN or an infinity.
            ConfigError: the calibrator does not have this method or option.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._check()
            return self._compute(method, options)

    def _check(self) -> None:
        """Raise an error unless there is finite data."""
        where, observer = type(self).__name__, self.observer
        if observer.nonfinite is None:
            raise CalibrationError(
                f"{where}: got no data; expected at least one collected tensor. "
                "Run a batch that reaches this quantizer, or disable it"
            )
        bad = int(observer.nonfinite)
        if bad:
            raise CalibrationError(
                f"{where}: got NaN or infinite values in {bad} of {observer.batches} batches; "
                "expected finite data. "
                "Check the input and the layers before, and start again"
            )

    @abstractmethod
    def _compute(self, method: str | None, options: dict[str, Any]) -> Tensor:
        """Compute the amax; the data was checked."""


def _granularity(axis: int | tuple[int, ...] | None) -> Granularity:
    """Return the granularity that keeps one amax for each index of ``axis``."""
    if axis is None:
        return PerTensor()
    return PerAxis((axis,) if isinstance(axis, int) else tuple(axis))


class MaxCalibrator(Calibrator):
    """The largest magnitude, or a moving average of the largest magnitude of each batch.

    Supports every granularity.

    Args:
        num_bits: see :class:`Calibrator`, as are axis, unsigned, format and granularity.
        axis: see :class:`Calibrator`.
        unsigned: see :class:`Calibrator`.
        momentum: None for the maximum; otherwise the weight of the past, 0 <= momentum < 1, in
            ``average = momentum * average + (1 - momentum) * batch``, started by the first batch.
        format: see :class:`Calibrator`.
        granularity: see :class:`Calibrator`.

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
        signed = self.format.signed
        if momentum is None:
            self.observer = MaxObserver(self.granularity, signed=signed)
        else:
            self.observer = MovingAverageObserver(
                self.granularity, signed=signed, momentum=momentum
            )

    def _compute(self, method: str | None, options: dict[str, Any]) -> Tensor:
        own = "max" if isinstance(self.observer, MaxObserver) else "moving_average"
        if method not in (None, own) or options:
            raise ConfigError(
                f"MaxCalibrator.compute_amax: got method={method!r} with options {options}; "
                f"expected method={own!r} without options. "
                "Collect with a HistogramCalibrator for other methods"
            )
        if isinstance(self.observer, MaxObserver):
            return self.observer.amax.clone()
        return self.observer.average()


#: Estimators by method name: ``function(histogram, format, *, option=default, ...) -> amax``.
ESTIMATORS: Registry[str, Callable[..., Tensor]] = Registry("histogram method")
ESTIMATORS.add("max", estimators.largest)
ESTIMATORS.add("percentile", estimators.percentile)
ESTIMATORS.add("mse", estimators.mse)
ESTIMATORS.add("entropy", estimators.entropy)
ESTIMATORS.add("lp", estimators.lp)


class HistogramCalibrator(Calibrator):
    """A histogram of magnitudes and the estimators that read it, per tensor or per axis.

    The histogram is exact: it does not depend on how the data was divided into batches or spread
    over ranks (see :mod:`torchq.calib.histogram`). It takes at most 32 MiB.

    Args:
        num_bits: see :class:`Calibrator`, as are axis, unsigned, format and granularity.
        axis: see :class:`Calibrator`.
        unsigned: see :class:`Calibrator`.
        num_bins: bins of each group; at least half of them lie within the range seen.
        method: the name of the estimator that :meth:`compute_amax` uses by default.
        format: see :class:`Calibrator`.
        granularity: see :class:`Calibrator`.
        options: options of ``method``, used whenever :meth:`compute_amax` gives none.

    Raises:
        ConfigError: an unknown method or option, or a granularity or number of bins that a
            histogram does not support.

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
        method: str = "entropy",
        format: Format | None = None,
        granularity: Granularity | None = None,
        **options: Any,
    ) -> None:
        super().__init__(num_bits, axis, unsigned, format=format, granularity=granularity)
        check_options(method, options, self.format)
        self.method = method
        self.options = options
        self.observer = HistogramObserver(
            self.granularity, signed=self.format.signed, num_bins=num_bins
        )

    def histogram(self) -> Histogram:
        """Return the statistics collected so far.

        Raises:
            CalibrationError: nothing was collected, or a batch held a NaN or an infinity.
        """
        self._check()
        return self.observer.histogram()

    def _compute(self, method: str | None, options: dict[str, Any]) -> Tensor:
        method = method or self.method
        check_options(method, options, self.format)
        if method == self.method:
            options = {**self.options, **options}
        histogram = self.observer.histogram()
        if self.scale_format is POWER_OF_TWO and method in ("mse", "lp"):
            power = float(options.get("power", 2.0 if method == "mse" else 2.4))
            found = least_error_power_of_two(histogram.to("cpu"), self.format, power)
            return found.to(histogram.counts.device)
        # Estimating on the CPU in float64 gives every device and rank the same bits; some devices
        # have no float64.
        amax = ESTIMATORS[method](histogram.to("cpu"), self.format, **options)
        return amax.to(histogram.counts.device)


def check_options(method: str, options: dict[str, Any], format: Format) -> None:
    """Check the options of an estimator by running it on one number, before there are others."""
    known = ESTIMATORS[method].__kwdefaults__ or {}
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        raise ConfigError(
            f"calibration method {method!r}: got options {unknown}; "
            f"expected {sorted(known) or 'none'}"
        )
    for name, value in options.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(known[name], float) and not is_number:
            raise ConfigError(
                f"calibration method {method!r}: got {name}={short_repr(value)}; expected a number"
            )
    if options:
        counts = torch.zeros(1, 16, dtype=torch.int64, device="cpu")
        counts[0, 1] = 1
        one = torch.ones(1, dtype=torch.float32, device="cpu")
        ESTIMATORS[method](Histogram(counts, one, one), format, **options)


#: ``factory(*, format, granularity, **options) -> Calibrator`` of the methods that do not read a
#: histogram.
CALIBRATORS: Registry[str, Callable[..., Calibrator]] = Registry("calibration method")

#: For tensors that exist as a whole (weights), what a method without options does in place of a
#: calibrator: ``search(x, format, granularity, *, scale_format)``, one for symmetric ranges that
#: returns amax, and one for asymmetric ranges that returns ``(amin, amax)``.
SEARCHES: Registry[str, tuple[Callable[..., Tensor], Callable[..., tuple[Tensor, Tensor]]]]
SEARCHES = Registry("range search")


def _make_moving_average(*, momentum: float = 0.9, **options: Any) -> Calibrator:
    """Return a calibrator whose momentum has the documented default."""
    return MaxCalibrator(momentum=momentum, **options)


CALIBRATORS.add("max", MaxCalibrator)
CALIBRATORS.add("moving_average", _make_moving_average)
CALIBRATORS.add("histogram", HistogramCalibrator)
SEARCHES.add("mse", (search_amax, search_range))
# Without the inputs of a layer no error is known, so the whole range is taken.
SEARCHES.add(
    "activation",
    (
        lambda x, format, granularity, **_: reduce_amax(x, granularity),
        lambda x, format, granularity, **_: reduce_range(x, granularity),
    ),
)


def methods() -> tuple[str, ...]:
    """Return the names that :func:`make_calibrator` knows.

    These are the names in ``CALIBRATORS``, then those in ``ESTIMATORS``, which read a histogram.

    >>> {"max", "mse", "entropy"} <= set(methods())
    True
    """
    return tuple(dict.fromkeys((*CALIBRATORS, *ESTIMATORS)))


def make_calibrator(
    method: str, *, format: Format, granularity: Granularity, **options: Any
) -> Calibrator:
    """Return a new calibrator whose ``compute_amax()`` uses ``method``.

    Args:
        method: one of :func:`methods`; ``"histogram"`` uses entropy by default.
        format: the number format to calibrate for.
        granularity: which elements share one amax.
        options: ``momentum`` for moving_average; ``num_bins`` and the options of the
            method itself, such as ``percentile``, for histograms.

    Raises:
        ConfigError: an unknown method or option, or a granularity without support for the method.

    Example:
        >>> from torchq.formats import INT8, PerTensor
        >>> calibrator = make_calibrator(
        ...     "percentile", format=INT8, granularity=PerTensor(), percentile=99.9
        ... )
        >>> calibrator.method
        'percentile'
    """
    if method not in methods():
        raise ConfigError(
            f"unknown calibration method {method!r}; expected one of: {', '.join(methods())}"
        )
    factory = CALIBRATORS.get(method) or partial(HistogramCalibrator, method=method)
    try:
        return factory(format=format, granularity=granularity, **options)
    except TypeError as error:
        raise ConfigError(
            f"calibration method {method!r}: got options {sorted(options)}; {error}"
        ) from None


class RangeCalibrator:
    """Finds the range [amin, amax] of one quantizer from the tensors it is given.

    * The methods ``max``, ``moving_average`` and ``percentile`` treat each side by itself. A
      percentile of 99.9 lets 0.1 % of the values lie above the range, and 0.1 % below.
    * ``mse`` and ``lp`` choose both ends together: first one fraction for both, then each in turn.
    * ``entropy`` takes the threshold that it finds for the magnitudes, and no more of a side than
      its largest value, as ONNX Runtime does.

    Args:
        method: one of :func:`torchq.calib.methods`.
        format: an integer format.
        granularity: which elements share one range.
        options: of the method; see :func:`torchq.calib.make_calibrator`.

    Attributes:
        scale_format: see :class:`torchq.calib.Calibrator`.

    Raises:
        ConfigError: see :func:`torchq.calib.make_calibrator`.

    Example:
        >>> from torchq.formats import UINT8, PerTensor
        >>> calibrator = RangeCalibrator("max", format=UINT8, granularity=PerTensor())
        >>> calibrator.collect(torch.tensor([-0.25, 0.0, 3.0]))
        >>> calibrator.compute_range()
        (tensor(-0.2500), tensor(3.))
    """

    def __init__(
        self, method: str, *, format: Format, granularity: Granularity, **options: Any
    ) -> None:
        self.format = format
        self.scale_format: Format | None = None
        side = integer_format(format.bits, unsigned=True)
        self.upper = make_calibrator(method, format=side, granularity=granularity, **options)
        self.lower = make_calibrator(method, format=side, granularity=granularity, **options)

    @property
    def sides(self) -> tuple[Calibrator, Calibrator]:
        """The calibrators of the positive and of the negative values."""
        return self.upper, self.lower

    @property
    def batches(self) -> int:
        """The number of non-empty tensors collected, known on the host."""
        return self.upper.batches

    @property
    def seen(self) -> bool:
        """True if any data was collected; reads no device memory."""
        return self.upper.seen

    def collect(self, x: Tensor) -> None:
        """Add one tensor to the statistics; see :meth:`torchq.calib.Calibrator.collect`."""
        self.upper.collect(x)
        self.lower.collect(x.detach().neg())

    def compute_range(self, method: str | None = None, **options: Any) -> tuple[Tensor, Tensor]:
        """Return the range for everything collected so far; waits for the device.

        Args:
            method: default: the one it was made for; others need histograms.
            options: of the method, such as ``percentile=99.9``.

        Returns:
            ``(amin, amax)`` with ``amin <= 0 <= amax``, float32 of the shape of an amax each.

        Raises:
            CalibrationError: nothing was collected, or a batch held a NaN or an infinity.
        """
        own = self.upper.method if isinstance(self.upper, HistogramCalibrator) else ""
        if (method or own) not in ("mse", "lp", "entropy"):
            amin = -self.lower.compute_amax(method, **options)
            return amin, self.upper.compute_amax(method, **options)
        assert isinstance(self.upper, HistogramCalibrator)
        assert isinstance(self.lower, HistogramCalibrator)
        check_options(method or own, options, self.format)
        with torch.inference_mode(False), torch.no_grad():
            sides = self.upper.histogram(), self.lower.histogram()
            if (method or own) == "entropy":
                return _entropy_range(*sides, self.format)
            options = {**(self.upper.options if method in (None, own) else {}), **options}
            power = float(options.get("power", 2.0 if (method or own) == "mse" else 2.4))
            return _least_error(*sides, self.format, power, self.scale_format)


def _least_error(
    upper: Histogram,
    lower: Histogram,
    format: Format,
    power: float,
    scale_format: Format | None,
) -> tuple[Tensor, Tensor]:
    """Return the range of least error of the bin centers; see :func:`torchq.calib.estimators.lp`.

    The first bins are left out: their values round to 0, or nearly so, in every range.
    """
    device = upper.counts.device
    upper, lower = upper.to("cpu"), lower.to("cpu")
    centers = torch.cat([-_centers(lower), _centers(upper)], 1)
    counts = torch.cat([lower.counts[:, 1:], upper.counts[:, 1:]], 1).double()

    def error(amin: Tensor, amax: Tensor) -> Tensor:
        return total_error(centers, counts, amin, amax, format, power, scale_format)

    amin, amax = minimize_range(-lower.amax, upper.amax, error)
    return amin.view(lower.shape).to(device), amax.view(upper.shape).to(device)


def _centers(histogram: Histogram) -> Tensor:
    """Return the centers of all bins but the first, (groups, bins - 1) float64."""
    bins, device = histogram.counts.shape[1], histogram.width.device
    index = torch.arange(1, bins, dtype=torch.float64, device=device)
    return (index + 0.5) * histogram.width.double().unsqueeze(1)


def _entropy_range(upper: Histogram, lower: Histogram, format: Format) -> tuple[Tensor, Tensor]:
    """Return the threshold of the magnitudes, on each side at most its largest value."""
    assert isinstance(format, IntFormat)
    width = torch.maximum(upper.width, lower.width)
    sides = [
        merge_bins(side.counts, torch.log2(width / side.width).round().long())
        for side in (upper, lower)
    ]
    counts = sides[0] + sides[1]
    # Each side counts the values of the other one as zeros.
    counts[:, 0] = torch.minimum(sides[0][:, 0], sides[1][:, 0])
    largest = torch.maximum(upper.amax, lower.amax)
    magnitudes = Histogram(counts, width, largest, upper.shape)
    threshold = estimators.entropy(magnitudes.to("cpu"), integer_format(max(2, format.bits)))
    threshold = threshold.to(counts.device)
    ends = (torch.minimum(threshold, side.amax.view(side.shape)) for side in (lower, upper))
    amin, amax = ends
    return -amin, amax

"""Calibrators: observers, and the computation of a range from their statistics."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchq.calib import estimators
from torchq.calib.histogram import Histogram, HistogramObserver
from torchq.calib.observer import MaxObserver, MovingAverageObserver, Observer, gather_full_tensor
from torchq.calib.search import search_range
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import (
    POWER_OF_TWO,
    Format,
    Granularity,
    PerAxis,
    PerTensor,
    by_bits,
    integer_format,
)
from torchq.functional import Range
from torchq.utils import Registry, short_repr


class Calibrator(ABC):
    """Base class of all calibrators: finds the range of one quantizer from the tensors it is given.

    The statistics are float32 and int64 tensors on the device of the data. Calibrators are plain
    objects: they can be pickled and copied, and they are no part of a state_dict.

    Args:
        num_bits: the integer width, or ``(exponent, mantissa)`` bits of a float format.
        axis: the axis or axes that keep their own range; None for one range.
        unsigned: True calibrates for an unsigned format, for which negative values are zeros.
        format: used in place of ``num_bits`` and ``unsigned``; an integer format for asymmetric
            ranges.
        granularity: used in place of ``axis``.
        symmetric: False finds both ends of the range, from the values on each side of zero.

    Attributes:
        observers: that of the magnitudes, or those of the positive and of the negative values.
        scale_format: the format of scales, if they are rounded; only
            :data:`torchq.formats.POWER_OF_TWO` changes what is computed, and only for mse and lp.
    """

    observers: tuple[Observer, ...]

    def __init__(
        self,
        num_bits: int | tuple[int, int] = 8,
        axis: int | tuple[int, ...] | None = None,
        unsigned: bool = False,
        *,
        format: Format | None = None,
        granularity: Granularity | None = None,
        symmetric: bool = True,
    ) -> None:
        self.format = format or by_bits(num_bits, unsigned=unsigned)
        self.granularity = granularity or _granularity(axis)
        self.symmetric = symmetric
        self.scale_format: Format | None = None

    def _observe_with(self, make: Callable[..., Observer], **options: Any) -> None:
        """Make the observers; each side of zero is the positive side of one."""
        signs = (self.format.signed,) if self.symmetric else (False, False)
        self.observers = tuple(make(self.granularity, signed=s, **options) for s in signs)

    @property
    def batches(self) -> int:
        """The number of non-empty tensors collected, known on the host."""
        return self.observers[0].batches

    @property
    def seen(self) -> bool:
        """True if any data was collected; reads no device memory."""
        return self.batches > 0

    def track_negative(self) -> None:
        """Look for negative values from now on, to choose between signed and unsigned codes."""
        self.observers[0].tracks_negative = True

    @property
    def negative_batches(self) -> int:
        """The number of tensors with negative values, if they are counted; waits for the device."""
        negative = self.observers[0].negative
        return 0 if negative is None else int(negative)

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
            text = f"{type(self).__name__}.collect: got a tensor of {x.dtype}; "
            text += "expected floating point. Convert it with x.float()"
            raise CalibrationError(text)
        if x.numel():
            x = gather_full_tensor(x.detach())
            self.observers[0].observe(x)
            for observer in self.observers[1:]:
                observer.observe(x.neg())

    def reset(self) -> None:
        """Forget everything collected."""
        for observer in self.observers:
            observer.reset()

    def range(self, method: str | None = None, **options: Any) -> Range:
        """Return the range for everything collected so far; waits for the device.

        Collecting may go on afterwards.

        Args:
            method: one of the calibrator's methods; default: the one it was made for.
            options: options of that method, such as ``percentile=99.9``.

        Returns:
            ``low <= 0 <= high``, float32 of ``granularity.amax_shape(x.shape)`` on the data's
            device, finite, never inference tensors; ``low`` is None for symmetric ranges.

        Raises:
            CalibrationError: nothing was collected, or a batch held a NaN or an infinity.
            ConfigError: the calibrator does not have this method or option.
        """
        with torch.inference_mode(False), torch.no_grad():
            self._check()
            return self._compute(method, options)

    def _check(self) -> None:
        """Raise an error unless there is finite data."""
        where, observer = type(self).__name__, self.observers[0]
        if observer.nonfinite is None:
            text = f"{where}: got no data; expected at least one collected tensor. "
            text += "Run a batch that reaches this quantizer, or disable it"
            raise CalibrationError(text)
        bad = int(observer.nonfinite)
        if bad:
            text = f"{where}: got NaN or infinite values in {bad} of {observer.batches} batches; "
            text += "expected finite data. "
            text += "Check the input and the layers before, and start again"
            raise CalibrationError(text)

    @abstractmethod
    def _compute(self, method: str | None, options: dict[str, Any]) -> Range:
        """Compute the range; the data was checked."""


def _two_sided(upper: Tensor, lower: Tensor | None = None) -> Range:
    """Return the range of the largest values of one side, or of each side of zero."""
    return Range(upper, None if lower is None else -lower)


def _granularity(axis: int | tuple[int, ...] | None) -> Granularity:
    """Return the granularity that keeps one amax for each index of ``axis``."""
    if axis is None:
        return PerTensor()
    return PerAxis((axis,) if isinstance(axis, int) else tuple(axis))


class MaxCalibrator(Calibrator):
    """The largest magnitude, or a moving average of the largest magnitude of each batch.

    Supports every granularity. Asymmetric ranges take the largest value of each side.

    Args:
        num_bits, axis, unsigned: see :class:`Calibrator`.
        momentum: None for the maximum; otherwise the weight of the past, 0 <= momentum < 1, in
            ``average = momentum * average + (1 - momentum) * batch``, started by the first batch.
        **settings: the other arguments of :class:`Calibrator`.

    Example:
        >>> calibrator = MaxCalibrator(axis=0)
        >>> calibrator.collect(torch.tensor([[1.0, -3.0], [0.5, 0.25]]))
        >>> calibrator.range().high
        tensor([[3.0000],
                [0.5000]])
    """

    observers: tuple[MaxObserver | MovingAverageObserver, ...]

    def __init__(
        self,
        num_bits: int | tuple[int, int] = 8,
        axis: int | tuple[int, ...] | None = None,
        unsigned: bool = False,
        *,
        momentum: float | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(num_bits, axis, unsigned, **settings)
        self.method = "max" if momentum is None else "moving_average"
        if momentum is None:
            self._observe_with(MaxObserver)
        else:
            self._observe_with(MovingAverageObserver, momentum=momentum)

    def _compute(self, method: str | None, options: dict[str, Any]) -> Range:
        if method not in (None, self.method) or options:
            text = f"MaxCalibrator.range: got method={method!r} with options {options}; "
            text += f"expected method={self.method!r} without options. "
            text += "Collect with a HistogramCalibrator for other methods"
            raise ConfigError(text)
        return _two_sided(*(observer.result() for observer in self.observers))


#: Estimators by method name: ``function(histogram, format, *, option=default, ...) -> amax``.
ESTIMATORS: Registry[str, Callable[..., Tensor]] = Registry("histogram method")
ESTIMATORS.add("max", estimators.largest)
ESTIMATORS.add("percentile", estimators.percentile)
ESTIMATORS.add("mse", estimators.mse)
ESTIMATORS.add("entropy", estimators.entropy)
ESTIMATORS.add("lp", estimators.lp)

# What needs both sides of zero together for an asymmetric range:
# ``function(upper, lower, format, scale_format, **options)``. Others take each side by itself.
_TOGETHER: dict[str, Callable[..., Range]] = {
    "mse": partial(estimators.least_error_range, power=2.0),
    "lp": estimators.least_error_range,
    "entropy": estimators.entropy_range,
}
# The powers of errors by which power-of-two scales are chosen, unless an option says otherwise.
_POWERS = {"mse": 2.0, "lp": 2.4}


class HistogramCalibrator(Calibrator):
    """A histogram of magnitudes and the estimators that read it, per tensor or per axis.

    The histogram is exact: it does not depend on how the data was divided into batches or spread
    over ranks (see :mod:`torchq.calib.histogram`). It takes at most 32 MiB.

    Of asymmetric ranges, ``max`` and ``percentile`` treat each side by itself: a percentile of 99.9
    lets 0.1 % of the values lie above the range, and 0.1 % below. ``mse`` and ``lp`` choose both
    ends together: first one fraction for both, then each in turn. ``entropy`` takes the threshold
    that it finds for the magnitudes, and no more of a side than its largest value, as ONNX Runtime
    does.

    Args:
        num_bits, axis, unsigned, format, granularity, symmetric: see :class:`Calibrator`.
        num_bins: bins of each group; at least half of them lie within the range seen.
        method: the name of the estimator that :meth:`range` uses by default.
        **options: options of ``method``, used whenever :meth:`range` gives none.

    Raises:
        ConfigError: an unknown method or option, or a granularity or number of bins that a
            histogram does not support.

    Example:
        >>> calibrator = HistogramCalibrator(method="percentile", percentile=50.0)
        >>> calibrator.collect(torch.arange(1025.0))
        >>> calibrator.range().high
        tensor(512.5000)
        >>> calibrator.range("max").high
        tensor(1024.)
    """

    observers: tuple[HistogramObserver, ...]

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
        symmetric: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(
            num_bits, axis, unsigned, format=format, granularity=granularity, symmetric=symmetric
        )
        check_options(method, options, self.format)
        self.method = method
        self.options = options
        self._observe_with(HistogramObserver, num_bins=num_bins)

    def histogram(self) -> Histogram:
        """Return the statistics collected so far, of the positive values for asymmetric ranges.

        Raises:
            CalibrationError: nothing was collected, or a batch held a NaN or an infinity.
        """
        self._check()
        return self.observers[0].histogram()

    def _compute(self, method: str | None, options: dict[str, Any]) -> Range:
        method = method or self.method
        check_options(method, options, self.format)
        if method == self.method:
            options = {**self.options, **options}
        # Estimating on the CPU in float64 gives every device and rank the same bits; some devices
        # have no float64.
        sides = [observer.histogram().to("cpu") for observer in self.observers]
        if not self.symmetric and method in _TOGETHER:
            found = _TOGETHER[method](*sides, self.format, self.scale_format, **options)
        elif self.scale_format is POWER_OF_TWO and method in _POWERS and self.symmetric:
            power = float(options.get("power", _POWERS[method]))
            found = Range(estimators.least_error_power_of_two(sides[0], self.format, power))
        else:
            format = (
                self.format if self.symmetric else integer_format(self.format.bits, unsigned=True)
            )
            estimate = ESTIMATORS[method]
            found = _two_sided(*(estimate(side, format, **options) for side in sides))
        return found.map(lambda end: end.to(self.observers[0].counts.device))


def check_options(method: str, options: dict[str, Any], format: Format) -> None:
    """Check the options of an estimator by running it on one number, before there are others."""
    known = ESTIMATORS[method].__kwdefaults__ or {}
    unknown = sorted(options.keys() - known.keys())
    if unknown:
        text = f"calibration method {method!r}: got options {unknown}; "
        text += f"expected {sorted(known) or 'none'}"
        raise ConfigError(text)
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
#: calibrator: ``search(x, format, granularity, *, symmetric, scale_format) -> Range``.
SEARCHES: Registry[str, Callable[..., Range]] = Registry("range search")


CALIBRATORS.add("max", MaxCalibrator)
CALIBRATORS.add("moving_average", partial(MaxCalibrator, momentum=0.9))
CALIBRATORS.add("histogram", HistogramCalibrator)
SEARCHES.add("mse", search_range)
# Without the inputs of a layer no error is known, so the whole range is taken.
SEARCHES.add(
    "activation",
    lambda x, format, granularity, *, symmetric=True, scale_format=None: Range.of(
        x, granularity, symmetric=symmetric
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
    method: str,
    *,
    format: Format,
    granularity: Granularity,
    symmetric: bool = True,
    **options: Any,
) -> Calibrator:
    """Return a new calibrator whose ``range()`` is that of ``method``.

    Args:
        method: one of :func:`methods`; ``"histogram"`` uses entropy by default.
        format: the number format to calibrate for.
        granularity: which elements share one range.
        symmetric: False finds both ends of the range; ``format`` is an integer format then.
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
        text = f"unknown calibration method {method!r}; expected one of: {', '.join(methods())}"
        raise ConfigError(text)
    factory = CALIBRATORS.get(method) or partial(HistogramCalibrator, method=method)
    factory = factory if symmetric else partial(factory, symmetric=False)
    try:
        return factory(format=format, granularity=granularity, **options)
    except TypeError as error:
        text = f"calibration method {method!r}: got options {sorted(options)}; {error}"
        raise ConfigError(text) from None

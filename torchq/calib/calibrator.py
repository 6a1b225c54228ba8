"""Calibrators: observers, and the computation of a range from their statistics."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchq.calib import estimators
from torchq.calib.histogram import Histogram, HistogramObserver
from torchq.calib.observer import (
    MaxObserver,
    MovingAverageObserver,
    Observer,
    gather_full_tensor,
)
from torchq.calib.search import search_range
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import (
    INT8,
    POWER_OF_TWO,
    Format,
    Granularity,
    PerTensor,
    integer_format,
)
from torchq.functional import Range
from torchq.utils import Registry, short_repr

#: Observers of the methods that do not read a histogram, and "histogram" for the estimator
#: "entropy": ``observer(granularity, *, signed, **options)``, whose ``result()`` is an amax.
OBSERVERS: Registry[str, Callable[..., Observer]] = Registry("calibration method")
OBSERVERS.add("max", MaxObserver)
OBSERVERS.add("moving_average", MovingAverageObserver)
OBSERVERS.add("histogram", HistogramObserver)

#: Estimators by method name: ``function(histogram, format, *, option=default, ...) -> amax``.
ESTIMATORS: Registry[str, Callable[..., Tensor]] = Registry("histogram method")
ESTIMATORS.add("max", estimators.largest)
ESTIMATORS.add("percentile", estimators.percentile)
ESTIMATORS.add("mse", estimators.mse)
ESTIMATORS.add("entropy", estimators.entropy)

# What needs both sides of zero together for an asymmetric range:
# ``function(upper, lower, format, scale_format)``. Others take each side by itself.
_TOGETHER: dict[str, Callable[..., Range]] = {
    "mse": estimators.least_error_range,
    "entropy": estimators.entropy_range,
}

#: For tensors that exist as a whole (weights), what a method without options does in place of a
#: calibrator: ``search(x, format, granularity, *, symmetric, scale_format) -> Range``.
SEARCHES: Registry[str, Callable[..., Range]] = Registry("range search")
SEARCHES.add("mse", search_range)
# Without the inputs of a layer no error is known, so the whole range is taken.
SEARCHES.add(
    "activation",
    lambda x, format, granularity, *, symmetric=True, scale_format=None: Range.of(
        x, granularity, symmetric=symmetric
    ),
)


def methods() -> tuple[str, ...]:
    """Return the names that :class:`Calibrator` knows.

    These are the names in ``OBSERVERS``, then those in ``ESTIMATORS``, which read a histogram.

    >>> {"max", "mse", "entropy"} <= set(methods())
    True
    """
    return tuple(dict.fromkeys((*OBSERVERS, *ESTIMATORS)))


class Calibrator:
    """Finds the range of one quantizer from the tensors it is given.

    The statistics are float32 and int64 tensors on the device of the data. Calibrators are plain
    objects: they can be pickled and copied, and they are no part of a state_dict. A histogram is
    exact: it does not depend on how the data was divided into batches or spread over ranks (see
    :mod:`torchq.calib.histogram`). It takes at most 32 MiB.

    Of asymmetric ranges, ``max``, ``moving_average`` and ``percentile`` treat each side of zero by
    itself: a percentile of 99.9 lets 0.1 % of the values lie above the range, and 0.1 % below.
    ``mse`` chooses both ends together: first one fraction for both, then each in turn. ``entropy``
    takes the threshold that it finds for the magnitudes, and no more of a side than its
    largest value, as ONNX Runtime does.

    Args:
        method: one of :func:`methods`; ``"histogram"`` uses entropy by default.
        format: the number format to calibrate for; for an unsigned one negative values are zeros.
        granularity: which elements share one range.
        symmetric: False finds both ends of the range; ``format`` is an integer format then.
        options: ``momentum`` for moving_average, the weight of the past; ``num_bins`` for
            histograms, of which at least half lie within the range seen, and the options of the
            method itself, such as ``percentile``.

    Attributes:
        observers: that of the magnitudes, or those of the positive and of the negative values.
        scale_format: the format of scales, if they are rounded; only
            :data:`torchq.formats.POWER_OF_TWO` changes what is computed, and only for mse.

    Raises:
        ConfigError: an unknown method or option, or a granularity without support for the method.

    Example:
        >>> calibrator = Calibrator("percentile", percentile=50.0)
        >>> calibrator.collect(torch.arange(1025.0))
        >>> calibrator.range().high
        tensor(512.5000)
        >>> calibrator.range("max").high
        tensor(1024.)
    """

    def __init__(
        self,
        method: str = "max",
        *,
        format: Format = INT8,
        granularity: Granularity | None = None,
        symmetric: bool = True,
        **options: Any,
    ) -> None:
        if method not in methods():
            raise ConfigError(
                f"unknown calibration method {method!r}; expected one of: {', '.join(methods())}"
            )
        self.format = format
        self.symmetric = symmetric
        self.granularity = granularity or PerTensor()
        self.scale_format: Format | None = None
        observe = OBSERVERS.get(method) or HistogramObserver
        self.method = method
        self.options = {}
        settings = options
        if observe is HistogramObserver:
            self.method = "entropy" if method == "histogram" else method
            settings = {
                name: value for name, value in options.items() if name == "num_bins"
            }
            self.options = {
                name: value for name, value in options.items() if name != "num_bins"
            }
            check_options(self.method, self.options, format)
        # Each side of zero is the positive side of one observer.
        signs = (format.signed,) if symmetric else (False, False)
        try:
            observers = [
                observe(self.granularity, signed=signed, **settings) for signed in signs
            ]
        except TypeError as error:
            raise ConfigError(
                f"calibration method {method!r}: got options {sorted(options)}; {error}"
            ) from None
        self.observers: tuple[Any, ...] = tuple(observers)

    @property
    def batches(self) -> int:
        """The number of non-empty tensors collected, known on the host."""
        result: int = self.observers[0].batches
        return result

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
            raise CalibrationError(
                f"{type(self).__name__}.collect: got a tensor of {x.dtype}; "
                "expected floating point. Convert it with x.float()"
            )
        if x.numel():
            x = gather_full_tensor(x.detach())
            self.observers[0].observe(x)
            for observer in self.observers[1:]:
                observer.observe(x.neg())

    def reset(self) -> None:
        """Forget everything collected."""
        for observer in self.observers:
            observer.reset()

    def range(self, method: str | None = None, **options: object) -> Range:
        """Return the range for everything collected so far; waits for the device.

        Collecting may go on afterwards.

        Args:
            method: default its own; a calibrator with a histogram has all that read one.
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
            return self._compute(method or self.method, options)

    def histogram(self) -> Histogram:
        """Return the statistics so far, of the positive values for asymmetric ranges.

        Raises:
            CalibrationError: nothing was collected, or a batch held a NaN or an infinity.
        """
        self._check()
        histogram: Histogram = self.observers[0].histogram()
        return histogram

    def _check(self) -> None:
        """Raise an error unless there is finite data."""
        where = type(self).__name__
        observer = self.observers[0]
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

    def _compute(self, method: str, options: dict[str, object]) -> Range:
        """Return the range; the data was checked."""
        if not isinstance(self.observers[0], HistogramObserver):
            if method != self.method or options:
                raise ConfigError(
                    f"Calibrator.range: got method={method!r} with options {options}; expected "
                    f"method={self.method!r} without options. Collect with the method "
                    "'histogram' for others"
                )
            upper, *lower = (observer.result() for observer in self.observers)
            return Range(upper, -lower[0] if lower else None)
        check_options(method, options, self.format)
        if method == self.method:
            options = {**self.options, **options}
        # Estimating on the CPU in float64 gives every device and rank the same bits; some devices
        # have no float64.
        sides = [observer.histogram().to("cpu") for observer in self.observers]
        estimated = self._estimate(method, sides, options)
        device = self.observers[0].counts.device
        return estimated.map(lambda end: end.to(device))

    def _estimate(
        self, method: str, sides: list[Histogram], options: dict[str, object]
    ) -> Range:
        """Return the range of histograms: of the magnitudes, or of both sides of zero."""
        if not self.symmetric and method in _TOGETHER:
            return _TOGETHER[method](*sides, self.format, self.scale_format, **options)
        if self.symmetric and method == "mse" and self.scale_format is POWER_OF_TWO:
            return Range(estimators.least_error_power_of_two(sides[0], self.format))
        estimate = ESTIMATORS[method]
        if self.symmetric:
            return Range(estimate(sides[0], self.format, **options))
        # Each side by itself has all codes from 0 on.
        format = integer_format(self.format.bits, unsigned=True)
        upper, lower = (estimate(side, format, **options) for side in sides)
        return Range(upper, -lower)


def check_options(method: str, options: dict[str, object], format: Format) -> None:
    """Check the options of an estimator by running it on one number, before there are others."""
    defaults = ESTIMATORS[method].__kwdefaults__ or {}
    unknown = sorted(options.keys() - defaults.keys())
    if unknown:
        raise ConfigError(
            f"calibration method {method!r}: got options {unknown}; "
            f"expected {sorted(defaults) or 'none'}"
        )
    for name, value in options.items():
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if isinstance(defaults[name], float) and not is_number:
            raise ConfigError(
                f"calibration method {method!r}: got {name}={short_repr(value)}; expected a number"
            )
    if options:
        counts = torch.zeros(1, 16, dtype=torch.int64, device="cpu")
        counts[0, 1] = 1
        one = torch.ones(1, dtype=torch.float32, device="cpu")
        ESTIMATORS[method](Histogram(counts, one, one), format, **options)

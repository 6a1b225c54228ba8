"""Calibrators of pytorch-quantization: the maximum, and histograms with its bins and methods.

Equal bins reach up to the maximum of the first batch; a wider range adds bins of equal width. A
range is one of the edges or bin centers. As in the original, the candidates start at
``start_bin`` for every format, and ranges are not interpolated. Two errors of the original are
corrected: reading does not change the histogram, and a candidate without data below it is no
optimum. :mod:`torchq.calib.estimators` has torchq's own definitions.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from torchq.calib.estimators import divergences
from torchq.compat.errors import LegacyTypeError, UnsupportedError
from torchq.compat.pytorch_quantization.descriptor import NumBits, field
from torchq.compat.pytorch_quantization.tensor_quant import (
    TINY,
    fake_tensor_quant,
    scaled_e4m3,
)
from torchq.compat.pytorch_quantization.utils import reduce_amax
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import PerAxis, PerTensor
from torchq.functional import reduce_amax as reduce_groups

# histc counts in float32, which is exact up to this number.
_PIECE = 1 << 24
_NOT_FINITE = (
    "got NaN or infinite values; expected finite data. Check the layers before"
)
# A histogram of this number of bins takes 128 MiB, and twice that for its edges.
_MAX_BINS = 1 << 24
# Elements of one temporary of the search for the least squared error.
_ELEMENTS = 1 << 22


class _Calibrator:
    """Base that scripts derive their own calibrators from."""

    def __init__(
        self,
        num_bits: int | tuple[int, int],
        axis: int | tuple[int, ...] | None,
        unsigned: bool,
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
        settings = (
            f"num_bits={self._num_bits} axis={self._axis} unsigned={self._unsigned}"
        )
        return f"{type(self).__name__}({settings})"


class MaxCalibrator(_Calibrator):
    """The largest magnitude of each group, whatever the format; integers are collected too.

    With ``track_amax`` the range of every batch is kept in :attr:`amaxs`.
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
        self._amaxs: list[object] = []
        #: The range so far, which scripts read and assign.
        self._calib_amax: Tensor | None = None

    amaxs = field(
        "_amaxs", "A float32 ndarray for each tensor; empty without ``track_amax``."
    )

    def collect(self, x: Tensor) -> None:
        """Add one tensor to the statistics; waits for the device only with ``track_amax``."""
        if not x.numel():
            return
        axis = (self._axis,) if isinstance(self._axis, int) else self._axis
        granularity = PerTensor() if axis is None else PerAxis(tuple(axis))
        x = x.detach()
        amax = reduce_groups(
            x if x.is_floating_point() else x.float(), granularity
        ).float()
        amax_before = self._calib_amax
        if amax_before is not None and amax_before.shape != amax.shape:
            raise CalibrationError(
                f"MaxCalibrator: amax shape changed: got {tuple(amax.shape)}; "
                f"expected {tuple(amax_before.shape)} as before"
            )
        self._calib_amax = (
            amax
            if amax_before is None
            else torch.maximum(amax_before.to(amax.device), amax)
        )
        if self._track_amax:
            self._amaxs.append(amax.cpu().numpy().copy())

    def reset(self) -> None:
        """Forget everything collected."""
        self._calib_amax = None

    def compute_amax(self) -> Tensor | None:
        """Return the largest magnitude of each group, or None if nothing was collected."""
        if self._calib_amax is None:
            return None
        if not self._calib_amax.isfinite().all():
            raise CalibrationError(f"MaxCalibrator: {_NOT_FINITE}")
        return self._calib_amax.clone()


class HistogramCalibrator(_Calibrator):
    """One histogram of magnitudes, read by entropy, mse or percentile; per tensor.

    A range that grows beyond 8 times the first one doubles the width of the bins in place of
    adding ever more.

    Args:
        num_bits: the width of the format to calibrate for.
        axis: None.
        unsigned: calibrate for an unsigned format.
        num_bins: bins up to the largest magnitude of the first batch.
        grow_method: has no effect, as in the original.
        skip_zeros: leave exact zeros out.
        torch_hist: has no effect: torch counts on the tensor's device.

    Raises:
        ConfigError: ``num_bins`` is out of range.
        UnsupportedError: an axis. :class:`torchq.calib.Calibrator` has one.
    """

    # Defaults for objects that the original pickled.
    _zeros = 0
    _first_bins = 2048

    def __init__(
        self,
        num_bits: NumBits,
        axis: int | tuple[int, ...] | None,
        unsigned: bool,
        num_bins: int = 2048,
        grow_method: str | None = None,
        skip_zeros: bool = False,
        torch_hist: bool = True,
    ) -> None:
        super().__init__(num_bits, axis, unsigned)
        if axis is not None:
            raise UnsupportedError(
                f"HistogramCalibrator: got axis={axis}; expected None, per tensor. "
                "Use calib_method='max'"
            )
        if not 0 < num_bins <= _MAX_BINS:
            raise ConfigError(f"num_bins: got {num_bins}; expected 1 to {_MAX_BINS}")
        self._first_bins = num_bins
        self._skip_zeros = skip_zeros
        self._torch_hist = torch_hist
        self.reset()

    def reset(self) -> None:
        """Forget everything collected."""
        self._num_bins = self._first_bins
        self._calib_hist: Tensor | None = None
        self._calib_bin_edges: Tensor | None = None
        self._zeros = 0

    def collect(self, x: Tensor) -> None:
        """Count one tensor of any dtype by magnitude; waits for the device."""
        x = x.detach().abs().float().reshape(-1)
        if self._skip_zeros:
            x = x[x != 0]
        if not x.numel():
            return
        largest = x.max().item()
        if not math.isfinite(largest):
            raise CalibrationError(f"HistogramCalibrator: {_NOT_FINITE}")
        if self._calib_hist is None and largest <= TINY:
            # No bin width follows from zeros; they are added to the first bin later.
            self._zeros += x.numel()
            return
        self._widen(largest, x.device)
        assert self._calib_hist is not None and self._calib_bin_edges is not None
        end = self._calib_bin_edges[-1].item()
        for piece in x.split(_PIECE):
            counted = torch.histc(piece, bins=self._num_bins, min=0, max=end).long()
            self._calib_hist += counted.to(self._calib_hist.device)

    def _widen(self, largest: float, device: torch.device) -> None:
        """Create bins up to ``largest``, or add bins of the same width."""
        if self._calib_hist is None or self._calib_bin_edges is None:
            self._calib_hist = torch.zeros(
                self._num_bins, dtype=torch.int64, device=device
            )
            self._calib_hist[0] = self._zeros
            kind: Any = {"dtype": torch.float32, "device": device}
            self._calib_bin_edges = torch.linspace(
                0, largest, self._num_bins + 1, **kind
            )
            return
        if largest <= self._calib_bin_edges[-1].item():
            return
        width = self._calib_bin_edges[1].item()
        counts = self._calib_hist
        while math.ceil(largest / width) > 8 * max(self._first_bins, 2048):
            counts = (
                torch.nn.functional.pad(counts, (0, counts.numel() % 2))
                .view(-1, 2)
                .sum(1)
            )
            width *= 2
        self._num_bins = max(math.ceil(largest / width), counts.numel())
        self._calib_hist = torch.nn.functional.pad(
            counts, (0, self._num_bins - counts.numel())
        )
        self._calib_bin_edges = (
            torch.arange(self._num_bins + 1, device=counts.device) * width
        )

    def compute_amax(
        self,
        method: str = "entropy",
        *,
        stride: int = 1,
        start_bin: int = 128,
        percentile: float = 99.99,
    ) -> Tensor | None:
        """Return the range for everything collected, 0-d float32, or None if nothing was.

        Args:
            method: "entropy", "mse" or "percentile".
            stride: the distance of the candidates of entropy and mse, in bins.
            start_bin: the first candidate of entropy and mse.
            percentile: 0 to 100.

        Raises:
            LegacyTypeError: another method.
            ConfigError: a percentile out of range, or a histogram too small for ``start_bin``.
        """
        if method not in ("entropy", "mse", "percentile"):
            raise LegacyTypeError(
                f"Unknown calibration method {method!r}; expected 'entropy', 'mse' or 'percentile'"
            )
        if self._calib_hist is None or self._calib_bin_edges is None:
            return torch.zeros(()) if self._zeros else None
        counts, edges = self._calib_hist, self._calib_bin_edges
        if method == "percentile":
            return _compute_amax_percentile(counts, edges, percentile).float()
        find = _compute_amax_entropy if method == "entropy" else _compute_amax_mse
        return find(
            counts, edges, self._num_bits, self._unsigned, stride, start_bin
        ).float()

    def __setstate__(self, state: dict[str, object]) -> None:
        self.__dict__.update(state)
        # The original kept arrays, or counts in floating point.
        if self._calib_hist is not None:
            self._calib_hist = torch.as_tensor(self._calib_hist).long()
            self._calib_bin_edges = torch.as_tensor(self._calib_bin_edges).float()

    def __repr__(self) -> str:
        edges = self._calib_bin_edges
        range_text = "nothing"
        if edges is not None:
            range_text = f"[0, {float(edges[-1]):.4g}] in {len(edges) - 1} bins"
        return f"{super().__repr__()[:-1]} collected {range_text})"


def _compute_amax_entropy(
    calib_hist: object,
    calib_bin_edges: object,
    num_bits: NumBits,
    unsigned: bool,
    stride: int = 1,
    start_bin: int = 128,
) -> Tensor:
    """Return the last edge with the least Kullback-Leibler divergence of the histogram."""
    if not isinstance(num_bits, int) or num_bits == 0:
        raise ConfigError(
            f"entropy: got num_bits={num_bits}; expected an integer format. Use mse or percentile"
        )
    counts, edges = map(torch.as_tensor, (calib_hist, calib_bin_edges))
    candidates = _candidates(counts.numel() + 1, start_bin, stride)
    groups = counts.to("cpu", torch.float64).unsqueeze(0)
    starts = torch.arange((1 << (num_bits - 1 + unsigned)) + 1, dtype=torch.float64)
    parts = [divergences(groups, part, starts) for part in candidates.split(1024)]
    found = torch.cat(parts, 1)[0].nan_to_num(nan=torch.inf, posinf=torch.inf)
    # Scores of float64 that differ by less than their rounding are equal.
    best = torch.nonzero(found <= found.min() + 1e-12)[-1]
    return edges[int(candidates[best])]


def _compute_amax_mse(
    calib_hist: object,
    calib_bin_edges: object,
    num_bits: NumBits,
    unsigned: bool,
    stride: int = 1,
    start_bin: int = 128,
) -> Tensor:
    """Return the first bin center that is the range with the least squared error of all centers."""
    counts, edges = map(torch.as_tensor, (calib_hist, calib_bin_edges))
    centers = ((edges[1:] + edges[:-1]) / 2).float()
    candidates = _candidates(counts.numel(), start_bin, stride).to(centers.device)
    occupied = counts > 0
    weights = counts[occupied].double()
    values = centers[occupied].unsqueeze(0)
    errors = []
    for part in candidates.split(max(1, _ELEMENTS // weights.numel())):
        amax = centers[part].unsqueeze(1)
        if isinstance(num_bits, tuple):
            rounded = scaled_e4m3(values, amax, *num_bits)
        else:
            rounded = fake_tensor_quant(values, amax, num_bits, unsigned)
        errors.append((rounded - values).double().square() @ weights)
    return centers[candidates[torch.cat(errors).argmin()]]


def _compute_amax_percentile(
    calib_hist: object, calib_bin_edges: object, percentile: float
) -> Tensor:
    """Return the lower edge of the bin where the share of the data reaches ``percentile`` %."""
    if not 0 <= percentile <= 100:
        raise ConfigError(
            f"percentile: got {percentile}; expected a number in the range 0 to 100, such as 99.99"
        )
    counts, edges = map(torch.as_tensor, (calib_hist, calib_bin_edges))
    share = (counts.to("cpu", torch.float64) / counts.sum().item()).cumsum(0)
    return edges[int(torch.searchsorted(share, percentile / 100))]


def _candidates(stop: int, start_bin: int, stride: int) -> Tensor:
    """Return the indices of the candidates."""
    if stop <= start_bin:
        raise ConfigError(
            f"start_bin: got {start_bin} for a histogram of {stop} candidates; expected fewer. "
            "Collect with more bins"
        )
    return torch.arange(start_bin, stop, stride)


def calibrate_weights(
    model: nn.Module,
    method: str = "percentile",
    perchannel: bool = True,
    percentile: float = 99.99,
    num_bins: int = 2048,
) -> None:
    """Set the range of every ``weight_quantizer`` of ``model`` from the ``weight`` beside it.

    Args:
        model: a model.
        method: "max", "mse" or "percentile".
        perchannel: True for one range for each output channel (axis 1 of transposed
            convolutions), False for one range per tensor.
        percentile: the percentile, for ``method="percentile"``.
        num_bins: bins of the histograms.

    Raises:
        LegacyTypeError: another method.
    """
    if method not in ("max", "mse", "percentile"):
        raise LegacyTypeError(
            f"Unsupported calibration method {method!r}; expected 'max', 'mse' or 'percentile'"
        )
    for module in model.modules():
        weight = getattr(module, "weight", None)
        quantizer = getattr(module, "weight_quantizer", None)
        if not isinstance(weight, Tensor) or quantizer is None:
            continue
        axis = (
            (1 if getattr(module, "transposed", False) else 0) if perchannel else None
        )
        ranges: list[Tensor | None] = []
        for part in [weight] if axis is None else weight.unbind(axis):
            if method == "max":
                ranges.append(reduce_amax(part))
                continue
            options = (quantizer.num_bits, None, quantizer.unsigned, num_bins)
            calibrator = HistogramCalibrator(*options)
            calibrator.collect(part)
            ranges.append(calibrator.compute_amax(method, percentile=percentile))
        shape = (
            []
            if axis is None
            else [-1 if d == axis else 1 for d in range(weight.dim())]
        )
        quantizer.amax = torch.stack([r for r in ranges if r is not None]).reshape(
            shape
        )

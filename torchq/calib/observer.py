"""Observers: statistics of a stream of tensors, without any knowledge of calibration methods.

An :class:`Observer` keeps its state on the device of the data and never waits for that device. A
batch with a NaN or an infinity is left out by arithmetic and counted in
:attr:`Observer.nonfinite`; it is reported when the statistics are read.

A subclass defines how one tensor enters (:meth:`Observer._observe`) and how the ranks of a process
group are combined (:meth:`Observer.exchange`).
"""

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from torchq.errors import CalibrationError, ConfigError
from torchq.formats import Granularity
from torchq.functional.kernels.tiled import largest_magnitude
from torchq.functional.kernels.views import group_view


def gather_full_tensor(x: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, on every rank of its mesh; any other tensor as it is."""
    # The method is looked up because importing torch.distributed.tensor takes longer than
    # importing torchq.
    gather = getattr(x, "full_tensor", None)
    return x if gather is None else gather()


def is_on_host(x: Tensor) -> bool:
    """Return True if reading a value of ``x`` does not wait for a device."""
    return x.device.type == "cpu"


def magnitude(
    parts: Tensor, *, signed: bool, find_negative: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return the largest magnitude of every group, and what a format would lose.

    Only positive values count for an unsigned format. ``parts`` is a group view with an element.
    Returned on its device are the largest magnitudes, (groups,) float32, all 0 if any value is NaN
    or infinite; whether none is; and whether any is negative, None if nobody looked.
    """
    negative = None
    find_negative = find_negative or not signed
    if is_on_host(parts) and not find_negative:  # one pass, without the signs
        largest = largest_magnitude(parts, (0, 2)).view(-1).float()
        finite = torch.isfinite(largest).all()
    else:
        smallest, largest = _extremes(parts)
        finite = torch.isfinite(smallest).all() & torch.isfinite(largest).all()
        if find_negative:
            negative = (smallest < 0).any()
        largest = torch.maximum(largest, -smallest) if signed else largest.clamp(min=0)
    return torch.where(finite, largest, 0.0), finite, negative


def _extremes(parts: Tensor) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest value of each group, (groups,) float32 each."""
    if parts.shape[1] == 1:
        smallest, largest = torch.aminmax(parts)
        return smallest.view(1).float(), largest.view(1).float()
    return _reduce(parts, torch.amin), _reduce(parts, torch.amax)


def _reduce(parts: Tensor, reduction: Callable[..., Tensor]) -> Tensor:
    """Reduce all dimensions but the groups; return (groups,) float32."""
    # Reducing one dimension at a time is several times faster on the CPU than both at once.
    for dim in (2, 0):
        if parts.shape[dim] > 1:
            parts = reduction(parts, dim, keepdim=True)
    return parts.reshape(-1).float()


#: ``(operation, contribution of this rank)`` to the elementwise result over all ranks.
Reduce = Callable[[Literal["max", "sum"], Tensor], Tensor]


class Observer(ABC):
    """Statistics of a stream of tensors whose granularity gives one fixed amax shape.

    With ``signed`` negative values count by magnitude; else as zeros.

    Attributes:
        batches: the number of non-empty tensors observed, known on the host.
        nonfinite: 0-d int64 on the data's device, how many held a NaN or an infinity, or None.
        tracks_negative: True counts the tensors with negative values; set it first.
        negative: their number, 0-d int64 on the data's device, or None.
        shape: the shape of the amax; None before the first tensor.
    """

    def __init__(self, granularity: Granularity, *, signed: bool = True) -> None:
        self.granularity = granularity
        self.signed = signed
        self.tracks_negative = not signed
        self.reset()

    def reset(self) -> None:
        """Forget everything observed."""
        self.batches = 0
        self.nonfinite: Tensor | None = None
        self.negative: Tensor | None = None
        self.shape: tuple[int, ...] | None = None

    def observe(self, x: Tensor) -> None:
        """Add one non-empty floating-point tensor to the statistics."""
        # State created in the caller's inference mode could not be updated or used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.prepare(self.granularity.amax_shape(x.shape), x.device)
            parts = group_view(x.detach(), self.granularity)
            amax, finite, negative = magnitude(
                parts, signed=self.signed, find_negative=self.tracks_negative
            )
            assert self.nonfinite is not None
            self.nonfinite = self.nonfinite + ~finite
            if negative is not None:
                before = (
                    0 if self.negative is None else self.negative.to(negative.device)
                )
                self.negative = before + negative.long()
            self._observe(parts, amax, finite)
        self.batches += 1

    def prepare(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Allocate empty state for ``shape`` if there is none, and move the state to ``device``."""
        if self.shape is None:
            self.shape = tuple(shape)
            self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)
            self._allocate(self.shape, device)
        elif tuple(shape) != self.shape:
            raise CalibrationError(
                f"{type(self).__name__}: got a tensor whose amax has shape {tuple(shape)}; "
                f"expected {self.shape} as before. Give the axis of the channels, not of the "
                "batch, or use one calibrator per shape"
            )
        elif self.nonfinite is not None and self.nonfinite.device != device:
            self.nonfinite = self.nonfinite.to(device)
            self._move(device)

    def settings(self) -> tuple[object, ...]:
        """Return what must be equal on every rank."""
        return (
            type(self).__name__,
            self.granularity,
            self.signed,
            self.tracks_negative,
        )

    @abstractmethod
    def _allocate(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Create the empty state."""

    @abstractmethod
    def _move(self, device: torch.device) -> None:
        """Move the state to ``device``."""

    @abstractmethod
    def _observe(self, parts: Tensor, amax: Tensor, finite: Tensor) -> None:
        """Add one group view; ``amax`` (groups,) float32 is 0 where not all of it is ``finite``."""

    @abstractmethod
    def exchange(self, batches: list[int], rank: int, reduce: Reduce) -> None:
        """Combine the state of all ranks, which observed so many ``batches``, on every rank."""


class MaxObserver(Observer):
    """The largest magnitude of each group; the state is one float32 per group."""

    amax: Tensor

    def result(self) -> Tensor:
        """Return the largest magnitudes, float32 of :attr:`shape`."""
        return self.amax.clone()

    def _allocate(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.amax = torch.zeros(shape, dtype=torch.float32, device=device)

    def _move(self, device: torch.device) -> None:
        self.amax = self.amax.to(device)

    def _observe(self, parts: Tensor, amax: Tensor, finite: Tensor) -> None:
        self.amax = torch.maximum(self.amax, amax.view(self.amax.shape))

    def exchange(self, batches: list[int], rank: int, reduce: Reduce) -> None:
        """Take the maximum over all ranks."""
        self.amax = reduce("max", self.amax)


class MovingAverageObserver(Observer):
    """The largest magnitudes of the latest batches, of which :meth:`result` is computed.

    ``average = momentum * average + (1 - momentum) * batch``, started by the first batch. Older
    batches than :attr:`window` weigh below half a unit in the last place of float32. The batches
    of the next rank follow those of this one where maxima are combined.
    """

    recent: deque[Tensor]

    def __init__(
        self, granularity: Granularity, *, signed: bool = True, momentum: float = 0.9
    ) -> None:
        if not 0.0 <= momentum < 1.0:
            raise ConfigError(
                f"momentum: got {momentum}; expected 0 <= momentum < 1, the weight of the past"
            )
        self.momentum = momentum
        self.window = (
            1 if momentum == 0 else max(1, math.ceil(-25 / math.log2(momentum)))
        )
        super().__init__(granularity, signed=signed)

    def settings(self) -> tuple[object, ...]:
        """Return what must be equal on every rank."""
        return (*super().settings(), self.momentum)

    def result(self) -> Tensor:
        """Return the moving average of the kept maxima, float32 of :attr:`shape`."""
        # Computing on the CPU in float64 gives every device and rank the same bits; some devices
        # have no float64.
        values = torch.stack(tuple(self.recent)).cpu().double()
        age = torch.arange(len(values) - 1, -1, -1, dtype=torch.float64, device="cpu")
        weights = self.momentum**age * (1 - self.momentum)
        weights[0] = self.momentum ** (len(self.recent) - 1)
        result: Tensor = (
            torch.tensordot(weights, values, dims=1).float().to(self.recent[0].device)
        )
        return result

    def _allocate(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.recent = deque(maxlen=self.window)

    def _move(self, device: torch.device) -> None:
        self.recent = deque(
            (amax.to(device) for amax in self.recent), maxlen=self.window
        )

    def _observe(self, parts: Tensor, amax: Tensor, finite: Tensor) -> None:
        assert self.shape is not None
        self.recent.append(amax.view(self.shape))

    def exchange(self, batches: list[int], rank: int, reduce: Reduce) -> None:
        """Concatenate the maxima of all ranks in rank order."""
        assert self.shape is not None and self.nonfinite is not None
        rows_by_rank = [min(count, self.window) for count in batches]
        # Each rank fills its own rows and leaves the others zero. Adding zeros is exact, so this
        # sum is a gather that every backend supports.
        device = self.nonfinite.device
        rows = torch.zeros(
            sum(rows_by_rank), *self.shape, dtype=torch.float32, device=device
        )
        first = sum(rows_by_rank[:rank])
        for offset, amax in enumerate(self.recent):
            rows[first + offset] = amax
        self.recent = deque(reduce("sum", rows).unbind(0), maxlen=self.window)

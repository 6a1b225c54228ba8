"""Observers gather statistics of the tensors they are shown; they know nothing of methods or formats' grids.

An :class:`Observer` keeps tensors on the data's device and never waits for that device: a batch with a NaN or an infinity
is left out by arithmetic, counted in :attr:`Observer.nonfinite`, and reported when the statistics are read. Subclasses
declare how a batch enters (:meth:`Observer._observe`), how two observers join (:meth:`Observer._merge`) and how the ranks of
a process group do (:meth:`Observer.exchange`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Generator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchq.calib.statistics import magnitude
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import Granularity
from torchq.functional.kernels import group_view

__all__ = ["Exchange", "MaxObserver", "MovingAverageObserver", "Observer", "Reduce"]


@dataclass(frozen=True)
class Reduce:
    """A request of :meth:`Observer.exchange`: reduce ``tensor`` elementwise over all ranks and send the result back."""

    op: Literal["max", "sum"]
    tensor: Tensor


Exchange = Generator[Reduce, Tensor, None]


class Observer(ABC):
    """Statistics of a stream of tensors whose granularity gives one fixed amax shape.

    Args:
        granularity: which elements share one amax.
        signed: whether negative values count by magnitude; otherwise they count as zeros, which an unsigned format makes of them.

    Attributes:
        batches: tensors observed, empty ones apart. A host number.
        nonfinite: 0-d int64 on the data's device, how many of them held a NaN or an infinity; None before the first.
        negative: of an unsigned format likewise, how many held negative values. Of this process alone: it serves a warning.
        shape: the amax shape; None before the first batch.
    """

    def __init__(self, granularity: Granularity, *, signed: bool = True) -> None:
        self.granularity = granularity
        self.signed = signed
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self.batches = 0
        self.nonfinite: Tensor | None = None
        self.negative: Tensor | None = None
        self.shape: tuple[int, ...] | None = None

    def observe(self, x: Tensor) -> None:
        """Take in one non-empty floating-point tensor.

        Raises:
            CalibrationError: the amax shape is not that of the tensors before.
        """
        # State made inside the caller's inference mode could never be updated or used outside of it.
        with torch.inference_mode(False), torch.no_grad():
            self.prepare(self.granularity.amax_shape(x.shape), x.device)
            parts = group_view(x.detach(), self.granularity)
            amax, finite, negative = magnitude(parts, signed=self.signed)
            assert self.nonfinite is not None
            self.nonfinite = self.nonfinite + ~finite
            if negative is not None:
                self._count_negative(negative.long())
            self._observe(parts, amax, finite)
        self.batches += 1

    def merge(self, other: Observer) -> None:
        """Add what ``other`` saw, as if it had come after what this one saw. ``other`` is left as it is.

        Raises:
            CalibrationError: the other gathers different statistics or amax shapes.
        """
        if self.settings() != other.settings():
            raise CalibrationError(
                f"merge: got {other.settings()}; expected {self.settings()}. Make both with the same arguments"
            )
        if other.shape is None or other.nonfinite is None:
            return
        device = other.nonfinite.device if self.nonfinite is None else self.nonfinite.device
        self.prepare(other.shape, device)
        assert self.nonfinite is not None
        self.nonfinite = self.nonfinite + other.nonfinite.to(device)
        if other.negative is not None:
            self._count_negative(other.negative)
        self._merge(other, device)
        self.batches += other.batches

    def prepare(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Allocate the empty state for ``shape`` where there is none, and bring the state to ``device``."""
        if self.shape is None:
            self.shape = tuple(shape)
            self.nonfinite = torch.zeros((), dtype=torch.int64, device=device)
            self._allocate(self.shape, device)
        elif tuple(shape) != self.shape:
            raise CalibrationError(
                f"{type(self).__name__}: got a tensor whose amax has shape {tuple(shape)}; expected {self.shape} as before. "
                "Give the axis of the channels, not of the batch, or use one calibrator per shape"
            )
        elif self.nonfinite is not None and self.nonfinite.device != device:
            self.nonfinite = self.nonfinite.to(device)
            self._move(device)

    def _count_negative(self, more: Tensor) -> None:
        self.negative = more if self.negative is None else self.negative.to(more.device) + more

    def settings(self) -> tuple[object, ...]:
        """What must agree between observers that are merged; equal on every rank."""
        return (type(self).__name__, self.granularity, self.signed)

    @abstractmethod
    def _allocate(self, shape: tuple[int, ...], device: torch.device) -> None:
        """Make the empty state."""

    @abstractmethod
    def _move(self, device: torch.device) -> None:
        """Bring the state to ``device``."""

    @abstractmethod
    def _observe(self, parts: Tensor, amax: Tensor, finite: Tensor) -> None:
        """Take in a :func:`~torchq.functional.kernels.group_view` and its magnitude; ``amax`` is 0 where ``finite`` is False."""

    @abstractmethod
    def _merge(self, other: Observer, device: torch.device) -> None:
        """Take in the state of an observer of the same settings and shape."""

    @abstractmethod
    def exchange(self, batches: list[int], rank: int) -> Exchange:
        """Join the state over all ranks: yield requests, receive results, and end with the same state on every rank.

        Args:
            batches: number of batches that each rank observed.
            rank: this rank.
        """


class MaxObserver(Observer):
    """Largest magnitude of each group. State: one float32 per group."""

    amax: Tensor

    def _allocate(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.amax = torch.zeros(shape, dtype=torch.float32, device=device)

    def _move(self, device: torch.device) -> None:
        self.amax = self.amax.to(device)

    def _observe(self, parts: Tensor, amax: Tensor, finite: Tensor) -> None:
        self.amax = torch.maximum(self.amax, amax.view(self.amax.shape))

    def _merge(self, other: Observer, device: torch.device) -> None:
        assert isinstance(other, MaxObserver)
        self.amax = torch.maximum(self.amax, other.amax.to(device))

    def exchange(self, batches: list[int], rank: int) -> Exchange:
        self.amax = yield Reduce("max", self.amax)


class MovingAverageObserver(Observer):
    """The largest magnitudes of the latest batches, for ``average = momentum * average + (1 - momentum) * batch``.

    The first batch starts the average. Only the last :attr:`window` batches are kept: the weight of an older one is below
    half a unit in the last place of float32. State: ``window`` float32 per group at most (165 for momentum 0.9). Keeping
    the maxima, not their average, makes merging exact: batches of the merged observer, or of the next rank, come after.

    Args:
        momentum: weight of the past, 0 <= momentum < 1.
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
        self.window = 1 if momentum == 0 else max(1, math.ceil(-25 / math.log2(momentum)))
        super().__init__(granularity, signed=signed)

    def settings(self) -> tuple[object, ...]:
        return (*super().settings(), self.momentum)

    def average(self) -> Tensor:
        """The moving average, float32 of :attr:`shape`; computed in float64 from the kept maxima."""
        # On the CPU whatever the device: float64 is not everywhere, and every device and rank gets the same bits.
        values = torch.stack(tuple(self.recent)).cpu().double()
        age = torch.arange(len(self.recent) - 1, -1, -1, dtype=torch.float64)
        weights = self.momentum**age * (1 - self.momentum)
        weights[0] = self.momentum ** (len(self.recent) - 1)
        return torch.tensordot(weights, values, dims=1).float().to(self.recent[0].device)

    def _allocate(self, shape: tuple[int, ...], device: torch.device) -> None:
        self.recent = deque(maxlen=self.window)

    def _move(self, device: torch.device) -> None:
        self.recent = deque((amax.to(device) for amax in self.recent), maxlen=self.window)

    def _observe(self, parts: Tensor, amax: Tensor, finite: Tensor) -> None:
        assert self.shape is not None
        self.recent.append(amax.view(self.shape))

    def _merge(self, other: Observer, device: torch.device) -> None:
        assert isinstance(other, MovingAverageObserver)
        self.recent.extend([amax.to(device) for amax in other.recent])

    def exchange(self, batches: list[int], rank: int) -> Exchange:
        assert self.shape is not None and self.nonfinite is not None
        kept = [min(count, self.window) for count in batches]
        # Every rank fills its own rows and zero elsewhere; a sum with zeros is exact, so this is a gather that any backend has.
        rows = torch.zeros(
            sum(kept), *self.shape, dtype=torch.float32, device=self.nonfinite.device
        )
        first = sum(kept[:rank])
        for offset, amax in enumerate(self.recent):
            rows[first + offset] = amax
        rows = yield Reduce("sum", rows)
        self.recent = deque(rows.unbind(0), maxlen=self.window)

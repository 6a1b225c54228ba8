"""The one timer: calls against each other, in turns, after a warm-up.

Timings on a shared machine drift, so calls are never timed one after the other: each round times
all of them, in rotating order. A short call that follows another one with large weights finds its
own data out of the caches, so a sample of short calls begins with one that is not timed.
"""

import gc
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch

K = TypeVar("K")


@dataclass(frozen=True)
class Samples:
    """The seconds that one call took, one number for each round, each the mean of ``calls``."""

    seconds: tuple[float, ...]
    calls: int

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The lower quartile, the median and the upper quartile."""
        return quartiles(self.seconds)

    @property
    def median(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.seconds)

    @property
    def noise(self) -> float:
        """Half the distance of the quartiles, as a part of the median."""
        low, middle, high = self.quartiles
        return (high - low) / 2 / middle


def quartiles(values: tuple[float, ...]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile of at least one number."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def time_calls(
    calls: Mapping[K, Callable[[], object]],
    *,
    rounds: int = 15,
    warmup: int = 3,
    min_time: float = 0.02,
    budget: float = math.inf,
    least: int = 7,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[K, Samples]:
    """Time calls against each other; return the samples of each.

    A sample lasts ``min_time`` seconds; of the ``rounds`` those after ``least`` fit ``budget``.
    """
    names = list(calls)
    repeats = {}
    for name in names:
        for _ in range(warmup):
            calls[name]()
        repeats[name] = max(
            1, round(min_time / max(_sample(calls[name], 1, clock), 1e-9))
        )
    seconds: dict[K, list[float]] = {name: [] for name in names}
    started, collecting = clock(), gc.isenabled()
    for number in range(rounds):
        if number >= least and clock() - started > budget:
            break
        turn = number % max(len(names), 1)
        gc.disable()  # Python collects garbage between the rounds, not in the sample of one call.
        try:
            for name in names[turn:] + names[:turn]:
                seconds[name].append(_sample(calls[name], repeats[name], clock))
        finally:
            if collecting:
                gc.enable()
    return {name: Samples(tuple(seconds[name]), repeats[name]) for name in names}


def _sample(
    call: Callable[[], object], calls: int, clock: Callable[[], float]
) -> float:
    """Return the seconds that a call takes, the mean of several; work on a GPU is waited for."""
    wait = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    if calls > 1:
        call()
    wait()
    start = clock()
    for _ in range(calls):
        call()
    wait()
    return (clock() - start) / calls

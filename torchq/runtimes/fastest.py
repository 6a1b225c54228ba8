"""The engine "fastest": every engine that is there, measured on the example."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torchq.errors import ExportError, TorchqError
from torchq.graph import call_model, tensors_in
from torchq.runtime import RUNTIMES
from torchq.runtimes.engine import Engine, Task
from torchq.runtimes.export import with_rows
from torchq.utils import progress_bar, table

log = logging.getLogger(__name__)

#: The least seconds of a sample, and about the seconds of all samples of one batch size.
_SAMPLE, _BUDGET = 0.004, 3.0
#: Samples of each candidate, where the budget allows, and where it does not.
_MOST, _LEAST = 80, 7
#: Samples of a candidate once it is built. One that takes more than this many times as long as
#: another, at every batch size, is measured no further and gives its memory back.
_LOOKS, _HEAVY = 3, 4.0


@dataclass(frozen=True)
class Candidate:
    """An engine with its settings, and how it did.

    Attributes:
        engine: the engine and its settings.
        seconds: for one call, by batch size: the lower quartile of the samples. Interruptions add
            time to some of them, and the least one is a matter of luck. Empty where there is a
            problem.
        problem: why the model cannot run there, or what is wrong with the results; may be empty.
    """

    engine: Engine
    seconds: dict[int, float]
    problem: str = ""


@dataclass(frozen=True)
class FastestReport:
    """What ``torchq.deploy(target="fastest")`` measured; ``print`` it.

    Attributes:
        chosen: the label of the engine that runs the model.
        candidates: all that were considered, the best first, those with problems last.
        threads: the number of threads of torch during the measurement.
    """

    chosen: str
    candidates: tuple[Candidate, ...]
    threads: int

    def __str__(self) -> str:
        sizes = list(self.candidates[0].seconds)
        head = ("engine", *(f"ms, batch {size}" for size in sizes), "problem")
        rows = [
            (
                candidate.engine.label,
                *(_milliseconds(candidate.seconds.get(size)) for size in sizes),
                candidate.problem.partition("\n")[0],
            )
            for candidate in self.candidates
        ]
        return table([head, *rows], f"chosen: {self.chosen}, on {self.threads} threads")


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{1000 * seconds:.3g}"


@dataclass
class _Entry:
    """A candidate while it is built and measured.

    Attributes:
        engine: the engine and its settings.
        module: the model on that engine; None before it is built, and once it is far behind.
        notes: the warnings of building it.
        samples: seconds for one call, by batch size.
        problem: see :class:`Candidate`.
    """

    engine: Engine
    module: nn.Module | None = None
    notes: list[str] = field(default_factory=list)
    samples: dict[int, list[float]] = field(default_factory=dict)
    problem: str = ""

    def seconds(self) -> dict[int, float]:
        return {} if self.problem else {rows: _quartile(s) for rows, s in self.samples.items()}


def build_fastest(task: Task) -> tuple[nn.Module, FastestReport]:
    """Return the model on the engine that runs the example fastest, and what was measured.

    Every engine that is installed is a candidate, with the quantized model and with the float one.
    One that cannot run the model, or whose results differ from the simulation, is left out.
    """
    entries = list(_entries())
    batches = [_batch(task, rows) for rows in (None, *task.batch_sizes)]
    shown = progress_bar(entries, description="engines", unit="engine", enabled=task.progress)
    for entry in shown:
        if not entry.problem:
            _build(entry, task)
        if not entry.problem:
            _look(entry, batches)
        if entry.problem:
            log.debug("%s is no candidate: %s", entry.engine.label, entry.problem)
        _release(entries)
    for rows, batch in batches:
        _measure([e for e in entries if e.module is not None], batch, rows)
    running = [entry for entry in entries if not entry.problem]
    if not running:
        text = "; ".join(f"{entry.engine.label}: {entry.problem}" for entry in entries)
        raise ExportError(f"deploy: no engine runs the model ({text}); expected one at least")
    running = sorted(running, key=lambda entry: _cost(entry, running))
    for text in running[0].notes:
        warnings.warn(text, stacklevel=3)
    rest = [entry for entry in entries if entry.problem]
    candidates = tuple(Candidate(e.engine, e.seconds(), e.problem) for e in (*running, *rest))
    chosen = running[0].module
    assert chosen is not None
    return chosen, FastestReport(candidates[0].engine.label, candidates, torch.get_num_threads())


def _entries() -> Iterator[_Entry]:
    """Yield every engine with the settings to measure, or the reason why it is not there."""
    for engine in RUNTIMES.values():
        if not isinstance(engine, Engine) or not engine.measured:
            continue
        try:
            engine.check()
        except TorchqError as error:
            yield _Entry(engine, problem=str(error))
            continue
        for candidate in engine.candidates():
            yield _Entry(candidate)


def _build(entry: _Entry, task: Task) -> None:
    """Build the module of a candidate, or note the problem."""
    try:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            entry.module = entry.engine.build(task)
        # An engine compares quantized results itself, and knows when ties explain a difference.
        if not entry.engine.quantized:
            entry.problem = task.check.difference(entry.module)
    except Exception as error:  # an engine may fail in any way it likes; another one is taken
        entry.problem = str(error) or type(error).__name__
        return
    entry.notes = [str(w.message) for w in seen if w.category is UserWarning]


def _batch(task: Task, rows: int | None) -> tuple[int, Any]:
    """Return the batch size, and the example with that many rows; None is its own number."""
    batch = with_rows(task.model, task.example, rows)
    return next((t.shape[0] for t in tensors_in(batch) if t.dim()), 1), batch


def _look(entry: _Entry, batches: Sequence[tuple[int, Any]]) -> None:
    """Time a new candidate a few times, or note the problem that it has with a batch."""
    for rows, batch in batches:
        try:
            for _ in range(2):  # opening, packing, first pages
                _seconds(entry, batch, 1)
            entry.samples[rows] = [_seconds(entry, batch, 1) for _ in range(_LOOKS)]
        except Exception as error:  # see _build
            entry.problem = f"with {rows} rows: {error}"
            return


def _release(entries: Sequence[_Entry]) -> None:
    """Drop the modules that have a problem, or are far behind another one with every batch."""
    timed = [entry.seconds() for entry in entries if entry.seconds()]
    for entry in entries:
        own = entry.seconds()
        if entry.problem or any(
            all(own[rows] > _HEAVY * other[rows] for rows in own) for other in timed if own
        ):
            entry.module = None


def _measure(entries: list[_Entry], batch: Any, rows: int) -> None:
    """Time the candidates on one batch, all of them in each round, in rotating order."""
    repeats = {id(e): max(1, round(_SAMPLE / max(min(e.samples[rows]), 1e-7))) for e in entries}
    started = time.perf_counter()
    for number in range(_MOST if entries else 0):
        if number >= _LEAST and time.perf_counter() - started > _BUDGET:
            return
        turn = number % len(entries)
        for entry in entries[turn:] + entries[:turn]:
            calls = repeats[id(entry)]
            if calls > 1:
                _seconds(entry, batch, 1)  # behind another candidate, caches are cold
            entry.samples[rows].append(_seconds(entry, batch, calls))


def _quartile(samples: Sequence[float]) -> float:
    """Return the lower quartile."""
    return sorted(samples)[len(samples) // 4]


def _seconds(entry: _Entry, batch: Any, calls: int) -> float:
    """Return the seconds that one call takes, on average over a few.

    Of one thread on the CPU they are the processor's, of which other programs take none.
    """
    assert entry.module is not None
    alone = torch.get_num_threads() == 1 and all(t.is_cpu for t in tensors_in(batch))
    clock = time.process_time if alone else time.perf_counter
    with torch.no_grad():
        started = clock()
        for _ in range(calls):
            call_model(entry.module, batch)
        return (clock() - started) / calls


def _cost(entry: _Entry, entries: Sequence[_Entry]) -> float:
    """Return the geometric mean over batch sizes of how far a candidate is behind the best."""
    own = entry.seconds()
    best = {rows: min(other.seconds()[rows] for other in entries) for rows in own}
    return sum(math.log(own[rows] / best[rows]) for rows in own) / len(own)

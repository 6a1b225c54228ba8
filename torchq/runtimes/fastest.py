"""The target "fastest": every runtime that is there, measured on the example."""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from torchq.errors import ExportError, TorchqError
from torchq.graph import call_model, tensors_in
from torchq.runtime import RUNTIMES
from torchq.runtimes.engine import Engine, Task
from torchq.utils import progress_bar, table
from torchq.utils.timing import time_calls

log = logging.getLogger(__name__)

#: How candidates are timed against each other, after a warm-up.
_MEASUREMENT: Any = {"rounds": 80, "warmup": 2, "min_time": 0.004, "budget": 3.0}


@dataclass(frozen=True)
class Candidate:
    """An engine with its settings, and how it did.

    Attributes:
        engine: the engine and its settings.
        seconds: for one call: the median of the samples; infinite where there is a problem.
        problem: why the model cannot run there, or what is wrong with the results; may be empty.
    """

    engine: Engine
    seconds: float
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
        rows = [("engine", "ms", "problem")]
        for c in self.candidates:
            time = "" if c.problem else f"{1000 * c.seconds:.3g}"
            rows.append((c.engine.label, time, c.problem.partition("\n")[0]))
        return table(rows, f"chosen: {self.chosen}, on {self.threads} threads")


def build_fastest(task: Task) -> tuple[nn.Module, FastestReport]:
    """Return the model on the runtime that runs the example fastest, and what was measured.

    Every runtime that is installed is a candidate, with the quantized model and with the float one.
    One that cannot run the model, or whose results differ from the simulation, is left out. The
    rule is the median of the seconds of interleaved calls.
    """
    problems: dict[Engine, str] = {}
    modules: dict[Engine, nn.Module] = {}
    notes: dict[Engine, list[str]] = {}
    engines = list(_candidates(problems))
    shown = progress_bar(
        engines, description="engines", unit="engine", enabled=task.progress
    )
    for engine in shown:
        try:
            module, notes[engine] = _built(engine, task)
            with torch.no_grad():
                call_model(module, task.example)
            modules[engine] = module
        # A runtime may fail in any way it likes; another one is taken.
        except Exception as error:
            problems[engine] = str(error) or type(error).__name__
            log.debug("%s is no candidate: %s", engine.label, problems[engine])
    if not modules:
        failures = "; ".join(
            f"{engine.label}: {problem}" for engine, problem in problems.items()
        )
        raise ExportError(
            f"deploy: no runtime runs the model ({failures}); expected one at least"
        )
    seconds = _medians(modules, task.example)
    order = sorted(modules, key=seconds.__getitem__)
    for note in notes[order[0]]:
        warnings.warn(note, stacklevel=3)
    candidates = [Candidate(engine, seconds[engine]) for engine in order]
    candidates += [
        Candidate(engine, math.inf, problem) for engine, problem in problems.items()
    ]
    report = FastestReport(order[0].label, tuple(candidates), torch.get_num_threads())
    return modules[order[0]], report


def _candidates(problems: dict[Engine, str]) -> Iterator[Engine]:
    """Yield every runtime with the settings to measure; note why one is not there."""
    for runtime in RUNTIMES.values():
        if not isinstance(runtime, Engine) or not runtime.measured:
            continue
        try:
            if settings := runtime.candidates():
                runtime.check()
            yield from settings
        except TorchqError as error:
            problems[runtime] = str(error)


def _built(engine: Engine, task: Task) -> tuple[nn.Module, list[str]]:
    """Return the module of a candidate, and the warnings of building it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = engine.build(task)
    return module, [str(w.message) for w in caught if w.category is UserWarning]


def _medians(
    modules: Mapping[Engine, nn.Module], example: object
) -> dict[Engine, float]:
    """Return the median of the seconds that each candidate takes for an example.

    Of one thread on the CPU they are the processor's, of which other programs take none.
    """
    alone = torch.get_num_threads() == 1 and all(t.is_cpu for t in tensors_in(example))
    clock = time.process_time if alone else time.perf_counter
    calls = {
        engine: partial(call_model, module, example)
        for engine, module in modules.items()
    }
    with torch.no_grad():
        samples_by_engine = time_calls(calls, clock=clock, **_MEASUREMENT)
    return {engine: samples.median for engine, samples in samples_by_engine.items()}

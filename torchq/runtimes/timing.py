"""What a runtime makes of a model, timed: files of one size, against each other."""

from __future__ import annotations

import io
import math
import tempfile
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError, ExportError
from torchq.graph import call_model, tensors_in
from torchq.lowering.api import simulated_copy
from torchq.runtime import Runtime
from torchq.runtimes.engine import Engine, Task
from torchq.runtimes.file_engine import EngineModule
from torchq.runtimes.interface import GraphInterface
from torchq.runtimes.onnx_engine import OnnxEngine
from torchq.utils.timing import Samples, time_calls

#: How often a file is timed by a function of the user.
_CALLS = 3


@dataclass(frozen=True)
class Measurement:
    """How modules are timed against each other, after a warm-up.

    Attributes:
        budget: seconds for all of them together.
        rounds: how often each is timed at most.
        min_time: seconds of one sample at least.
        warmup: calls of each before.
    """

    budget: float = 12.0
    rounds: int = 60
    min_time: float = 0.004
    warmup: int = 3


def module_to_time(engine: Engine, task: Task) -> nn.Module:
    """Return what an engine makes of a model: of one size alone, and compared with nothing.

    Raises:
        TorchqError: The engine cannot run the model.
    """
    if not isinstance(engine, OnnxEngine):
        return engine.build(task)
    engine.check()
    file_for = engine if engine.quantized else None
    return EngineModule(engine, *graph_to_time(file_for, task))


def graph_to_time(runtime: Runtime | None, task: Task) -> tuple[Tensor, GraphInterface]:
    """Return a model as an ONNX file of one size for a runtime, or the float one for None.

    Raises:
        ExportError: The model cannot be exported.
    """
    fixed = task.lengths[-1]
    graph = partial(task.graph, runtime, lengths=fixed, for_all_inputs=False)
    try:  # The older exporter takes a quarter of the time for the same operators.
        return graph(dynamo=False)
    except ExportError:
        return graph(dynamo=True)


def time_modules(
    modules: Iterable[nn.Module], example: object, measurement: Measurement
) -> dict[int, Samples]:
    """Time all modules against each other; return their samples by id.

    Of one thread on the CPU they are the processor's, of which other programs take none.
    """
    alone = torch.get_num_threads() == 1 and all(t.is_cpu for t in tensors_in(example))
    calls: dict[int, Callable[[], object]] = {
        id(module): partial(call_model, module, example) for module in modules
    }
    with torch.no_grad():
        return time_calls(
            calls,
            clock=time.process_time if alone else time.perf_counter,
            rounds=measurement.rounds,
            warmup=measurement.warmup,
            min_time=measurement.min_time,
            budget=measurement.budget,
        )


def stored_size(module: nn.Module) -> int:
    """Return the bytes of the file, or of the saved module without one."""
    if isinstance(module, EngineModule):
        return module.graph.numel()
    saved = io.BytesIO()
    torch.save(module, saved)
    return saved.getbuffer().nbytes


def shapes_in_words(example: object) -> str:
    """Return the shapes of the tensors of an example."""
    shapes = [str(tuple(tensor.shape)) for tensor in tensors_in(example)]
    return " and ".join(shapes) or "no tensors"


def call_in_words(example: object) -> str:
    """Return what one call computes, and on how many threads."""
    count = torch.get_num_threads()
    threads = "1 thread" if count == 1 else f"{count} threads"
    return f"one call of {shapes_in_words(example)} on {threads}"


def can_be_timed(runtime: Runtime | None) -> bool:
    """Return True if the kernels of a runtime are here, and take as long as on its machines."""
    return isinstance(runtime, Engine) and runtime.measured and runtime.here


class Timer(ABC):
    """Makes what is timed of a model, and times it."""

    def __init__(self, runtime: Runtime, example: Any) -> None:
        self.runtime, self.example = runtime, example

    @abstractmethod
    def file(self, model: nn.Module, *, quantized: bool) -> Any:
        """Return a calibrated model as the runtime gets it, or as it was before."""

    @abstractmethod
    def times(self, files: Sequence[Any]) -> list[Samples]:
        """Return the times of one call of each file."""

    @abstractmethod
    def size(self, file: Any) -> int:
        """Return the bytes of a file."""


class _Here(Timer):
    """Times on the kernels of this machine."""

    def file(self, model: nn.Module, *, quantized: bool) -> nn.Module:
        assert isinstance(self.runtime, Engine)
        engine = replace(self.runtime, quantized=quantized)
        task = Task(simulated_copy(model), self.example, compares=False)
        return module_to_time(engine, task)

    def times(self, files: Sequence[nn.Module]) -> list[Samples]:
        samples = time_modules(files, self.example, Measurement())
        return [samples[id(file)] for file in files]

    def size(self, file: nn.Module) -> int:
        return stored_size(file)


class _Elsewhere(Timer):
    """Writes files, which a function of the user times."""

    def __init__(
        self,
        runtime: Runtime,
        example: Any,
        time: Callable[[Path], float],
        folder: Path,
    ) -> None:
        super().__init__(runtime, example)
        self.time, self.folder = time, folder
        self.written = 0

    def file(self, model: nn.Module, *, quantized: bool) -> Path:
        self.written += 1
        task = Task(simulated_copy(model), self.example, compares=False)
        graph, _ = graph_to_time(self.runtime if quantized else None, task)
        path = self.folder / f"{self.written}.onnx"
        path.write_bytes(graph.numpy().tobytes())
        return path

    def times(self, files: Sequence[Path]) -> list[Samples]:
        """Return the times of files, in turns, as a machine may drift."""
        rounds = [[float(self.time(path)) for path in files] for _ in range(_CALLS)]
        for seconds in rounds:
            for value in seconds:
                if not 0 < value < math.inf:
                    raise ConfigError(
                        f"time: got {value} from {self.time!r}; expected the seconds of "
                        "one call"
                    )
        return [Samples(tuple(column), 1) for column in zip(*rounds, strict=True)]

    def size(self, file: Path) -> int:
        return file.stat().st_size


@contextmanager
def timer_of(
    caller: str,
    runtime: Runtime | None,
    example: object,
    time: Callable[[Path], float] | None,
) -> Iterator[Timer]:
    """Yield what times a model on a runtime, here or elsewhere."""
    if runtime is None or example is None:
        missing = "target" if runtime is None else "example"
        raise ConfigError(
            f"{caller}: got no {missing}; expected one, as a model is timed on a runtime and on "
            f"an example. Pass {missing}="
        )
    if time is None and not can_be_timed(runtime):
        raise ConfigError(
            f"{caller}: the runtime {runtime.name!r} cannot be timed here; expected one with "
            "its own kernels on this machine. Pass time=, a function of the path of an ONNX "
            "file: see torchq.runtimes.Pays"
        )
    # What a file is warned of is said by the steps that make one to use.
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        if time is None:
            yield _Here(runtime, example)
        else:
            yield _Elsewhere(runtime, example, time, Path(folder))


def is_faster(after: Samples, before: Samples) -> bool:
    """Return True if a time is below another one by more than both are off by."""
    noise = math.hypot(before.noise, after.noise)
    return after.median < before.median * (1 - noise)


def milliseconds(samples: Samples) -> str:
    """Return the median of samples in words."""
    return f"{1000 * samples.median:.3g} ms"

"""What a runtime makes of a model, timed: files of one size, against each other."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.graph import call_model, tensors_in
from torchq.runtime import Runtime
from torchq.runtimes.engine import Engine, Task
from torchq.runtimes.file_engine import EngineModule
from torchq.runtimes.interface import GraphInterface
from torchq.runtimes.onnx_engine import OnnxEngine
from torchq.utils.timing import Samples, time_calls


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
    try:  # The older exporter takes a quarter of the time for the same operators.
        return task.graph(runtime, False, fixed)
    except ExportError:
        return task.graph(runtime, True, fixed)


def time_modules(
    modules: Iterable[nn.Module], example: Any, measurement: Measurement
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

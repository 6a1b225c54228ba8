"""torch itself: the integer kernels that it ships for CPUs and GPUs, through torchq.lowering."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchq.engines.float_parts import partly_float, slower_parts
from torchq.engines.registry import Engine, register
from torchq.engines.task import Task
from torchq.graph import call_model
from torchq.lowering.api import lower_model
from torchq.utils import copy_module, progress_bar
from torchq.workflow import quantizers

__all__ = ["TorchEngine"]

#: A model whose float call takes fewer seconds is not measured: a few calls of torch decide there.
_WORTH_MEASURING = 0.005
#: How often each of the two models runs, and by how much integers may be behind: less is noise.
_ROUNDS, _MARGIN = 7, 1.03
#: A model that takes more than this share of its float time on integers is timed part by part.
_WORTH_PARTS = 0.8


@register("torch")
@dataclass(frozen=True)
class TorchEngine(Engine):
    """The kernels of torch; needs no other package.

    Attributes:
        quantized: see :class:`Engine`.
        reduce_range: see :func:`torchq.deploy`.
        fuse: see :func:`torchq.deploy`.
        measured: a model that takes more than 5 ms, and that gains little on integers for the
            example, keeps the parts in float that are slower on integers, or stays float as a
            whole; a warning and the summary say so.
    """

    reduce_range: bool = False
    fuse: bool = True
    measured: bool = True

    def check(self) -> None:
        """See :meth:`Engine.check`; torch is always there."""

    def build(self, task: Task) -> nn.Module:
        """See :meth:`Engine.build`; the task may have no example."""
        if not self.quantized:
            return copy_module(task.float_model)
        module = self._lowered(task, task.model)
        if task.example is None or not self.measured or not self.fuse:
            return module
        integers, floats = _least_milliseconds((module, task.float_model), task)
        if integers <= _WORTH_PARTS * floats:
            return module
        parts = slower_parts(task)
        partly = partly_float(task.model, parts)
        if parts and quantizers(partly):
            mixed = self._lowered(task, partly)
            mixture, integers, floats = _least_milliseconds((mixed, module, task.float_model), task)
            if mixture < min(integers, floats) and not task.check(mixed).problem:
                return mixed
        return module if integers <= _MARGIN * floats else _stay_float(task, integers, floats)

    def _lowered(self, task: Task, simulated: nn.Module) -> nn.Module:
        return lower_model(
            simulated,
            task.example,
            reduce_range=self.reduce_range,
            fuse=self.fuse,
            progress=task.progress,
        )

    def candidates(self) -> tuple[Engine, ...]:
        """See :meth:`Engine.candidates`."""
        return TorchEngine(measured=False), TorchEngine(quantized=False)


def _stay_float(task: Task, integers: float, floats: float) -> nn.Module:
    """Return the float model with a note, and warn."""
    note = f"stays float: {integers:.3g} ms on integers, {floats:.3g} ms in float"
    warnings.warn(
        f"deploy: {type(task.float_model).__name__} {note} for the example. Pass "
        "engine='fastest' for an engine with faster kernels, or "
        "engine=torchq.engines.TorchEngine(measured=False) for integers all the same",
        stacklevel=4,
    )
    result = copy_module(task.float_model)
    result.deploy_note = note  # type: ignore[assignment]
    return result


def _least_milliseconds(models: Sequence[nn.Module], task: Task) -> tuple[float, ...]:
    """Return the shortest time of each model for the example of a task, all of them in turn.

    The last one is run first: where it is quick, zeros are returned.
    """
    with torch.no_grad():
        for _ in range(2):
            quick = _seconds(models[-1], task.example) < _WORTH_MEASURING
            if quick:
                return (0.0,) * len(models)
        shown = progress_bar(
            range(_ROUNDS), description="measure", unit="round", enabled=task.progress
        )
        rounds = [[_seconds(model, task.example) for model in models] for _ in shown]
    return tuple(1000 * min(times) for times in zip(*rounds, strict=True))


def _seconds(model: nn.Module, example: Any) -> float:
    started = time.perf_counter()
    call_model(model, example)
    return time.perf_counter() - started

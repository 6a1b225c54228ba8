"""Parts of a model that the engine "torch" leaves in float, because integers would be slower there.

A model may hold layers that gain much from integers, and blocks whose layers are so small that
calling integer kernels and converting between codes and floats costs more than it saves. Each block
is timed on its own, in float and on integers, with the inputs that it has in a call of the model on
the example.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchq.engines.task import Task
from torchq.errors import TorchqError
from torchq.graph import call_model
from torchq.lowering.api import lower_model
from torchq.nn import QuantModule
from torchq.swap import restore_
from torchq.utils import copy_module, progress_bar
from torchq.workflow import quantizers

__all__ = ["FloatPart", "partly_float", "slower_parts"]

log = logging.getLogger(__name__)

#: A part that takes a larger share of the time than this is looked at child by child.
_LARGEST_SHARE = 0.15
#: How often a part runs, and how much slower integers must be: a part that has neighbours on
#: integers exchanges codes with them, which timing it alone does not know.
_ROUNDS, _SLOWER = 5, 1.15
#: The calls in which inputs are recorded and times taken: the first one is not typical.
_CALLS = 2


@dataclass(frozen=True)
class FloatPart:
    """A part that is slower on integers.

    Attributes:
        name: its dotted path.
        integers: milliseconds on integers, alone.
        floats: milliseconds in float.
    """

    name: str
    integers: float
    floats: float

    def __str__(self) -> str:
        return (
            f"stays float: {self.integers:.3g} ms on integers, {self.floats:.3g} ms in float, alone"
        )


@dataclass
class _Call:
    """What one call of a module got, and how long it took."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    count: int = 0
    seconds: float = 0.0
    started: float = 0.0


def slower_parts(task: Task) -> list[FloatPart]:
    """Return the parts of the model of a task that are slower on integers for its example.

    Args:
        task: with an example.
    """
    calls = _calls(task.float_model, task.example)
    names = list(_parts(task, calls))
    found = []
    bar = progress_bar(names, description="parts", unit="part", enabled=task.progress)
    for name in bar:
        part = _measured(task, name, calls[name])
        if part is not None and part.integers > _SLOWER * part.floats:
            log.debug("deploy: %s %s", name, part)
            found.append(part)
    return found


def partly_float(simulated: nn.Module, parts: Sequence[FloatPart]) -> nn.Module:
    """Return a copy of a simulated model in which some parts are float, with a note about why.

    Args:
        simulated: left unchanged.
        parts: from :func:`slower_parts`.
    """
    result = copy_module(simulated)
    for part in parts:
        module = result.get_submodule(part.name)
        layers = [m for m in module.modules() if isinstance(m, QuantModule)]
        restore_(module)
        for quantizer in quantizers(module).values():  # that the author of the model placed
            quantizer.mode = "off"
        for layer in layers:
            layer.deploy_note = str(part)  # type: ignore[assignment]
    return result


def _calls(model: nn.Module, example: Any) -> dict[str, _Call]:
    """Return the inputs of the modules in one call of ``model``, and their times in another."""
    calls: dict[str, _Call] = {}

    def before(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            call = calls.setdefault(name, _Call(args, kwargs))
            call.count += 1
            call.started = time.perf_counter()

        return hook

    def after(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
            calls[name].seconds = time.perf_counter() - calls[name].started

        return hook

    with ExitStack() as stack, torch.no_grad():
        for name, module in model.named_modules():
            for handle in (
                module.register_forward_pre_hook(before(name), with_kwargs=True),
                module.register_forward_hook(after(name)),
            ):
                stack.callback(handle.remove)
        for _ in range(_CALLS):
            call_model(model, example)
    return calls


def _parts(task: Task, calls: dict[str, _Call], name: str = "") -> Iterator[str]:
    """Yield the parts to time: called once, with quantized layers, and of a small share each."""
    module = task.model.get_submodule(name)
    if not any(isinstance(m, QuantModule) for m in module.modules()):
        return
    call, whole = calls.get(name), calls[""].seconds
    children = [child for child, _ in module.named_children()]
    leaf = isinstance(module, QuantModule) or not children
    once = call is not None and call.count == _CALLS and bool(name)
    if once and (leaf or calls[name].seconds <= _LARGEST_SHARE * whole):
        yield name
        return
    for child in [] if leaf else children:
        yield from _parts(task, calls, f"{name}.{child}" if name else child)


def _measured(task: Task, name: str, call: _Call) -> FloatPart | None:
    """Return the times of a part; None where it cannot be deployed on its own."""
    floats = task.float_model.get_submodule(name)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the model as a whole has warned
            integers = lower_model(task.model.get_submodule(name))
        times = _least_milliseconds((integers, floats), call)
    except (TorchqError, RuntimeError, TypeError, ValueError) as error:
        log.debug("deploy: %s is not timed: %s", name, error)
        return None
    return FloatPart(name, *times)


def _least_milliseconds(models: Sequence[nn.Module], call: _Call) -> tuple[float, ...]:
    """Return the shortest time of each module for one call, all of them in turn."""
    least = [float("inf")] * len(models)
    with torch.no_grad():
        for number in range(_ROUNDS + 3):
            for index, model in enumerate(models):
                started = time.perf_counter()
                model(*call.args, **call.kwargs)
                if number >= 3:  # packing, binding, first pages
                    least[index] = min(least[index], time.perf_counter() - started)
    return tuple(1000 * seconds for seconds in least)

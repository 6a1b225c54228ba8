"""The runs of one ranking: a whole float run of each batch, then each group switched alone."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchq.analysis.batches import Batches, gathered, place_in_group
from torchq.analysis.layers import QuantizedLayer, active_quantizers, quantizing
from torchq.analysis.ranking.fisher import Disturbance, fisher_sums
from torchq.analysis.ranking.groups import Group
from torchq.analysis.ranking.metrics import Evaluation, Metric, Score, batch_size
from torchq.analysis.ranking.prefix import Runs
from torchq.analysis.ranking.saved import SavedSums, fingerprint
from torchq.errors import CalibrationError, ConfigError
from torchq.graph import Forward, call_model
from torchq.nn import TensorQuantizer
from torchq.utils import device_of, progress_bar

__all__ = ["Measured", "Measurement"]

_WHERE = "sensitivity"
_NO_BATCH = f"{_WHERE}: got no batch; expected at least one"

# Keys of results that belong to no group.
_EVERYTHING = "everything quantized"
_NOTHING = "nothing quantized"


@dataclass
class Measured:
    """Values of groups.

    Attributes:
        metric: its name.
        unit: of the values.
        rising: True where a larger value is better.
        values: of each group.
        baseline: with everything quantized.
        reference: of the float model, where it has a value.
        note: for the user.
    """

    metric: str
    unit: str
    rising: bool
    values: dict[str, float]
    baseline: float
    reference: float | None = None
    note: str = ""


@dataclass
class Measurement:
    """One ranking of one model, which is in eval mode.

    Attributes:
        model: the quantized model.
        layers: its layers.
        groups: what is switched together.
        mode: ``"only"`` or ``"all_but"``.
        forward: the user's own way to run it.
        num_batches: to stop after.
        progress: show a bar.
        known: all quantizers that are on.
    """

    model: nn.Module
    layers: list[QuantizedLayer]
    groups: list[Group]
    mode: str
    forward: Forward | None
    num_batches: int | None
    progress: bool
    known: list[TensorQuantizer] = field(init=False)

    def __post_init__(self) -> None:
        self.known = active_quantizers(self.model)

    def active(self, group: Group) -> list[TensorQuantizer]:
        """Return the quantizers that are on when a group is measured."""
        chosen = {id(q) for q in group.quantizers.values()}
        return [q for q in self.known if (id(q) in chosen) == (self.mode == "only")]

    def compare(
        self,
        metric: Metric,
        batches: Batches,
        resume: str | os.PathLike[str] | None,
        group: dist.ProcessGroup | None,
    ) -> Measured:
        """Measure the outputs of each group, batch by batch."""
        saved = self._saved(metric.name, resume)
        comparison = _Comparison(self, metric, saved)
        with torch.no_grad(), _written(saved):
            self._show(comparison.work(batches), batches, len(self.groups))
        sums = _joined(saved.sums, group)
        if _EVERYTHING not in sums:
            raise CalibrationError(_NO_BATCH)
        return Measured(
            metric=metric.name,
            unit=metric.unit,
            rising=metric.rising,
            values=self._values(sums, metric.value),
            baseline=metric.value(sums[_EVERYTHING]),
            reference=metric.value(sums[_NOTHING]) if isinstance(metric, Score) else None,
            note=comparison.runs.note,
        )

    def evaluate(self, metric: Evaluation, resume: str | os.PathLike[str] | None) -> Measured:
        """Let the user's function run the model once for each group."""
        saved = self._saved(metric.name, resume)
        cases = {g.name: self.active(g) for g in self.groups}
        cases = {_NOTHING: [], _EVERYTHING: self.known, **cases}
        with torch.no_grad(), _written(saved):
            shown = progress_bar(list(cases), description=_WHERE, unit="run", enabled=self.progress)
            for name in shown:
                if not saved.done(name):
                    with quantizing(self.known, cases[name]):
                        value = metric.of(self.model)
                    saved.add(name, [value])
        values = {name: sums[0] for name, sums in saved.sums.items()}
        return Measured(
            metric=metric.name,
            unit="",
            rising=True,
            values=self._values(saved.sums, lambda sums: sums[0]),
            baseline=values[_EVERYTHING],
            reference=values[_NOTHING],
        )

    def estimate(self, batches: Batches, group: dist.ProcessGroup | None) -> Measured:
        """Estimate the cost of each group from gradients."""
        if self.mode != "only":
            raise ConfigError(
                f"{_WHERE}: got mode {self.mode!r} with metric='fisher'; expected mode='only'"
            )
        first = place_in_group(batches.total, group)
        disturbances = [d for g in self.groups for d in self._disturbances(g.name, g.quantizers)]
        everything = {p: q for a in self.layers for p, q in a.quantizers.items()}
        disturbances += self._disturbances(_EVERYTHING, everything)
        sums: dict[str, list[float]] = {}
        with quantizing(self.known, []):
            self._show(self._estimates(batches, disturbances, first, sums), batches, 1)
        sums = _joined(sums, group)
        if not sums:
            raise CalibrationError(_NO_BATCH)

        def mean(sums: list[float]) -> float:
            return sums[0] / sums[1]

        return Measured(
            metric="fisher",
            unit="nat",
            rising=False,
            values=self._values(sums, mean),
            baseline=mean(sums[_EVERYTHING]),
            reference=0.0,
        )

    def _estimates(
        self,
        batches: Batches,
        disturbances: list[Disturbance],
        first: int,
        sums: dict[str, list[float]],
    ) -> Iterator[None]:
        for number, batch in enumerate(islice(batches, self.num_batches), first):
            call = partial(self._call, batch)
            found = fisher_sums(call, disturbances, batch_size(batch), number)
            for name, new in found.items():
                known = sums.get(name, [0.0, 0.0])
                sums[name] = [a + b for a, b in zip(known, new, strict=True)]
            yield

    def _call(self, batch: Any) -> Any:
        return call_model(self.model, batch, forward=self.forward, device=device_of(self.model))

    def _disturbances(self, key: str, chosen: dict[str, TensorQuantizer]) -> list[Disturbance]:
        """Return what quantizing ``chosen`` alone does to each layer that has some of them."""
        wanted = {id(q) for q in chosen.values()}
        found = []
        for layer in self.layers:
            own = [q for q in layer.quantizers.values() if id(q) in wanted]
            if own:
                found.append(Disturbance(key, layer.module, partial(_run_with, layer.module, own)))
        return found

    def _values(
        self, sums: dict[str, list[float]], value: Callable[[list[float]], float]
    ) -> dict[str, float]:
        return {g.name: value(sums[g.name]) for g in self.groups if g.name in sums}

    def _saved(self, metric: str, resume: str | os.PathLike[str] | None) -> SavedSums:
        key = fingerprint(self.groups, self.known, metric=metric, mode=self.mode)
        return SavedSums(resume, key)

    def _show(self, work: Iterator[None], batches: Batches, runs: int) -> None:
        """Do the work behind a bar; it yields once for each of ``runs`` of each batch."""
        total = None if batches.total is None else batches.total * runs
        shown = progress_bar(
            work, description=_WHERE, total=total, unit="run", enabled=self.progress
        )
        for _ in shown:
            pass


class _Comparison:
    """Outputs with some quantizers on, beside those that they are compared with."""

    def __init__(self, owner: Measurement, metric: Metric, saved: SavedSums) -> None:
        self.owner, self.metric, self.saved = owner, metric, saved
        self.runs = Runs(owner.model, owner.forward, device_of(owner.model), owner.groups)
        self._unchanged: dict[int, list[float]] = {}

    def work(self, batches: Batches) -> Iterator[None]:
        """Measure batch by batch, and yield after each group."""
        owner, runs = self.owner, self.runs
        for number, batch in enumerate(islice(batches, owner.num_batches)):
            todo = [group for group in owner.groups if self.saved.done(group.name) <= number]
            if todo:
                expected, unchanged = self._whole_runs(number, batch, todo)
                if not all(map(runs.is_reached, todo)):
                    self._unchanged[number] = self.metric.sums(unchanged, expected, batch)
            for group in todo:
                if runs.is_reached(group):
                    self._catch_up(group.name, number)
                    with quantizing(owner.known, owner.active(group)):
                        output = runs.switched(group)
                    self._add(group.name, number, output, expected, batch)
                elif self.saved.done(group.name):
                    self._catch_up(group.name, number + 1)
                yield

    def _whole_runs(self, number: int, batch: Any, todo: list[Group]) -> tuple[Any, Any]:
        """Run the batch float and quantized, and keep what later runs start from.

        Returns:
            The float output, and the one with no group switched.
        """
        known = self.owner.known
        only = self.owner.mode == "only"
        with quantizing(known, []):
            expected = self.runs.reference(batch, todo if only else [])
        with quantizing(known, known):
            everything = self.runs.again() if only else self.runs.reference(batch, todo)
        self._add(_NOTHING, number, expected, expected, batch)
        self._add(_EVERYTHING, number, everything, expected, batch)
        return expected, expected if only else everything

    def _catch_up(self, name: str, number: int) -> None:
        """Add the batches before ``number`` that did not reach a group."""
        for earlier in range(self.saved.done(name), number):
            self.saved.add(name, self._unchanged[earlier])

    def _add(self, name: str, number: int, output: Any, expected: Any, batch: Any) -> None:
        if self.saved.done(name) <= number:
            self.saved.add(name, self.metric.sums(output, expected, batch))


def _run_with(
    module: nn.Module, chosen: list[TensorQuantizer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module by itself with some quantizers on."""
    with quantizing(chosen, chosen):
        return module.forward(*args, **kwargs)


@contextmanager
def _written(saved: SavedSums) -> Iterator[None]:
    """Write what is known at the end, also where Ctrl-C is the end."""
    try:
        yield
    finally:
        saved.write()


def _joined(
    sums: dict[str, list[float]], group: dist.ProcessGroup | None
) -> dict[str, list[float]]:
    """Return the sums over all processes of a group."""
    total: dict[str, list[float]] = {}
    for part in gathered(sums, group):
        for name, new in part.items():
            known = total.get(name, [0.0] * len(new))
            total[name] = [a + b for a, b in zip(known, new, strict=True)]
    return total

"""``keep="pays"``: what a plan quantizes stays so where the runtime gains time by it.

Whether a quantized operator gains time depends on its neighbours: codes that are computed and
read in float at once cost time. So groups of modules that stand in alike places are put back into
float, one after the other, and the whole model is timed each time. The float model is timed along,
so that the result is never slower, beyond what the timer is off by.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from torch import nn

from torchq.errors import TorchqError
from torchq.runtime import Runtime
from torchq.runtimes.timing import Timer, is_faster, milliseconds, timer_of
from torchq.swap import Plan, apply_
from torchq.swap.keeping import KEEPS, Kept, PlanWithout
from torchq.swap.optional import optional_operators
from torchq.utils import copy_module
from torchq.workflow import calibrate

log = logging.getLogger(__name__)

#: The work of small layers, together, as a part of the whole.
_SMALL = 0.05
#: Into how many parts of neighbours a model is cut.
_PARTS = 4


@dataclass(frozen=True)
class Group:
    """Modules that are put back into float together.

    Attributes:
        label: what they are.
        paths: of the modules.
        has_weights: False for operators beside layers. In float they cost no accuracy, so they go
            there also where they take as long.
    """

    label: str
    paths: tuple[str, ...]
    has_weights: bool


@dataclass(frozen=True)
class Pays:
    """Keeps quantized what gains time on the runtime of the plan, on the example.

    ``torchq.plan(model, target=..., example=..., keep="pays")`` is this with its defaults. Timed
    are files with ranges from the example; accuracy is not looked at.

    Args:
        time: called with the path of an ONNX file; returns the seconds of one call where the file
            is to run, such as ``trtexec`` on another machine or a phone. None times on this one.
        limit: seconds after which no further file is made; the best one so far is kept.

    Raises:
        ConfigError: There is no target or no example, or the runtime is not here and there is no
            ``time``; or ``time`` returns no number of seconds.
    """

    name: ClassVar[str] = "pays"
    time: Callable[[Path], float] | None = None
    limit: float = 100.0

    def __call__(
        self,
        model: nn.Module,
        planned: Plan,
        without: PlanWithout,
        example: object,
        runtime: Runtime | None,
    ) -> Kept:
        """Return what is to stay float; see :class:`torchq.swap.keeping.Keep`."""
        deadline = time.monotonic() + self.limit
        with timer_of('keep="pays"', runtime, example, self.time) as timer:
            return _Search(timer, model, without, deadline).kept(planned)


KEEPS.add(Pays.name, Pays())


def groups_of(model: nn.Module, planned: Plan) -> list[Group]:
    """Return the groups of what a plan quantizes; a module may be in several."""
    rows = [decision for decision in planned.replaced if not decision.is_container]
    paths_by_kind: dict[str, list[str]] = {}
    for decision in rows:
        if decision.weight is None:
            paths_by_kind.setdefault(decision.class_name, []).append(decision.name)
    groups = [Group(kind, tuple(p), False) for kind, p in paths_by_kind.items()]
    if len(groups) > 1:
        beside = tuple(path for group in groups for path in group.paths)
        groups.append(Group("all operators beside layers", beside, False))
    layers = [decision.name for decision in rows if decision.weight is not None]
    depthwise = [path for path in layers if _is_depthwise(model, path)]
    small = _small(planned, [path for path in layers if path not in depthwise])
    groups += [
        Group(label, tuple(paths), True)
        for label, paths in (
            ("depthwise convolutions", depthwise),
            ("small layers", small),
        )
        if paths
    ]
    return groups + _parts([decision.name for decision in rows])


def _parts(paths: list[str]) -> list[Group]:
    """Return groups of neighbours, as many in each."""
    if len(paths) < 2 * _PARTS:
        return []
    ends = [len(paths) * number // _PARTS for number in range(_PARTS + 1)]
    return [
        Group(f"part {number + 1} of {_PARTS}", tuple(paths[start:end]), True)
        for number, (start, end) in enumerate(itertools.pairwise(ends))
    ]


def _is_depthwise(model: nn.Module, path: str) -> bool:
    module = model.get_submodule(path)
    groups = getattr(module, "groups", 1)
    return groups > 1 and groups == getattr(module, "in_channels", 0)


def _small(planned: Plan, paths: list[str]) -> list[str]:
    """Return the layers with the least work that together have a small part of the whole."""
    if planned.work is None or not planned.work.measured:
        return []
    amounts = planned.work.amounts
    left = _SMALL * sum(amounts.values())
    small = []
    for path in sorted(paths, key=lambda path: amounts.get(path, 0.0)):
        left -= amounts.get(path, 0.0)
        if left < 0:
            break
        small.append(path)
    return small if len(small) < len(paths) else []


@dataclass(frozen=True)
class _Version:
    """A model with some modules in float."""

    in_float: tuple[str, ...]
    file: object


class _Search:
    """Puts groups of modules back into float, as long as that makes the model faster."""

    def __init__(
        self, timer: Timer, model: nn.Module, without: PlanWithout, deadline: float
    ) -> None:
        self.timer, self.model, self.without = timer, model, without
        self.deadline = deadline
        self.reasons: dict[str, str] = {}

    def kept(self, planned: Plan) -> Kept:
        """Return what stays float, and the times before and after."""
        quantized = self._calibrated(())
        in_float = self.timer.file(quantized, quantized=False)
        everything = _Version((), self.timer.file(quantized, quantized=True))
        best = everything
        for group in self._gaining(everything, groups_of(self.model, planned)):
            best = self._tried(best, group)
        before, after = self.timer.times([in_float, best.file])
        name = self.timer.runtime.name
        times = f"{milliseconds(before)} in float, {milliseconds(after)} quantized"
        if not is_faster(after, before):
            reason = f"{name} takes {times}: integers gain nothing"
            every_path = [decision.name for decision in planned.replaced]
            return Kept(dict.fromkeys(every_path, reason), f"{name}: {times}")
        needed = self._needed(planned, best, in_float)
        return Kept(self.reasons, f"{name}: {times}", needed)

    def _needed(
        self, planned: Plan, best: _Version, in_float: object
    ) -> frozenset[str]:
        """Return the operators beside layers, if the layers alone gain nothing.

        Calibration leaves some of them in float where that brings the outputs nearer to float. It
        knows no time, so what pays with them would end slower than the float model.
        """
        optional = [decision.name for decision in optional_operators(planned)]
        operators = frozenset(optional).difference(best.in_float)
        if not operators:
            return frozenset()
        layers = self._version_or_none((*best.in_float, *sorted(operators)))
        if layers is None:
            return frozenset()
        before, alone = self.timer.times([in_float, layers.file])
        return frozenset() if is_faster(alone, before) else operators

    def _calibrated(self, in_float: Iterable[str]) -> nn.Module:
        """Return a quantized copy, without some modules, with the ranges of the example."""
        twin = copy_module(self.model).eval()
        example = self.timer.example
        apply_(twin, self.without(in_float))
        calibrate(twin, [example], correct=False, on_unseen="disable", progress=False)
        return twin

    def _version(self, in_float: tuple[str, ...]) -> _Version:
        file = self.timer.file(self._calibrated(in_float), quantized=True)
        return _Version(in_float, file)

    def _version_or_none(self, in_float: tuple[str, ...]) -> _Version | None:
        """Return a version; None after the deadline, and where nothing would be quantized."""
        if time.monotonic() > self.deadline:
            return None
        try:
            return self._version(in_float)
        except TorchqError as error:
            log.debug("without %s: %s", in_float, error)
            return None

    def _gaining(self, everything: _Version, groups: Sequence[Group]) -> list[Group]:
        """Return the groups without which all of the rest takes less time, the best first."""
        versions = {group: self._version_or_none(group.paths) for group in groups}
        made = {group: v for group, v in versions.items() if v is not None}
        files = [everything.file, *(version.file for version in made.values())]
        whole, *rest = [samples.median for samples in self.timer.times(files)]
        seconds = dict(zip(made, rest, strict=True))
        gaining = [group for group in made if seconds[group] < whole]
        return sorted(gaining, key=lambda group: seconds[group])

    def _tried(self, best: _Version, group: Group) -> _Version:
        """Return the version without a group too, where it is no slower than the best one."""
        in_float = tuple(dict.fromkeys((*best.in_float, *group.paths)))
        version = None if in_float == best.in_float else self._version_or_none(in_float)
        if version is None:
            return best
        before, after = self.timer.times([best.file, version.file])
        # Float operators beside layers cost no accuracy; layers in float cost size.
        is_better = after.median <= before.median
        if group.has_weights:
            is_better = is_faster(after, before)
        if not is_better:
            return best
        reason = (
            f"{self.timer.runtime.name} takes {milliseconds(before)} with {group.label} on "
            f"integers and {milliseconds(after)} without"
        )
        for path in version.in_float:
            self.reasons.setdefault(path, reason)
        return version

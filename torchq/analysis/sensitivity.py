"""Which layers hurt: each is quantized alone, and the output is compared."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import nn

from torchq.analysis.detections import Detections
from torchq.analysis.fisher import Disturbance, fisher_costs
from torchq.analysis.layers import QuantizedLayer, active_quantizers, quantized_layers
from torchq.analysis.metrics import (
    Evaluate,
    Evaluation,
    Score,
    Sqnr,
    Sums,
    add_sums,
    bar,
    decibel_text,
    find_metric,
)
from torchq.errors import CalibrationError, ConfigError
from torchq.graph import Forward, call_model
from torchq.nn import TensorQuantizer, quantizing_only
from torchq.utils import (
    Pattern,
    check_batches,
    device_of,
    evaluating,
    item_count,
    pattern_text,
    progress_bar,
    state_kept,
    table,
    uncompiled,
    unwrapped,
    watching,
    wrap,
)
from torchq.workflow import select_quantizers

#: Names of scopes, or the patterns of groups.
Scope = str | Mapping[str, Any] | Sequence[Pattern]
T = TypeVar("T")

_WHERE = "sensitivity"
# Keys of results that belong to no group.
_EVERYTHING = "everything quantized"
_NOTHING = "nothing quantized"


@dataclass(frozen=True)
class SensitivityRow:
    """The effect of one layer or group.

    Attributes:
        name: the path of the layer, or the name of the group.
        value: of the metric, with this group alone switched.
        layers: paths of the layers of the group.
        quantizers: paths of the quantizers that were switched.
    """

    name: str
    value: float
    layers: tuple[str, ...]
    quantizers: tuple[str, ...]


@dataclass(frozen=True)
class SensitivityReport:
    """The layers in the order in which they should be excluded; ``print`` it.

    Attributes:
        rows: the one that hurts most comes first.
        metric: its name.
        unit: of the values.
        rising: True where a larger value is better.
        scope: ``"layer"``, ``"input"``, ``"weight"`` or ``"groups"``.
        baseline: the value with everything quantized.
        reference: the value of the float model, where the metric has one.
        unseen: groups that no batch reached.
    """

    rows: tuple[SensitivityRow, ...]
    metric: str
    unit: str
    rising: bool
    scope: str
    baseline: float
    reference: float | None = None
    unseen: tuple[str, ...] = ()

    def worst(self, count: int = 1) -> list[str]:
        """Return the paths of the layers of the first ``count`` rows, for ``exclude=``.

        Args:
            count: rows, at least 0.
        """
        found = [layer for row in self.rows[:count] for layer in row.layers]
        return list(dict.fromkeys(found))

    def _value_text(self, value: float) -> str:
        if self.unit == "dB":
            return decibel_text(value)
        return f"{value:.4g} {self.unit}".rstrip()

    def _shares(self) -> list[float]:
        """Return the length of each row's bar, 0 to 1: its harm."""
        values = [row.value for row in self.rows]
        finite = [v for v in values if math.isfinite(v)]
        if not finite:
            return [0.0] * len(values)
        # Estimates grow with the harm, and all other figures fall.
        start, end = (max(finite), min(finite)) if self.rising else (0.0, max(finite))
        width = end - start
        return [(v - start) / width if width and math.isfinite(v) else 0.0 for v in values]

    def __str__(self) -> str:
        rows = [("rank", "layer", f"{self.metric}, only this quantized", "")]
        for number, (row, share) in enumerate(zip(self.rows, self._shares(), strict=True), 1):
            figures = (self._value_text(row.value), bar(share))
            rows.append((str(number), row.name or "(root)", *figures))
        parts = [f"everything quantized: {self._value_text(self.baseline)}"]
        if self.reference is not None:
            parts.append(f"nothing quantized: {self._value_text(self.reference)}")
        if self.unseen:
            parts.append(f"not reached: {', '.join(self.unseen)}")
        if math.isnan(self.baseline):
            parts.append("torchq.layer_errors names the layer that NaN or infinity comes from")
        elif self.rows:
            parts.append(f"try exclude={self.worst(2)!r}")
        return table(rows, wrap("; ".join(parts)))


@uncompiled()
def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    metric: str | Evaluate | Detections = "sqnr",
    *,
    scope: Scope = "layer",
    forward: Forward | None = None,
    num_batches: int | None = None,
    progress: bool = True,
) -> SensitivityReport:
    """Rank the layers of a quantized model by what they cost at its output.

    Each batch runs once for each layer, and twice more; with ``"fisher"`` it takes four backward
    passes for all layers together. The model is left as it was, also after Ctrl-C.

    Args:
        model: quantized and calibrated.
        batches: each holds the arguments of one call, perhaps followed by labels; see
            :func:`torchq.graph.call_arguments`. A function ``metric(output, batch)`` gets them
            whole.
        metric: what is compared with the float model: ``"sqnr"`` (signal to noise ratio of the
            outputs), ``"fisher"`` (an estimate of the divergence of class probabilities from
            gradients), or ``"detections"`` (the share of boxes that both models have), also as a
            :class:`torchq.analysis.Detections` with settings. Or a function that returns a number
            which is larger for a better model: ``metric(output, batch)``, or ``metric(model)``,
            which runs the model itself.
        scope: ``"layer"`` switches the quantizers of a layer together, ``"input"`` and
            ``"weight"`` a part of them; a list of patterns, or a mapping of names to patterns,
            makes each a group.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        progress: show a bar with the time left.

    Returns:
        The ranking. ``exclude=report.worst(2)`` leaves out the layers of its first two rows.

    Raises:
        ConfigError: The model has no quantizer that is on, or an argument is invalid.
        CalibrationError: There was no batch, or nothing that the float model detects.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> swapped = torchq.quantize_(model)
        >>> found = torchq.sensitivity(model, [torch.randn(8, 4)], progress=False)
        >>> sorted(found.worst(2))
        ['0', '1']
    """
    model = unwrapped(model)
    check_batches(_WHERE, batches, num_batches)
    layers = quantized_layers(model, _WHERE)
    groups = _find_groups(model, layers, scope)
    call = partial(call_model, model, forward=forward, device=device_of(model))
    run = _Run(model, layers, groups, call, progress)
    chosen = None if metric == "fisher" else find_metric(_WHERE, metric)
    with evaluating(model), state_kept(model):
        if chosen is None:
            values = run.estimate(batches, num_batches)
        elif isinstance(chosen, Evaluation):
            values = run.evaluate(chosen)
        else:
            values = run.compare(chosen, batches, num_batches)
    return _report(values, groups, scope, chosen)


@dataclass(frozen=True)
class _Group:
    """Quantizers that are switched together, and the paths of the layers that they belong to."""

    name: str
    layers: tuple[str, ...]
    quantizers: dict[str, TensorQuantizer]


def _find_groups(model: nn.Module, layers: list[QuantizedLayer], scope: Scope) -> list[_Group]:
    """Return the groups of a scope, in the order of the layers."""
    if isinstance(scope, str):
        chosen = {"layer": "quantizers", "input": "inputs", "weight": "weights"}.get(scope)
        if chosen is None:
            text = f"{_WHERE}: got scope {scope!r}; expected 'layer', 'input', 'weight', a mapping "
            text += "of names to patterns, or a list of patterns"
            raise ConfigError(text)
        found = [_Group(a.name, (a.name,), getattr(a, chosen)) for a in layers]
        return [group for group in found if group.quantizers]
    if isinstance(scope, Mapping):
        patterns = dict(scope)
    else:
        patterns = {pattern_text(pattern): pattern for pattern in scope}
    return [_selected(model, layers, name, chosen) for name, chosen in patterns.items()]


def _selected(model: nn.Module, layers: list[QuantizedLayer], name: str, patterns: Any) -> _Group:
    found = select_quantizers(model, patterns)
    active = {path: q for path, q in found.items() if q.quantizing}
    if not active:
        raise ConfigError(
            f"{_WHERE}: group {name!r} selects quantizers that are all off; expected one that is on"
        )
    ids = {id(q) for q in active.values()}
    owners = [a.name for a in layers if ids & {id(q) for q in a.quantizers.values()}]
    return _Group(name, tuple(owners), active)


@dataclass(frozen=True)
class _Run:
    """One ranking of one model, which is in eval mode; ``call`` runs it on a batch."""

    model: nn.Module
    layers: list[QuantizedLayer]
    groups: list[_Group]
    call: Callable[[Any], Any]
    progress: bool

    def compare(
        self, metric: Sqnr | Score | Detections, batches: Iterable[Any], most: int | None
    ) -> dict[str, float]:
        """Measure the outputs of each group, batch by batch."""
        known, cases, reached = active_quantizers(self.model), self._cases(), set[str]()
        sums: Sums = {}
        expected: Any = None
        count = item_count(batches, most)
        shown = progress_bar(
            ((batch, name) for batch in islice(batches, most) for name in cases),
            description=_WHERE,
            total=None if count is None else count * len(cases),
            unit="run",
            enabled=self.progress,
        )
        with torch.no_grad():
            for batch, name in shown:
                noted = self._noting(reached) if name == _EVERYTHING else ()
                with quantizing_only(known, cases[name]), watching(noted, before=True):
                    output = self.call(batch)
                expected = output if name == _NOTHING else expected
                add_sums(sums, name, metric.sums(output, expected, batch))
        if isinstance(metric, Detections):
            metric.check_count(_required(sums)[_NOTHING])
        reached |= {_EVERYTHING, _NOTHING}
        return {name: metric.value(row) for name, row in _required(sums).items() if name in reached}

    def _cases(self) -> dict[str, list[TensorQuantizer]]:
        """Return the quantizers that are on in each run; nothing quantized comes first."""
        known = active_quantizers(self.model)
        cases = {_NOTHING: [], _EVERYTHING: known}
        for group in self.groups:
            chosen = {id(q) for q in group.quantizers.values()}
            cases[group.name] = [q for q in known if id(q) in chosen]
        return cases

    def _noting(self, reached: set[str]) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
        """Yield what adds the name of a group if a layer or a quantizer of it is called."""
        for group in self.groups:
            layers = [self.model.get_submodule(name) for name in group.layers]
            for part in (*layers, *group.quantizers.values()):
                yield part, lambda *_, name=group.name: reached.add(name)

    def evaluate(self, metric: Evaluation) -> dict[str, float]:
        """Let the user's function run the model once for each group."""
        known, cases, values = active_quantizers(self.model), self._cases(), {}
        shown = progress_bar(list(cases), description=_WHERE, unit="run", enabled=self.progress)
        for name in shown:
            with quantizing_only(known, cases[name]):
                values[name] = metric.of(self.model)
        return values

    def estimate(self, batches: Iterable[Any], most: int | None) -> dict[str, float]:
        """Estimate the cost of each group from gradients."""
        everything = {p: q for a in self.layers for p, q in a.quantizers.items()}
        chosen = {g.name: g.quantizers for g in self.groups} | {_EVERYTHING: everything}
        disturbances = [d for name, own in chosen.items() for d in self._disturbances(name, own)]
        shown = progress_bar(batches, description=_WHERE, most=most, enabled=self.progress)
        with quantizing_only(active_quantizers(self.model)):
            return _required(fisher_costs(self.call, shown, disturbances)) | {_NOTHING: 0.0}

    def _disturbances(self, key: str, chosen: dict[str, TensorQuantizer]) -> list[Disturbance]:
        """Return what quantizing ``chosen`` alone does to each layer that has some of them."""
        wanted = {id(q) for q in chosen.values()}
        found = []
        for layer in self.layers:
            own = [q for q in layer.quantizers.values() if id(q) in wanted]
            if own:
                found.append(Disturbance(key, layer.module, partial(_run_with, layer.module, own)))
        return found


def _required(found: dict[str, T]) -> dict[str, T]:
    """Return what was found over batches; an error says that there was none."""
    if not found:
        raise CalibrationError(f"{_WHERE}: got no batch; expected at least one")
    return found


def _run_with(
    module: nn.Module, chosen: list[TensorQuantizer], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Call a module by itself with some quantizers on."""
    with quantizing_only(chosen, chosen):
        return module.forward(*args, **kwargs)


def _report(
    values: dict[str, float],
    groups: list[_Group],
    scope: Scope,
    metric: Sqnr | Score | Detections | Evaluation | None,
) -> SensitivityReport:
    """Return the ranking of measured values, or of an estimate, which has no metric."""
    rising = metric is not None
    rows = [
        SensitivityRow(g.name, values[g.name], g.layers, tuple(g.quantizers))
        for g in groups
        if g.name in values
    ]
    sign = 1 if rising else -1
    # NaN, the output of a broken layer, comes first.
    rows.sort(key=lambda row: -math.inf if math.isnan(row.value) else sign * row.value)
    return SensitivityReport(
        rows=tuple(rows),
        metric="fisher" if metric is None else metric.name,
        unit="nat" if metric is None else getattr(metric, "unit", ""),
        rising=rising,
        scope=scope if isinstance(scope, str) else "groups",
        baseline=values[_EVERYTHING],
        reference=None if isinstance(metric, Sqnr) else values[_NOTHING],
        unseen=tuple(g.name for g in groups if g.name not in values),
    )

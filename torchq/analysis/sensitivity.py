"""Which layers hurt: each is quantized alone, and the output is compared.

The metric "fisher" estimates the cost of all layers from a few backward passes. A layer that is
quantized alone moves its output by ``d``. To second order this changes the divergence of the class
probabilities by ``d' F d / 2``, where ``F`` is the Fisher information at that output. The Fisher
information of the scores is known: ``diag(p) - p p'`` for probabilities ``p``. So for random
directions of the scores with this second moment, ``F`` is the mean of ``g g'``, with ``g`` the
gradient along them, and the cost is the mean of ``(g . d)**2 / 2``.
Reference: Martens, New Insights and Perspectives on the Natural Gradient Method (2020), sections 5
and 9.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from torchq.analysis.detections import Detections
from torchq.analysis.layers import QuantizedLayer, active_quantizers, quantized_layers
from torchq.analysis.outputs import (
    Evaluate,
    Evaluation,
    Score,
    Sqnr,
    Sums,
    add_sums,
    bar,
    batch_size,
    class_axis,
    decibel_text,
    find_metric,
    scores_in,
)
from torchq.errors import CalibrationError, ConfigError
from torchq.graph import Forward, call_model, floats_in, map_tensors
from torchq.nn import TensorQuantizer, switched_off, switched_on
from torchq.utils import (
    RandomState,
    check_batches,
    device_of,
    evaluating,
    item_count,
    network_of,
    progress_bar,
    state_kept,
    table,
    uncompiled,
    unwrapped,
    watching,
    wrap,
)

T = TypeVar("T")

_WHERE = "sensitivity"
#: What a scope switches of a layer.
_SCOPES = {"layer": "quantizers", "input": "inputs", "weight": "weights"}
#: Backward passes for each batch.
_PROBES = 4
# Keys of results that belong to no layer.
_EVERYTHING = "everything quantized"
_NOTHING = "nothing quantized"


#: The ranks that are printed.
_SCREEN = 20


@dataclass(frozen=True)
class SensitivityRow:
    """The effect of one layer.

    Attributes:
        name: its path.
        value: of the metric, with this layer alone switched.
    """

    name: str
    value: float


@dataclass(frozen=True)
class SensitivityReport:
    """The layers in the order in which they should be excluded; ``print`` it.

    Attributes:
        rows: the one that hurts most comes first.
        metric: its name.
        unit: of the values.
        rising: True where a larger value is better.
        scope: ``"layer"``, ``"input"`` or ``"weight"``.
        baseline: the value with everything quantized.
        reference: the value of the float model, where the metric has one.
        unseen: layers that no batch reached.
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
        return [row.name for row in self.rows[:count]]

    def harms(self) -> dict[str, float]:
        """Return what each layer costs by itself, the first row first: what adds up over layers.

        It is the share of noise beside the signal, the divergence, or what a metric loses.
        """
        if self.unit == "dB":
            return {row.name: 10 ** (-row.value / 10) for row in self.rows}
        if self.reference is None or not self.rising:
            return {row.name: row.value for row in self.rows}
        return {row.name: max(self.reference - row.value, 0.0) for row in self.rows}

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
        return [
            (v - start) / width if width and math.isfinite(v) else 0.0 for v in values
        ]

    def __str__(self) -> str:
        """Return the first ranks, and what follows from them."""
        return self._table(_SCREEN)

    def table(self) -> str:
        """Return a row for each layer."""
        return self._table(len(self.rows))

    def _table(self, most: int) -> str:
        rows = [("rank", "layer", f"{self.metric}, only this quantized", "")]
        ranked = list(zip(self.rows, self._shares(), strict=True))
        for number, (row, share) in enumerate(ranked[:most], 1):
            figures = (self._value_text(row.value), bar(share))
            rows.append((str(number), row.name or "(root)", *figures))
        parts = [f"everything quantized: {self._value_text(self.baseline)}"]
        if self.reference is not None:
            parts.append(f"nothing quantized: {self._value_text(self.reference)}")
        if self.unseen:
            parts.append(f"not reached: {', '.join(self.unseen)}")
        if math.isnan(self.baseline):
            parts.append(
                "torchq.layer_errors names the layer that NaN or infinity comes from"
            )
        elif self.rows:
            parts.append(f"try exclude={self.worst(2)!r}")
        if len(ranked) > most:
            parts.append(f"report.table() has all {len(ranked)}")
        return table(rows, wrap("; ".join(parts)))


@uncompiled()
def sensitivity(
    model: nn.Module,
    batches: Iterable[object],
    metric: str | Evaluate | Detections = "sqnr",
    *,
    scope: str = "layer",
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
            ``"weight"`` a part of them.
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
    model = network_of(model)
    model = unwrapped(model)
    check_batches(_WHERE, batches, num_batches)
    layers = quantized_layers(model, _WHERE)
    if scope not in tuple(_SCOPES):
        raise ConfigError(
            f"{_WHERE}: got scope {scope!r}; expected one of {', '.join(map(repr, _SCOPES))}"
        )
    groups = {
        layer.name: group
        for layer in layers
        if (group := getattr(layer, _SCOPES[scope]))
    }
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
    return _report(values, list(groups), scope, chosen)


#: Returns what a module would return under some quantization, given its arguments.
Run = Callable[[tuple[Any, ...], dict[str, Any]], Any]


@dataclass(frozen=True)
class Disturbance:
    """One way to quantize one module; ``run`` computes the output that it would have.

    The cost is added to that of ``key``: a group, or a layer with a format.
    """

    key: Any
    module: nn.Module
    run: Run


def fisher_costs(
    call: Callable[[Any], object],
    batches: Iterable[object],
    disturbances: Collection[Disturbance],
) -> dict[Any, float]:
    """Return the estimate of each key, for one prediction; those of one key happen together.

    ``call`` runs the float model on a batch. A ConfigError says that its output has no gradient
    with respect to the layers, or no classes.
    """
    total: Sums = {}
    for number, batch in enumerate(batches):
        taps = _Taps(disturbances)
        with torch.enable_grad(), watching(taps.hooks()):
            scores = _class_scores(call(batch))
        if taps.points:
            gradients = _drawn_gradients(scores, taps.points, number)
            predictions = float(scores.numel() // scores.shape[class_axis(scores)])
            for key, value in taps.squares(gradients, batch_size(batch)).items():
                add_sums(total, key, [value / (2 * _PROBES), predictions])
    return {key: value / max(count, 1.0) for key, (value, count) in total.items()}


def _drawn_gradients(
    scores: Tensor, points: Sequence[Tensor], number: int
) -> list[Sequence[Tensor | None]]:
    """Return gradients at ``points`` along random directions of batch ``number``."""
    generator = torch.Generator().manual_seed(number)
    gradients: list[Sequence[Tensor | None]] = []
    for probe in range(_PROBES):
        with torch.enable_grad():
            along = (_drawn_direction(scores, generator) * scores).sum()
        another_follows = probe < _PROBES - 1
        gradients.append(
            torch.autograd.grad(
                along, points, retain_graph=another_follows, allow_unused=True
            )
        )
    return gradients


def _class_scores(output: object) -> Tensor:
    """Return the first output with classes that a gradient leads to; an error names what to do."""
    candidates = [scores for scores in scores_in(output) if scores.requires_grad]
    if not candidates:
        raise ConfigError(
            "sensitivity: metric='fisher' got a model whose output has no classes, or no gradient; "
            "expected scores of shape (N, classes, ...). Use metric='sqnr'"
        )
    return candidates[0]


def _drawn_direction(scores: Tensor, generator: torch.Generator) -> Tensor:
    """Return a random direction of the scores whose second moment is the Fisher information.

    Signs ``e`` give ``(diag(r) - p r') e``, where ``r`` is the root of the probabilities ``p``.
    Each draw weighs all classes; a drawn label is nearly always the likeliest one.
    """
    axis = class_axis(scores)
    chances = scores.detach().float().softmax(axis)
    signs = (
        torch.randint(0, 2, scores.shape, generator=generator, device="cpu").to(chances)
        * 2
        - 1
    )
    drawn = chances.sqrt() * signs
    return (drawn - chances * drawn.sum(axis, keepdim=True)).to(scores.dtype)


@dataclass
class _Tap:
    """One call of a module: its arguments, its outputs, and points where gradients are taken."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[Tensor]
    first: int


class _Taps:
    """Points at the outputs of modules, and what disturbances do there."""

    def __init__(self, disturbances: Collection[Disturbance]) -> None:
        self._by_module: dict[nn.Module, list[Disturbance]] = {}
        for disturbance in disturbances:
            self._by_module.setdefault(disturbance.module, []).append(disturbance)
        self.points: list[Tensor] = []
        self._taps: list[_Tap] = []

    def hooks(self) -> list[tuple[nn.Module, Callable[..., Any]]]:
        """Return what taps every module."""
        return [(module, partial(self._after, module)) for module in self._by_module]

    def _after(
        self, module: nn.Module, args: Any, kwargs: Any, output: object
    ) -> object:
        outputs = floats_in(output)
        points = [torch.zeros_like(t, requires_grad=True) for t in outputs]
        float_outputs = [t.detach() for t in outputs]
        self._taps.append(_Tap(module, args, kwargs, float_outputs, len(self.points)))
        self.points += points
        waiting = iter(points)
        # The sum is a new tensor, so that code in place does not change the one that is kept.
        return map_tensors(
            output, lambda t: t + next(waiting) if t.is_floating_point() else t
        )

    @torch.no_grad()
    def squares(
        self, gradients: Sequence[Sequence[Tensor | None]], size: int
    ) -> dict[object, float]:
        """Return for each key the sum of squared products with the gradients, over samples."""
        # One disturbance after the other, so that they need not lie in memory together.
        products: dict[object, list[Tensor]] = {}
        for tap in self._taps:
            for disturbance in self._by_module[tap.module]:
                moved = floats_in(disturbance.run(tap.args, tap.kwargs))
                for place, value in enumerate(moved[: len(tap.outputs)]):
                    move = value - tap.outputs[place]
                    tap_gradients = [g[tap.first + place] for g in gradients]
                    new = [
                        _of_samples(g * move, size)
                        for g in tap_gradients
                        if g is not None
                    ]
                    earlier = products.get(disturbance.key)
                    products[disturbance.key] = _added(earlier, new)
        return {
            key: sum(float(part.double().square().sum()) for part in parts)
            for key, parts in products.items()
        }


def _added(known: list[Tensor] | None, new: list[Tensor]) -> list[Tensor]:
    """Return sums, probe by probe; products of unlike shapes count by themselves."""
    if not known:
        return new
    if [a.shape for a in known] != [b.shape for b in new]:
        return known + new
    return [a + b for a, b in zip(known, new, strict=True)]


def _of_samples(values: Tensor, size: int) -> Tensor:
    """Return the sum of each sample; of everything where the samples cannot be told apart."""
    if values.dim() and size and values.shape[0] % size == 0:
        return values.reshape(size, -1).sum(1)
    return values.sum().reshape(1)


@dataclass(frozen=True)
class _Run:
    """One ranking of one model, which is in eval mode; ``call`` runs it on a batch.

    ``groups`` are the quantizers that are switched together, by the path of their layer.
    """

    model: nn.Module
    layers: list[QuantizedLayer]
    groups: dict[str, dict[str, TensorQuantizer]]
    call: Callable[[Any], Any]
    progress: bool

    def compare(
        self,
        metric: Sqnr | Score | Detections,
        batches: Iterable[object],
        most: int | None,
    ) -> dict[str, float]:
        """Measure the outputs for each layer, batch by batch."""
        active = active_quantizers(self.model)
        cases = self._cases()
        reached = set[str]()
        sums: Sums = {}
        expected: object = None
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
                # All runs of a batch draw the same random numbers.
                if name == _NOTHING:
                    start = RandomState.now()
                else:
                    start.restore()
                noted = self._noting(reached) if name == _EVERYTHING else ()
                with (
                    switched_off(active, but=cases[name]),
                    watching(noted, before=True),
                ):
                    output = self.call(batch)
                expected = output if name == _NOTHING else expected
                add_sums(sums, name, metric.sums(output, expected, batch))
        if isinstance(metric, Detections):
            metric.check_count(_required(sums)[_NOTHING])
        reached |= {_EVERYTHING, _NOTHING}
        return {
            name: metric.value(row)
            for name, row in _required(sums).items()
            if name in reached
        }

    def _cases(self) -> dict[str, list[TensorQuantizer]]:
        """Return the quantizers that are on in each run; nothing quantized comes first."""
        of_groups = {
            name: list(quantizers.values()) for name, quantizers in self.groups.items()
        }
        return {_NOTHING: [], _EVERYTHING: active_quantizers(self.model), **of_groups}

    def _noting(
        self, reached: set[str]
    ) -> Iterator[tuple[nn.Module, Callable[..., None]]]:
        """Yield what adds the name of a layer if it or a quantizer of it is called."""
        for name, group in self.groups.items():
            for part in (self.model.get_submodule(name), *group.values()):
                yield part, lambda *_, name=name: reached.add(name)

    def evaluate(self, metric: Evaluation) -> dict[str, float]:
        """Let the user's function run the model once for each layer."""
        active = active_quantizers(self.model)
        cases = self._cases()
        values = {}
        shown = progress_bar(
            list(cases), description=_WHERE, unit="run", enabled=self.progress
        )
        for name in shown:
            with switched_off(active, but=cases[name]):
                values[name] = metric.of(self.model)
        return values

    def estimate(self, batches: Iterable[object], most: int | None) -> dict[str, float]:
        """Estimate the cost of each layer from gradients."""
        everything = {p: q for a in self.layers for p, q in a.quantizers.items()}
        chosen = self.groups | {_EVERYTHING: everything}
        disturbances = [
            d for name, group in chosen.items() for d in self._disturbances(name, group)
        ]
        shown = progress_bar(
            batches, description=_WHERE, most=most, enabled=self.progress
        )
        with switched_off(active_quantizers(self.model)):
            return _required(fisher_costs(self.call, shown, disturbances)) | {
                _NOTHING: 0.0
            }

    def _disturbances(
        self, key: str, chosen: dict[str, TensorQuantizer]
    ) -> list[Disturbance]:
        """Return what quantizing ``chosen`` alone does to each layer that has some of them."""
        chosen_ids = {id(q) for q in chosen.values()}
        disturbances = []
        for layer in self.layers:
            layer_quantizers = [
                q for q in layer.quantizers.values() if id(q) in chosen_ids
            ]
            if layer_quantizers:
                disturbances.append(
                    Disturbance(
                        key,
                        layer.module,
                        partial(_run_with, layer.module, layer_quantizers),
                    )
                )
        return disturbances


def _required(found: dict[str, T]) -> dict[str, T]:
    """Return what was found over batches; an error says that there was none."""
    if not found:
        raise CalibrationError(f"{_WHERE}: got no batch; expected at least one")
    return found


def _run_with(
    module: nn.Module,
    chosen: list[TensorQuantizer],
    args: tuple[object, ...],
    kwargs: dict[str, object],
) -> object:
    """Call a module by itself with some quantizers on."""
    with switched_on(chosen):
        return module.forward(*args, **kwargs)


def _report(
    values: dict[str, float],
    names: list[str],
    scope: str,
    metric: Sqnr | Score | Detections | Evaluation | None,
) -> SensitivityReport:
    """Return the ranking of measured values, or of an estimate, which has no metric."""
    rising = metric is not None
    rows = [SensitivityRow(name, values[name]) for name in names if name in values]
    sign = 1 if rising else -1
    # NaN, the output of a broken layer, comes first.
    rows.sort(key=lambda row: -math.inf if math.isnan(row.value) else sign * row.value)
    return SensitivityReport(
        rows=tuple(rows),
        metric="fisher" if metric is None else metric.name,
        unit="nat" if metric is None else getattr(metric, "unit", ""),
        rising=rising,
        scope=scope,
        baseline=values[_EVERYTHING],
        reference=None if isinstance(metric, Sqnr) else values[_NOTHING],
        unseen=tuple(name for name in names if name not in values),
    )

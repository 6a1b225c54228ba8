"""The choice of a format for each layer, under a budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from torchq.analysis.formats import (
    BUDGETS,
    FLOAT,
    Candidate,
    Damages,
    FormatChoice,
    LayerFacts,
    check_budget,
    check_formats,
    costs_of,
    estimated_damages,
    exact_rule,
    gather_facts,
    make_candidate,
    measured_damages,
    named_config,
    widths_of,
)
from torchq.analysis.metrics import Evaluate, batch_size
from torchq.analysis.solver import Problem, Solution
from torchq.analysis.text import plain
from torchq.config import QuantConfig
from torchq.errors import CalibrationError, ConfigError
from torchq.graph import Forward, call_model
from torchq.swap import Decision, restore_
from torchq.utils import (
    Pattern,
    copy_module,
    device_of,
    kept_batches,
    matches,
    table,
    uncompiled,
    unwrapped,
)

_WHERE = "mixed_precision"
_POINTS = 12  # budgets that are tried for the front


@dataclass(frozen=True)
class LayerChoice:
    """The format of one layer.

    Attributes:
        name: its dotted path.
        format: the name of the format, ``"float"`` among them.
        damage: what this format costs at the output, by the metric.
        weights: elements of its weights.
        weight_bits: their width.
        input_bits: the width of its input.
        group: number of the group of layers that have one format together.
    """

    name: str
    format: str
    damage: float
    weights: int
    weight_bits: int
    input_bits: int
    group: int


@dataclass(frozen=True)
class FrontPoint:
    """One choice of formats: of those that were found, none beats it in both cost and damage.

    Attributes:
        costs: by kind of budget.
        damage: the predicted damage of all layers together.
        formats: path of each layer -> the name of its format.
    """

    costs: Mapping[str, float]
    damage: float
    formats: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class MixedPrecision(QuantConfig):
    """A config with a format for each layer, to be given to :func:`torchq.quantize_`.

    Attributes:
        choices: the format of each layer.
        front: alternatives, the cheapest first.
        budget: what was asked for.
        costs: what the config costs, by kind of budget.
        damage: its predicted damage.
        metric: what damage is measured by.
    """

    choices: tuple[LayerChoice, ...] = ()
    front: tuple[FrontPoint, ...] = ()
    budget: Mapping[str, float] = field(default_factory=dict)
    costs: Mapping[str, float] = field(default_factory=dict)
    damage: float = math.nan
    metric: str = ""

    def summary(self) -> dict[str, Any]:
        """Return choices and front as JSON data; :meth:`to_dict` returns the config."""
        return {
            "metric": self.metric,
            "budget": dict(self.budget),
            "costs": dict(self.costs),
            "damage": plain(self.damage),
            "choices": [vars(choice) for choice in self.choices],
            "front": [
                {"costs": dict(p.costs), "damage": p.damage, "formats": dict(p.formats)}
                for p in self.front
            ],
        }

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [("layer", "format", "weights", f"damage ({self.metric})")]
        for choice in self.choices:
            figures = (f"{choice.weights:,}", f"{choice.damage:.2e}")
            rows.append((choice.name or "(root)", choice.format, *figures))
        costs = ", ".join(f"{kind} {value:.4g}" for kind, value in self.costs.items())
        asked = ", ".join(f"{kind} {value:.4g}" for kind, value in self.budget.items())
        return table(rows, f"budget {asked}; costs {costs}; predicted damage {self.damage:.2e}")


@uncompiled()
def mixed_precision(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    budget: Mapping[str, float],
    formats: Sequence[FormatChoice] = ("w8a8", "w4a8", "w4a4"),
    metric: str | Evaluate = "auto",
    groups: Sequence[Sequence[Pattern] | Pattern] = (),
    fixed: Mapping[str, FormatChoice] | None = None,
    exclude: Sequence[Pattern] | Pattern | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> MixedPrecision:
    """Choose a format for each layer, so that the damage is least within a budget.

    The damage of each layer in each format is estimated or measured, and taken to add up. From the
    least damage on, those steps to smaller formats are taken that do the least damage for what
    they save. The same arguments give the same result.

    Args:
        model: float or quantized; left unchanged. Fuse it first.
        batches: to calibrate each format and to measure damage on; see
            :func:`torchq.graph.call_arguments`. They are kept in memory.
        budget: what the result may cost, by kind: ``"mean_bits"`` of the weights, their
            ``"bytes"``, or ``"bit_operations"`` (multiplications for one input, times the widths
            of both factors). Several bounds hold together.
        formats: what a layer may have: ``"w4a8"`` (4-bit weights, 8-bit inputs), ``"w4"``
            (weights alone), recipes such as ``"fp8"``, widths, pairs of widths, configs, and
            ``"float"``.
        metric: ``"auto"`` estimates the divergence of class probabilities from gradients, and
            measures the noise of models without classes; or a metric of
            :func:`torchq.sensitivity`.
        groups: patterns of layers that must have one format together. Layers that read one tensor
            always do, such as the projections of attention.
        fixed: pattern -> the format of the layers that it matches, such as
            ``{"conv1": "w8a8"}``.
        exclude: layers that stay float and do not count.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        progress: show bars.

    Returns:
        A config for :func:`torchq.quantize_`, with the choices and the front; ``print`` it.

    Raises:
        ConfigError: An argument is invalid, or no choice is within the budget.
        CalibrationError: There was no batch.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> config = torchq.mixed_precision(
        ...     model, [torch.randn(8, 4)], budget={"mean_bits": 7}, formats=[8, 4], progress=False
        ... )
        >>> config.costs["mean_bits"] <= 7
        True
    """
    check_budget(budget)
    check_formats(formats)
    kept = kept_batches(_WHERE, batches)
    base = copy_module(unwrapped(model)).eval()
    restore_(base)
    chosen = dict(map(_named, (*formats, *(fixed or {}).values())))
    candidates = [
        make_candidate(base, choice, kept, exclude, forward)
        for choice in chosen.values()
        if choice != FLOAT
    ]
    names = list(dict.fromkeys(name for c in candidates for name in c.decisions))
    found, metric_name = _damages(base, candidates, names, kept, metric, (forward, progress))
    broken = next((key for key, damage in found.items() if math.isnan(damage)), None)
    if broken is not None:
        raise CalibrationError(
            f"{_WHERE}: got a damage of NaN for {broken[0]} in {broken[1]}; expected a number. The "
            "output holds NaN or infinity: torchq.layer_errors names the layer it comes from"
        )
    run = partial(call_model, base, kept[0], forward=forward, device=device_of(base))
    facts = gather_facts(base, names, run, batch_size(kept[0]))
    free = [_named(choice)[0] for choice in formats]
    search = _Search(base, {c.name: c for c in candidates}, list(chosen), free, found, facts)
    search.join(groups, fixed or {})
    return search.config(budget, metric_name)


def _named(choice: FormatChoice) -> tuple[str, FormatChoice]:
    return (FLOAT, FLOAT) if choice == FLOAT else (named_config(choice)[0], choice)


def _damages(
    base: nn.Module,
    candidates: list[Candidate],
    names: list[str],
    batches: list[Any],
    metric: str | Evaluate,
    options: tuple[Forward | None, bool],
) -> tuple[Damages, str]:
    """Return the damages, and the name of the metric; options are forward and progress."""
    if metric in ("auto", "fisher"):
        try:
            return estimated_damages(base, candidates, names, batches, *options), "fisher"
        except ConfigError:
            if metric == "fisher":
                raise
            metric = "sqnr"
    found = measured_damages(candidates, batches, metric, *options)
    return found, metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")


class _Search:
    """Layers in groups, with their damages and costs in each format."""

    def __init__(
        self,
        base: nn.Module,
        candidates: dict[str, Candidate],
        formats: list[str],
        free: list[str],
        damages: Damages,
        facts: dict[str, LayerFacts],
    ) -> None:
        self.base, self.candidates = base, candidates
        self.formats, self.free = formats, free
        self.damages, self.facts = damages, facts
        self.group_of = {name: number for number, name in enumerate(facts)}
        self.forced: dict[str, str] = {}

    def join(
        self,
        groups: Sequence[Sequence[Pattern] | Pattern],
        fixed: Mapping[str, FormatChoice],
    ) -> None:
        """Join layers that must agree, and note those whose format is given."""
        for candidate in self.candidates.values():
            for shared in candidate.shared:
                self._unite([name for name in shared if name in self.group_of])
        # With forward= nothing is shared yet, but the layers read one tensor all the same.
        readers: dict[Any, list[str]] = {}
        for name, facts in self.facts.items():
            for tensor in facts.reads:
                readers.setdefault(tensor, []).append(name)
        for names in readers.values():
            self._unite(names)
        for patterns in groups:
            self._unite(self._matching(patterns))
        for pattern, choice in fixed.items():
            self.forced |= dict.fromkeys(self._matching(pattern), _named(choice)[0])

    def _matching(self, patterns: Sequence[Pattern] | Pattern) -> list[str]:
        if isinstance(patterns, (str, type)) or callable(patterns):
            patterns = (patterns,)
        found = [
            name
            for name in self.facts
            if any(matches(p, (name,), self.base.get_submodule(name)) for p in patterns)
        ]
        if not found:
            raise ConfigError(
                f"{_WHERE}: the patterns {patterns!r} select no layer; expected one of "
                f"{', '.join(list(self.facts)[:8])}, ..."
            )
        return found

    def _unite(self, names: Sequence[str]) -> None:
        old = {self.group_of[name] for name in names}
        for name, number in self.group_of.items():
            if number in old:
                self.group_of[name] = min(old)

    def _decision(self, name: str, format: str) -> Decision | None:
        """Return what a format means for a layer; None where it stays or is float."""
        return None if format == FLOAT else self.candidates[format].decisions.get(name)

    def _damage(self, name: str, format: str) -> float:
        """Return the damage; infinity where the layer cannot have the format."""
        forced = self.forced.get(name)
        if format != forced if forced is not None else format not in self.free:
            return math.inf
        if format == FLOAT:
            return 0.0
        if self._decision(name, format) is None:
            return math.inf
        return self.damages.get((name, format), 0.0)

    def config(self, budget: Mapping[str, float], metric: str) -> MixedPrecision:
        """Solve for the budget, and for others."""
        groups = sorted(set(self.group_of.values()))
        members = [[n for n in self.facts if self.group_of[n] == g] for g in groups]
        for names in members:
            self._check_together(names)
        problem = self._problem(members)
        best = self._point(members, problem.require(budget))
        first = next(iter(budget))
        others = {kind: bound for kind, bound in budget.items() if kind != first}
        front = [self._point(members, s) for s in problem.front(first, others, _POINTS)]
        return MixedPrecision(
            rules=tuple(exact_rule(n, self._decision(n, f)) for n, f in best.formats.items()),
            name="mixed",
            choices=tuple(self._choice(n, f) for n, f in best.formats.items()),
            front=tuple(front),
            budget=dict(budget),
            costs=best.costs,
            damage=best.damage,
            metric=metric,
        )

    def _problem(self, members: list[list[str]]) -> Problem:
        """Return the sums of damages and of costs for each group in each format."""
        total = sum(facts.weights for facts in self.facts.values())
        damages = {(n, f): self._damage(n, f) for n in self.facts for f in self.formats}
        costs = {
            (name, format): costs_of(self.facts[name], self._decision(name, format), total)
            for (name, format), damage in damages.items()
            if math.isfinite(damage)
        }
        return Problem(
            [[sum(damages[n, f] for n in group) for f in self.formats] for group in members],
            {
                kind: [
                    [sum(costs.get((n, f), {}).get(kind, 0.0) for n in group) for f in self.formats]
                    for group in members
                ]
                for kind in BUDGETS
            },
        )

    def _check_together(self, names: list[str]) -> None:
        """Raise ConfigError unless there is a format that all ``names`` can have."""
        if any(all(math.isfinite(self._damage(n, f)) for n in names) for f in self.formats):
            return
        given = {name: self.forced[name] for name in names if name in self.forced}
        raise ConfigError(
            f"{_WHERE}: got no format that suits {', '.join(names)} together, with fixed "
            f"{given!r}; expected one for all of them, as they read one tensor or are in one of "
            "groups="
        )

    def _point(self, members: list[list[str]], solution: Solution) -> FrontPoint:
        chosen = {
            name: self.formats[format]
            for group, format in zip(members, solution.choices, strict=True)
            for name in group
        }
        ordered = {name: chosen[name] for name in self.facts}
        return FrontPoint(solution.costs, solution.damage, ordered)

    def _choice(self, name: str, format: str) -> LayerChoice:
        weight_bits, input_bits = widths_of(self._decision(name, format))
        return LayerChoice(
            name=name,
            format=format,
            damage=self._damage(name, format),
            weights=self.facts[name].weights,
            weight_bits=weight_bits,
            input_bits=input_bits,
            group=self.group_of[name],
        )

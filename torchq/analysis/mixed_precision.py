"""The choice of a format for each layer, under a budget.

A calibrated copy of the model in each format says what damage the format does to a layer. Formats
are then chosen in steps of the least damage for what they save.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import starmap
from typing import Any

import torch
from torch import Tensor, nn

from torchq import recipes, utils
from torchq.analysis.fisher import Disturbance, fisher_costs
from torchq.analysis.metrics import Evaluate, batch_size, plain
from torchq.analysis.sensitivity import sensitivity
from torchq.analysis.solver import Problem
from torchq.config import QuantConfig, Rule
from torchq.errors import CalibrationError, ConfigError
from torchq.graph import Forward, call_model
from torchq.nn import shared_groups
from torchq.swap import Decision, quantize_, restore_
from torchq.workflow.calibrate import calibrate

_WHERE = "mixed_precision"
_POINTS = 12  # budgets that are tried for the front
_FLOAT_BITS = 32
#: The name of the choice that leaves a layer as it is.
FLOAT = "float"
#: Kinds of budget.
BUDGETS = ("mean_bits", "bytes", "bit_operations")

#: A name such as "w4a8", "w4" or "int8", an integer width, or a pair of widths, or a config.
FormatChoice = str | int | tuple[int | None, int | None] | QuantConfig
_WIDTHS = re.compile(r"w(\d+)(?:a(\d+))?")

#: (path of the layer, name of the format) -> damage.
Damages = dict[tuple[str, str], float]


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
            "front": [vars(point) for point in self.front],
        }

    def __str__(self) -> str:
        rows = [("layer", "format", "weights", f"damage ({self.metric})")]
        for c in self.choices:
            rows.append((c.name or "(root)", c.format, f"{c.weights:,}", f"{c.damage:.2e}"))
        costs, asked = (
            ", ".join(f"{kind} {value:.4g}" for kind, value in figures.items())
            for figures in (self.costs, self.budget)
        )
        return utils.table(
            rows, f"budget {asked}; costs {costs}; predicted damage {self.damage:.2e}"
        )


@utils.uncompiled()
def mixed_precision(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    budget: Mapping[str, float],
    formats: Sequence[FormatChoice] = ("w8a8", "w4a8", "w4a4"),
    metric: str | Evaluate = "auto",
    groups: Sequence[Sequence[utils.Pattern] | utils.Pattern] = (),
    fixed: Mapping[str, FormatChoice] | None = None,
    exclude: Sequence[utils.Pattern] | utils.Pattern | None = None,
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
    kept = utils.kept_batches(_WHERE, batches)
    base = utils.copy_module(utils.unwrapped(model)).eval()
    restore_(base)
    chosen = dict(map(_named, (*formats, *(fixed or {}).values())))
    candidates = {
        name: _candidate(base, choice, kept, exclude, forward)
        for name, choice in chosen.items()
        if name != FLOAT
    }
    names = list(dict.fromkeys(name for c in candidates.values() for name in c.decisions))
    options: dict[str, Any] = {"forward": forward, "progress": progress}
    found, metric_name = _damages(base, candidates, kept, metric, options)
    broken = next((key for key, damage in found.items() if math.isnan(damage)), None)
    if broken is not None:
        raise CalibrationError(
            f"{_WHERE}: got a damage of NaN for {broken[0]} in {broken[1]}; expected a number. The "
            "output holds NaN or infinity: torchq.layer_errors names the layer it comes from"
        )
    run = partial(call_model, base, kept[0], forward=forward, device=utils.device_of(base))
    facts = gather_facts(base, names, run, batch_size(kept[0]))
    free = {_named(choice)[0] for choice in formats}
    search = _Search(base, candidates, list(chosen), free, found, facts)
    search.join(groups, fixed or {})
    return search.config(budget, metric_name)


def check_budget(budget: Mapping[str, float]) -> None:
    """Raise ConfigError unless every kind of budget is known and every bound is positive."""
    if not isinstance(budget, Mapping) or not budget:
        text = f"{_WHERE}: got budget {budget!r}; expected a mapping such as {{'mean_bits': 5}}"
        raise ConfigError(text)
    for kind, bound in budget.items():
        if kind not in BUDGETS:
            known = ", ".join(BUDGETS)
            raise ConfigError(f"{_WHERE}: got budget {kind!r}; expected one of {known}")
        if not bound > 0:
            raise ConfigError(f"{_WHERE}: got {kind}={bound!r}; expected a positive number")


def check_formats(choices: Sequence[FormatChoice]) -> None:
    """Raise ConfigError unless every choice is known, and one is a format of integers."""
    if not [name for name, _ in map(_named, choices) if name != FLOAT]:
        raise ConfigError(f"{_WHERE}: got no formats; expected one at least, such as [4, 8]")


def _named(choice: FormatChoice) -> tuple[str, QuantConfig | None]:
    """Return the name and the recipe of a format; None for float."""
    if choice == FLOAT:
        return FLOAT, None
    if isinstance(choice, QuantConfig):
        return choice.name, choice
    if isinstance(choice, str):
        found = _WIDTHS.fullmatch(choice)
        # The recipe called w4a4 has other first and last layers; here a layer has its own format.
        if found is None:
            return choice, recipes.by_name(choice)
        widths = int(found[1]), None if found[2] is None else int(found[2])
    elif isinstance(choice, int):
        widths = choice, choice
    elif isinstance(choice, tuple) and len(choice) == 2:
        widths = choice  # type: ignore[assignment]
    else:
        text = f"{_WHERE}: got format {choice!r}; expected a name such as 'w4a8', a recipe, a "
        text += "width, a pair of widths or a QuantConfig"
        raise ConfigError(text)
    config = recipes.integer(*widths)
    return config.name, config


@dataclass
class LayerFacts:
    """What does not depend on the format: elements of weights, multiplications for one input.

    ``reads`` tells the input of each call from other tensors: it is equal for layers that read one
    tensor, or equal views of it.
    """

    weights: int
    multiplications: float = 0.0
    reads: set[tuple[Any, ...]] = field(default_factory=set)


def gather_facts(
    model: nn.Module, names: list[str], run: Callable[[], Any], size: int
) -> dict[str, LayerFacts]:
    """Return the facts of layers of a float model; ``run`` runs it on ``size`` inputs."""
    # The module imports Triton, which `import torchq` must not do.
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    layers = {name: model.get_submodule(name) for name in names}
    facts = {name: LayerFacts(_weight_count(layer)) for name, layer in layers.items()}
    alive: list[Tensor] = []  # An address is unique only as long as its tensor lives.
    started: list[int] = []
    counter = FlopCounterMode(display=False)

    def enter(name: str, args: Any, kwargs: Any, _: None) -> None:
        started.append(counter.get_total_flops())
        if args and isinstance(args[0], Tensor) and args[0].numel():
            x = args[0]
            version = 0 if x.is_inference() else x._version
            facts[name].reads.add((x.data_ptr(), tuple(x.shape), x.stride(), version))
            alive.append(x)

    def leave(name: str, args: Any, kwargs: Any, output: Any) -> None:
        flops = counter.get_total_flops() - started.pop()
        facts[name].multiplications += flops / 2 / max(size, 1)

    with (
        torch.no_grad(),
        counter,
        utils.watching(
            ((layer, partial(enter, name)) for name, layer in layers.items()), before=True
        ),
        utils.watching((layer, partial(leave, name)) for name, layer in layers.items()),
    ):
        run()
    return facts


def _weight_count(module: nn.Module) -> int:
    own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    return sum(p.numel() for p in own or module.parameters() if p.dim() > 1)


def _widths(decision: Decision | None) -> tuple[int, int]:
    """Return the bits of the weight and of the input of a layer; without a decision it is float."""
    slots = (None, None) if decision is None else (decision.weight, decision.input)
    weight, input = (_FLOAT_BITS if slot is None else slot.format.bits for slot in slots)
    return weight, input


def _costs(facts: LayerFacts, decision: Decision | None, total_weights: int) -> dict[str, float]:
    """Return the cost of one layer by kind of budget, beside the weights of all layers."""
    weight_bits, input_bits = _widths(decision)
    return {
        "mean_bits": facts.weights * weight_bits / max(total_weights, 1),
        "bytes": facts.weights * weight_bits / 8,
        "bit_operations": facts.multiplications * weight_bits * input_bits,
    }


@dataclass(frozen=True)
class _Candidate:
    """A calibrated copy of the model in one format; groups in ``shared`` share a quantizer."""

    model: nn.Module
    decisions: dict[str, Decision]
    shared: list[list[str]]


def _candidate(
    model: nn.Module,
    config: QuantConfig | None,
    batches: Sequence[Any],
    exclude: Sequence[utils.Pattern] | utils.Pattern | None,
    forward: Forward | None,
) -> _Candidate:
    """Return a calibrated copy of a float model in one format."""
    quantized = utils.copy_module(model)
    example = None if forward is not None else batches[0]
    report = quantize_(quantized, config, exclude=exclude, example=example, progress=False)
    options: dict[str, Any] = {"forward": forward, "correct": False, "progress": False}
    calibrate(quantized, batches, on_unseen="dynamic", **options)
    decisions = {d.name: d for d in report.replaced if d.input or d.weight}
    shared = [[path.rpartition(".")[0] for path in g] for g in shared_groups(quantized)]
    return _Candidate(quantized, decisions, shared)


def _damages(
    base: nn.Module,
    candidates: dict[str, _Candidate],
    batches: list[Any],
    metric: str | Evaluate,
    options: dict[str, Any],
) -> tuple[Damages, str]:
    """Return the damage that each layer does when it alone is quantized, and the metric's name.

    Signal to noise ratios become shares of noise, which add up over layers, and the user's
    figures become losses.
    """
    if metric in ("auto", "fisher"):
        try:
            return _estimated(base, candidates, batches, **options), "fisher"
        except ConfigError:
            if metric == "fisher":
                raise
            metric = "sqnr"
    found: Damages = {}
    for format, candidate in candidates.items():
        report = sensitivity(candidate.model, batches, metric, **options)
        for row in report.rows:
            if report.unit == "dB":
                damage = 10 ** (-row.value / 10)
            else:
                damage = max((report.reference or 0.0) - row.value, 0.0)
            found[row.name, format] = math.inf if math.isnan(damage) else damage
    return found, metric if isinstance(metric, str) else getattr(metric, "__name__", "metric")


def _run_alone(module: nn.Module, args: Any, kwargs: Any) -> Any:
    return module.forward(*args, **kwargs)


def _estimated(
    model: nn.Module,
    candidates: dict[str, _Candidate],
    batches: Sequence[Any],
    forward: Forward | None,
    progress: bool,
) -> Damages:
    """Return the estimates from gradients, for all layers of a float model and formats together."""
    disturbances = []
    for format, candidate in candidates.items():
        for name in candidate.decisions:
            run = partial(_run_alone, candidate.model.get_submodule(name))
            disturbances.append(Disturbance((name, format), model.get_submodule(name), run))
    call = partial(call_model, model, forward=forward, device=utils.device_of(model))
    shown = utils.progress_bar(batches, description="estimate damage", enabled=progress)
    return fisher_costs(call, shown, disturbances)


@dataclass
class _Search:
    """Layers in groups, with their damages and costs in each format."""

    base: nn.Module
    candidates: dict[str, _Candidate]
    formats: list[str]
    free: set[str]
    damages: Damages
    facts: dict[str, LayerFacts]
    forced: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.group_of = {name: number for number, name in enumerate(self.facts)}

    def join(self, groups: Sequence[Any], fixed: Mapping[str, FormatChoice]) -> None:
        """Join layers that must agree, and note those whose format is given."""
        for candidate in self.candidates.values():
            for shared in candidate.shared:
                self._unite(shared)
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

    def _matching(self, patterns: Sequence[utils.Pattern] | utils.Pattern) -> list[str]:
        if isinstance(patterns, (str, type)) or callable(patterns):
            patterns = (patterns,)
        found = [
            name
            for name in self.facts
            if any(utils.matches(p, (name,), self.base.get_submodule(name)) for p in patterns)
        ]
        if not found:
            text = f"{_WHERE}: the patterns {patterns!r} select no layer; expected one of "
            text += f"{', '.join(list(self.facts)[:8])}, ..."
            raise ConfigError(text)
        return found

    def _unite(self, names: Sequence[str]) -> None:
        old = {self.group_of[name] for name in names if name in self.group_of}
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
        members: dict[int, list[str]] = {}
        for name, group in self.group_of.items():
            members.setdefault(group, []).append(name)
        for names in members.values():
            self._check_together(names)
        groups = [members[number] for number in sorted(members)]
        problem = self._problem(groups)
        best = self._point(groups, problem, problem.require(budget))
        front = [self._point(groups, problem, c) for c in problem.front(budget, _POINTS)]
        return MixedPrecision(
            rules=tuple(_exact_rule(n, self._decision(n, f)) for n, f in best.formats.items()),
            name="mixed",
            choices=tuple(starmap(self._choice, best.formats.items())),
            front=tuple(front),
            budget=dict(budget),
            costs=best.costs,
            damage=best.damage,
            metric=metric,
        )

    def _problem(self, groups: list[list[str]]) -> Problem:
        """Return the sums of damages and of costs for each group in each format."""
        total = sum(facts.weights for facts in self.facts.values())
        found = {(n, f): self._damage(n, f) for n in self.facts for f in self.formats}
        costs = {
            (name, format): _costs(self.facts[name], self._decision(name, format), total)
            for (name, format), damage in found.items()
        }

        def summed(figures: Mapping[tuple[str, str], float]) -> Tensor:
            rows = [[sum(figures[n, f] for n in names) for f in self.formats] for names in groups]
            return torch.tensor(rows, dtype=torch.float64, device="cpu")

        by_kind = {k: summed({key: cost[k] for key, cost in costs.items()}) for k in BUDGETS}
        return Problem(summed(found), by_kind)

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

    def _point(
        self, groups: list[list[str]], problem: Problem, choices: Sequence[int]
    ) -> FrontPoint:
        chosen = {
            name: self.formats[format]
            for names, format in zip(groups, choices, strict=True)
            for name in names
        }
        damage, costs = problem.figures(choices)
        return FrontPoint(costs, damage, {name: chosen[name] for name in self.facts})

    def _choice(self, name: str, format: str) -> LayerChoice:
        weights, widths = self.facts[name].weights, _widths(self._decision(name, format))
        figures = (self._damage(name, format), weights, *widths, self.group_of[name])
        return LayerChoice(name, format, *figures)


def _exact_rule(name: str, decision: Decision | None) -> Rule:
    """Return a rule for one module alone; without a decision it stays float."""
    plain = name and not set(name) & set("*?[")
    pattern = name if plain else f"re:^{re.escape(name)}$"
    if decision is None:
        return Rule(pattern, skip=True)
    return Rule(pattern, input=decision.input, weight=decision.weight)

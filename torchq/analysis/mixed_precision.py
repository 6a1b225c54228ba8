"""The choice of a format for each layer, under a budget.

A calibrated copy of the model in each format says what damage the format does to a layer. Formats
are then chosen in steps of the least damage for what they save.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq import recipes, utils
from torchq.analysis.outputs import Evaluate, batch_size, plain
from torchq.analysis.sensitivity import Disturbance, fisher_costs, sensitivity
from torchq.config import QuantConfig, Rule
from torchq.errors import CalibrationError, ConfigError
from torchq.graph import Forward, call_model, version_of
from torchq.nn import shared_groups
from torchq.swap import Decision, quantize_, restore_
from torchq.workflow.calibrate import calibrate

_WHERE = "mixed_precision"
_POINTS = 12  # budgets that are tried for the front
_FLOAT_BITS = 32
#: Share of a bound that may be taken; sums of many numbers are rounded.
_ALLOWED = 1 + 1e-9
#: The name of the choice that leaves a layer as it is.
FLOAT = "float"
#: Kinds of budget.
BUDGETS = ("mean_bits", "bytes", "bit_operations")

#: A name such as "w4a8", "w4" or "int8", an integer width, or a config.
FormatChoice = str | int | QuantConfig
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
            rows.append(
                (c.name or "(root)", c.format, f"{c.weights:,}", f"{c.damage:.2e}")
            )
        costs = _listed(self.costs)
        budget = _listed(self.budget)
        return utils.table(
            rows, f"budget {budget}; costs {costs}; predicted damage {self.damage:.2e}"
        )


def _listed(figures: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {value:.4g}" for kind, value in figures.items())


@utils.uncompiled()
def mixed_precision(
    model: nn.Module,
    batches: Iterable[object],
    *,
    budget: Mapping[str, float],
    formats: Sequence[FormatChoice] = ("w8a8", "w4a8", "w4a4"),
    metric: str | Evaluate = "auto",
    exclude: Sequence[utils.Pattern] | utils.Pattern | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> MixedPrecision:
    """Choose a format for each layer, so that the damage is least within a budget.

    The damage of each layer in each format is estimated or measured, and taken to add up. Layers
    that read one tensor have one format, such as the projections of attention. From the least
    damage on, those steps to smaller formats are taken that do the least damage for what
    they save. The same arguments give the same result.

    Args:
        model: float or quantized; left unchanged. Fuse it first.
        batches: to calibrate each format and to measure damage on; see
            :func:`torchq.graph.call_arguments`. They are kept in memory.
        budget: what the result may cost, by kind: ``"mean_bits"`` of the weights, their
            ``"bytes"``, or ``"bit_operations"`` (multiplications for one input, times the widths
            of both factors). Several bounds hold together.
        formats: what a layer may have: ``"w4a8"`` (4-bit weights, 8-bit inputs), ``"w4"``
            (weights alone), recipes such as ``"fp8"``, widths, configs, and ``"float"``.
        metric: ``"auto"`` estimates the divergence of class probabilities from gradients, and
            measures the noise of models without classes; or a metric of
            :func:`torchq.sensitivity`.
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
    sample_batches = utils.kept_batches(_WHERE, batches)
    base = utils.copy_module(utils.unwrapped(utils.network_of(model))).eval()
    restore_(base)
    chosen = dict(map(_named, formats))
    candidates = {
        name: _candidate(base, choice, sample_batches, exclude, forward)
        for name, choice in chosen.items()
        if name != FLOAT
    }
    names = list(
        dict.fromkeys(name for c in candidates.values() for name in c.decisions)
    )
    options: dict[str, Any] = {"forward": forward, "progress": progress}
    damages, metric_name = _damages(base, candidates, sample_batches, metric, options)
    broken = next((key for key, damage in damages.items() if math.isnan(damage)), None)
    if broken is not None:
        raise CalibrationError(
            f"{_WHERE}: got a damage of NaN for {broken[0]} in {broken[1]}; expected a number. The "
            "output holds NaN or infinity: torchq.layer_errors names the layer it comes from"
        )
    run = partial(
        call_model,
        base,
        sample_batches[0],
        forward=forward,
        device=utils.device_of(base),
    )
    facts = gather_facts(base, names, run, batch_size(sample_batches[0]))
    return _Search(candidates, list(chosen), damages, facts).config(budget, metric_name)


def check_budget(budget: Mapping[str, float]) -> None:
    """Raise ConfigError unless every kind of budget is known and every bound is positive."""
    if not isinstance(budget, Mapping) or not budget:
        raise ConfigError(
            f"{_WHERE}: got budget {budget!r}; expected a mapping such as {{'mean_bits': 5}}"
        )
    for kind, bound in budget.items():
        if kind not in BUDGETS:
            kinds = ", ".join(BUDGETS)
            raise ConfigError(f"{_WHERE}: got budget {kind!r}; expected one of {kinds}")
        if not bound > 0:
            raise ConfigError(
                f"{_WHERE}: got {kind}={bound!r}; expected a positive number"
            )


def check_formats(choices: Sequence[FormatChoice]) -> None:
    """Raise ConfigError unless every choice is known, and one is a format of integers."""
    if not [name for name, _ in map(_named, choices) if name != FLOAT]:
        raise ConfigError(
            f"{_WHERE}: got no formats; expected one at least, such as [4, 8]"
        )


def _named(choice: FormatChoice) -> tuple[str, QuantConfig | None]:
    """Return the name and the recipe of a format; None for float."""
    if choice == FLOAT:
        return FLOAT, None
    if isinstance(choice, QuantConfig):
        return choice.name, choice
    if isinstance(choice, str):
        width_match = _WIDTHS.fullmatch(choice)
        # The recipe called w4a4 has other first and last layers; here a layer has its own format.
        if width_match is None:
            return choice, recipes.by_name(choice)
        widths = (
            int(width_match[1]),
            None if width_match[2] is None else int(width_match[2]),
        )
    elif isinstance(choice, int):
        widths = choice, choice
    else:
        raise ConfigError(
            f"{_WHERE}: got format {choice!r}; expected a name such as 'w4a8', a recipe, a "
            "width or a QuantConfig"
        )
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
    reads: set[tuple[object, ...]] = field(default_factory=set)


def gather_facts(
    model: nn.Module, names: list[str], run: Callable[[], object], size: int
) -> dict[str, LayerFacts]:
    """Return the facts of layers of a float model; ``run`` runs it on ``size`` inputs."""
    layers = {name: model.get_submodule(name) for name in names}
    facts = {name: LayerFacts(_weight_count(layer)) for name, layer in layers.items()}
    alive: list[Tensor] = []  # An address is unique only as long as its tensor lives.
    started: list[int] = []

    def enter(name: str, args: Sequence[object], kwargs: object, _: None) -> None:
        started.append(total())
        if args and isinstance(args[0], Tensor) and args[0].numel():
            x = args[0]
            tensor = (x.data_ptr(), tuple(x.shape), x.stride(), version_of(x))
            facts[name].reads.add(tensor)
            alive.append(x)

    def leave(name: str, args: object, kwargs: object, output: object) -> None:
        flops = total() - started.pop()
        facts[name].multiplications += flops / 2 / max(size, 1)

    with (
        torch.no_grad(),
        utils.counting_operations(model) as total,
        utils.watching(
            ((layer, partial(enter, name)) for name, layer in layers.items()),
            before=True,
        ),
        utils.watching((layer, partial(leave, name)) for name, layer in layers.items()),
    ):
        run()
    return facts


def _weight_count(module: nn.Module) -> int:
    direct_weights = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    return sum(p.numel() for p in direct_weights or module.parameters() if p.dim() > 1)


def _widths(decision: Decision | None) -> tuple[int, int]:
    """Return the bits of the weight and of the input of a layer; without a decision it is float."""
    slots = (None, None) if decision is None else (decision.weight, decision.input)
    weight, input = (
        _FLOAT_BITS if slot is None else slot.format.bits for slot in slots
    )
    return weight, input


def _costs(
    facts: LayerFacts, decision: Decision | None, total_weights: int
) -> dict[str, float]:
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
    batches: Sequence[object],
    exclude: Sequence[utils.Pattern] | utils.Pattern | None,
    forward: Forward | None,
) -> _Candidate:
    """Return a calibrated copy of a float model in one format.

    All formats see what one state of the random numbers draws, as a forward may add noise.
    """
    quantized = utils.copy_module(model)
    example = None if forward is not None else batches[0]
    options: dict[str, Any] = {"forward": forward, "correct": False, "progress": False}
    with utils.random_kept():
        report = quantize_(
            quantized, config, exclude=exclude, example=example, progress=False
        )
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
    damages: Damages = {}
    for format, candidate in candidates.items():
        with utils.random_kept():
            report = sensitivity(candidate.model, batches, metric, **options)
        for name, harm in report.harms().items():
            damages[name, format] = math.inf if math.isnan(harm) else harm
    return damages, metric if isinstance(metric, str) else getattr(
        metric, "__name__", "metric"
    )


def _run_alone(
    module: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> object:
    return module.forward(*args, **kwargs)


def _estimated(
    model: nn.Module,
    candidates: dict[str, _Candidate],
    batches: Sequence[object],
    forward: Forward | None,
    progress: bool,
) -> Damages:
    """Return the estimates from gradients, for all layers of a float model and formats together."""
    disturbances = []
    for format, candidate in candidates.items():
        for name in candidate.decisions:
            run = partial(_run_alone, candidate.model.get_submodule(name))
            disturbances.append(
                Disturbance((name, format), model.get_submodule(name), run)
            )
    call = partial(call_model, model, forward=forward, device=utils.device_of(model))
    shown = utils.progress_bar(batches, description="estimate damage", enabled=progress)
    with utils.random_kept():
        return fisher_costs(call, shown, disturbances)


@dataclass(frozen=True)
class Problem:
    """Damages, and costs by kind of budget, (groups, formats) each.

    A damage of infinity rules a format out.
    """

    damages: Tensor
    costs: Mapping[str, Tensor]

    def figures(self, choices: Sequence[int]) -> tuple[float, dict[str, float]]:
        """Return the damage and the costs of a format for each group."""
        place = torch.arange(len(choices)), list(choices)
        costs = {kind: float(rows[place].sum()) for kind, rows in self.costs.items()}
        return float(self.damages[place].sum()), costs

    def bounds(self, kind: str) -> tuple[float, float]:
        """Return the least and the greatest cost that is possible."""
        allowed = self.damages.isfinite()
        costs = self.costs[kind]
        least = costs.where(allowed, math.inf).amin(1)
        most = costs.where(allowed, -math.inf).amax(1)
        return float(least.sum()), float(most.sum())

    def solve(self, budget: Mapping[str, float]) -> list[int] | None:
        """Return a choice with little damage within a budget; None where none was found.

        From the least damage, and from the least cost, each step takes the change of one group that
        does the least damage for what it saves. Then single changes and pairs of them are made as
        long as they help; the better one of both results counts.
        """
        shares = torch.stack(
            [self.costs[kind] / bound for kind, bound in budget.items()]
        )
        allowed = self.damages.isfinite()
        starts = [_least(self.damages, shares.sum(0))]
        starts.append(_least(shares.amax(0).where(allowed, math.inf), self.damages))
        within = [_within(self.damages, shares, start) for start in starts]
        improved = [
            _improved(self.damages, shares, choice) for choice in within if choice
        ]
        return min(improved, key=lambda choice: self.figures(choice)[0], default=None)

    def front(self, budget: Mapping[str, float], count: int) -> list[list[int]]:
        """Return choices that no other one beats in both damage and cost, the cheapest first.

        ``count`` bounds of the first kind of budget are tried, between the least and the greatest
        possible cost; the others hold as they are.
        """
        kind = next(iter(budget))
        low, high = self.bounds(kind)
        steps = range(count) if low > 0 else []
        tried = [low * (high / low) ** (i / (count - 1)) for i in steps] or [high]
        choices: list[list[int]] = []
        for bound in tried:
            choice = self.solve({**budget, kind: max(bound, 1e-30) * _ALLOWED})
            damages = [
                self.figures(c)[0] for c in (choice, *choices[-1:]) if c is not None
            ]
            if choice is not None and (not choices or damages[0] < damages[1]):
                choices.append(choice)
        return choices

    def require(self, budget: Mapping[str, float]) -> list[int]:
        """Return :meth:`solve`; an error names the least that is possible."""
        solution = self.solve(budget)
        if solution is not None:
            return solution
        least = ", ".join(f"{kind}={self.bounds(kind)[0]:.6g}" for kind in budget)
        bounds = ", ".join(f"{kind}={bound:.6g}" for kind, bound in budget.items())
        raise ConfigError(
            f"mixed_precision: got the budget {bounds}; expected at least {least}, the least that "
            "these formats need. Raise the budget or add smaller formats"
        )


def _least(first: Tensor, second: Tensor) -> list[int]:
    """Return for each row the place of the least ``first``, of equals that of the least second."""
    tied = first == first.amin(1, keepdim=True)
    return second.where(tied, math.inf).argmin(1).tolist()


def _changes(table: Tensor, choice: list[int]) -> Tensor:
    """Return what each change of one group adds; the last axis of a table holds the formats."""
    place = torch.tensor(choice, device="cpu").expand(table.shape[:-1]).unsqueeze(-1)
    return table - table.gather(-1, place)


def _sums(shares: Tensor, choice: list[int]) -> Tensor:
    """Return the share of each bound that a choice takes; shape (kinds,)."""
    return shares[:, torch.arange(len(choice)), choice].sum(1)


def _within(damages: Tensor, shares: Tensor, choice: list[int]) -> list[int] | None:
    """Return a choice within all bounds by steps of the least damage for what they save."""
    choice = list(choice)
    while True:
        sums = _sums(shares, choice)
        over = (sums - _ALLOWED).clamp(min=0).sum()
        if over <= 0:
            return choice
        after = (
            (sums[:, None, None] + _changes(shares, choice) - _ALLOWED)
            .clamp(min=0)
            .sum(0)
        )
        saved = over - after
        worse = _changes(damages, choice)
        price = (worse / saved).where((saved > 1e-15) & worse.isfinite(), math.inf)
        group, format = divmod(int(price.argmin()), price.shape[1])
        if not math.isfinite(price[group, format]):
            return None
        choice[group] = format


def _improved(damages: Tensor, shares: Tensor, choice: list[int]) -> list[int]:
    """Return a choice that no change of one or two groups betters within the bounds."""
    choice, (groups, formats) = list(choice), damages.shape
    count = damages.numel()
    owners = torch.arange(groups, device="cpu").repeat_interleave(formats)
    least = -1e-12 * float(damages.where(damages.isfinite(), 0).abs().max())
    while True:
        room = _ALLOWED - _sums(shares, choice)
        worse = _changes(damages, choice).flatten()
        more = _changes(shares, choice).flatten(1)
        fits = (more <= room[:, None]).all(0)
        gain = (worse / more.sum(0).clamp(min=1e-15)).where(fits & (worse < least), 0.0)
        changes = [int(gain.argmin())]
        if not gain.min() < 0:
            fits = ((more[:, :, None] + more[:, None, :]) <= room[:, None, None]).all(0)
            fits &= owners[:, None] != owners[None, :]
            pairs = (worse[:, None] + worse[None, :]).where(fits, math.inf)
            changes = list(divmod(int(pairs.argmin()), count))
            if not pairs.min() < least:
                return choice
        for change in changes:
            choice[change // formats] = change % formats


@dataclass(frozen=True)
class _Search:
    """Layers with their damages and costs in each format."""

    candidates: dict[str, _Candidate]
    formats: list[str]
    damages: Damages
    facts: dict[str, LayerFacts]

    def _groups(self) -> dict[int, list[str]]:
        """Return the layers that have one format together, by the number of the first of them."""
        group_of = {name: number for number, name in enumerate(self.facts)}
        # With forward= nothing is shared yet, but the layers read one tensor all the same.
        readers: dict[object, list[str]] = {}
        for name, facts in self.facts.items():
            for tensor in facts.reads:
                readers.setdefault(tensor, []).append(name)
        shared = [
            names
            for candidate in self.candidates.values()
            for names in candidate.shared
        ]
        for names in (*shared, *readers.values()):
            old = {group_of[name] for name in names if name in group_of}
            group_of |= {
                name: min(old) for name, number in group_of.items() if number in old
            }
        members: dict[int, list[str]] = {}
        for name, number in group_of.items():
            members.setdefault(number, []).append(name)
        return dict(sorted(members.items()))

    def _decision(self, name: str, format: str) -> Decision | None:
        """Return what a format means for a layer; None where it stays or is float."""
        return None if format == FLOAT else self.candidates[format].decisions.get(name)

    def _damage(self, name: str, format: str) -> float:
        """Return the damage; infinity where the layer cannot have the format."""
        if format == FLOAT:
            return 0.0
        if self._decision(name, format) is None:
            return math.inf
        return self.damages.get((name, format), 0.0)

    def config(self, budget: Mapping[str, float], metric: str) -> MixedPrecision:
        """Solve for the budget, and for others."""
        groups = self._groups()
        problem = self._problem(list(groups.values()))
        best = self._point(groups, problem, problem.require(budget))
        front = [
            self._point(groups, problem, c) for c in problem.front(budget, _POINTS)
        ]
        group_of = {name: number for number, names in groups.items() for name in names}
        return MixedPrecision(
            rules=tuple(
                _exact_rule(n, self._decision(n, f)) for n, f in best.formats.items()
            ),
            name="mixed",
            choices=tuple(
                self._choice(n, f, group_of[n]) for n, f in best.formats.items()
            ),
            front=tuple(front),
            budget=dict(budget),
            costs=best.costs,
            damage=best.damage,
            metric=metric,
        )

    def _problem(self, groups: list[list[str]]) -> Problem:
        """Return the sums of damages and of costs for each group in each format."""
        total = sum(facts.weights for facts in self.facts.values())
        damages = {(n, f): self._damage(n, f) for n in self.facts for f in self.formats}
        costs = {
            (name, format): _costs(
                self.facts[name], self._decision(name, format), total
            )
            for name, format in damages
        }

        def summed(figures: Mapping[tuple[str, str], float]) -> Tensor:
            rows = [
                [sum(figures[n, f] for n in names) for f in self.formats]
                for names in groups
            ]
            return torch.tensor(rows, dtype=torch.float64, device="cpu")

        by_kind = {
            k: summed({key: cost[k] for key, cost in costs.items()}) for k in BUDGETS
        }
        return Problem(summed(damages), by_kind)

    def _point(
        self, groups: dict[int, list[str]], problem: Problem, choices: Sequence[int]
    ) -> FrontPoint:
        chosen = {
            name: self.formats[format]
            for names, format in zip(groups.values(), choices, strict=True)
            for name in names
        }
        damage, costs = problem.figures(choices)
        return FrontPoint(costs, damage, {name: chosen[name] for name in self.facts})

    def _choice(self, name: str, format: str, group: int) -> LayerChoice:
        weights = self.facts[name].weights
        widths = _widths(self._decision(name, format))
        return LayerChoice(
            name, format, self._damage(name, format), weights, *widths, group
        )


def _exact_rule(name: str, decision: Decision | None) -> Rule:
    """Return a rule for one module alone; without a decision it stays float."""
    plain = name and not set(name) & set("*?[")
    pattern = name if plain else f"re:^{re.escape(name)}$"
    if decision is None:
        return Rule(pattern, skip=True)
    return Rule(pattern, input=decision.input, weight=decision.weight)

"""The formats that a layer may have: a calibrated copy of the model in each, damage and cost."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq import recipes
from torchq.analysis.fisher import Disturbance, fisher_costs
from torchq.analysis.metrics import Evaluate
from torchq.analysis.sensitivity import sensitivity
from torchq.config import QuantConfig, Rule
from torchq.errors import ConfigError
from torchq.graph import Forward, call_model
from torchq.nn import shared_groups
from torchq.swap import Decision, quantize_
from torchq.utils import Pattern, copy_module, device_of, progress_bar
from torchq.workflow.calibrate import calibrate

#: Kinds of budget.
BUDGETS = ("mean_bits", "bytes", "bit_operations")
FLOAT_BITS = 32


@dataclass
class LayerFacts:
    """What does not depend on the format: elements of weights, multiplications for one input.

    ``reads`` tells the input of each call from other tensors: it is equal for layers that read one
    tensor, or equal views of it.
    """

    weights: int
    multiplications: float = 0.0
    reads: set[tuple[Any, ...]] = field(default_factory=set)


def check_budget(budget: Mapping[str, float]) -> None:
    """Raise ConfigError unless every kind of budget is known and every bound is positive."""
    if not isinstance(budget, Mapping) or not budget:
        raise ConfigError(
            f"mixed_precision: got budget {budget!r}; expected a mapping such as {{'mean_bits': 5}}"
        )
    for kind, bound in budget.items():
        if kind not in BUDGETS:
            raise ConfigError(
                f"mixed_precision: got budget {kind!r}; expected one of {', '.join(BUDGETS)}"
            )
        if not bound > 0:
            raise ConfigError(f"mixed_precision: got {kind}={bound!r}; expected a positive number")


def gather_facts(
    model: nn.Module, names: list[str], run: Callable[[], Any], size: int
) -> dict[str, LayerFacts]:
    """Return the facts of layers of a float model; ``run`` runs it on ``size`` inputs."""
    # The module imports Triton, which `import torchq` must not do.
    from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

    facts = {name: LayerFacts(_weight_count(model.get_submodule(name))) for name in names}
    alive: list[Tensor] = []  # An address is unique only as long as its tensor lives.
    started: list[int] = []
    with torch.no_grad(), FlopCounterMode(display=False) as counter, ExitStack() as stack:
        for name in names:

            def before(module: nn.Module, args: Any, facts: LayerFacts = facts[name]) -> None:
                started.append(counter.get_total_flops())
                if args and isinstance(args[0], Tensor) and args[0].numel():
                    x = args[0]
                    version = 0 if x.is_inference() else x._version
                    facts.reads.add((x.data_ptr(), tuple(x.shape), x.stride(), version))
                    alive.append(x)

            def after(
                module: nn.Module, args: Any, output: Any, facts: LayerFacts = facts[name]
            ) -> None:
                flops = counter.get_total_flops() - started.pop()
                facts.multiplications += flops / 2 / max(size, 1)

            layer = model.get_submodule(name)
            stack.callback(layer.register_forward_pre_hook(before).remove)
            stack.callback(layer.register_forward_hook(after).remove)
        run()
    return facts


def _weight_count(module: nn.Module) -> int:
    own = [p for p in module.parameters(recurse=False) if p.dim() > 1]
    return sum(p.numel() for p in own or module.parameters() if p.dim() > 1)


def widths_of(decision: Decision | None) -> tuple[int, int]:
    """Return the bits of the weight and of the input of a layer; without a decision it is float."""
    weight = None if decision is None else decision.weight
    input = None if decision is None else decision.input
    return (
        FLOAT_BITS if weight is None else weight.format.bits,
        FLOAT_BITS if input is None else input.format.bits,
    )


def costs_of(facts: LayerFacts, decision: Decision | None, total_weights: int) -> dict[str, float]:
    """Return the cost of one layer by kind of budget, beside the weights of all layers."""
    weight_bits, input_bits = widths_of(decision)
    return {
        "mean_bits": facts.weights * weight_bits / max(total_weights, 1),
        "bytes": facts.weights * weight_bits / 8,
        "bit_operations": facts.multiplications * weight_bits * input_bits,
    }


#: The name of the choice that leaves a layer as it is.
FLOAT = "float"

#: A name such as "w4a8", "w4" or "int8", an integer width, or a pair of widths, or a config.
FormatChoice = str | int | tuple[int | None, int | None] | QuantConfig

#: (path of the layer, name of the format) -> damage.
Damages = dict[tuple[str, str], float]

_WIDTHS = re.compile(r"w(\d+)(?:a(\d+))?")


@dataclass(frozen=True)
class Candidate:
    """A calibrated copy of the model in the format ``name``.

    ``shared`` are groups of layers that share a quantizer.
    """

    name: str
    model: nn.Module
    decisions: dict[str, Decision]
    shared: tuple[tuple[str, ...], ...]


def check_formats(choices: Sequence[FormatChoice]) -> None:
    """Raise ConfigError unless every choice is known, and one is a format of integers."""
    found = [named_config(choice) for choice in choices if choice != FLOAT]
    if not found:
        raise ConfigError("mixed_precision: got no formats; expected one at least, such as [4, 8]")


def named_config(choice: FormatChoice) -> tuple[str, QuantConfig]:
    """Return the name and the recipe of a format."""
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
        raise ConfigError(
            f"mixed_precision: got format {choice!r}; expected a name such as 'w4a8', a recipe, a "
            "width, a pair of widths or a QuantConfig"
        )
    config = recipes.integer(*widths)
    return config.name, config


def make_candidate(
    model: nn.Module,
    choice: FormatChoice,
    batches: Sequence[Any],
    exclude: Sequence[Pattern] | Pattern | None,
    forward: Forward | None,
) -> Candidate:
    """Return a calibrated copy of a float model in one format."""
    name, config = named_config(choice)
    quantized = copy_module(model)
    example = None if forward is not None else batches[0]
    report = quantize_(quantized, config, exclude=exclude, example=example, progress=False)
    calibrate(quantized, batches, forward=forward, on_unseen="dynamic", progress=False)
    decisions = {d.name: d for d in report.replaced if d.input or d.weight}
    shared = [tuple(path.rpartition(".")[0] for path in g) for g in shared_groups(quantized)]
    return Candidate(name, quantized, decisions, tuple(shared))


def exact_rule(name: str, decision: Decision | None) -> Rule:
    """Return a rule for one module alone; without a decision it stays float."""
    plain = name and not set(name) & set("*?[")
    pattern = name if plain else f"re:^{re.escape(name)}$"
    if decision is None:
        return Rule(pattern, skip=True)
    return Rule(pattern, input=decision.input, weight=decision.weight)


def estimated_damages(
    model: nn.Module,
    candidates: Sequence[Candidate],
    names: Sequence[str],
    batches: Sequence[Any],
    forward: Forward | None,
    progress: bool,
) -> Damages:
    """Return the estimates from gradients, for all layers of a float model and formats together."""
    disturbances = [
        Disturbance((name, candidate.name), model.get_submodule(name), _alone(candidate, name))
        for name in names
        for candidate in candidates
        if name in candidate.decisions
    ]
    call = partial(call_model, model, forward=forward, device=device_of(model))
    shown = progress_bar(batches, description="estimate damage", enabled=progress)
    return fisher_costs(call, shown, disturbances)


def _alone(candidate: Candidate, name: str) -> Callable[[Any, Any], Any]:
    module = candidate.model.get_submodule(name)
    return lambda args, kwargs: module.forward(*args, **kwargs)


def measured_damages(
    candidates: Sequence[Candidate],
    batches: Iterable[Any],
    metric: str | Evaluate,
    forward: Forward | None,
    progress: bool,
) -> Damages:
    """Return the damage that each layer does when it alone is quantized.

    Signal to noise ratios become shares of noise, which add up over layers, and the user's
    figures become losses.
    """
    found: Damages = {}
    for candidate in candidates:
        report = sensitivity(candidate.model, batches, metric, forward=forward, progress=progress)
        for row in report.rows:
            if report.unit == "dB":
                damage = 10 ** (-row.value / 10)
            else:
                damage = max((report.reference or 0.0) - row.value, 0.0)
            found[row.name, candidate.name] = math.inf if math.isnan(damage) else damage
    return found

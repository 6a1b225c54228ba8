"""Deciding every swap before anything changes: layers, and what a target adds beside them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx, nn

from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.formats import PerTensor
from torchq.nn.calls.functions import CallSite
from torchq.nn.operator_routes import MARK
from torchq.runtime import Placement, Runtime, runtime_of
from torchq.swap.decision import FLOAT_INPUT
from torchq.swap.decisions import (
    Decision,
    SwapReport,
    by_rules,
    check_used,
    config_or_default,
    decide,
    patterns,
    resolve_positions,
)
from torchq.swap.find_operators import MODULES, Operator, find_operators
from torchq.swap.flow import is_depthwise
from torchq.swap.share import measure_work, warn_if_small
from torchq.utils import Pattern, matches, qualified_name, state_kept


@dataclasses.dataclass(frozen=True)
class Placed:
    """What a target adds to a plan: rules in front, operators, and what it leaves float."""

    config: QuantConfig
    operators: tuple[tuple[Operator, Decision], ...]
    skipped: tuple[Decision, ...]


def plan_placement(
    model: nn.Module,
    config: QuantConfig,
    target: Runtime,
    placement: Placement,
    include: tuple[Pattern, ...],
    example: Any = None,
) -> Placed:
    """Decide which operators a target wants quantized.

    Before: ``config`` says how activations are quantized. After: it has the target's rules in
    front, so that its own rules win, and every operator of the kinds that the target names has a
    decision.
    """
    descriptor = _activation_descriptor(config, target)
    if descriptor is None:
        return Placed(config, (), ())
    patterns = [f"type:{qualified_name(MODULES[kind])}" for kind in sorted(placement.operators)]
    rules = [
        Rule(pattern, input=descriptor, optional=True)
        for pattern in (*patterns, *placement.modules)
    ]
    config = dataclasses.replace(config, rules=(*rules, *config.rules))
    found, untraceable = find_operators(model, placement.operators, example)
    operators = [
        operator
        for operator in found
        if operator.kind in ("matmul", "attention") or _has_convolution(operator.owner)
    ]
    decisions = [
        (operator, by_rules(operator.names, operator.module(), config, include))
        for operator in operators
    ]
    skipped = [decision for _, decision in decisions if decision.reason]
    skipped += [
        Decision(
            u.owner_names,
            u.owner,
            type(u.owner),
            reason=f"{u.reason}; its operators stay float. {_WRITE}",
        )
        for u in untraceable
    ]
    chosen = tuple((operator, d) for operator, d in decisions if not d.reason)
    return Placed(config, chosen, tuple(skipped))


_CONVOLUTIONS = (
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
)


def _has_convolution(module: nn.Module) -> bool:
    return any(isinstance(part, _CONVOLUTIONS) for part in module.modules())


_WRITE = (
    "Let a run show them: pass example=... (its source must be readable), or write "
    "torchq.nn.QuantAdd() and the like in it"
)


def _activation_descriptor(config: QuantConfig, target: Runtime) -> QuantDescriptor | None:
    """Return how the config quantizes activations, at 8 bits at least; None if it does not."""
    found = next((rule.input for rule in config.rules if rule.input is not None), None)
    if found is None:
        return None
    if found.dynamic or found.granularity != PerTensor():
        raise ConfigError(
            f"target {target.name}: the config quantizes activations as {found}; "
            "expected a fixed range per tensor"
        )
    narrow = isinstance(found.num_bits, int) and found.num_bits < 8
    return found.replace(num_bits=8, name=None) if narrow else found.replace(name=None)


def adapt_to_target(
    decisions: Sequence[Decision], target: Runtime, placement: Placement
) -> tuple[Decision, ...]:
    """Return the decisions without what the integer kernels of a target cannot take.

    Before: every layer is quantized as the rules say. After: inputs are float where the target
    has no integer kernel, with a note in the report, and weights have one scale where its kernels
    take no more.
    """
    return tuple(_adapted(decision, target, placement) for decision in decisions)


def _adapted(decision: Decision, target: Runtime, placement: Placement) -> Decision:
    def selected(patterns: tuple[str, ...]) -> bool:
        return any(matches(pattern, decision.names, decision.module) for pattern in patterns)

    if decision.reason:
        return decision
    module, is_named = decision.module, decision.rule in decision.names
    if is_depthwise(module) and module.groups < placement.narrow_depthwise and not is_named:
        reason = f"{target.name} runs {module.groups} channels faster in float"
        return dataclasses.replace(decision, reason=reason, input=None, weight=None)
    if selected(placement.float_inputs):
        if decision.weight is None:
            reason = f"{target.name} has no integer kernel for it"
            return dataclasses.replace(decision, reason=reason)
        note = f"{FLOAT_INPUT}, as {target.name} has no integer kernel for it"
        decision = dataclasses.replace(decision, input=None, note=note)
    weight = decision.weight
    if weight is not None and weight.axis is not None and selected(placement.per_tensor_weights):
        decision = dataclasses.replace(decision, weight=weight.replace(axis=None, name=None))
    return decision


def plan(
    model: nn.Module,
    config: QuantConfig | None = None,
    *,
    include: Sequence[Pattern] | Pattern | None = None,
    exclude: Sequence[Pattern] | Pattern | None = None,
    target: str | Runtime | None = None,
    example: Any = None,
) -> SwapReport:
    """Decide what :func:`quantize_` would do; nothing is changed.

    Args:
        model: any module; a bare layer too.
        config: the rules; default the recipe of the target, :func:`torchq.recipes.int8` without
            one.
        include: only modules that match one of these patterns.
        exclude: no module that matches one of these patterns.
        target: also place quantizers where this runtime wants them; one of
            :func:`torchq.targets`, or a :class:`torchq.runtimes.Runtime`. Additions,
            concatenations and the like in the forward of a module become children of it, named
            ``quant_add``, ``quant_cat_1``, ...
        example: the arguments for one call of the model; see
            :func:`torchq.graph.call_arguments`. The model runs once on it, which shows the
            operators of forwards that cannot be traced, and the function calls with weights in
            every forward. Without it these calls are found where a forward passes the weight of a
            child to a function.

    Returns:
        Every decision with the rule that made it; ``print`` it for a dry run. Its last line says
        how much is quantized: of the multiply-adds of the example, or of the weights of layers
        without one. Below a third of what was not excluded, a warning names the reasons.

    Raises:
        InputError: ``config`` is no QuantConfig.
        ConfigError: A pattern of ``include`` or ``exclude``, or a rule that is not ``optional``,
            selects no module that could be quantized; or nothing at all would be quantized; or
            the model is a program of torch.export.
    """
    report = decide_all(
        model, config, include=include, exclude=exclude, target=target, example=example
    )
    report = replace(report, work=measure_work(model, example))
    warn_if_small(model, report.share)
    return report


def decide_all(
    model: nn.Module,
    config: QuantConfig | None,
    *,
    include: Sequence[Pattern] | Pattern | None = None,
    exclude: Sequence[Pattern] | Pattern | None = None,
    target: str | Runtime | None = None,
    example: Any = None,
) -> SwapReport:
    """Return what :func:`plan` does, without the work of the model."""
    runtime = runtime_of(target)
    config = config_or_default(config, runtime)
    _refuse_programs(model)
    wanted = patterns(include)
    config = config.with_rules(*(Rule(pattern, skip=True) for pattern in patterns(exclude)))
    with state_kept(model):
        config = resolve_positions(model, config, example=example)
        if runtime is None or runtime.placement is None:
            decisions = decide(model, config, wanted, example=example)
            report = SwapReport(config, decisions, target=runtime)
        else:
            report = _plan_for_target(model, config, wanted, runtime, runtime.placement, example)
    check_used(model, report.config, wanted, report.decisions)
    return report


def _refuse_programs(model: nn.Module) -> None:
    """Raise ConfigError for a program of torch.export, which has no layers left."""
    # Such a module refuses to change its mode by methods of its own.
    if isinstance(model, fx.GraphModule) and "eval" in vars(model):
        raise ConfigError(
            f"{qualified_name(type(model))}: got a program of torch.export, whose layers are calls "
            "of operators; expected the model that was exported. Quantize it, then export it"
        )


def _plan_for_target(
    model: nn.Module,
    config: QuantConfig,
    include: tuple[Pattern, ...],
    target: Runtime,
    placement: Placement,
    example: Any,
) -> SwapReport:
    placed = plan_placement(model, config, target, placement, include, example)
    rewritten = frozenset(id(operator.owner) for operator, _ in placed.operators)
    decisions = decide(model, placed.config, include, example=example, rewritten=rewritten)
    layers = adapt_to_target(decisions, target, placement)
    calls = {id(d.module): d.calls for d in layers if d.calls}
    reasons = [_beside_calls(o, calls.get(id(o.owner), ())) for o, _ in placed.operators]
    found = list(zip(placed.operators, reasons, strict=True))
    operators = tuple(pair for pair, reason in found if not reason)
    float_operators = (replace(d, reason=reason) for (_, d), reason in found if reason)
    skipped = (*float_operators, *placed.skipped)
    every = (*layers, *(d for _, d in operators), *skipped)
    return SwapReport(placed.config, every, operators, target)


def _beside_calls(operator: Operator, calls: Sequence[CallSite]) -> str:
    """Return why an operator stays float beside quantized function calls; "" if it need not."""
    if calls and not operator.site.startswith(MARK):
        return (
            "its module keeps its own forward, in which function calls are quantized, and the "
            "source of that cannot be rewritten"
        )
    # Their calls are counted, and a quantized operator makes such calls too.
    is_product = operator.kind in ("matmul", "attention")
    if is_product and any(site.kind == "matmul" and not site.weight for site in calls):
        return "its forward computes the weight of a matmul, which is quantized"
    return ""

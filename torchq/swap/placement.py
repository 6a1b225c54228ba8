"""What a target adds to the rules: operators that become modules, and layers that stay float."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn
from torch.nn.modules.conv import _ConvNd

from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.formats import PerTensor
from torchq.nn.calls.find import FoundCalls
from torchq.runtime import Placement, Runtime
from torchq.swap.decisions import by_rules, decide
from torchq.swap.draft import Draft
from torchq.swap.find_operators import MODULES, Operator, find_operators
from torchq.swap.passes import is_depthwise
from torchq.swap.plan import FLOAT_INPUT
from torchq.utils import Pattern, matches, qualified_name


@dataclass(frozen=True)
class Placed:
    """What a target adds to a plan: rules in front, operators, and what it leaves float."""

    config: QuantConfig
    operators: tuple[tuple[Operator, Draft], ...]
    skipped: tuple[Draft, ...]


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
    config = replace(config, rules=(*rules, *config.rules))
    found, untraceable = find_operators(model, placement.operators, example)
    decisions = [
        (operator, by_rules(operator.names, operator.module(), config, include))
        for operator in found
        if operator.kind in ("matmul", "attention") or _has_convolution(operator.owner)
    ]
    skipped = [decision for _, decision in decisions if decision.reason]
    for u in untraceable:
        reason = f"{u.reason}; its operators stay float. {_WRITE}"
        skipped.append(Draft(u.owner_names, u.owner, type(u.owner), reason=reason))
    chosen = tuple((operator, d) for operator, d in decisions if not d.reason)
    return Placed(config, chosen, tuple(skipped))


def _has_convolution(module: nn.Module) -> bool:
    return any(isinstance(part, _ConvNd) for part in module.modules())


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
    if isinstance(found.num_bits, int) and found.num_bits < 8:
        # Whether few bits choose their sign says nothing about the form of eight.
        unsigned = False if found.unsigned == "auto" else found.unsigned
        return found.replace(num_bits=8, unsigned=unsigned, name=None)
    return found.replace(name=None)


def adapt_to_target(
    decisions: Sequence[Draft], target: Runtime, placement: Placement
) -> tuple[Draft, ...]:
    """Return the decisions without what the integer kernels of a target cannot take.

    Before: every layer is quantized as the rules say. After: inputs are float where the target
    has no integer kernel, with a note in the report, and weights have one scale where its kernels
    take no more.
    """
    return tuple(_adapted(decision, target, placement) for decision in decisions)


def _adapted(decision: Draft, target: Runtime, placement: Placement) -> Draft:
    """Return one decision as :func:`adapt_to_target` does."""

    def selected(patterns: tuple[str, ...]) -> bool:
        return any(matches(pattern, decision.names, decision.module) for pattern in patterns)

    if decision.reason:
        return decision
    module, is_named = decision.module, decision.rule in decision.names
    if is_depthwise(module) and module.groups < placement.narrow_depthwise and not is_named:
        reason = f"{target.name} runs {module.groups} channels faster in float"
        return replace(decision, reason=reason, input=None, weight=None)
    if selected(placement.float_inputs):
        reason = f"{target.name} has no integer kernel for it"
        if decision.weight is None:
            return replace(decision, reason=reason)
        decision = replace(decision, input=None, note=f"{FLOAT_INPUT}, as {reason}")
    weight = decision.weight
    if weight is not None and weight.axis is not None and selected(placement.per_tensor_weights):
        decision = replace(decision, weight=weight.replace(axis=None, name=None))
    return decision


def decide_for_target(
    model: nn.Module,
    config: QuantConfig,
    include: tuple[Pattern, ...],
    target: Runtime,
    placement: Placement,
    example: Any,
    calls: Mapping[int, FoundCalls] | None,
) -> tuple[QuantConfig, tuple[Draft, ...], tuple[tuple[Operator, Draft], ...]]:
    """Return the rules with those of a target, every decision, and those about operators."""
    placed = plan_placement(model, config, target, placement, include, example)
    rewritten = frozenset(id(operator.owner) for operator, _ in placed.operators)
    decisions = decide(model, placed.config, include, found=calls, rewritten=rewritten)
    layers = adapt_to_target(decisions, target, placement)
    sites = {id(d.module): d.calls for d in layers if d.calls}
    operators, skipped = [], []
    for operator, draft in placed.operators:
        own = sites.get(id(operator.owner), ())
        if operator.site in {call.site for call in own if not call.is_unseen}:
            skipped.append(replace(draft, reason=_BESIDE_CALL))
        else:
            operators.append((operator, draft))
    rows = (*layers, *(draft for _, draft in operators), *skipped, *placed.skipped)
    return placed.config, rows, tuple(operators)


_BESIDE_CALL = "its operand is a weight, and the call is quantized as that of a layer"

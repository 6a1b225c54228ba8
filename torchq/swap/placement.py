"""What a target adds to the rules: operators that become modules."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.formats import PerTensor
from torchq.nn.calls.find import ATTENTION_OUTSIDE, Seen
from torchq.runtime import Placement, Runtime
from torchq.swap.decisions import Draft, Rules, decide
from torchq.swap.find_operators import (
    MODULES,
    PRODUCTS,
    OperatorSite,
    find_operators,
    has_convolution,
)
from torchq.utils import qualified_name


def decide_for_target(
    model: nn.Module,
    rules: Rules,
    target: Runtime,
    placement: Placement,
    seen: Seen | None,
) -> tuple[Rules, tuple[Draft, ...], tuple[tuple[OperatorSite, Draft], ...]]:
    """Return the rules with those of a target, every decision, and those about operators.

    Before: the rules say how activations are quantized. After: those of the target are in front, so
    that the user's own win, and every operator of the kinds that the target names has a decision.
    """
    rules, pairs, skipped, rewritten = _placed(model, rules, target, placement, seen)
    layers = decide(model, rules, seen, rewritten)
    sites = {
        id(d.module): {c.site for c in d.calls if not c.is_unseen}
        for d in layers
        if d.calls
    }
    beside = [
        pair for pair in pairs if pair[0].site in sites.get(id(pair[0].owner), ())
    ]
    operators = tuple(pair for pair in pairs if pair not in beside)
    layers, skipped = _said_once(layers, skipped)
    skipped = [*(replace(draft, reason=_BESIDE_CALL) for _, draft in beside), *skipped]
    return rules, (*layers, *(draft for _, draft in operators), *skipped), operators


def _said_once(
    layers: tuple[Draft, ...], skipped: Sequence[Draft]
) -> tuple[tuple[Draft, ...], list[Draft]]:
    """Return decisions in which attention outside of a forward is said once, with what helps."""
    helped = {id(d.module) for d in skipped if d.reason.endswith(_ATTENTION)}
    outside = {
        id(d.module)
        for d in layers
        if id(d.module) in helped and ATTENTION_OUTSIDE in d.reason
    }
    merged = tuple(
        replace(d, reason=f"{d.reason}. {_ATTENTION}") if id(d.module) in outside else d
        for d in layers
    )
    others = [
        d
        for d in skipped
        if id(d.module) not in outside or not d.reason.endswith(_ATTENTION)
    ]
    return merged, others


_BESIDE_CALL = "its operand is a weight, and the call is quantized as that of a layer"


def _placed(
    model: nn.Module,
    rules: Rules,
    target: Runtime,
    placement: Placement,
    seen: Seen | None,
) -> tuple[Rules, list[tuple[OperatorSite, Draft]], list[Draft], frozenset[int]]:
    """Return the rules with those for operators, the operators to quantize, and the others.

    The last are the ids of modules whose attention is an operator, quantized or not: what a rule
    leaves float as an operator is not quantized as a call either.
    """
    descriptor = _activation_descriptor(rules.config, target)
    if descriptor is None:
        return rules, [], [], frozenset()
    patterns = [
        f"type:{qualified_name(MODULES[kind])}" for kind in sorted(placement.operators)
    ]
    target_rules = [
        Rule(pattern, input=descriptor, optional=True)
        for pattern in (*patterns, *placement.modules)
    ]
    rules = replace(
        rules,
        config=replace(rules.config, rules=(*target_rules, *rules.config.rules)),
        optional=tuple(target_rules) if target.computes_floats else (),
    )
    operators, untraceable = find_operators(model, placement.operators, seen)
    decisions = [
        (operator, rules.about(operator.names, operator.module()))
        for operator in operators
        if operator.kind in PRODUCTS or has_convolution(operator.owner)
    ]
    skipped = [decision for _, decision in decisions if decision.reason]
    for owner, names, reason in untraceable:
        advice = _RUN_OR_WRITE if seen is None else _WRITE
        advice = _ATTENTION if "attention in it" in reason else advice
        what = "" if reason.endswith(" float") else "; operators in it stay float"
        obstacle = f"{reason}{what}. {advice}"
        skipped.append(Draft.of(names, owner, reason=obstacle))
    quantized = [pair for pair in decisions if not pair[1].reason]
    rewritten = {id(operator.owner) for operator, _ in quantized}
    rewritten |= {id(op.owner) for op, _ in decisions if op.kind == "attention"}
    return rules, quantized, skipped, frozenset(rewritten)


_WRITE = "Write torchq.nn.QuantAdd() and the like in it"
_ATTENTION = (
    "Models of transformers: torchq.hugging_face.attend_in_modules_(model, example)"
)
_RUN_OR_WRITE = (
    "Let a run show them: pass example=... (its source must be readable), or write "
    "torchq.nn.QuantAdd() and the like in it"
)


def _activation_descriptor(
    config: QuantConfig, target: Runtime
) -> QuantDescriptor | None:
    """Return how the config quantizes activations, at 8 bits at least; None if it does not."""
    descriptor = next(
        (rule.input for rule in config.rules if rule.input is not None), None
    )
    if descriptor is None:
        return None
    if descriptor.dynamic or descriptor.granularity != PerTensor():
        raise ConfigError(
            f"target {target.name}: the config quantizes activations as {descriptor}; "
            "expected a fixed range per tensor"
        )
    if isinstance(descriptor.num_bits, int) and descriptor.num_bits < 8:
        # Whether few bits choose their sign says nothing about the form of eight.
        unsigned = False if descriptor.unsigned == "auto" else descriptor.unsigned
        return descriptor.replace(num_bits=8, unsigned=unsigned, name=None)
    return descriptor.replace(name=None)

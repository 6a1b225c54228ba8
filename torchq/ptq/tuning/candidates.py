"""What tune tries, in stages; each trial changes the best settings so far in one point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import nn

from torchq.analysis import mixed_precision
from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.ptq.tuning.settings import ALGORITHMS, TunedConfig

__all__ = ["STAGES", "mixed_configs"]

_METHODS = ("mse", "percentile", "entropy")
_END_BITS = 8
# Steps from the recipe's mean bits of the weights to 8 bits, or from 8 bits to float.
_FRACTIONS = (0.1, 0.25, 0.5, 0.75)
_FLOAT_BITS = 32


def _methods(best: TunedConfig) -> Iterator[tuple[str, TunedConfig]]:
    """Yield other calibration methods."""
    for method in _METHODS:
        yield f"calibration {method}", replace(best, method=method)


def _unsigned(best: TunedConfig) -> Iterator[tuple[str, TunedConfig]]:
    """Yield inputs that may be unsigned, where a rule leaves them signed."""

    def change(rule: Rule) -> Rule:
        d = rule.input
        if d is None or d.unsigned or d.dynamic or d.amax is not None or not d.format.is_integer:
            return rule
        return replace(rule, input=d.replace(unsigned="auto"))

    rules = tuple(map(change, best.config.rules))
    if rules != best.config.rules:
        yield "unsigned inputs", replace(best, config=replace(best.config, rules=rules))


def _ends(best: TunedConfig) -> Iterator[tuple[str, TunedConfig]]:
    """Yield 8 bits for the first and last layer, where they have fewer."""
    if any(rule.position for rule in best.config.rules):
        return
    few = [rule for rule in best.config.rules if not rule.skip and _has_few_bits(rule)]
    ends = [
        replace(rule, input=_with_end_bits(rule.input), weight=_with_end_bits(rule.weight))
        for rule in few
    ]
    rules = [
        replace(rule, position=position, optional=True)
        for position in ("first", "last")
        for rule in ends
    ]
    if rules:
        config = best.config.with_rules(*rules)
        yield "first and last layer 8 bits", replace(best, config=config)


def _has_few_bits(rule: Rule) -> bool:
    return any(d is not None and _bits(d) < _END_BITS for d in (rule.input, rule.weight))


def _bits(descriptor: QuantDescriptor) -> int:
    return descriptor.format.bits if descriptor.format.is_integer else _END_BITS


def _with_end_bits(descriptor: QuantDescriptor | None) -> QuantDescriptor | None:
    if descriptor is None or _bits(descriptor) >= _END_BITS:
        return descriptor
    return descriptor.replace(num_bits=_END_BITS)


def _equalize(best: TunedConfig) -> Iterator[tuple[str, TunedConfig]]:
    """Yield equalized channels."""
    yield "equalization", replace(best, equalize=True)


def _algorithms(best: TunedConfig) -> Iterator[tuple[str, TunedConfig]]:
    """Yield the algorithms after calibration, the cheapest first."""
    for name in ALGORITHMS:
        yield name, replace(best, algorithm=name)


Stage = Callable[[TunedConfig], Iterator[tuple[str, TunedConfig]]]

#: The stages, in order; the last one, mixed precision, needs the model: :func:`mixed_configs`.
STAGES: Sequence[Stage] = (_methods, _unsigned, _ends, _equalize, _algorithms)


def _fewest_weight_bits(config: QuantConfig) -> int:
    """Return the fewest bits of a weight among the rules; 32 where all weights are float."""
    found = [_bits(rule.weight) for rule in config.rules if rule.weight is not None]
    return min(found, default=_FLOAT_BITS)


def mixed_configs(
    best: TunedConfig, model: nn.Module, batches: Sequence[Any]
) -> Iterator[tuple[str, TunedConfig]]:
    """Yield configs with more bits for the layers that need them, the cheapest first.

    Layers have the recipe's widths or 8 bits, the first and last one too; with a recipe of 8 bits
    they have these or stay float.
    """
    narrow = QuantConfig(
        tuple(rule for rule in best.config.rules if rule.position is None), name=best.config.name
    )
    weight = _fewest_weight_bits(narrow)
    top = _END_BITS if weight < _END_BITS else _FLOAT_BITS
    other = "w8a8" if weight < _END_BITS else "float"
    for fraction in _FRACTIONS:
        mean_bits = weight + (top - weight) * fraction
        config = mixed_precision(
            model,
            batches,
            budget={"mean_bits": mean_bits},
            formats=[narrow, other],
            progress=False,
        )
        plain = QuantConfig(config.rules, name=f"mixed, {mean_bits:.3g} bits a weight")
        yield f"mixed precision, {mean_bits:.3g} bits", replace(best, config=plain)

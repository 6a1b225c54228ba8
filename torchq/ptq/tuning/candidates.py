"""What tune tries, in stages; each trial changes the best settings so far in one point."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

from torch import nn

from torchq.analysis import mixed_precision
from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.ptq.tuning.settings import ALGORITHMS, TunedConfig

__all__ = ["STAGES", "mixed_settings", "wider"]

Candidate = tuple[str, TunedConfig]

_METHODS = ("mse", "percentile", "entropy")
_END_BITS = 8
_FLOAT_BITS = 32
# What norms of transformers are called; other libraries have their own classes.
_NORMS = ("LayerNorm", "RMSNorm")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def _methods(best: TunedConfig, model: nn.Module) -> Iterator[Candidate]:
    """Yield other calibration methods."""
    for method in _METHODS:
        yield f"calibration {method}", replace(best, method=method)


def _unsigned(best: TunedConfig, model: nn.Module) -> Iterator[Candidate]:
    """Yield inputs that may be unsigned, where a rule leaves them signed."""

    def change(rule: Rule) -> Rule:
        d = rule.input
        if d is None or d.unsigned or d.dynamic or d.amax is not None or not d.format.is_integer:
            return rule
        return replace(rule, input=d.replace(unsigned="auto"))

    rules = tuple(map(change, best.config.rules))
    if rules != best.config.rules:
        yield "unsigned inputs", replace(best, config=replace(best.config, rules=rules))


def _ends(best: TunedConfig, model: nn.Module) -> Iterator[Candidate]:
    """Yield 8 bits for the first and last layer, where they have fewer."""
    config = _with_wide_ends(best.config)
    if config != best.config:
        yield "first and last layer 8 bits", replace(best, config=config)


def _with_wide_ends(config: QuantConfig) -> QuantConfig:
    """Return a config with 8 bits for the first and last layer, unless it has rules for them."""
    if any(rule.position for rule in config.rules):
        return config
    ends = [
        replace(rule, input=_with_end_bits(rule.input), weight=_with_end_bits(rule.weight))
        for rule in config.rules
        if not rule.skip and _has_few_bits(rule)
    ]
    rules = [
        replace(rule, position=position, optional=True)
        for position in ("first", "last")
        for rule in ends
    ]
    return config.with_rules(*rules) if rules else config


def _has_few_bits(rule: Rule) -> bool:
    return any(d is not None and _bits(d) < _END_BITS for d in (rule.input, rule.weight))


def _bits(descriptor: QuantDescriptor) -> int:
    return descriptor.format.bits if descriptor.format.is_integer else _END_BITS


def _with_end_bits(descriptor: QuantDescriptor | None) -> QuantDescriptor | None:
    if descriptor is None or _bits(descriptor) >= _END_BITS:
        return descriptor
    return descriptor.replace(num_bits=_END_BITS)


def _prepared(best: TunedConfig, model: nn.Module) -> Iterator[Candidate]:
    """Yield what runs before calibration, where it applies."""
    names = []
    if any(isinstance(module, _CONVOLUTIONS) for module in model.modules()):
        names.append("equalization")
    kinds = {type(module).__name__ for module in model.modules()}
    if any(kind.endswith(_NORMS) for kind in kinds):
        names.append("smoothing")
    for name in names:
        yield name, replace(best, before=(*best.before, name))


def _algorithms(best: TunedConfig, model: nn.Module) -> Iterator[Candidate]:
    """Yield the algorithms after calibration, the cheapest first."""
    for name in ALGORITHMS:
        yield name, replace(best, algorithm=name)


Stage = Callable[[TunedConfig, nn.Module], Iterator[Candidate]]

#: The stages, in order. Mixed precision follows them: :func:`mixed_settings`.
STAGES: Sequence[Stage] = (_methods, _unsigned, _ends, _prepared, _algorithms)


def _fewest_weight_bits(config: QuantConfig) -> int:
    """Return the fewest bits of a weight among the rules; 32 where all weights are float."""
    found = [_bits(rule.weight) for rule in config.rules if rule.weight is not None]
    return min(found, default=_FLOAT_BITS)


def wider(config: QuantConfig) -> tuple[Literal["w8a8", "float"], int]:
    """Return the format that layers get which need more bits than ``config`` has, and its bits."""
    narrow = _fewest_weight_bits(config) < _END_BITS
    return ("w8a8", _END_BITS) if narrow else ("float", _FLOAT_BITS)


def mixed_settings(
    narrow: TunedConfig,
    wide: Literal["w8a8", "float"],
    mean_bits: float,
    model: nn.Module,
    batches: Sequence[Any],
) -> Candidate:
    """Return settings with the wide format for the layers that need it most.

    Args:
        narrow: the settings of the other layers.
        wide: the other format.
        mean_bits: of a weight.
        model: in float.
        batches: the damage of the narrow format is estimated on them.
    """
    config = mixed_precision(
        model,
        batches,
        budget={"mean_bits": mean_bits},
        formats=[replace(narrow.config, name="narrow"), wide],
        progress=False,
    )
    bits = f"{config.costs['mean_bits']:.3g} bits"
    named = QuantConfig(config.rules, name=f"mixed, {bits} a weight")
    return f"mixed precision, {bits}", replace(narrow, config=named)

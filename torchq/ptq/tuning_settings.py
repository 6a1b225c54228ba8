"""The ways to quantize a model that tune tries: what they are, and in which order."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import nn

from torchq.analysis.mixed_precision import mixed_precision
from torchq.calib import methods
from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.fusion.modules import CONVOLUTIONS
from torchq.ptq.adaround import adaround_
from torchq.ptq.bias_correction import correct_bias_
from torchq.ptq.equalization import equalize_
from torchq.ptq.gptq import gptq_
from torchq.ptq.smoothing import smooth_
from torchq.swap import quantize_
from torchq.utils import check_fields, parse_json, short_repr
from torchq.workflow import calibrate


def _equalized(model: nn.Module, batches: Sequence[Any], **progress: bool) -> Any:
    return equalize_(model, batches[0])


#: Algorithms before calibration, by name, in the order in which they run.
PREPARATIONS: Mapping[str, Any] = {
    "equalization": _equalized,
    "smoothing": smooth_,
}

#: Algorithms after calibration, by name.
ALGORITHMS: Mapping[str, Any] = {
    "bias correction": correct_bias_,
    "gptq": gptq_,
    "adaround": adaround_,
}


@dataclass(frozen=True)
class TunedConfig:
    """How a model is quantized, from a float model to the result.

    Args:
        config: the rules of :func:`torchq.quantize_`.
        method: the calibration method of activations; None takes that of each descriptor.
        before: names in :data:`PREPARATIONS`: what runs before calibration.
        algorithm: a name in :data:`ALGORITHMS`, or None: what runs after calibration.

    Example:
        >>> settings = TunedConfig(torchq.recipes.int8(), algorithm="gptq")
        >>> TunedConfig.from_json(settings.to_json()) == settings
        True
    """

    config: QuantConfig
    _: dataclasses.KW_ONLY
    method: str | None = None
    before: tuple[str, ...] = ()
    algorithm: str | None = None

    def __post_init__(self) -> None:
        names = {"algorithm": ALGORITHMS, "method": methods()}
        for field, known in names.items():
            value = getattr(self, field)
            if value is not None and value not in known:
                raise ConfigError(
                    f"TunedConfig: got {field}={short_repr(value)}; expected None or one of "
                    f"{', '.join(known)}"
                )
        if not set(self.before) <= set(PREPARATIONS):
            raise ConfigError(
                f"TunedConfig: got before={short_repr(self.before)}; expected names among "
                f"{', '.join(PREPARATIONS)}"
            )

    def apply_(self, model: nn.Module, batches: Sequence[Any], *, progress: bool = False) -> None:
        """Quantize ``model`` in place; inputs of layers that no batch reaches stay float, as said.

        Args:
            model: a float model, fused.
            batches: for calibration and the algorithm; see :func:`torchq.graph.call_arguments`.
            progress: show bars.

        Raises:
            TorchqError: what the functions raise.
        """
        quantize_(model, self.config, progress=progress)
        for name, function in PREPARATIONS.items():
            if name in self.before:
                function(model, batches, progress=progress)
        report = calibrate(
            model, batches, method=self.method, on_unseen="disable", progress=progress
        )
        if report.unseen:
            warnings.warn(
                f"no batch reached {', '.join(report.unseen)}: these inputs stay float",
                stacklevel=2,
            )
        if self.algorithm is not None:
            ALGORITHMS[self.algorithm](model, batches, progress=progress)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the settings as JSON text."""
        data = {
            "config": self.config.to_dict(),
            "method": self.method,
            "before": list(self.before),
            "algorithm": self.algorithm,
        }
        return json.dumps(data, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> TunedConfig:
        """Return the settings that :meth:`to_json` was called on.

        Raises:
            ConfigError: not such a text.
        """
        known = ["config", "method", "before", "algorithm"]
        data = dict(
            check_fields(
                parse_json(text, "TunedConfig"), "TunedConfig", known=known, required=known
            )
        )
        before = data.pop("before")
        if not isinstance(before, list) or not all(isinstance(name, str) for name in before):
            got = short_repr(before)
            raise ConfigError(f"TunedConfig: got before={got}; expected a list of names")
        return cls(QuantConfig.from_dict(data.pop("config")), before=tuple(before), **data)

    def __str__(self) -> str:
        parts = [self.config.name]
        parts += [f"calibration {self.method}"] if self.method else []
        parts += self.before
        parts += [self.algorithm] if self.algorithm else []
        return ", ".join(parts)


Candidate = tuple[str, TunedConfig]

_METHODS = ("mse", "percentile", "entropy")
_END_BITS = 8
_FLOAT_BITS = 32
# What norms of transformers are called; other libraries have their own classes.
_NORMS = ("LayerNorm", "RMSNorm")


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
    if any(isinstance(module, CONVOLUTIONS) for module in model.modules()):
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

    A weight of the float ``model`` gets ``mean_bits``; ``batches`` show what narrow ones damage.
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

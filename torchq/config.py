"""Which modules are quantized, and how: an ordered list of rules, of which the last match wins."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.formats import PerTensor
from torchq.utils import (
    Pattern,
    check_fields,
    check_pattern,
    parse_json,
    pattern_text,
    short_repr,
)

__all__ = ["Rule", "QuantConfig"]

_VERSION = 1


@dataclass(frozen=True)
class Rule:
    """The treatment of the modules that a pattern selects.

    Args:
        pattern: a glob on the dotted path (``"*.head.*"``), ``"re:..."``, ``"type:Conv*"``, a
            class, or a callable ``(name, module) -> bool``; see :mod:`torchq.utils.names`.
        input: the descriptor of the input quantizer; None leaves the input in float.
        weight: the descriptor of the weight quantizer; None leaves the weight in float.
        position: "first" or "last" narrows the pattern to the first or last layer of the model
            with a quantized weight, in the order of ``named_modules()`` and before exclusions.
            None: every module that the pattern matches.
        skip: True leaves the modules alone.
        optional: True allows that the pattern matches nothing, which otherwise is an error.

    Raises:
        ConfigError: an argument of the wrong type, or ``skip`` with a descriptor.
    """

    pattern: Pattern
    _: dataclasses.KW_ONLY
    input: QuantDescriptor | None = None
    weight: QuantDescriptor | None = None
    position: Literal["first", "last"] | None = None
    skip: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        for field in ("input", "weight"):
            value = getattr(self, field)
            if not isinstance(value, QuantDescriptor | None):
                raise ConfigError(
                    f"rule {self}: got {field}={short_repr(value)}; "
                    "expected a QuantDescriptor or None"
                )
        if self.weight is not None and self.weight.unsigned == "auto":
            raise ConfigError(
                f"rule {self}: got unsigned='auto' for a weight; expected a bool"
            )
        if self.position not in (None, "first", "last"):
            raise ConfigError(
                f"rule {self}: got position={short_repr(self.position)}; "
                "expected 'first', 'last' or None"
            )
        for field in ("skip", "optional"):
            value = getattr(self, field)
            if not isinstance(value, bool):
                raise ConfigError(
                    f"rule {self}: got {field}={short_repr(value)}; expected True or False"
                )
        if self.skip and (self.input or self.weight):
            raise ConfigError(
                f"rule {self}: skip=True with a descriptor; expected one or the other"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return the rule as JSON data.

        Raises:
            ConfigError: the pattern is a callable.
        """
        if not isinstance(self.pattern, (str, type)):
            raise ConfigError(
                f"rule {self}: a callable cannot be saved; expected a string or a class as pattern"
            )
        out: dict[str, Any] = {"pattern": pattern_text(self.pattern)}
        for slot in ("input", "weight"):
            descriptor = getattr(self, slot)
            if descriptor is not None:
                out[slot] = descriptor.to_dict()
        if self.position is not None:
            out["position"] = self.position
        return out | {
            flag: True for flag in ("skip", "optional") if getattr(self, flag)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> Rule:
        """Return the rule that :meth:`to_dict` was called on.

        A class as pattern becomes its ``"type:..."`` pattern, which selects exactly that class.

        Raises:
            ConfigError: not a mapping, an unknown or missing key, or an invalid value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        fields = dict(check_fields(data, "rule", known=known, required=["pattern"]))
        if not isinstance(fields["pattern"], str):
            raise ConfigError(
                f"rule: got pattern {short_repr(fields['pattern'])}; expected text"
            )
        for slot in ("input", "weight"):
            if fields.get(slot) is not None:
                fields[slot] = QuantDescriptor.from_dict(fields[slot])
        return cls(**fields)

    def __str__(self) -> str:
        text = pattern_text(self.pattern)
        return text if self.position is None else f"{text} ({self.position} layer)"


@dataclass(frozen=True)
class QuantConfig:
    """An ordered list of rules; for each module the last rule that matches decides.

    Args:
        rules: the rules, the most general first.
        name: a label for reports.

    Raises:
        ConfigError: an element of ``rules`` is no :class:`Rule`, or the name is no text.

    Example:
        >>> config = torchq.recipes.int8().with_rules(Rule("*.head", skip=True))
        >>> QuantConfig.from_json(config.to_json()) == config
        True
    """

    rules: tuple[Rule, ...]
    _: dataclasses.KW_ONLY
    name: str = "custom"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rules", tuple(self.rules))
        if not isinstance(self.name, str):
            raise ConfigError(
                f"config: got name {short_repr(self.name)}; expected text"
            )
        for rule in self.rules:
            if not isinstance(rule, Rule):
                raise ConfigError(
                    f"config {self.name}: got {short_repr(rule)} among the rules; "
                    "expected Rule objects"
                )

    def with_rules(self, *rules: Rule) -> QuantConfig:
        """Return a copy with more rules at the end, where they win."""
        return dataclasses.replace(self, rules=(*self.rules, *rules))

    def with_ends(self, bits: int | None) -> QuantConfig:
        """Return a copy with a width of its own for the first and the last layer.

        Args:
            bits: the least width of their integer weights and inputs; None leaves both layers in
                float. A config that has rules with positions already keeps their widths.

        Example:
            >>> torchq.recipes.integer(4, 4).with_ends(8).rules[1].weight.num_bits
            8
        """
        if bits is not None and any(rule.position for rule in self.rules):
            return self
        found: list[Rule] = []
        for rule in self.rules:
            ends = _ends_of(rule, bits)
            # Right behind its rule, so that what overrules that one overrules these too.
            found += ends if rule.position and ends else (rule, *ends)
        return dataclasses.replace(self, rules=tuple(found))

    def with_zero_points(self) -> QuantConfig:
        """Return a copy in which inputs with integer codes have zero points.

        Their ranges end where their values end. Ranges of each call, of blocks, and those that a
        rule gives stay as they are.

        Example:
            >>> torchq.recipes.int8().with_zero_points().rules[0].input.symmetric
            False
        """
        rules = (dataclasses.replace(r, input=_two_ended(r.input)) for r in self.rules)
        return dataclasses.replace(self, rules=tuple(rules))

    def with_input_bits(self, bits: int) -> QuantConfig:
        """Return a copy in which integer codes of inputs have another width.

        Args:
            bits: 2 to 16.

        Example:
            >>> str(torchq.recipes.int8().with_input_bits(16).rules[0].input)
            'int16 per-tensor max'
        """
        rules = (
            dataclasses.replace(rule, input=_with_bits(rule.input, bits))
            for rule in self.rules
        )
        return dataclasses.replace(self, rules=tuple(rules))

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as JSON data.

        Returns:
            ``{"version": 1, "name": ..., "rules": [...]}``

        Raises:
            ConfigError: a rule has a callable as pattern.
        """
        rules = [rule.to_dict() for rule in self.rules]
        return {"version": _VERSION, "name": self.name, "rules": rules}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QuantConfig:
        """Return the configuration that :meth:`to_dict` was called on.

        Raises:
            ConfigError: not a mapping, an unknown key, another version, or an invalid rule.
        """
        data = check_fields(data, "config", known=["version", "name", "rules"])
        version = data.get("version")
        rules = data.get("rules")
        if (
            type(version) is not int
            or version != _VERSION
            or not isinstance(rules, list)
        ):
            raise ConfigError(
                f"config: got version {short_repr(version)} and keys {sorted(data)}; "
                f"expected version {_VERSION} with a list of rules"
            )
        name = data.get("name", "custom")
        return cls(tuple(Rule.from_dict(rule) for rule in rules), name=name)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return :meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> QuantConfig:
        """Return the configuration that :meth:`to_json` was called on.

        Raises:
            ConfigError: not JSON, or see :meth:`from_dict`.
        """
        return cls.from_dict(parse_json(text, "config"))

    def __str__(self) -> str:
        lines = [f"QuantConfig {self.name}"]
        for rule in self.rules:
            treatment = (
                f"input: {rule.input or 'float'}; weight: {rule.weight or 'float'}"
            )
            lines.append(f"  {rule}: {'skip' if rule.skip else treatment}")
        return "\n".join(lines)


def _ends_of(rule: Rule, bits: int | None) -> list[Rule]:
    """Return the rules for the first and last layer that ``rule`` selects; none for the same."""
    if rule.skip or not (rule.input or rule.weight):
        return []

    def wide(d: QuantDescriptor | None) -> QuantDescriptor | None:
        is_narrow = (
            d is not None and d.format.is_integer and d.format.bits < (bits or 0)
        )
        return d.replace(num_bits=bits) if d is not None and is_narrow else d

    if bits is None:
        ends = Rule(rule.pattern, skip=True, position=rule.position, optional=True)
    else:
        ends = dataclasses.replace(
            rule, input=wide(rule.input), weight=wide(rule.weight)
        )
        if ends == rule:
            return []
    first = dataclasses.replace(ends, position=rule.position or "first", optional=True)
    return (
        [first]
        if rule.position
        else [first, dataclasses.replace(first, position="last")]
    )


def _with_bits(d: QuantDescriptor | None, bits: int) -> QuantDescriptor | None:
    is_integer = d is not None and d.format.is_integer
    return d.replace(num_bits=bits) if d is not None and is_integer else d


def _two_ended(d: QuantDescriptor | None) -> QuantDescriptor | None:
    if d is None or not d.format.is_integer or d.granularity != PerTensor():
        return d
    is_fixed = d.dynamic or d.amax is not None or d.narrow_range or d.unsigned is True
    return d if is_fixed else d.replace(unsigned=True, symmetric=False)

"""Which modules are quantized, and how: an ordered list of rules, the last match wins."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.utils import Pattern, check_pattern, pattern_text

__all__ = ["Rule", "QuantConfig"]


@dataclass(frozen=True)
class Rule:
    """What to do with the modules that a pattern selects.

    Args:
        pattern: a glob on the dotted path (``"*.head.*"``), ``"re:..."``, ``"type:Conv*"``, a class, or a callable
            ``(name, module) -> bool``; see :mod:`torchq.utils.names`.
        input, weight: descriptors of the input and weight quantizers; None leaves that tensor in float.
        skip: leave the modules alone.
        optional: matching nothing is not an error.
    """

    pattern: Pattern
    _: dataclasses.KW_ONLY
    input: QuantDescriptor | None = None
    weight: QuantDescriptor | None = None
    skip: bool = False
    optional: bool = False

    def __post_init__(self) -> None:
        check_pattern(self.pattern)
        for field in ("input", "weight"):
            if not isinstance(getattr(self, field), QuantDescriptor | None):
                raise ConfigError(
                    f"rule {self}: got {field}={getattr(self, field)!r}; expected a QuantDescriptor or None"
                )
        if self.skip and (self.input or self.weight):
            raise ConfigError(
                f"rule {self}: skip=True with a descriptor; expected one or the other"
            )

    def to_dict(self) -> dict[str, Any]:
        """As JSON data.

        Raises:
            ConfigError: the pattern is a callable.
        """
        if not isinstance(self.pattern, (str, type)):
            raise ConfigError(
                f"rule {self}: a callable cannot be saved; expected a string or a class as pattern"
            )
        out: dict[str, Any] = {"pattern": pattern_text(self.pattern)}
        out |= {
            field: d.to_dict()
            for field in ("input", "weight")
            if (d := getattr(self, field)) is not None
        }
        return out | {field: True for field in ("skip", "optional") if getattr(self, field)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Rule:
        """Inverse of :meth:`to_dict`; a class comes back as its ``"type:..."`` pattern, which selects that class exactly."""
        fields = {f.name for f in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - fields):
            raise ConfigError(
                f"rule: got unknown keys {unknown}; expected some of {sorted(fields)}"
            )
        if "pattern" not in data:
            raise ConfigError(f"rule: got {dict(data)}; expected a 'pattern'")
        descriptors = {
            field: QuantDescriptor.from_dict(data[field])
            for field in ("input", "weight")
            if data.get(field) is not None
        }
        return cls(**{**data, **descriptors})

    def __str__(self) -> str:
        return pattern_text(self.pattern)


@dataclass(frozen=True)
class QuantConfig:
    """An ordered list of rules; for each module the last rule that matches decides.

    Args:
        rules: the rules, most general first.
        name: for reports.

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
        if bad := [rule for rule in self.rules if not isinstance(rule, Rule)]:
            raise ConfigError(
                f"config {self.name}: got {bad[0]!r} among the rules; expected Rule objects"
            )

    def with_rules(self, *rules: Rule) -> QuantConfig:
        """A config with more rules at the end, where they win."""
        return dataclasses.replace(self, rules=(*self.rules, *rules))

    def to_dict(self) -> dict[str, Any]:
        """As JSON data: ``{"version": 1, "name": ..., "rules": [...]}``."""
        return {"version": 1, "name": self.name, "rules": [rule.to_dict() for rule in self.rules]}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QuantConfig:
        """Inverse of :meth:`to_dict`."""
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"config: got a {type(data).__name__}; expected a mapping with version and rules"
            )
        if data.get("version") != 1 or not isinstance(data.get("rules"), list):
            raise ConfigError(
                f"config: got version {data.get('version')!r} and keys {sorted(data)}; expected version 1 with a list of rules"
            )
        return cls(
            tuple(Rule.from_dict(rule) for rule in data["rules"]), name=data.get("name", "custom")
        )

    def to_json(self, *, indent: int | None = 2) -> str:
        """:meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict(), indent=indent)

    @classmethod
    def from_json(cls, text: str) -> QuantConfig:
        """Inverse of :meth:`to_json`."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"config: not JSON ({error})") from None
        return cls.from_dict(data)

    def __str__(self) -> str:
        lines = [f"QuantConfig {self.name}"]
        for rule in self.rules:
            what = (
                "skip"
                if rule.skip
                else f"input: {rule.input or 'float'}; weight: {rule.weight or 'float'}"
            )
            lines.append(f"  {rule}: {what}")
        return "\n".join(lines)

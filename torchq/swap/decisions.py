"""What the rules decide about each module."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn

from torchq import recipes
from torchq.config import QuantConfig, Rule
from torchq.errors import ConfigError, InputError
from torchq.nn import QuantModule, quantized_as, quantized_class
from torchq.nn.calls.find import FoundCalls
from torchq.runtime import Runtime
from torchq.swap.calls import decide_calls, inside_quantizers
from torchq.swap.draft import Draft, obstacle
from torchq.utils import (
    Pattern,
    check_pattern,
    modules_with_names,
    pattern_text,
    qualified_name,
)


def config_or_default(config: QuantConfig | None, runtime: Runtime | None = None) -> QuantConfig:
    """Return ``config``, or in the place of None the recipe of a runtime, or INT8."""
    if config is None:
        return recipes.int8() if runtime is None else runtime.recipe()
    if not isinstance(config, QuantConfig):
        raise InputError(
            f"config: got {config!r:.60}; expected a QuantConfig. Call a recipe, as in "
            "torchq.recipes.int8()"
        )
    return config


def patterns(given: Sequence[Pattern] | Pattern | None) -> tuple[Pattern, ...]:
    """Return one pattern or several, checked, as a tuple."""
    if given is None:
        return ()
    if isinstance(given, (str, type)) or callable(given):
        given = (given,)
    return tuple(check_pattern(pattern) for pattern in given)


@dataclass(frozen=True)
class Rules:
    """The rules of a configuration, and patterns of which a module must match one if there are."""

    config: QuantConfig
    include: tuple[Pattern, ...] = ()

    def about(
        self, names: tuple[str, ...], module: nn.Module, layer: type[nn.Module] | None = None
    ) -> Draft:
        """Return what they say about one module that can be swapped, or has been."""
        cls = type(module).float_class if isinstance(module, QuantModule) else type(module)
        layer = layer or quantized_as(cls)
        base = Draft(names, module, cls, layer=layer)
        rule = next((r for r in reversed(self.config.rules) if base.matches(r.pattern)), None)
        if self.include and not any(map(base.matches, self.include)):
            return replace(base, reason="not in include")
        if rule is None:
            hint = _RECURRENT if issubclass(cls, nn.RNNBase) else ""
            return replace(base, reason=f"no rule matches{hint}")
        base = replace(base, rule=str(rule))
        if rule.skip:
            return replace(base, reason="excluded")
        twin = None if layer is None else quantized_class(layer)
        used = {name: getattr(rule, name) for name in (twin.descriptor_names() if twin else ())}
        if not any(used.values()):
            return replace(base, reason="the rule has no descriptor for it")
        return replace(base, **used)


#: Recipes leave recurrent layers in float unless asked: their steps run one by one on integers.
_RECURRENT = "; torchq.recipes.int8(recurrent=True) has one"


def decide(
    model: nn.Module,
    rules: Rules,
    found: Mapping[int, FoundCalls] | None = None,
    rewritten: frozenset[int] = frozenset(),
) -> tuple[Draft, ...]:
    """Return what the rules decide, unchecked.

    ``found`` are the calls of a run, if there was one, ``rewritten`` the ids of modules in whose
    forwards children stand for operators.
    """
    layers = _decide_layers(model, rules)
    decisions = decide_calls(model, layers, rules.about, found, rewritten)
    swapped = {id(d.parent or d.module) for d in decisions if not d.reason}
    for names, module in modules_with_names(model):
        parts = module.modules() if _is_container(module) else ()
        if any(id(part) in swapped or isinstance(part, QuantModule) for part in parts):
            rule = "(contains quantized modules)"
            decisions.append(Draft(names, module, type(module), rule=rule))
    return tuple(decisions)


def _is_container(module: nn.Module) -> bool:
    """Return True for a module that is converted because one of its descendants is."""
    twin = quantized_class(type(module))
    return twin is not None and twin.is_container


def _decide_layers(model: nn.Module, rules: Rules) -> list[Draft]:
    """Return the decisions about modules that are quantized as a whole."""
    inside = inside_quantizers(model)
    decisions: list[Draft] = []
    parents: dict[int, nn.Module] = {}
    for names, module in modules_with_names(model):
        if id(module) in inside or _is_container(module):
            continue
        reason = obstacle(module, parents.get(id(module)))
        parents |= {id(child): module for child in module.children()}
        if reason:
            decisions.append(Draft(names, module, type(module), reason=reason))
        elif reason is not None:
            twin = quantized_class(type(module))
            found = _by_places(model, names, module, rules)
            decisions += [d for d in found if twin is None or not twin.is_marker or _is_named(d)]
    return decisions


def _is_named(draft: Draft) -> bool:
    """Return True where a rule quantizes a module by its path or type, not with all others."""
    by_word = str(draft.rule).startswith(("type:", "re:"))
    return not draft.reason and (by_word or draft.rule in draft.names)


def resolve_positions(
    model: nn.Module, config: QuantConfig, found: Mapping[int, FoundCalls] | None = None
) -> QuantConfig:
    """Return ``config`` with the path of a layer as the pattern of each rule with a position.

    Rules that skip do not count, so excluding the last layer does not make the one before it the
    last. An optional rule whose pattern does not match its layer is dropped.
    """
    if not any(rule.position for rule in config.rules):
        return config
    general = tuple(r for r in config.rules if r.position is None and not r.skip)
    decisions = decide(model, Rules(replace(config, rules=general)), found)
    layers = [d for d in decisions if d.weight is not None and not d.reason]
    ends = {"first": layers[0], "last": layers[-1]} if layers else {}
    rules: list[Rule] = []
    for rule in config.rules:
        layer = ends.get(str(rule.position))
        if rule.position is None:
            rules.append(rule)
        elif layer is not None and layer.matches(rule.pattern):
            rules.append(replace(rule, pattern=_exactly(layer.name)))
        elif not rule.optional:
            raise ConfigError(
                f"rule {rule}: the {rule.position} layer is "
                f"{layer.name or '(root)' if layer else 'none'}; expected one that it matches"
            )
    return replace(config, rules=tuple(rules))


def _exactly(name: str) -> str:
    """Return the pattern that selects one path."""
    has_wildcard = not name or any(character in name for character in "*?[:")
    return f"re:^{re.escape(name)}$" if has_wildcard else name


def _by_places(
    model: nn.Module, names: tuple[str, ...], module: nn.Module, rules: Rules
) -> list[Draft]:
    """Return what the rules say about a module, for each place of one that has no state."""
    places: dict[tuple[int, str], list[str]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        places.setdefault((id(model.get_submodule(path)), leaf), []).append(name)
    state = (*module.parameters(), *module.buffers(), *module.children())
    found = [rules.about(tuple(paths), module) for paths in places.values()]
    if state or all(d.reason for d in found):
        return [rules.about(names, module)]
    return found


def check_used(model: nn.Module, rules: Rules, decisions: tuple[Draft, ...]) -> None:
    """Raise :class:`ConfigError` where a pattern selects nothing, or nothing is quantized."""
    wanted = [r.pattern for r in rules.config.rules if not r.optional] + list(rules.include)
    unused = [p for p in wanted if not any(d.matches(p) for d in decisions)]
    where = qualified_name(type(model))
    if unused:
        known = ", ".join(d.name or "(root)" for d in decisions[:8]) or "none"
        text = ", ".join(repr(pattern_text(p)) for p in unused)
        paths = dict(model.named_modules())
        below = [p for p in unused if isinstance(p, str) and p in paths]
        hint = f". For everything below it write '{below[0]}.*'" if below else ""
        raise ConfigError(
            f"{where}: pattern {text} matches no module that could be quantized; "
            f"candidates are {known}, ...{hint}"
        )
    if all(d.reason for d in decisions):
        found = sorted({f"{d.name or '(root)'}: {d.reason}" for d in decisions})[:5]
        reasons = "; ".join(found) or "it has no layer that torchq knows"
        raise ConfigError(
            f"{where}: nothing to quantize ({reasons}); "
            "expected at least one module that a rule selects"
        )

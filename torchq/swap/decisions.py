"""What happens to each module, as data, and the rules that decide it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchq import recipes
from torchq.config import QuantConfig, Rule
from torchq.errors import ConfigError, InputError
from torchq.nn import QuantModule, TensorQuantizer, quantized_as, quantized_class
from torchq.runtime import Placement, Runtime
from torchq.swap.calls import decide_calls
from torchq.swap.decision import Decision, obstacle
from torchq.swap.find_operators import Operator
from torchq.swap.share import Share, Work, share_of
from torchq.utils import (
    Pattern,
    check_pattern,
    matches,
    modules_with_names,
    pattern_text,
    qualified_name,
    table,
    twin_of,
)


@dataclass(frozen=True)
class SwapReport:
    """Every decision about a model: of :func:`plan` before, of :func:`quantize_` after the swap.

    Attributes:
        config: the rules, with ``exclude`` added at the end.
        decisions: one for each module that is quantized or that one could expect to be, and for
            each operator that becomes a module.
        operators: the operators that become modules, by the decision about each; only with a
            target.
        target: the runtime that it is planned for, or None.
        work: what each module computes: multiply-adds with an example, else its weights.
    """

    config: QuantConfig
    decisions: tuple[Decision, ...]
    operators: tuple[tuple[Operator, Decision], ...] = ()
    target: Runtime | None = None
    work: Work | None = None

    @property
    def placement(self) -> Placement | None:
        """Where the target wants quantizers beside the inputs of layers."""
        return None if self.target is None else self.target.placement

    @property
    def share(self) -> Share | None:
        """How much of the model is quantized; None where nothing says so."""
        if self.work is None:
            return None
        products = (o for o, _ in self.operators if o.kind in ("matmul", "attention"))
        owners = frozenset(name for operator in products for name in operator.owner_names)
        return share_of(self.work, self.decisions, owners)

    @property
    def replaced(self) -> tuple[Decision, ...]:
        """The modules that are quantized."""
        return tuple(d for d in self.decisions if not d.reason)

    @property
    def skipped(self) -> tuple[Decision, ...]:
        """The modules that stay float, each with its ``reason``."""
        return tuple(d for d in self.decisions if d.reason)

    def without(self, reasons: Mapping[str, str]) -> SwapReport:
        """Return the report in which some modules stay float.

        Args:
            reasons: path -> why.
        """
        changed = tuple(
            replace(d, reason=reasons[d.name], input=None, weight=None) if d.name in reasons else d
            for d in self.decisions
        )
        operators = tuple((o, d) for o, d in self.operators if d.name not in reasons)
        return replace(self, decisions=changed, operators=operators)

    def __str__(self) -> str:
        rows = [("module", "type", "what", "rule")]
        for d in self.decisions:
            names = " = ".join(d.names) or "(root)"
            rows.append((names, d.float_class.__name__, _what_text(d), d.rule or ""))
        operators = {id(d) for _, d in self.operators}
        containers = [d for d in self.replaced if not (d.input or d.weight)]
        layers = len(self.replaced) - len(operators) - len(containers)
        counts = [f"{layers} quantized"]
        if operators:
            counts.append(f"{len(operators)} operators for {getattr(self.target, 'name', '')}")
        if containers:
            counts.append(f"{len(containers)} containers")
        counts.append(f"{len(self.skipped)} skipped")
        share = f"; {self.share}" if self.share else ""
        return f"{table(rows)}\n{', '.join(counts)}, recipe {self.config.name}{share}"


def _what_text(decision: Decision) -> str:
    if decision.reason:
        return f"SKIPPED: {decision.reason}"
    slots = (
        ("input", decision.input),
        ("weight", decision.weight),
        ("output", decision.output),
    )
    text = ", ".join(f"{slot} {value}" for slot, value in slots if value)
    if decision.calls:
        kinds = ", ".join(dict.fromkeys(site.kind for site in decision.calls))
        text = f"{text}, at its call of {kinds}" if text else f"calls of {kinds}"
    text = text or "calls its children"
    return f"{text}; {decision.note}" if decision.note else text


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


def decide(
    model: nn.Module,
    config: QuantConfig,
    include: tuple[Pattern, ...] = (),
    *,
    example: Any = None,
    rewritten: frozenset[int] = frozenset(),
) -> tuple[Decision, ...]:
    """Return the decisions of :func:`plan`, without its checks."""

    def decide_call(names: tuple[str, ...], module: nn.Module, layer: type[nn.Module]) -> Decision:
        return by_rules(names, module, config, include, layer)

    layers = _decide_layers(model, config, include)
    decisions = decide_calls(model, layers, decide_call, example, rewritten)
    swapped = {id(d.parent or d.module) for d in decisions if not d.reason}
    for names, module in modules_with_names(model):
        parts = module.modules() if _is_container(module) else ()
        if any(id(part) in swapped or isinstance(part, QuantModule) for part in parts):
            rule = "(contains quantized modules)"
            decisions.append(Decision(names, module, type(module), rule=rule))
    return tuple(decisions)


def _is_container(module: nn.Module) -> bool:
    """Return True for a module that is converted because one of its descendants is."""
    twin = quantized_class(type(module))
    return twin is not None and twin.is_container


def _decide_layers(
    model: nn.Module, config: QuantConfig, include: tuple[Pattern, ...]
) -> list[Decision]:
    """Return the decisions about modules that are quantized as a whole."""
    inside = {
        id(part) for m in model.modules() if isinstance(m, TensorQuantizer) for part in m.modules()
    }
    decisions: list[Decision] = []
    parents: dict[int, nn.Module] = {}
    for names, module in modules_with_names(model):
        if id(module) in inside or _is_container(module):
            continue
        reason = obstacle(module, parents.get(id(module)))
        parents |= {id(child): module for child in module.children()}
        if reason is None:
            continue
        twin = quantized_class(type(module))
        if reason:
            found = [Decision(names, module, type(module), reason=reason)]
        else:
            found = _by_places(model, names, module, config, include)
        decisions += [d for d in found if d.rule is not None or twin is None or not twin.is_marker]
    return decisions


def resolve_positions(
    model: nn.Module,
    config: QuantConfig,
    *,
    example: Any = None,
) -> QuantConfig:
    """Return ``config`` with the path of a layer as the pattern of each rule with a position.

    The candidates are the layers whose weight the other rules quantize, in the order of
    ``named_modules()``. Rules that skip do not count, so excluding the last layer does not make
    the one before it the last. An optional rule whose pattern does not match its layer is dropped.
    """
    if not any(rule.position for rule in config.rules):
        return config
    general = tuple(r for r in config.rules if r.position is None and not r.skip)
    decisions = decide(model, replace(config, rules=general), example=example)
    layers = [d for d in decisions if d.weight is not None and not d.reason]
    rules: list[Rule] = []
    for rule in config.rules:
        layer = None
        if rule.position and layers:
            layer = layers[0 if rule.position == "first" else -1]
        if rule.position is None:
            rules.append(rule)
        elif layer is not None and _selects(rule.pattern, layer):
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
    model: nn.Module,
    names: tuple[str, ...],
    module: nn.Module,
    config: QuantConfig,
    include: tuple[Pattern, ...],
) -> list[Decision]:
    """Return what the rules say about a module.

    A module that stands in several places and has no state to share has a decision for each.
    """
    places: dict[tuple[int, str], tuple[nn.Module, list[str]]] = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        parent = model.get_submodule(path)
        places.setdefault((id(parent), leaf), (parent, []))[1].append(name)
    state = (*module.parameters(), *module.buffers(), *module.children())
    if len(places) == 1 or state:
        return [by_rules(names, module, config, include)]
    found = [
        (parent, by_rules(tuple(paths), module, config, include))
        for parent, paths in places.values()
    ]
    if all(d.reason for _, d in found):
        return [by_rules(names, module, config, include)]
    return [
        d if d.reason else replace(d, module=twin_of(module), parent=parent) for parent, d in found
    ]


def by_rules(
    names: tuple[str, ...],
    module: nn.Module,
    config: QuantConfig,
    include: tuple[Pattern, ...] = (),
    layer: type[nn.Module] | None = None,
) -> Decision:
    """Return what the rules say about one module that can be swapped, or has been."""
    cls = type(module).float_class if isinstance(module, QuantModule) else type(module)
    layer = layer or quantized_as(cls)
    base = Decision(names, module, cls, layer=layer)

    def selects(pattern: Pattern) -> bool:
        return _selects(pattern, base)

    rule = next((r for r in reversed(config.rules) if selects(r.pattern)), None)
    if include and not any(map(selects, include)):
        return replace(base, reason="not in include")
    if rule is None:
        return replace(base, reason=f"no rule matches{_RECURRENT if _is_recurrent(cls) else ''}")
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


def _is_recurrent(cls: type[nn.Module]) -> bool:
    return issubclass(cls, nn.RNNBase)


def _selects(pattern: Pattern, decision: Decision) -> bool:
    """Return True if ``pattern`` selects the module of a decision.

    Patterns of types see its float class, and the class that it is quantized as.
    """
    classes = {decision.float_class, decision.layer or decision.float_class}
    return any(matches(pattern, decision.names, decision.module, cls) for cls in classes)


def check_used(
    model: nn.Module,
    config: QuantConfig,
    include: tuple[Pattern, ...],
    decisions: tuple[Decision, ...],
) -> None:
    """Raise :class:`ConfigError` where a pattern selects nothing, or nothing is quantized."""

    def selects(pattern: Pattern) -> bool:
        return any(_selects(pattern, d) for d in decisions)

    wanted = [rule.pattern for rule in config.rules if not rule.optional] + list(include)
    unused = [pattern for pattern in wanted if not selects(pattern)]
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

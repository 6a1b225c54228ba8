"""What the rules decide about each module, and about function calls with weights in forwards."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from torch import fx, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

from torchq import recipes
from torchq.config import QuantConfig, Rule
from torchq.errors import ConfigError, InputError
from torchq.nn import (
    QUANTIZED,
    QuantModule,
    ScaledDotProductAttention,
    TensorQuantizer,
    quantized_as,
    quantized_class,
)
from torchq.nn.calls.find import WHOLE_ATTENTION, FoundCalls, Seen, weighted_calls
from torchq.nn.calls.routes import CallSite, equivalent_class, site_descriptors
from torchq.nn.convert import float_class_of, unparametrized
from torchq.nn.modules.operators import Call
from torchq.runtime import Runtime
from torchq.swap.plan import ALREADY, Decision, Plan
from torchq.utils import (
    Pattern,
    check_pattern,
    child_path,
    matches,
    modules_with_names,
    pattern_text,
    qualified_name,
)

_NO_TWIN = "no quantized twin of "


def no_twin(cls: type[nn.Module]) -> str:
    """Return the reason for a class with parameters that nobody registered."""
    name = qualified_name(cls)
    return (
        f"{_NO_TWIN}{name}, which has parameters of its own; pass example= to find function calls "
        f"with them, or register one with torchq.nn.register({name})"
    )


def _no_twin_in_run(cls: type[nn.Module]) -> str:
    """Return the reason for such a class where a run has shown no function calls to quantize."""
    name = qualified_name(cls)
    parts = (
        f"{_NO_TWIN}{name}, and the run on the example shows no function calls with its "
        "parameters; "
    )
    if issubclass(cls, nn.RNNCellBase):
        layer = cls.__name__.removesuffix("Cell")
        return (
            f"{parts}torch.nn.{layer} computes the same for all steps, and recipes with "
            "recurrent=True quantize it"
        )
    return f"{parts}register one with torchq.nn.register({name})"


@dataclass(frozen=True, kw_only=True)
class Draft(Decision):
    """A decision while it is made, with the module that it is about.

    Attributes:
        module: in its place in the model, or what will stand for a call or an operator.
        float_class: its class before the swap.
        parent: the module that adopts a new ``module`` for a call; None for one in its place.
        layer: the class that it is quantized as, whose rules apply; None is its own.
    """

    module: nn.Module
    float_class: type[nn.Module]
    parent: nn.Module | None = None
    layer: type[nn.Module] | None = None

    @classmethod
    def of(
        cls,
        names: tuple[str, ...],
        module: nn.Module,
        float_class: type[nn.Module] | None = None,
        **fields: Any,
    ) -> Draft:
        """Return a draft about a module whose class is float, unless another one is named."""
        float_class = float_class or type(module)
        name = qualified_name(unparametrized(float_class))
        return cls(names, name, module=module, float_class=float_class, **fields)

    @property
    def is_without_twin(self) -> bool:
        """True if the module stays float only because no class is registered for it."""
        return self.reason.startswith(_NO_TWIN)

    def after_run(self) -> Draft:
        """Return the decision without the advice to run the model, which was done."""
        if not self.is_without_twin:
            return self
        return replace(self, reason=_no_twin_in_run(self.float_class))

    def matches(self, pattern: Pattern) -> bool:
        """Return True if a pattern selects it, by its class or the one it is quantized as."""
        classes = {self.float_class, self.layer or self.float_class}
        return any(matches(pattern, self.names, self.module, cls) for cls in classes)

    def decision(self) -> Decision:
        """Return the decision without its module."""
        return Decision(
            **{one.name: getattr(self, one.name) for one in fields(Decision)}
        )


def obstacle(module: nn.Module, parent: nn.Module | None) -> str | None:
    """Return why ``module`` cannot be swapped."""
    cls = type(module)
    if isinstance(module, QuantModule):
        return ALREADY
    if isinstance(parent, nn.MultiheadAttention) and module is parent.out_proj:
        if quantized_class(type(parent)) is not None or isinstance(parent, QuantModule):
            return None  # It is quantized as a part of its parent.
        return "its weight is read by nn.MultiheadAttention directly, its forward is never called"
    if isinstance(module, parametrize.ParametrizationList):
        return None  # It computes a tensor of its parent.
    if parametrize.is_parametrized(module) and not _reads_attributes(cls):
        return "parametrized; bake it with torch.nn.utils.parametrize.remove_parametrizations first"
    if quantized_class(cls) is not None:
        if "forward" in vars(module):
            return "forward was replaced on the instance"
        is_complex = any(p.is_complex() for p in module.parameters(recurse=False))
        return "complex dtype" if is_complex else ""
    base = next((c for c in cls.__mro__[1:] if c in QUANTIZED), None)
    name = qualified_name(cls)
    if base is not None:
        if issubclass(cls, LazyModuleMixin):
            return "not initialised yet; run one batch through the model first"
        return (
            f"a subclass of {base.__name__} with code of its own may compute something else; "
            "pass example= to find its function calls, or register a twin with "
            f"torchq.nn.register({name})"
        )
    if any(
        p.dim() > 1 and p.is_floating_point() for p in module.parameters(recurse=False)
    ):
        return no_twin(cls)
    return None


def _reads_attributes(cls: type[nn.Module]) -> bool:
    """Return True if the twin of ``cls`` computes with the weights that its attributes give."""
    # Recurrent layers keep a list of their weights, which a parametrization does not change.
    return quantized_class(cls) is not None and not issubclass(cls, nn.RNNBase)


def config_or_default(
    config: QuantConfig | None, runtime: Runtime | None = None
) -> QuantConfig:
    """Return ``config``, or in the place of None the recipe of a runtime, or INT8."""
    if config is None:
        return recipes.int8() if runtime is None else runtime.recipe()
    if not isinstance(config, QuantConfig):
        raise InputError(
            f"config: got {config!r:.60}; expected a QuantConfig. Call a recipe, as in "
            "torchq.recipes.int8()"
        )
    return config


def patterns(selection: Sequence[Pattern] | Pattern | None) -> tuple[Pattern, ...]:
    """Return one pattern or several, checked, as a tuple."""
    if selection is None:
        return ()
    if isinstance(selection, (str, type)) or callable(selection):
        selection = (selection,)
    return tuple(check_pattern(pattern) for pattern in selection)


@dataclass(frozen=True)
class Rules:
    """The rules of a configuration, and patterns of which a module must match one if there are.

    Attributes:
        config: the rules, the last one that matches decides.
        include: a module must match one of these, if there are any.
        optional: those of the rules that a target added, and calibration may overrule.
    """

    config: QuantConfig
    include: tuple[Pattern, ...] = ()
    optional: tuple[Rule, ...] = ()

    def about(
        self,
        names: tuple[str, ...],
        module: nn.Module,
        layer: type[nn.Module] | None = None,
    ) -> Draft:
        """Return what they say about one module that can be swapped, or has been."""
        cls = float_class_of(module)
        layer = layer or quantized_as(cls)
        base = Draft.of(names, module, cls, layer=layer)
        rule = next(
            (r for r in reversed(self.config.rules) if base.matches(r.pattern)), None
        )
        if self.include and not any(map(base.matches, self.include)):
            return replace(base, reason="not in include")
        if rule is None:
            hint = _RECURRENT if issubclass(cls, nn.RNNBase) else ""
            return replace(base, reason=f"no rule matches{hint}")
        base = replace(base, by=str(rule))
        if rule.skip:
            return replace(base, reason="excluded")
        twin = None if layer is None else quantized_class(layer)
        descriptors = {
            name: getattr(rule, name)
            for name in (twin.descriptor_names() if twin else ())
        }
        if not any(descriptors.values()):
            return replace(base, reason="the rule has no descriptor for it")
        # A rule of the user may be equal to one of a target.
        is_optional = any(rule is one for one in self.optional)
        return replace(base, **descriptors, optional=is_optional)


#: Recipes leave recurrent layers in float unless asked: their steps run one by one on integers.
_RECURRENT = "; torchq.recipes.int8(recurrent=True) has one"


def decide(
    model: nn.Module,
    rules: Rules,
    seen: Seen | None = None,
    rewritten: frozenset[int] = frozenset(),
) -> tuple[Draft, ...]:
    """Return what the rules decide, unchecked.

    ``seen`` is what a run showed, if there was one, ``rewritten`` the ids of modules in whose
    forwards children stand for operators.
    """
    layers = _decide_layers(model, rules)
    decisions = _decide_calls(
        model, layers, rules, None if seen is None else seen.calls, rewritten
    )
    swapped = {id(d.parent or d.module) for d in decisions if not d.reason}
    for names, module in modules_with_names(model):
        parts = module.modules() if _is_container(module) else ()
        if any(id(part) in swapped or isinstance(part, QuantModule) for part in parts):
            rule = "(contains quantized modules)"
            decisions.append(Draft.of(names, module, by=rule))
    return tuple(decisions)


def _is_container(module: nn.Module) -> bool:
    """Return True for a module that is converted because one of its descendants is."""
    twin = quantized_class(type(module))
    return twin is not None and twin.is_container


def _decide_layers(model: nn.Module, rules: Rules) -> list[Draft]:
    """Return the decisions about modules that are quantized as a whole."""
    inside = _inside_quantizers(model)
    decisions: list[Draft] = []
    parents: dict[int, nn.Module] = {}
    for names, module in modules_with_names(model):
        if id(module) in inside or _is_container(module):
            continue
        reason = obstacle(module, parents.get(id(module)))
        parents |= {id(child): module for child in module.children()}
        if reason:
            decisions.append(Draft.of(names, module, reason=reason))
        elif reason is not None:
            twin = quantized_class(type(module))
            by_places = _by_places(model, names, module, rules)
            decisions += [
                d
                for d in by_places
                if twin is None or not twin.is_marker or _is_named(d)
            ]
    return decisions


def _is_named(draft: Draft) -> bool:
    """Return True where a rule quantizes a module by its path or type, not with all others."""
    by_word = draft.by.startswith(("type:", "re:"))
    return not draft.reason and (by_word or draft.by in draft.names)


def resolve_positions(
    model: nn.Module, config: QuantConfig, seen: Seen | None = None
) -> QuantConfig:
    """Return ``config`` with the path of a layer as the pattern of each rule with a position.

    Rules that skip do not count, so excluding the last layer does not make the one before it the
    last. An optional rule whose pattern does not match its layer is dropped.
    """
    if not any(rule.position for rule in config.rules):
        return config
    general = tuple(r for r in config.rules if r.position is None and not r.skip)
    decisions = decide(model, Rules(replace(config, rules=general)), seen)
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
    drafts = [rules.about(tuple(paths), module) for paths in places.values()]
    if state or all(d.reason for d in drafts):
        return [rules.about(names, module)]
    return drafts


def check_used(
    model: nn.Module, rules: Rules, drafts: tuple[Draft, ...], plan: Plan
) -> None:
    """Raise :class:`ConfigError` where a pattern selects nothing, or nothing is quantized."""
    decisions = plan.decisions
    required = [r.pattern for r in rules.config.rules if not r.optional] + list(
        rules.include
    )
    unused = [p for p in required if not any(d.matches(p) for d in drafts)]
    where = qualified_name(type(model))
    if unused:
        candidates = ", ".join(d.name or "(root)" for d in decisions[:8]) or "none"
        quoted = ", ".join(repr(pattern_text(p)) for p in unused)
        paths = dict(model.named_modules())
        below = [p for p in unused if isinstance(p, str) and p in paths]
        hint = f". For everything below it write '{below[0]}.*'" if below else ""
        raise ConfigError(
            f"{where}: pattern {quoted} matches no module that could be quantized; "
            f"candidates are {candidates}, ...{hint}"
        )
    if all(d.reason for d in decisions):
        obstacles = sorted({f"{d.name or '(root)'}: {d.reason}" for d in decisions})[:5]
        reasons = "; ".join(obstacles) or "it has no layer that torchq knows"
        raise ConfigError(
            f"{where}: nothing to quantize ({reasons}); "
            "expected at least one module that a rule selects"
        )


# --- function calls with weights ------------------------------------------------------------------


def _decide_calls(
    model: nn.Module,
    decisions: Sequence[Draft],
    rules: Rules,
    found: Mapping[int, FoundCalls] | None = None,
    rewritten: frozenset[int] = frozenset(),
) -> list[Draft]:
    """Return the decisions with those about function calls, which a run ``found``, added."""
    quantized = {id(d.module): d for d in decisions if not d.reason}
    result = list(decisions)
    inside = _inside_quantizers(model)
    for names, module in modules_with_names(model):
        if id(module) in inside or not _is_candidate(module):
            continue
        shown = None if found is None else found.get(id(module))
        calls = _calls_without_example(module, quantized) if found is None else shown
        if calls is None:
            continue
        if isinstance(module, fx.GraphModule):
            calls = replace(calls, obstacle=calls.obstacle or _IN_GRAPH)
        has_weights = any(site.kind != "attention" for site in calls.sites)
        if found is not None and not has_weights and calls.obstacle != WHOLE_ATTENTION:
            # It ran, and no call multiplies by a parameter of its own: nothing to quantize.
            result = [
                d for d in result if d.module is not module or not d.is_without_twin
            ]
        new = _decide_module(
            names, module, calls, quantized, rules, id(module) in rewritten
        )
        new = _with_unreached(names, module, calls, new)
        places = [i for i, d in enumerate(result) if d.module is module] or [
            len(result)
        ]
        # A module whose only call is quantized replaces the decision that it has no twin.
        replaced = any(d.module is module for d in new)
        result[places[0] + (not replaced) : places[0] + 1] = new
    return result if found is None else _without_unused(result, found)


def _inside_quantizers(model: nn.Module) -> set[int]:
    """Return the ids of the quantizers of a model, and of the modules in them."""
    quantizers = (m for m in model.modules() if isinstance(m, TensorQuantizer))
    return {id(part) for quantizer in quantizers for part in quantizer.modules()}


def _with_unreached(
    names: tuple[str, ...], module: nn.Module, calls: FoundCalls, decisions: list[Draft]
) -> list[Draft]:
    """Return the decisions with the uses of weights that no quantizer reaches named."""
    if not calls.unreached:
        return decisions
    note = f"its forward {' and '.join(sorted(calls.unreached.values()))}, which stays float"
    if not any(d.module is module for d in decisions):
        return [Draft.of(names, module, reason=note), *decisions]
    return [
        replace(d, note=d.note or note) if d.module is module and not d.reason else d
        for d in decisions
    ]


def _without_unused(
    decisions: list[Draft], found: Mapping[int, FoundCalls]
) -> list[Draft]:
    """Leave layers float that are never called, but whose weight a call uses or computes with."""
    sources = {key for calls in found.values() for key in calls.sources}
    weighted = [(d.module, site) for d in decisions for site in d.calls if site.weight]
    sources |= {id(module.get_parameter(site.weight)) for module, site in weighted}
    holders = {
        id(module.get_submodule(site.holder))
        for module, site in weighted
        if site.holder and not site.holder.endswith("_call")
    }
    result = []
    for d in decisions:
        parameter_ids = {
            id(parameter) for parameter in d.module.parameters(recurse=False)
        }
        is_called = id(d.module) in found or id(d.module) in holders
        if not d.reason and not d.calls and not is_called:
            if parameter_ids & sources:
                d = replace(d, input=None, weight=None, reason=_UNUSED)
            elif parameter_ids:  # other data than the example may call it
                d = replace(d, note=d.note or NOT_CALLED)
        result.append(d)
    return result


#: The note about a layer that a run on the example did not call.
NOT_CALLED = "not called in the run on the example"

_IN_GRAPH = (
    "its forward is a graph of torch.fx, whose copies would lose the quantizers of a call: "
    "quantize the model before it is traced, or use a module such as nn.Linear for the call"
)
_UNUSED = (
    "it is never called: a function call of another module uses its weight, and is quantized or "
    "reported there"
)


def _is_candidate(module: nn.Module) -> bool:
    if isinstance(module, (QuantModule, TensorQuantizer)) or "forward" in vars(module):
        return False
    library = type(module).__module__.startswith(("torch.nn.", "torchq."))
    return not library and quantized_class(type(module)) is None


def _calls_without_example(
    module: nn.Module, quantized: dict[int, Draft]
) -> FoundCalls:
    calls = FoundCalls()
    for site in weighted_calls(module):
        path = site.weight.rpartition(".")[0]
        child = module.get_submodule(path)
        same = quantized_as(type(child)) is equivalent_class(site.kind)
        if path and same and id(child) in quantized:
            calls.add(site, module.get_parameter(site.weight).dim())
    return calls


def _decide_module(
    names: tuple[str, ...],
    module: nn.Module,
    calls: FoundCalls,
    quantized: dict[int, Draft],
    rules: Rules,
    is_rewritten: bool,
) -> list[Draft]:
    """Return the decisions about the calls of one module, and about the module itself."""
    held, direct = _by_holder(module, calls, quantized)
    if is_rewritten:
        direct = [(site, ndim) for site, ndim in direct if site.kind != "attention"]
    is_leaf = next(module.children(), None) is None
    if is_leaf and len(direct) == 1 and direct[0][0].kind != "attention":
        return [_decide_leaf(names, module, calls, *direct[0], rules)]
    decisions: list[Draft] = []
    sites = list(held)
    for number, (site, ndim) in enumerate(direct):
        is_again = any(site.weight == earlier.weight for earlier, _ in direct[:number])
        site = replace(site, holder=_holder_name(module, site, number, is_again))
        child = ScaledDotProductAttention() if site.kind == "attention" else Call()
        paths = tuple(child_path(name, site.holder) for name in names)
        child.train(module.training)
        # Patterns select the call by its own paths, and by those of the module that makes it.
        decision = rules.about((*paths, *names), child, equivalent_class(site.kind))
        decision = replace(decision, names=paths)
        if decision.reason and not decision.by:
            continue  # No rule asks for it.
        if not decision.reason and calls.obstacle:
            decision = Draft.of(paths, child, reason=calls.obstacle)
        input, weight = site_descriptors(site, ndim, decision.input, decision.weight)
        decisions.append(replace(decision, input=input, weight=weight, parent=module))
        if not decision.reason:
            sites.append(site)
    if calls.obstacle and held:
        return [Draft.of(names, module, reason=calls.obstacle)]
    if sites:
        rule = "(contains quantized calls)"
        chosen = (*sites, *calls.unseen)
        decisions.insert(0, Draft.of(names, module, by=rule, calls=chosen))
    return decisions


def _decide_leaf(
    names: tuple[str, ...],
    module: nn.Module,
    calls: FoundCalls,
    site: CallSite,
    ndim: int,
    rules: Rules,
) -> Draft:
    """Return the decision about a module without children whose forward makes one call."""
    decision = rules.about(names, module, equivalent_class(site.kind))
    if not decision.reason and calls.obstacle:
        return Draft.of(names, module, reason=calls.obstacle)
    input, weight = site_descriptors(site, ndim, decision.input, decision.weight)
    chosen = () if decision.reason else (site, *calls.unseen)
    return replace(decision, input=input, weight=weight, calls=chosen)


def _by_holder(
    module: nn.Module, calls: FoundCalls, quantized: dict[int, Draft]
) -> tuple[list[CallSite], list[tuple[CallSite, int]]]:
    """Return the calls with the weight of a quantized child that computes the same, and others."""
    held, direct = [], []
    for site, ndim in calls.sites.items():
        path = site.weight.rpartition(".")[0]
        child = module.get_submodule(path) if path else module
        same = quantized_as(type(child)) is equivalent_class(site.kind)
        if path and same:
            if id(child) in quantized:  # Otherwise a rule has left the child float.
                held.append(replace(site, holder=path))
        else:
            direct.append((site, ndim))
    return held, direct


def _holder_name(module: nn.Module, site: CallSite, number: int, is_again: bool) -> str:
    base = site.weight.replace(".", "_") or site.kind
    name = f"{base}_call" if site.weight else f"{base}_call_{number}"
    if site.weight and is_again:  # one weight in several calls
        name = f"{base}_{number}_call"
    while hasattr(module, name):
        name += "_"
    return name

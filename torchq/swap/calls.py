"""What happens to function calls with weights in the forwards of modules, as decisions."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import fx, nn

from torchq.nn import (
    QuantModule,
    ScaledDotProductAttention,
    TensorQuantizer,
    quantized_as,
    quantized_class,
)
from torchq.nn.calls.find import WHOLE_ATTENTION, FoundCalls, weighted_calls
from torchq.nn.calls.functions import CallSite, equivalent_class, site_descriptors
from torchq.nn.modules.operators import Call
from torchq.swap.draft import Draft
from torchq.utils import modules_with_names

#: Decides about a module by the rules for a class: (names, module, class) -> decision.
ByRules = Callable[[tuple[str, ...], nn.Module, type[nn.Module]], Draft]


def decide_calls(
    model: nn.Module,
    decisions: Sequence[Draft],
    by_rules: ByRules,
    found: Mapping[int, FoundCalls] | None = None,
    rewritten: frozenset[int] = frozenset(),
) -> list[Draft]:
    """Return the decisions with those about function calls, which a run ``found``, added."""
    quantized = {id(d.module): d for d in decisions if not d.reason}
    result = list(decisions)
    inside = inside_quantizers(model)
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
            result = [d for d in result if d.module is not module or not d.is_without_twin]
        new = _decide_module(names, module, calls, quantized, by_rules, id(module) in rewritten)
        new = _with_unreached(names, module, calls, new)
        places = [i for i, d in enumerate(result) if d.module is module] or [len(result)]
        # A module whose only call is quantized replaces the decision that it has no twin.
        replaced = any(d.module is module for d in new)
        result[places[0] + (not replaced) : places[0] + 1] = new
    return result if found is None else _without_unused(result, found)


def inside_quantizers(model: nn.Module) -> set[int]:
    """Return the ids of the quantizers of a model, and of the modules in them."""
    quantizers = (m for m in model.modules() if isinstance(m, TensorQuantizer))
    return {id(part) for quantizer in quantizers for part in quantizer.modules()}


def _with_unreached(
    names: tuple[str, ...], module: nn.Module, calls: FoundCalls, decisions: list[Draft]
) -> list[Draft]:
    """Return the decisions with the uses of weights that no quantizer reaches named."""
    if not calls.unreached:
        return decisions
    text = f"its forward {' and '.join(sorted(calls.unreached.values()))}, which stays float"
    if not any(d.module is module for d in decisions):
        return [Draft(names, module, type(module), reason=text), *decisions]
    return [
        replace(d, note=d.note or text) if d.module is module and not d.reason else d
        for d in decisions
    ]


def _without_unused(decisions: list[Draft], found: Mapping[int, FoundCalls]) -> list[Draft]:
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
        own = {id(parameter) for parameter in d.module.parameters(recurse=False)}
        is_called = id(d.module) in found or id(d.module) in holders
        if not d.reason and not d.calls and not is_called:
            if own & sources:
                d = replace(d, input=None, weight=None, reason=_UNUSED)
            elif own:  # other data than the example may call it
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


def _calls_without_example(module: nn.Module, quantized: dict[int, Draft]) -> FoundCalls:
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
    by_rules: ByRules,
    is_rewritten: bool,
) -> list[Draft]:
    """Return the decisions about the calls of one module, and about the module itself."""
    cls = type(module)
    held, own = _by_holder(module, calls, quantized)
    if is_rewritten:
        own = [(site, ndim) for site, ndim in own if site.kind != "attention"]
    is_leaf = next(module.children(), None) is None
    if is_leaf and len(own) == 1 and own[0][0].kind != "attention":
        return [_decide_leaf(names, module, calls, *own[0], by_rules)]
    decisions: list[Draft] = []
    sites = list(held)
    for number, (site, ndim) in enumerate(own):
        site = replace(site, holder=_holder_name(module, site, number))
        child = ScaledDotProductAttention() if site.kind == "attention" else Call()
        paths = tuple(f"{name}.{site.holder}" if name else site.holder for name in names)
        child.train(module.training)
        # Patterns select the call by its own paths, and by those of the module that makes it.
        decision = by_rules((*paths, *names), child, equivalent_class(site.kind))
        decision = replace(decision, names=paths)
        if decision.rule is None and decision.reason:
            continue  # No rule asks for it.
        if not decision.reason and calls.obstacle:
            decision = Draft(paths, child, type(child), reason=calls.obstacle)
        input, weight = site_descriptors(site, ndim, decision.input, decision.weight)
        decisions.append(replace(decision, input=input, weight=weight, parent=module))
        if not decision.reason:
            sites.append(site)
    if calls.obstacle and held:
        return [Draft(names, module, cls, reason=calls.obstacle)]
    if sites:
        rule, chosen = "(contains quantized calls)", (*sites, *calls.unseen)
        decisions.insert(0, Draft(names, module, cls, rule=rule, calls=chosen))
    return decisions


def _decide_leaf(
    names: tuple[str, ...],
    module: nn.Module,
    calls: FoundCalls,
    site: CallSite,
    ndim: int,
    by_rules: ByRules,
) -> Draft:
    """Return the decision about a module without children whose forward makes one call."""
    decision = by_rules(names, module, equivalent_class(site.kind))
    if not decision.reason and calls.obstacle:
        return Draft(names, module, type(module), reason=calls.obstacle)
    input, weight = site_descriptors(site, ndim, decision.input, decision.weight)
    chosen = () if decision.reason else (site, *calls.unseen)
    return replace(decision, input=input, weight=weight, calls=chosen)


def _by_holder(
    module: nn.Module, calls: FoundCalls, quantized: dict[int, Draft]
) -> tuple[list[CallSite], list[tuple[CallSite, int]]]:
    """Return the calls with the weight of a quantized child that computes the same, and others."""
    held, own = [], []
    for site, ndim in zip(calls.sites, calls.ndims, strict=True):
        path = site.weight.rpartition(".")[0]
        child = module.get_submodule(path) if path else module
        same = quantized_as(type(child)) is equivalent_class(site.kind)
        if path and same:
            if id(child) in quantized:  # Otherwise a rule has left the child float.
                held.append(replace(site, holder=path))
        else:
            own.append((site, ndim))
    return held, own


def _holder_name(module: nn.Module, site: CallSite, number: int) -> str:
    base = site.weight.replace(".", "_") or site.kind
    name = f"{base}_call" if site.weight else f"{base}_call_{number}"
    while hasattr(module, name):
        name += "_"
    return name

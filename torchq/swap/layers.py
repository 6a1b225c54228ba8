"""Planning passes that several runtimes adapt layers with, before the model is looked at.

Each is a function ``(plan, facts) -> plan``, behind what it is set to. Of the facts there are the
modules, and which operands layers compute; see :attr:`torchq.runtime.Runtime.adapting`.
"""

import fnmatch
from collections.abc import Iterable
from dataclasses import replace

from torchq.formats import PerTensor
from torchq.swap.facts import Facts
from torchq.swap.plan import Decision, Plan


def is_of_class(decision: Decision, classes: Iterable[str]) -> bool:
    """Return True if one of these patterns is the qualified name of a module's float class."""
    return any(fnmatch.fnmatchcase(decision.cls, pattern) for pattern in classes)


def one_weight_scale(classes: tuple[str, ...], plan: Plan, facts: Facts) -> Plan:
    """Give each weight of some layers one scale, as the kernels of the target take no more.

    Before: weights have the scales that the rules say. After: those of layers of these classes have
    one, and ``one_scale`` marks it, so that no fold makes several of it.

    Args:
        classes: patterns of the qualified names of float classes.
        plan: the plan so far.
        facts: not read.
    """
    decisions = (
        _with_one_scale(d) if is_of_class(d, classes) else d for d in plan.decisions
    )
    return replace(plan, decisions=tuple(decisions))


def one_weight_scale_of_calls(kinds: tuple[str, ...], plan: Plan, facts: Facts) -> Plan:
    """Give each weight that forwards call functions with one scale, as results of calls are float.

    Before: weights have the scales that the rules say. After: those of calls of these kinds have
    one, as in :func:`one_weight_scale`.

    Args:
        kinds: the kinds of calls, see :class:`torchq.nn.calls.routes.CallSite`.
        plan: the plan so far.
        facts: not read.
    """
    holders = {
        f"{decision.name}.{site.holder}".strip(".")
        for decision in plan.decisions
        for site in decision.calls
        if site.kind in kinds
    }
    decisions = (_with_one_scale(d) if d.name in holders else d for d in plan.decisions)
    return replace(plan, decisions=tuple(decisions))


def _with_one_scale(decision: Decision) -> Decision:
    weight = decision.weight
    if decision.reason or weight is None:
        return decision
    if weight.axis is not None:
        weight = weight.replace(axis=None, name=None)
    return replace(decision, weight=weight, one_scale=weight.granularity == PerTensor())


def open_branches(plan: Plan, facts: Facts) -> Plan:
    """Leave the operand of an addition unquantized that comes straight from a layer.

    Before: both operands are quantized. After: the quantizer of that one is off.
    """
    slots = ("input_quantizer", "other_quantizer")
    open_modes = {f"{path}.{slots[main]}": "off" for path, main in facts.mains.items()}
    return replace(plan, modes={**plan.modes, **open_modes})

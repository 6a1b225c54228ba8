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
    return replace(
        plan, decisions=tuple(_with_one_scale(d, classes) for d in plan.decisions)
    )


def _with_one_scale(decision: Decision, classes: tuple[str, ...]) -> Decision:
    weight = decision.weight
    if decision.reason or weight is None or not is_of_class(decision, classes):
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

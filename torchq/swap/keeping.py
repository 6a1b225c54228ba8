"""What of a plan stays: rules that ask more than the model, such as the clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from torch import nn

from torchq.runtime import Runtime
from torchq.swap.plan import Decision, Plan
from torchq.utils import Registry

#: Returns the plan in which the modules at some paths stay float too.
PlanWithout = Callable[[Iterable[str]], Plan]


@dataclass(frozen=True)
class Kept:
    """What a rule found out.

    Attributes:
        in_float: path of a module that stays float -> why.
        timing: how long the model takes, in a sentence.
        needed: operators without which it does not pay: calibration keeps them on integers.
    """

    in_float: Mapping[str, str] = field(default_factory=dict)
    timing: str = ""
    needed: frozenset[str] = frozenset()


class Keep(Protocol):
    """A rule of what stays quantized: ``keep=`` of :func:`torchq.plan`."""

    @property
    def name(self) -> str:
        """The name that stands in :attr:`Decision.by` of what the rule decided."""

    def __call__(
        self,
        model: nn.Module,
        planned: Plan,
        without: PlanWithout,
        example: object,
        runtime: Runtime | None,
    ) -> Kept:
        """Return what is to stay float of a plan, whose model is left unchanged.

        Args:
            model: the float model.
            planned: what would be quantized without the rule.
            without: returns the plan without some modules.
            example: the arguments for one call; None if there are none.
            runtime: the target of the plan, which need not be registered.
        """


#: The note of an operator that calibration is not to leave in float.
_NEEDED = "without it the model takes as long as in float, so calibration keeps it"

#: Name -> rule.
KEEPS: Registry[str, Keep] = Registry("keep", filled_by="torchq.runtimes")


def _needed(decision: Decision) -> Decision:
    """Return an operator that calibration does not leave in float."""
    note = f"{decision.note}; {_NEEDED}" if decision.note else _NEEDED
    return replace(decision, optional=False, note=note)


def kept_plan(
    keep: str | Keep,
    model: nn.Module,
    without: PlanWithout,
    example: object,
    runtime: Runtime | None,
) -> Plan:
    """Return the plan without what a rule leaves in float."""
    rule = KEEPS[keep] if isinstance(keep, str) else keep
    planned = without(())
    kept = rule(model, planned, without, example, runtime)
    if {decision.name for decision in planned.replaced} <= kept.in_float.keys():
        return replace(planned.in_float(kept.in_float, rule.name), timing=kept.timing)
    if kept.in_float:
        planned = without(kept.in_float)
    decisions = [
        replace(decision, reason=kept.in_float[decision.name], by=rule.name)
        if decision.reason and decision.name in kept.in_float
        else decision
        for decision in planned.decisions
    ]
    decisions = [
        _needed(decision) if decision.name in kept.needed else decision
        for decision in decisions
    ]
    return replace(planned, decisions=tuple(decisions), timing=kept.timing)

"""Leaving operators in float that a target added beside layers, and taking them back.

Their quantizers buy time and never accuracy, so calibration may do without some of them. What the
rest of the plan says then is decided by its own functions, on what a run in float shows: layers
whose results one of them reads give float results, and others may have to follow into float where
the kernels of the target want that.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from torchq.nn import TensorQuantizer
from torchq.runtime import Runtime
from torchq.swap.apply import (
    carry_marks_,
    keep_as_plan,
    name_quantizers,
    public_path,
    quantizer_slots,
)
from torchq.swap.facts import Facts
from torchq.swap.passes import kernel_passes, share_ranges
from torchq.swap.plan import Decision, Plan, canonical_groups
from torchq.utils import set_submodule

#: Who decided that an operator stays in float.
BY = "calibrate"


def optional_operators(plan: Plan) -> tuple[Decision, ...]:
    """Return the decisions about what a target added beside layers, without weights."""
    return tuple(d for d in plan.replaced if d.optional and d.weight is None)


def as_planned(plan: Plan) -> Plan:
    """Return the plan in which calibration has not decided anything."""
    rows = []
    modes = dict(plan.modes)
    for d in plan.decisions:
        if d.left_float:
            for slot in slots_left_float(d):
                modes.pop(slot, None)
            d = replace(d, left_float=(), by=f"type:{d.cls}", note="")
        rows.append(replace(d, noise=None))
    return replace(plan, decisions=tuple(rows), modes=modes)


def slots_left_float(decision: Decision) -> list[str]:
    """Return the paths of the quantizers of a decision that calibration turned off."""
    return [f"{decision.name}.{slot}_quantizer" for slot in decision.left_float]


@dataclass(frozen=True)
class Replanning:
    """Plans of one model with some of its optional operators in float.

    Attributes:
        plan: as it was planned: every optional operator is quantized.
        facts: of the model; see :meth:`torchq.swap.facts.Facts.observed`.
        runtime: the target of the plan.
    """

    plan: Plan
    facts: Facts
    runtime: Runtime

    @classmethod
    def of(
        cls, model: nn.Module, plan: Plan, runtime: Runtime, example: object
    ) -> Replanning:
        """Look at a quantized model, in one float run on an example.

        Args:
            model: quantized as ``plan`` says.
            plan: that of the model, as it is now.
            runtime: its target.
            example: the arguments of one call, as they are: ``(args, kwargs)``.
        """
        # Where there was no run when the model was planned, no pass did anything.
        shown = example if plan.check else None
        facts = Facts.before_conversion(model, runtime, {}).observed(model, shown)
        # As they were planned, before calibration chose the sign of codes.
        descriptors = {
            path: q.given_descriptor.replace(name=None)
            for path, q in quantizer_slots(model)
        }
        held = _held(model, plan, facts)
        facts = replace(facts, descriptors=descriptors, held=held)
        return cls(as_planned(plan), facts, runtime)

    def without(self, names: Iterable[str]) -> Plan:
        """Return the plan in which some operators are left in float, with all that follows."""
        trial, left = self._followed(names)
        trial = replace(trial, shared=self._groups(trial))
        marks = self._marks(trial)
        rows = []
        modes = dict(self.plan.modes)
        for d in self.plan.decisions:
            if d.name in left:
                slots = self._slots_on(d)
                d = replace(d, bias="", rounded_by="", awaits_fold=False, by=BY)
                d = replace(d, left_float=slots)
                modes |= dict.fromkeys(slots_left_float(d), "off")
            elif d.name in marks and not d.reason:
                d = _with_marks(d, marks[d.name])
            rows.append(d)
        gone = {slot for d in rows for slot in slots_left_float(d)}
        groups = ([s for s in group if s not in gone] for group in trial.shared)
        shared = canonical_groups(group for group in groups if len(group) > 1)
        return replace(self.plan, decisions=tuple(rows), modes=modes, shared=shared)

    def _slots_on(self, decision: Decision) -> tuple[str, ...]:
        """Return the slots of an operator that the plan quantizes."""
        start = f"{decision.name}."
        paths = [
            path
            for path in self.facts.descriptors
            if path.startswith(start) and path.count(".") == start.count(".")
        ]
        slots = [
            path.removeprefix(start).removesuffix("_quantizer")
            for path in paths
            if path not in self.plan.modes
        ]
        return tuple(sorted(slots))

    def _followed(self, names: Iterable[str]) -> tuple[Plan, frozenset[str]]:
        """Return the plan with operators in float, and those that must follow them there."""
        operators = {d.name for d in self.plan.replaced if d.weight is None}
        left = frozenset(names)
        while True:
            trial = self.plan.in_float(dict.fromkeys(left, BY), BY)
            # What a target cannot compute beside float operators its own passes know.
            passed = trial
            for planning_pass in self.runtime.planning if self.facts.flow else ():
                passed = planning_pass(passed, self.facts)
            followers = {d.name for d in passed.skipped} & operators - left
            if not followers:
                return trial, left
            left |= followers

    def _marks(self, trial: Plan) -> dict[str, Decision]:
        """Return path of each layer and operator -> a decision with the marks of its kernel."""
        if self.facts.flow is None:
            return {}
        unmarked = replace(
            trial,
            decisions=tuple(
                replace(d, bias="", rounded_by="", awaits_fold=False, float_kernel="")
                for d in _results_at_layers(trial, self.facts)
            ),
        )
        marked = unmarked
        for planning_pass in kernel_passes(self.runtime):
            marked = planning_pass(marked, self.facts)
        return {d.name: d for d in marked.replaced if not d.is_norm}

    def _groups(self, trial: Plan) -> tuple[tuple[str, ...], ...]:
        """Return the quantizers that are one; those of operators that are taken back join again."""
        slots = {path for path, mode in self.facts.modes.items() if mode == "off"}
        is_back = slots - set(trial.modes)
        if not is_back or self.facts.flow is None:
            return trial.shared
        return share_ranges(trial, self.facts).shared


def _held(model: nn.Module, plan: Plan, facts: Facts) -> dict[str, Hashable]:
    """Return the quantizers of inputs whose ranges another maker chose, with these."""
    known = dict(quantizer_slots(model))
    adopted = [d for d in plan.replaced if d.adopted]
    slots = [slot for d in adopted for slot in facts.inputs.get(d.name, ()) if slot]
    return {slot: _numbers(known[slot]) for slot in slots if slot in known}


def _numbers(quantizer: TensorQuantizer) -> Hashable:
    if quantizer.pre_quant_scale is not None:
        return None
    low, high = quantizer.range.low, quantizer.range.high
    return repr(high.tolist()), "" if low is None else repr(low.tolist())


def _results_at_layers(plan: Plan, facts: Facts) -> list[Decision]:
    """Return the decisions with quantizers of results at layers, not yet behind their norms."""
    outputs: dict[str, Any] = {}
    of_norms: set[str] = set()
    for layer, norm in facts.norms.items():
        behind = plan.decision(norm.names[0])
        if behind is not None and behind.is_norm:
            outputs[layer] = behind.output
            of_norms.add(behind.name)
    rows = [d for d in plan.decisions if d.name not in of_norms]
    return [replace(d, output=outputs.get(d.name, d.output)) for d in rows]


def _with_marks(decision: Decision, marked: Decision) -> Decision:
    return replace(
        decision,
        bias=marked.bias,
        rounded_by=marked.rounded_by,
        from_zero=marked.from_zero,
        awaits_fold=marked.awaits_fold,
        float_kernel=marked.float_kernel,
    )


def replan_(model: nn.Module, plan: Plan) -> None:
    """Let a quantized model be as one of :class:`Replanning`'s plans says, in place.

    An operator that is left in float gets quantizers of its own, which are off, where it shared
    them with others. One that is taken back gets the others' again.
    """
    # What is made in inference mode could not be trained outside of it.
    with torch.inference_mode(False), torch.no_grad():
        _replan_(model, plan)


def _replan_(model: nn.Module, plan: Plan) -> None:
    modules = dict(model.named_modules(remove_duplicate=False))
    left = {slot for d in plan.replaced for slot in slots_left_float(d)}
    of_operators = {d.name for d in plan.replaced if d.weight is None}
    for path, module in modules.items():
        if not isinstance(module, TensorQuantizer):
            continue
        is_off = module.mode == "off"
        if public_path(path) in left and not is_off:
            alone = copy.deepcopy(module) if module.shared else module
            alone.shared = False
            alone.mode = "off"
            set_submodule(model, path, alone)
        elif (
            is_off
            and path.rpartition(".")[0] in of_operators
            and path not in plan.modes
        ):
            module.mode = "quantize"
    _join_(model, plan)
    carry_marks_(model, plan)
    name_quantizers(model)
    keep_as_plan(model, plan)


def _join_(model: nn.Module, plan: Plan) -> None:
    """Put one quantizer into all slots of each group that is not one already."""
    modules = dict(model.named_modules(remove_duplicate=False))
    for group in plan.shared:
        quantizers = [modules[path] for path in group if path in modules]
        # Those of layers were never apart.
        first: Any = next((q for q in quantizers if getattr(q, "shared", False)), None)
        first = quantizers[0] if first is None else first
        if all(q is first for q in quantizers):
            continue
        first.shared = True
        for path in group:
            set_submodule(model, path, first)

"""Planning passes for ONNX Runtime: layers that its kernels lose with, and concatenations."""

from __future__ import annotations

from dataclasses import replace

from torchq.graph import Call
from torchq.swap.facts import Facts, Value
from torchq.swap.layers import is_of_class
from torchq.swap.passes import (
    View,
    has_effect,
    is_depthwise,
    slot_of_range,
    values_read,
)
from torchq.swap.plan import FLOAT_INPUT, Decision, Plan
from torchq.utils import child_path

#: Depthwise convolutions of fewer channels are faster in float.
_NARROW = 16
_TRANSPOSED = ("torch.nn.modules.conv.ConvTranspose[123]d",)
#: The largest ratio of the ranges of concatenated tensors that share one range.
_MOST_UNEQUAL = 1.5


def narrow_depthwise_in_float(plan: Plan, facts: Facts) -> Plan:
    """Leave depthwise convolutions of few channels float, unless a rule is the path of one."""
    rows = []
    for d in plan.decisions:
        module = facts.modules.get(d.name)
        is_named = d.by in d.names
        if (
            not d.reason
            and is_depthwise(module)
            and module.groups < _NARROW
            and not is_named
        ):
            reason = f"{plan.target} runs {module.groups} channels faster in float"
            d = replace(d, input=None, weight=None, reason=reason)
        rows.append(d)
    return replace(plan, decisions=tuple(rows))


def transposed_convolutions_in_float(plan: Plan, facts: Facts) -> Plan:
    """Leave the inputs of transposed convolutions float, for which there is no integer kernel.

    Before: they are quantized as those of other layers. After: their weights alone are, with a note
    in the report; files store these as integers. Calls of their functions are like them.
    """
    reason = f"{plan.target} has no integer kernel for it"
    holders = {
        child_path(d.name, call.holder)
        for d in plan.decisions
        for call in d.calls
        if call.kind.startswith("conv_transpose")
    }
    rows = []
    for d in plan.decisions:
        if not d.reason and (is_of_class(d, _TRANSPOSED) or d.name in holders):
            d = _with_float_input(d, reason)
        rows.append(d)
    return replace(plan, decisions=tuple(rows))


def _with_float_input(decision: Decision, reason: str) -> Decision:
    if decision.weight is None:
        return replace(decision, input=None, reason=reason)
    return replace(decision, input=None, note=f"{FLOAT_INPUT}, as {reason}")


def separate_ranges(plan: Plan, facts: Facts) -> Plan:
    """Give each tensor of a concatenation its own range where that gains something.

    A tensor whose own range is a third of the shared one is left with a third of the codes, also
    where other layers read it: chains of concatenated layers, as in HGNetV2, gain most. Codes that
    begin at 0 include the ReLU in front of them, which a range with negative values leaves in
    float, with the convolution before it.

    Before: the tensors of each quantized concatenation have one range. After: they have one each
    where, on the example, only some of them have negative values, or operators show of some alone
    that they cannot have any, or where the ratio of their ranges is above 1.5 and another quantizer
    reads one of them, or a function or module reads the result in float.
    """
    if facts.flow is None:
        return plan
    view = View(plan, facts)
    readers: dict[tuple[int, int], set[str]] = {}
    for slot, value in values_read(plan, facts):
        readers.setdefault(value.key, set()).add(slot)
    rows = []
    modes = dict(plan.modes)
    for decision in plan.decisions:
        slot = f"{decision.name}.input_quantizer"
        is_cat = not decision.reason and decision.class_name == "Cat" and decision.input
        calls = _calls_of(facts, slot) if is_cat and decision.ranges == 1 else []
        if len({len(call) for call in calls}) == 1:
            read_elsewhere = any(
                readers[v.key] - {slot} for call in calls for v in call
            )
            needed = read_elsewhere or any(
                _leads_to_float(view, c)
                for c in view.flow.calls
                if view.path(c) == decision.name
            )
            if any(_is_mixed(call) or (needed and _differ(call)) for call in calls):
                decision = replace(decision, ranges=len(calls[0]))
                if slot in modes:
                    slots_of_ranges = (
                        slot_of_range(slot, i) for i in range(decision.ranges)
                    )
                    modes |= dict.fromkeys(slots_of_ranges, modes[slot])
        rows.append(decision)
    return replace(plan, decisions=tuple(rows), modes=modes)


def _calls_of(facts: Facts, slot: str) -> list[list[Value]]:
    """Return the tensors of each call of a concatenation."""
    calls: list[list[Value]] = []
    for value in facts.values:
        if value.slot == slot:
            if value.position == 0:
                calls.append([])
            calls[-1].append(value)
    return calls


def _leads_to_float(view: View, call: Call) -> bool:
    """Return True if a result, or a part of it, is returned by the model or read in float."""
    if call.index in view.flow.outputs:
        return True
    return any(
        _leads_to_float(view, reader)
        if view.moves_elements(reader) or has_effect(reader, "part")
        else not view.quantizes(reader)
        for reader in view.flow.consumers(call)
    )


def _is_mixed(call: list[Value]) -> bool:
    """Return True if only some tensors of a call have negative values, or only some cannot have.

    The end of a range that holds both would be known after calibration alone.
    """
    are_negative = {value.is_signed for value in call}
    are_known = {value.is_nonnegative for value in call}
    return len(are_negative) > 1 or len(are_known) > 1


def _differ(call: list[Value]) -> bool:
    """Return True if the ranges of the tensors of a call differ too much to be shared."""
    sizes = [value.amax for value in call]
    return max(sizes) > _MOST_UNEQUAL * min(sizes)

"""Activations of 8 and of 16 bits in one file: the chip's operators have one width each.

Between two widths stands a pair of the wider one. Its scale is that of the narrow codes over 257,
and its zero point 257 times theirs: all narrow codes are codes of it, from 0 * 257 to 255 * 257,
and as 257 is odd, the borders between narrow codes are borders between wide codes. So neither
direction changes a code.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    data_type,
    fresh_name,
    input_at,
    is_constant,
    onnx_ir,
    readers,
    value_of,
)
from torchq.swap.facts import Facts
from torchq.swap.passes import values_read
from torchq.swap.plan import Decision, Plan

_NARROW = 8
_WIDE = 16
#: 65,535 / 255.
_FACTOR = 257
_PAIRS = ("QuantizeLinear", "DequantizeLinear")


def give_tensors_one_width(plan: Plan, facts: Facts) -> Plan:
    """Let all that read one tensor have the width of the widest of them.

    The result of a layer that two quantizers read is no result in codes for the chip.

    Before: of those that read a tensor some quantize it to 8 bits, and some to 16.
    After: all of them quantize it to 16 bits, what is added to it among it.
    """
    owners: dict[int, set[str]] = {}
    for slot, value in values_read(plan, facts):
        if value.slot not in facts.weights:
            owners.setdefault(value.root, set()).add(slot.rpartition(".")[0])
    wide = {d.name for d in plan.replaced if _is_wide(d)}
    before: set[str] = set()
    while wide != before:
        before = set(wide)
        for names in owners.values():
            wide |= names if names & wide else set()
    decisions = (
        _widened(d) if d.name in wide and not _is_wide(d) else d for d in plan.decisions
    )
    return replace(plan, decisions=tuple(decisions))


def _is_wide(decision: Decision) -> bool:
    return decision.input is not None and decision.input.num_bits == _WIDE


def _widened(decision: Decision) -> Decision:
    """Return a decision whose inputs have 16 bits, if they have 8."""
    if decision.input is None or decision.input.num_bits != _NARROW:
        return decision
    form = decision.input.replace(num_bits=_WIDE)
    note = "16 bits, as another layer reads one of its tensors so"
    return replace(decision, input=form, note=decision.note or note)


def give_operators_one_width(model: Model) -> None:
    """Let all that operators read and compute have the width of the widest of it.

    Before: codes of 8 and 16 bits -> an operator, or several with float between -> codes of either.
    After: codes of 8 bits -> a pair of 16 bits -> operators -> a pair of 16 bits -> codes of 8
    bits.
    """
    for nodes in _parts(model):
        narrow = [node for node in _borders(nodes) if _bits(node) == _NARROW]
        if len(narrow) == len(list(_borders(nodes))):
            continue
        for node in narrow:
            if node.op_type == "DequantizeLinear":
                _widen(node, node.outputs[0], nodes)
            else:
                _widen(node, node.inputs[0], {node})


def _parts(model: Model) -> Iterator[set[Node]]:
    """Yield the operators that are joined by float tensors, without those that quantize."""
    operators = [node for node in model.graph if node.op_type not in _PAIRS]
    seen: set[Node] = set()
    for first in operators:
        if first in seen:
            continue
        part: set[Node] = set()
        pending = [first]
        while pending:
            node = pending.pop()
            if node in part or node.op_type in _PAIRS:
                continue
            part.add(node)
            produced = (v.producer() for v in node.inputs if v is not None)
            pending += [producer for producer in produced if producer is not None]
            pending += [user for v in node.outputs for user in readers(v)]
        seen |= part
        yield part


def _borders(nodes: set[Node]) -> Iterator[Node]:
    """Yield the DequantizeLinear in front of some operators, and the QuantizeLinear behind them."""
    borders: dict[Node, None] = {}
    for node in nodes:
        before = (value.producer() for value in node.inputs if value is not None)
        behind = (user for value in node.outputs for user in readers(value))
        borders |= dict.fromkeys(
            other
            for other in (*before, *behind)
            if other is not None and _is_of_activation(other)
        )
    yield from borders


def _is_of_activation(node: Node) -> bool:
    """Return True for a node of a pair that has one stored scale and reads no stored tensor."""
    if node.op_type not in _PAIRS or is_constant(node.inputs[0]):
        return False
    parameters = [input_at(node, 1), input_at(node, 2)]
    if not all(is_constant(value) for value in parameters):
        return False
    return int(value_of(parameters[0]).numel()) == 1


def _bits(node: Node) -> int:
    return int(data_type(node.inputs[2]).bitwidth)


def _widen(narrow: Node, value: Value, for_readers: set[Node]) -> None:
    """Let some readers of a value read it behind a pair of 16 bits that holds all narrow codes."""
    graph = narrow.graph
    scale = value_of(narrow.inputs[1]).float()
    zero_point = value_of(narrow.inputs[2])
    users = [(user, index) for user, index in value.uses() if user in for_readers]
    name = fresh_name(graph, f"{value.name}/wide")
    stored = torch.int16 if zero_point.dtype.is_signed else torch.uint16
    wide_point = (_FACTOR * zero_point.to(torch.int32)).to(stored)
    parameters = [
        add_initializer(graph, f"{name}/scale", scale / _FACTOR),
        add_initializer(graph, f"{name}/zero_point", wide_point),
    ]
    producer = value.producer()
    codes = add_node(producer, "QuantizeLinear", [value, *parameters], f"{name}/codes")
    codes.type = onnx_ir.TensorType(data_type(parameters[1]))
    wide = add_node(
        codes.producer(), "DequantizeLinear", [codes, *parameters], f"{name}/value"
    )
    for user, index in users:
        user.replace_input_with(index, wide)

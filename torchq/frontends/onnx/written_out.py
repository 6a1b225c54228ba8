"""Activations that a file writes out in arithmetic, as files below opset 20 do with GELU.

One module in their place stays one operator: quantizers between its parts would cost accuracy, and
keep runtimes from running it as one. What such a part of a graph computes is not read from its
form, which differs from exporter to exporter: it is run, and compared with the activation.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.frontends.onnx.context import GraphBuilder

_ELEMENTWISE = frozenset(
    [torch.add, torch.sub, torch.mul, torch.div, torch.pow, torch.erf]
)
#: What the forms of an activation have in their middle -> the activation.
_GELUS: dict[object, Callable[[], nn.Module]] = {
    torch.erf: nn.GELU,
    nn.Tanh: lambda: nn.GELU(approximate="tanh"),
}
#: How many operators may stand behind that.
_MOST_BEHIND = 4
#: Beyond them a GELU is 0 or its input.
_GRID = torch.linspace(-9.0, 9.0, 1801, dtype=torch.float64)
#: Constants in half precision move a GELU by 5e-5; 1.41 for the root of 2 does so by 9e-4.
_CLOSE = 2e-4


def merge_gelus_(builder: GraphBuilder, outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Put ``nn.GELU`` where a graph computes one of numbers and one tensor, in place.

    Nothing is done where something else reads a part.

    Args:
        builder: of the graph.
        outputs: the nodes that the graph returns.

    Returns:
        The outputs, of which some may be new nodes.
    """
    returned = list(outputs)
    for node in list(builder.graph.nodes):
        make = _GELUS.get(_kind(builder, node))
        part = None if make is None else _written_out(builder, node, make(), returned)
        if make is None or part is None:
            continue
        x, last = part
        name = last.meta.get("onnx_name") or last.name
        with builder.graph.inserting_after(last):
            path = builder.add_module(str(name), make().eval(), "Mul")
            merged = builder.graph.call_module(path, (x,))
        merged.meta |= last.meta
        last.replace_all_uses_with(merged)
        returned = [merged if output is last else output for output in returned]
    return returned


def _kind(builder: GraphBuilder, node: fx.Node) -> object:
    """Return the function that a node calls, or the class of its module."""
    if node.op == "call_module":
        return type(builder.root.get_submodule(str(node.target)))
    return node.target if node.op == "call_function" else None


def _written_out(
    builder: GraphBuilder,
    middle: fx.Node,
    activation: nn.Module,
    returned: Sequence[fx.Node],
) -> tuple[fx.Node, fx.Node] | None:
    """Return the tensor and the last node of an activation around a node; None if there is none."""
    last = middle
    for _ in range(_MOST_BEHIND):
        readers = list(last.users)
        if len(readers) != 1 or last in returned:
            return None
        (last,) = readers
        for x in _read_twice(builder, last):
            inside = _between(builder, x, last)
            if inside is None or middle not in inside:
                continue
            is_apart = all(
                node not in returned and inside.issuperset(node.users)
                for node in inside - {last}
            )
            if is_apart and _computes(builder, x, last, activation):
                return x, last
    return None


def _read_twice(builder: GraphBuilder, last: fx.Node) -> Iterator[fx.Node]:
    """Yield what several nodes in front of a node read, the nearest first."""
    seen = {last}
    pending = [last]
    while pending:
        node = pending.pop(0)
        if len(node.users) > 1:
            yield node
        if _is_elementwise(builder, node):
            new = [n for n in node.all_input_nodes if n not in seen]
            seen.update(new)
            pending += new


def _between(builder: GraphBuilder, x: fx.Node, last: fx.Node) -> set[fx.Node] | None:
    """Return the nodes that compute ``last`` of one tensor and of numbers; None for others."""
    inside: set[fx.Node] = set()
    pending = [last]
    while pending:
        node = pending.pop()
        if node is x or node in inside or _number(builder, node) is not None:
            continue
        if not _is_elementwise(builder, node):
            return None
        inside.add(node)
        pending += node.all_input_nodes
    return inside


def _is_elementwise(builder: GraphBuilder, node: fx.Node) -> bool:
    kind = _kind(builder, node)
    return (kind in _ELEMENTWISE or kind is nn.Tanh) and not node.kwargs


def _number(builder: GraphBuilder, node: fx.Node) -> float | None:
    """Return a number that is alone in its tensor in the file; None for others."""
    if node.op != "get_attr":
        return None
    stored = operator.attrgetter(str(node.target))(builder.root)
    return float(stored.item()) if stored.numel() == 1 else None


def _computes(
    builder: GraphBuilder, x: fx.Node, last: fx.Node, activation: nn.Module
) -> bool:
    """Return True if ``last`` is an activation of ``x``, on a grid in float64."""
    values: dict[fx.Node, Any] = {x: _GRID}

    def value(operand: Any) -> Any:
        if not isinstance(operand, fx.Node):
            return operand
        if operand not in values:
            number = _number(builder, operand)
            values[operand] = number if number is not None else called(operand)
        return values[operand]

    def called(node: fx.Node) -> Any:
        operands: Iterable[Any] = map(value, node.args)
        if node.op == "call_module":
            return torch.tanh(*operands)
        function: Any = node.target
        return function(*operands)

    result = value(last)
    want = activation(_GRID)
    if not isinstance(result, Tensor) or result.shape != want.shape:
        return False
    return torch.allclose(result, want, rtol=_CLOSE, atol=_CLOSE)

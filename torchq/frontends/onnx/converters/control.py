"""The operator If."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx, nn

from torchq.frontends.building.graph import Constant, Ints, Value
from torchq.frontends.onnx.context import GraphBuilder, NodeContext, converter


@converter("If", dtypes=None)
def _if(node: NodeContext) -> list[Value]:
    condition = node.constant(0)
    branches = [node.attr(name, object) for name in ("then_branch", "else_branch")]
    if condition is not None:
        return node.builder.convert_nodes(branches[0 if bool(condition.reshape(-1)[0]) else 1])
    return _decided_by_the_network(node, branches)


def _decided_by_the_network(node: NodeContext, branches: list[Any]) -> list[Value]:
    """Convert both branches as modules, of which each call takes one."""
    values = node.builder.values
    names = list(dict.fromkeys(name for graph in branches for name in names_from_outside(graph)))
    missing = [name for name in names if name not in values]
    if missing:
        node.refuse(f"a branch reads {missing[0]!r}, which nothing before it computes")
    names = [n for n in names if not (values[n] is None or isinstance(values[n], Constant))]
    modules = [branch_module(node.builder, graph, names) for graph in branches]
    counts = [len(graph.output) for graph in branches]
    if counts != [len(node.output_names)] * 2:
        node.refuse(f"its branches have {counts} outputs; expected {len(node.output_names)}")
    arguments = [values[name] for name in names]
    condition: Any = node.inputs[0]
    if isinstance(condition, Ints):  # sizes decide: a flag, which exporters know while they trace
        condition = condition.items[0]
    result = node.module(Conditional(*modules), condition, *arguments)
    return [result] if counts[0] == 1 else node.parts(counts[0], result)


def names_from_outside(graph: Any) -> list[str]:
    """Return the names that a sub-graph reads and does not compute, in order."""
    own = {tensor.name for tensor in graph.initializer} | {value.name for value in graph.input}
    own |= {name for node in graph.node for name in node.output}
    return list(dict.fromkeys(name for name in _read(graph) if name and name not in own))


def _read(graph: Any) -> Iterator[str]:
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                yield from names_from_outside(attribute.g)
    yield from (output.name for output in graph.output)


def branch_module(outer: GraphBuilder, graph: Any, names: Sequence[str]) -> fx.GraphModule:
    """Return a sub-graph as a module that takes the values of ``names``."""
    inner = outer.inside()
    for name in names:
        node = inner.input(name)
        node.meta["onnx_name"] = name
        inner.values[name] = node
    end = NodeContext(inner, "output", "output", 1, {}, [], [], [])
    outputs = [end.tensor(value) for value in inner.convert_nodes(graph)]
    found = [output.name for output in graph.output]
    return inner.finish(outputs, graph.name or "Branch", names, found, [None] * len(names))


class Conditional(nn.Module):
    """Calls one of two modules, whichever a condition says: the ONNX operator If."""

    is_traced_whole = True

    def __init__(self, then_branch: nn.Module, else_branch: nn.Module) -> None:
        super().__init__()
        self.then_branch, self.else_branch = then_branch, else_branch

    def forward(self, condition: Tensor | bool, *values: Any) -> Any:
        """Return what the chosen branch makes of ``values``."""
        if isinstance(condition, Tensor):
            condition = bool(condition.reshape(-1)[0])
        return (self.then_branch if condition else self.else_branch)(*values)

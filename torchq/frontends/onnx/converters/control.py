"""The operator If."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch import Tensor, fx, nn

from torchq.frontends.building.graph import Ints, Value
from torchq.frontends.onnx.context import GraphBuilder, NodeContext, converter


@converter("If", dtypes=None)
def _if(node: NodeContext) -> list[Value]:
    condition = node.constant(0)
    branches = [node.attr(name, object) for name in ("then_branch", "else_branch")]
    if condition is not None:
        return node.builder.convert_nodes(
            branches[0 if bool(condition.reshape(-1)[0]) else 1]
        )
    counts = [len(graph.output) for graph in branches]
    if counts != [len(node.output_names)] * 2:
        node.refuse(
            f"its branches have {counts} outputs; expected {len(node.output_names)}"
        )
    values = node.builder.values
    read = dict.fromkeys(name for graph in branches for name in _read(graph))
    names = [name for name in read if isinstance(values.get(name), (fx.Node, Ints))]
    modules = [_branch(node.builder, graph, names) for graph in branches]
    flag: Any = node.inputs[0]
    # Sizes decide: a flag, which exporters know while they trace.
    if isinstance(flag, Ints):
        flag = flag.items[0]
    result = node.module(Conditional(*modules), flag, *(values[name] for name in names))
    return [result] if counts[0] == 1 else node.parts(counts[0], result)


def _read(graph: Any) -> Iterator[str]:
    """Yield the names that a sub-graph reads, its own too."""
    for node in graph.node:
        yield from node.input
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                yield from _read(attribute.g)
    yield from (output.name for output in graph.output)


def _branch(outer: GraphBuilder, graph: Any, names: Sequence[str]) -> fx.GraphModule:
    """Return a sub-graph as a module that takes the values of ``names``."""
    inner = outer.inside()
    for name in names:
        inner.values[name] = node = inner.input(name)
        node.meta["onnx_name"] = name
    end = NodeContext(inner, "output", "output", 1, {}, [], [], [])
    outputs = [end.tensor(value) for value in inner.convert_nodes(graph)]
    output_names = [output.name for output in graph.output]
    return inner.finish(
        outputs, graph.name or "Branch", names, output_names, [None] * len(names)
    )


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

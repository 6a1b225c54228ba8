"""Control flow: the operator If."""

from __future__ import annotations

from typing import Any

from torchq.frontends.building import Constant, Ints, Value
from torchq.frontends.onnx.branches import branch_module, names_from_outside
from torchq.frontends.onnx.context import NodeContext
from torchq.frontends.onnx.functions.control import Conditional
from torchq.frontends.onnx.registry import converter


@converter("If", dtypes=None)
def _if(node: NodeContext) -> list[Value]:
    condition = node.constant(0)
    branches = [node.required(name) for name in ("then_branch", "else_branch")]
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
    return node.module_parts(counts[0], Conditional(*modules), condition, *arguments)

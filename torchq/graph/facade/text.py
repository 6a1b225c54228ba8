"""A graph as text: to read, as JSON, and for Graphviz."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from torchq.graph.operators import operator_name

__all__ = ["dot_text", "ir_text", "json_text"]


def ir_text(
    module: fx.GraphModule, attributes: Mapping[str, Any], shown: Sequence[str] = ()
) -> str:
    """Return one line for each node: its number, its operator and what it reads.

    Args:
        module: the graph.
        attributes: of the graph.
        shown: names of those that belong to nodes, to show on their lines.
    """
    names: dict[fx.Node, str] = {}
    inputs, lines = [], []
    for number, node in enumerate(module.graph.nodes):
        names[node] = f"%{node.target if node.op in ('placeholder', 'get_attr') else number}"
        if node.op == "placeholder":
            inputs.append(names[node])
        elif node.op == "output":
            lines.append(f"  ret {_argument(node.args[0], names)}")
        elif node.op != "get_attr":
            parts = [_argument(value, names) for value in node.args]
            parts += [f"{key}={_argument(value, names)}" for key, value in node.kwargs.items()]
            known = [(key, attributes[key].get(node.name)) for key in shown if key in attributes]
            tail = "".join(f", {key}={value}" for key, value in known)
            lines.append(f"  {names[node]} = {_label(node)}({', '.join(parts)}){tail}")
    head = f"Graph({', '.join(inputs)}) {{"
    return "\n".join([head, *lines, "}", f"attributes = {sorted(attributes)}"])


def json_text(module: fx.GraphModule, attributes: Mapping[str, Any]) -> str:
    """Return the nodes with their inputs, the numbers of inputs and outputs, and attributes.

    Attributes that JSON has no form for are left out.
    """
    numbers = {node: number for number, node in enumerate(module.graph.nodes)}
    nodes = []
    for node in module.graph.nodes:
        if node.op != "output":
            reads = [numbers[source] for source in node.all_input_nodes]
            nodes.append({"op": _label(node), "kind": node.op, "name": node.name, "inputs": reads})
    heads = [numbers[source] for source in module.graph.output_node().all_input_nodes]
    arguments = [numbers[node] for node in module.graph.nodes if node.op == "placeholder"]
    plain = {key: _plain(value) for key, value in attributes.items() if key != "example"}
    return json.dumps({"nodes": nodes, "arg_nodes": arguments, "heads": heads, "attrs": plain})


def dot_text(module: fx.GraphModule) -> str:
    """Return a box for each node, and an arrow for each value that is read."""
    lines = ["digraph {", "  node [shape=box]"]
    for node in module.graph.nodes:
        calls = node.op not in ("placeholder", "output")
        label = f"{node.name}\n{_label(node)}" if calls else node.name
        lines.append(f"  {json.dumps(node.name)} [label={json.dumps(label)}]")
        lines += [
            f"  {json.dumps(source.name)} -> {json.dumps(node.name)}"
            for source in node.all_input_nodes
        ]
    return "\n".join([*lines, "}"])


def _label(node: fx.Node) -> str:
    """Return the path of a module, the name of an attribute, or the operator."""
    return operator_name(node) if node.op == "call_function" else str(node.target)


def _argument(value: Any, names: Mapping[fx.Node, str]) -> str:
    if isinstance(value, fx.Node):
        return names[value]
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_argument(item, names) for item in value) + "]"
    return repr(value)


def _plain(value: Any) -> Any:
    """Return an attribute as JSON has it."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, (bool, int, float)) else str(value)

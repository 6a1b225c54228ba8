"""Operators of graphs of torch.fx whose nodes are calls of child modules.

A :class:`torch.fx.GraphModule` computes what its graph says, and its copies, pickles, exports and
edits start from that graph. So the module gets a graph with other nodes, not another forward.
"""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchq.errors import QuantizationError
from torchq.nn.convert import QuantModule, change_class
from torchq.nn.modules.operators import (
    Add,
    Cat,
    MatMul,
    Mul,
    ScaledDotProductAttention,
    Tap,
    operator_name,
)
from torchq.utils import qualified_name

_META = "torchq_operators"
_FUNCTIONS: dict[type[nn.Module], Callable[..., Any]] = {
    Add: torch.add,
    Mul: torch.mul,
    MatMul: torch.matmul,
    Cat: torch.cat,
    ScaledDotProductAttention: F.scaled_dot_product_attention,
}


class OperatorOwner(QuantModule):
    """Base of modules whose operators (``+``, ``torch.cat``, ...) are calls of their children.

    Attributes:
        replacements: Name of an operator (of a site in the source, or of a node of a graph) -> name
            of the child that is called instead.
    """

    input_slots = ()
    weight_slots = ()
    is_container = True

    replacements: Mapping[str, str] = types.MappingProxyType({})

    def replacement_record(self) -> dict[str, Any]:
        """Return what :func:`replace_recorded_operators_` needs, as JSON data."""
        children = dict.fromkeys(self.replacements.values())
        kinds = {child: operator_name(self.get_submodule(child)) for child in children}
        return {
            "class": qualified_name(type(self).float_class),
            "nodes": dict(self.replacements),
            "children": kinds,
        }


class RewrittenGraph(OperatorOwner):
    """Base of graph modules in which nodes call children instead of operators.

    A class is made for each class of graph modules; torch adds one more for each object, which
    holds its forward.
    """

    graph: fx.Graph
    meta: dict[str, Any]

    @property
    def replacements(self) -> Mapping[str, str]:  # type: ignore[override]
        """Name of a node of the float graph -> name of the child that it calls now."""
        # Copies of a graph module keep ``meta``, and no other attributes.
        found: Mapping[str, str] = self.meta.get(_META, {})
        return found

    def on_revert(self) -> None:
        """Let the nodes call functions again, and remove the children."""
        children = set(self.replacements.values())
        graph = copy.deepcopy(self.graph)
        for node in list(graph.nodes):
            if node.op == "call_module" and node.target in children:
                self._revert_node(node)
        self.graph = graph
        for child in children:
            delattr(self, child)
        self.meta.pop(_META, None)

    def _revert_node(self, node: fx.Node) -> None:
        child = self.get_submodule(str(node.target))
        if isinstance(child, Tap):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            node.graph.erase_node(node)
            return
        cls = next(cls for cls in type(child).__mro__ if cls in _FUNCTIONS)
        node.op, node.target = "call_function", _FUNCTIONS[cls]

    def __reduce__(self) -> Any:
        reduced: Any = super().__reduce__()
        function, arguments = reduced
        return _unpickled, (type(self).float_class, dict(self.replacements), function, arguments)


@cache
def _graph_class(cls: type[Any]) -> type[RewrittenGraph]:
    body = {
        "float_class": cls,
        "__doc__": f":class:`{qualified_name(cls)}` with operators replaced by child modules.",
        "__module__": cls.__module__,
    }
    bases = (RewrittenGraph, cls)
    return types.new_class(f"Rewritten{cls.__name__}", bases, {}, lambda space: space.update(body))


def _unpickled(
    cls: type[Any], replacements: dict[str, str], function: Any, arguments: Any
) -> fx.GraphModule:
    module: fx.GraphModule = function(*arguments)
    module.meta[_META] = replacements
    change_class(module, _graph_class(cls))  # type: ignore[arg-type]
    return module


def replace_nodes_(module: fx.GraphModule, replacements: Mapping[str, str]) -> fx.GraphModule:
    """Make nodes of the module's graph call its children, in place, and return the module.

    Args:
        module: A float module; the children that ``replacements`` names exist already.
        replacements: Name of a node -> child name. A :class:`Tap` is called on the first operand of
            the node, any other child in its place.

    Raises:
        QuantizationError: The graph has no such node. The module is unchanged then.
    """
    # A copy is changed, so that an error further on leaves the module with the graph that it had.
    graph, cls = copy.deepcopy(module.graph), _float_class(module)
    nodes = {node.name: node for node in graph.nodes}
    for name in replacements:
        if name not in nodes:
            raise QuantizationError(
                f"{qualified_name(cls)}: its graph has no node {name}; expected the graph that was "
                "quantized"
            )
    for name, child in replacements.items():
        _call_child(nodes[name], child, isinstance(module.get_submodule(child), Tap))
    # The class that the module had keeps the code of the graph that it had.
    change_class(module, _graph_class(cls))  # type: ignore[arg-type]
    module.graph = graph
    module.meta[_META] = dict(replacements)
    return module


def _float_class(module: fx.GraphModule) -> type[Any]:
    """Return the class of a graph module without the layer that torch adds for each object."""
    blank = type(module).__new__(type(module))
    return type(blank).__bases__[0]


def _call_child(node: fx.Node, child: str, before: bool) -> None:
    if before:
        with node.graph.inserting_before(node):
            first = node.graph.call_module(child, (node.args[0],))
        node.args = (first, *node.args[1:])
    else:
        node.op, node.target = "call_module", child

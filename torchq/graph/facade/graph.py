"""``Graph``: a traced model with attributes, on which passes are applied by name.

The idea is that of ``nnvm.graph``: a pass is pure, says which attributes it needs and which it
gives, and one that needs what is not there is refused with the name of the pass that gives it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch import fx, nn

from torchq.errors import ConfigError, GraphError
from torchq.graph.facade.text import dot_text, ir_text, json_text
from torchq.graph.model_trace import trace
from torchq.utils import Registry, evaluating

__all__ = ["PASSES", "Graph", "GraphPass", "graph_pass"]


class Graph:
    """A traced model and what is known about it. Never changed: a pass returns a new one.

    Args:
        model: a GraphModule, or any module, which is then traced with the example.
        example: the arguments of one call; the attribute ``"example"`` of the graph.
        attributes: more attributes by name.

    Raises:
        GraphError: the module cannot be traced.
        ConfigError: a module that is no GraphModule comes without an example.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 2), nn.Dropout(), nn.Identity())
        >>> graph = Graph(model, example=torch.zeros(1, 4))
        >>> print(graph.apply(["remove_identity", "simplify_inference", "infer_shape"]).ir("shape"))
        Graph(%input) {
          %1 = 0(%input), shape=(1, 2)
          ret %1
        }
        attributes = ['example', 'shape']
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any = None,
        attributes: Mapping[str, Any] | None = None,
    ) -> None:
        if not isinstance(model, fx.GraphModule):
            if example is None:
                raise ConfigError(
                    f"Graph: got a {type(model).__name__} without an example; expected one to "
                    "trace the model with"
                )
            model = trace(model, example).graph_module
        given = {} if example is None else {"example": example}
        self._module = model
        self._attributes = MappingProxyType({**given, **(attributes or {})})

    @property
    def module(self) -> fx.GraphModule:
        """The model. It shares its weights with the model that it was made of."""
        return self._module

    @property
    def attributes(self) -> Mapping[str, Any]:
        """Facts about the graph, by name."""
        return self._attributes

    def with_attributes(self, **attributes: Any) -> Graph:
        """Return the same graph with more attributes, or others."""
        return Graph(self._module, attributes={**self._attributes, **attributes})

    def with_module(self, module: fx.GraphModule) -> Graph:
        """Return a rewritten graph. Of the attributes only the example still holds."""
        return Graph(module, self._attributes.get("example"))

    def apply(self, passes: str | Sequence[str]) -> Graph:
        """Return the graph after passes.

        Args:
            passes: one name, or several in order. ``torchq.graph.PASSES`` lists them.

        Raises:
            ConfigError: there is no such pass.
            GraphError: a pass needs an attribute that the graph does not have, or fails.
        """
        graph = self
        for name in [passes] if isinstance(passes, str) else passes:
            found = PASSES[name]
            for attribute in found.requires:
                if attribute not in graph.attributes:
                    raise GraphError(f"{name}: the graph lacks {attribute!r}. {_advice(attribute)}")
            graph = _run(found, graph)
            missing = [each for each in found.provides if each not in graph.attributes]
            if missing:
                raise GraphError(f"{name}: did not give the attribute {missing[0]!r} as it says")
        return graph

    def ir(self, *attributes: str) -> str:
        """Return the graph as text, one node on a line.

        Args:
            attributes: of nodes, such as ``"shape"``, to show behind each.
        """
        return ir_text(self._module, self._attributes, attributes)

    def json(self) -> str:
        """Return the graph as JSON text: nodes with their inputs, in order, and the outputs."""
        return json_text(self._module, self._attributes)

    def dot(self) -> str:
        """Return the graph in the language of Graphviz."""
        return dot_text(self._module)


@dataclass(frozen=True)
class GraphPass:
    """A pass and its conditions.

    Attributes:
        name: by which it is applied.
        function: from a graph to a new one; its docstring says what stands there before and after.
        requires: attributes that the graph must have.
        provides: attributes that the result has.
    """

    name: str
    function: Callable[[Graph], Graph]
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()


#: The passes by name.
PASSES: Registry[str, GraphPass] = Registry("graph pass")


def graph_pass(
    requires: tuple[str, ...] = (), provides: tuple[str, ...] = ()
) -> Callable[[Callable[[Graph], Graph]], Callable[[Graph], Graph]]:
    """Enter the decorated function as a pass under its own name.

    Args:
        requires: attributes that the graph must have.
        provides: attributes that the result has.

    Raises:
        ConfigError: there is a pass of this name already.
    """

    def enter(function: Callable[[Graph], Graph]) -> Callable[[Graph], Graph]:
        name = function.__name__
        PASSES.add(name, GraphPass(name, function, requires, provides))
        return function

    return enter


def _run(found: GraphPass, graph: Graph) -> Graph:
    """Run a pass while the modules of the graph are in eval mode."""
    if not any(module.training for module in graph.module.children()):
        return found.function(graph)  # torch.export's modules refuse to change their mode
    with evaluating(graph.module):
        return found.function(graph)


def _advice(attribute: str) -> str:
    """Return how to get an attribute."""
    givers = [name for name in PASSES if attribute in PASSES[name].provides]
    if givers:
        return f"Apply {' or '.join(map(repr, givers))} first"
    return f"Pass it: Graph(model, {attribute}=...)"

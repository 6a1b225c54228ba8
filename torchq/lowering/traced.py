"""Traced models that stay what the code around them expects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate


class TracedModel(fx.GraphModule):
    """A traced model with the plain attributes of the original, which code around it may read.

    An example is ``f`` and ``i`` of the layers of a detector. Copies and files keep them.
    """

    @classmethod
    def of(cls, root: nn.Module, rows: Sequence[Any], original: nn.Module) -> TracedModel:
        """Return a graph of :func:`rows_of` under the name of ``original``, in eval mode."""
        graph, nodes = fx.Graph(), dict[str, fx.Node]()
        for op, name, target, args, kwargs in rows:
            args, kwargs = map_aggregate((args, kwargs), lambda a: _node_of(a, nodes))
            if dataclasses.is_dataclass(target) and args:  # a dictionary with fields
                kwargs, args = args[0], ()
            nodes[name] = graph.create_node(op, target, args, kwargs, name)
        result = cls(root, graph, class_name=type(original).__name__)
        copy_plain_attributes(original, result)
        return result.eval()

    def recompile(self) -> Any:
        """Write the code of the graph; see :meth:`torch.fx.GraphModule.recompile`."""
        code = super().recompile()
        # torch makes a class for each graph, whose call prints errors to stderr before it raises.
        type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedModel:
        result: TracedModel = super().__deepcopy__(memo)  # type: ignore[assignment]
        for name, value in _plain_attributes(self, result).items():
            setattr(result, name, copy.deepcopy(value, memo))
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        # torch pickles the code, which its own tracer would have to trace again.
        root = nn.Module()
        for name in ("_modules", "_parameters", "_buffers"):
            vars(root)[name] = vars(self)[name]
        vars(root).update(_plain_attributes(self, nn.Module()))
        return _rebuild, (root, rows_of(self.graph), type(self).__name__)


def _rebuild(root: nn.Module, rows: Sequence[Any], name: str) -> TracedModel:
    original = type(name, (nn.Module,), {})()
    vars(original).update(_plain_attributes(root, original))
    return TracedModel.of(root, rows, original)


@dataclasses.dataclass(frozen=True)
class _Ref:
    """Stands for the result of a node in rows."""

    name: str


def rows_of(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return a graph as what can be pickled: operation, name, target and arguments of each node."""
    return [
        (node.op, node.name, node.target, *map_aggregate((node.args, node.kwargs), _ref_of))
        for node in graph.nodes
    ]


def _ref_of(value: Any) -> Any:
    return _Ref(value.name) if isinstance(value, fx.Node) else value


def _node_of(value: Any, nodes: dict[str, fx.Node]) -> Any:
    return nodes[value.name] if isinstance(value, _Ref) else value


def copy_plain_attributes(source: nn.Module, destination: nn.Module) -> None:
    """Copy the public attributes that ``destination`` lacks, such as ``in_features``."""
    for name, value in _plain_attributes(source, destination).items():
        setattr(destination, name, value)


def _plain_attributes(source: nn.Module, destination: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(source).items()
        if not name.startswith("_") and not hasattr(destination, name)
    }


def nth_chunk(x: Tensor, method: str, index: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return one of the tensors that a method such as ``chunk`` or ``split`` makes of ``x``."""
    chunks: Sequence[Tensor] = getattr(x, method)(*args, **kwargs)
    return chunks[index]

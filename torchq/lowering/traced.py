"""Traced models that stay what the code around them expects."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from torchq.lowering.placeholder import carry_placeholder_


class TracedModel(fx.GraphModule):
    """A traced model with the plain attributes of the original, which code around it may read.

    An example is ``f`` and ``i`` of the layers of a detector. Copies and files keep them.
    """

    def __init__(
        self, root: nn.Module, graph: fx.Graph, name: str, original: nn.Module
    ) -> None:
        super().__init__(root, graph, class_name=name)
        copy_plain_attributes(original, self)
        self.eval()

    def recompile(self) -> Any:
        """Write the code of the graph; see :meth:`torch.fx.GraphModule.recompile`."""
        code = super().recompile()
        # torch makes a class for each graph, whose call prints errors to stderr before it raises.
        type(self).__call__ = nn.Module.__call__  # type: ignore[method-assign]
        return code

    def __deepcopy__(self, memo: dict[int, object]) -> TracedModel:
        result: TracedModel = super().__deepcopy__(memo)  # type: ignore[assignment]
        for name, value in _plain_attributes(self, result).items():
            setattr(result, name, copy.deepcopy(value, memo))
        carry_placeholder_(self, result)
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        # torch pickles the code, which its own tracer would have to trace again.
        root = nn.Module()
        for name in ("_modules", "_parameters", "_buffers"):
            vars(root)[name] = vars(self)[name]
        vars(root).update(_plain_attributes(self, nn.Module()))
        rows = [
            (
                n.op,
                n.name,
                n.target,
                fx.map_arg((n.args, n.kwargs), lambda x: _Name(x.name)),
            )
            for n in self.graph.nodes
        ]
        return _rebuilt, (type(self).__name__, root, rows)


class _Name(str):
    """Stands for a node in a file, as nodes that hold each other are too deep for one."""

    __slots__ = ()


def _rebuilt(name: str, root: nn.Module, rows: Sequence[Any]) -> TracedModel:
    graph = fx.Graph()
    nodes = dict[str, fx.Node]()
    for op, name_of_node, target, arguments in rows:
        args, kwargs = map_aggregate(
            arguments, lambda a: nodes[a] if isinstance(a, _Name) else a
        )
        nodes[name_of_node] = graph.create_node(op, target, args, kwargs, name_of_node)
    model = TracedModel(root, graph, name, root)
    carry_placeholder_(root, model)
    return model


def copy_plain_attributes(source: nn.Module, destination: nn.Module) -> None:
    """Copy the public attributes that ``destination`` lacks, such as ``in_features``."""
    for name, value in _plain_attributes(source, destination).items():
        setattr(destination, name, value)


def _plain_attributes(source: nn.Module, destination: nn.Module) -> dict[str, object]:
    return {
        name: value
        for name, value in vars(source).items()
        if not name.startswith("_") and not hasattr(destination, name)
    }


def nth_chunk(
    x: Tensor, method: str, index: int, *args: object, **kwargs: object
) -> Tensor:
    """Return one of the tensors that a method such as ``chunk`` or ``split`` makes of ``x``."""
    chunks: Sequence[Tensor] = getattr(x, method)(*args, **kwargs)
    return chunks[index]

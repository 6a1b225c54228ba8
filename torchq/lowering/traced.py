"""Traced models that stay what the code around them expects.

A :class:`torch.fx.GraphModule` is pickled as code that unpickling traces with torch's own tracer.
That keeps calls of modules and of importable functions alone, so what else there is are such.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx, nn

from torchq.lowering.bound_graph import BoundGraphs, forward_with_bound_graphs


class TracedModel(fx.GraphModule):
    """A traced model with the plain attributes of the original.

    Code around a model may read such attributes, for example ``f`` and ``i`` of the layers of a
    detector. Copies and files keep them.

    Attributes:
        bound_graphs: what calls run instead of the forward; see :mod:`.bound_graph`.
    """

    bound_graphs: BoundGraphs

    @classmethod
    def of(cls, graph_module: fx.GraphModule, original: nn.Module) -> TracedModel:
        """Return ``graph_module`` under the name and with the attributes of ``original``.

        The result is in eval mode.
        """
        # A graph of its own: the one that was traced names the tracer, and unpickling would look
        # for that class.
        graph = fx.Graph()
        graph.output(graph.graph_copy(graph_module.graph, {}))
        for node in graph.nodes:
            # Annotations may be strings, which torch 2.9 cannot pickle.
            node.type = None
        result = cls(graph_module, graph, class_name=type(original).__name__)
        copy_plain_attributes(original, result)
        return result.eval()

    def recompile(self) -> Any:
        """Write the code of the graph; see :meth:`torch.fx.GraphModule.recompile`."""
        code = super().recompile()
        cls: Any = type(self)  # torch makes a class for each graph
        cls.forward = forward_with_bound_graphs(cls.forward)
        # That of torch prints each error in the code to stderr before it raises it.
        cls.__call__ = nn.Module.__call__
        self.bound_graphs = BoundGraphs()
        return code

    def __deepcopy__(self, memo: dict[int, Any]) -> TracedModel:
        result: TracedModel = super().__deepcopy__(memo)  # type: ignore[assignment]
        for name, value in _plain_attributes(self, result).items():
            setattr(result, name, copy.deepcopy(value, memo))
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        rebuild, arguments = super().__reduce__()
        return _rebuild_traced_model, (rebuild, arguments)


def _rebuild_traced_model(
    rebuild: Callable[..., fx.GraphModule], arguments: tuple[Any, ...]
) -> TracedModel:
    """Return the traced model that a file holds."""
    plain = rebuild(*arguments)
    return TracedModel.of(plain, plain)


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


class AssertNone(nn.Module):
    """Check that an argument is None, as it was when the graph was traced."""

    def __init__(self, message: str) -> None:
        super().__init__()
        self.message = message

    def forward(self, value: object) -> None:
        """Raise AssertionError unless ``value`` is None."""
        if value is not None:
            raise AssertionError(self.message)


class BuildDict(nn.Module):
    """Build a dictionary of the type that the original model returns."""

    def __init__(self, kind: type[dict[str, Any]]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, items: dict[str, Any]) -> dict[str, Any]:
        """Return ``items`` as a dictionary of :attr:`kind`."""
        return self.kind(**items) if dataclasses.is_dataclass(self.kind) else self.kind(items)


def nth_chunk(x: Tensor, method: str, index: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return one of the tensors that a method such as ``chunk`` or ``split`` makes of ``x``."""
    chunks: Sequence[Tensor] = getattr(x, method)(*args, **kwargs)
    return chunks[index]

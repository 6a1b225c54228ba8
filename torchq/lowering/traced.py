"""Traced models that stay what the code around them expects."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

from torch import Tensor, fx, nn
from torch.fx.node import map_aggregate

from torchq.utils import calls_are_recorded


class TracedModel(fx.GraphModule):
    """A traced model with the plain attributes of the original.

    Code around a model may read such attributes, for example ``f`` and ``i`` of the layers of a
    detector. Copies and files keep them.

    Calls run :class:`_Flat` code instead of the forward, which programs record.
    """

    _flat: _Flat | None

    @classmethod
    def of(cls, graph_module: fx.GraphModule, original: nn.Module) -> TracedModel:
        """Return ``graph_module`` under the name and with the attributes of ``original``.

        The result is in eval mode.
        """
        return cls._from_rows(graph_module, _rows(graph_module.graph), original)

    @classmethod
    def _from_rows(cls, root: nn.Module, rows: Sequence[Any], original: nn.Module) -> TracedModel:
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
        cls: Any = type(self)  # torch makes a class for each graph
        cls.forward = _flat_forward(cls.forward)
        # That of torch prints each error in the code to stderr before it raises it.
        cls.__call__ = nn.Module.__call__
        vars(self)["_flat"] = None
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
        return _rebuild, (root, _rows(self.graph), type(self).__name__)


def _rebuild(root: nn.Module, rows: Sequence[Any], name: str) -> TracedModel:
    original = type(name, (nn.Module,), {})()
    vars(original).update(_plain_attributes(root, original))
    return TracedModel._from_rows(root, rows, original)  # noqa: SLF001


@dataclasses.dataclass(frozen=True)
class _Ref:
    """Stands for the result of a node in rows."""

    name: str


def _rows(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Return a graph as what can be pickled: operation, name, target and arguments of each node."""
    return [
        (node.op, node.name, node.target, *map_aggregate((node.args, node.kwargs), _ref_of))
        for node in graph.nodes
    ]


def _ref_of(value: Any) -> Any:
    return _Ref(value.name) if isinstance(value, fx.Node) else value


def _node_of(value: Any, nodes: dict[str, fx.Node]) -> Any:
    return nodes[value.name] if isinstance(value, _Ref) else value


class _Flat:
    """The code of a graph that calls the modules themselves, without looking each up by its path.

    Looking up takes a tenth as long as the kernels of small layers. The code holds until a module
    is replaced; each call looks. Copies and files of a model start without it.
    """

    def __init__(self, model: fx.GraphModule) -> None:
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        places = dict[tuple[int, str], tuple[dict[str, Any], str, nn.Module]]()
        for node in model.graph.nodes:
            new = copies[node] = graph.node_copy(node, copies.__getitem__)
            if node.op not in ("call_module", "get_attr"):
                continue
            owner: Any = model
            *path, name = str(node.target).split(".")
            for part in path + [name] * (node.op == "call_module"):
                modules, owner = vars(owner)["_modules"], getattr(owner, part)
                places[id(modules), part] = modules, part, owner
            called = _calling(owner) if node.op == "call_module" else _reading(owner, name)
            new.op, new.target = "call_function", called
        self.run: Callable[..., Any] = fx.GraphModule(nn.Module(), graph).forward
        self._modules, self._names, self._found = zip(*places.values(), strict=True)

    def holds(self) -> bool:
        """Return True if every module is where it was."""
        return all(map(is_, map(dict.get, self._modules, self._names), self._found))

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


def _flat_forward(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a traced model that runs the flat code of its graph where it can."""

    def flat_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if calls_are_recorded():
            return forward(self, *args, **kwargs)
        flat = vars(self)["_flat"]
        if flat is None or not flat.holds():
            flat = vars(self)["_flat"] = _Flat(self)
        return flat.run(*args, **kwargs)

    # Callers read the names of the arguments.
    flat_forward.__wrapped__ = forward  # type: ignore[attr-defined]
    return flat_forward


def _calling(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module; generated code wants the name of a function."""

    def call_module(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return call_module


def _reading(owner: nn.Module, name: str) -> Callable[[], Any]:
    """Return a function that reads a tensor of a model."""

    def read_tensor() -> Any:
        return getattr(owner, name)

    return read_tensor


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


def nth_chunk(x: Tensor, method: str, index: int, *args: Any, **kwargs: Any) -> Tensor:
    """Return one of the tensors that a method such as ``chunk`` or ``split`` makes of ``x``."""
    chunks: Sequence[Tensor] = getattr(x, method)(*args, **kwargs)
    return chunks[index]

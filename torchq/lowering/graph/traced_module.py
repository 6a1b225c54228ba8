"""Traced models that stay what the code around them expects."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from torchq.graph import ForwardTracer, trace_call
from torchq.utils import evaluating

__all__ = ["Absent", "Joined", "Made", "adopt", "trace"]

log = logging.getLogger(__name__)


class Joined(fx.GraphModule):
    """A traced model with the plain attributes of the original, which code around it may read; copies and files keep them."""

    @classmethod
    def of(cls, graph_module: fx.GraphModule, original: nn.Module) -> Joined:
        """``graph_module`` under the name of ``original`` and with its attributes, in eval mode."""
        graph = fx.Graph()  # one that does not name the tracer: unpickling would look for it
        graph.output(graph.graph_copy(graph_module.graph, {}))
        for node in graph.nodes:
            node.type = None  # annotations, perhaps as strings; torch 2.6 cannot pickle those
        result = cls(graph_module, graph, class_name=type(original).__name__)
        adopt(result, original)
        return result.eval()

    def __deepcopy__(self, memo: dict[int, Any]) -> Joined:
        result: Joined = super().__deepcopy__(memo)  # type: ignore[assignment]
        for name, value in _plain_attributes(self, result).items():
            setattr(result, name, copy.deepcopy(value, memo))
        return result

    def __reduce__(self) -> tuple[Any, ...]:
        make, arguments = super().__reduce__()
        return _rebuilt, (make, arguments)


def _rebuilt(make: Callable[..., fx.GraphModule], arguments: tuple[Any, ...]) -> Joined:
    plain = make(*arguments)
    return Joined.of(plain, plain)


def adopt(new: nn.Module, old: nn.Module) -> None:
    """Take over the plain attributes that other code may read: ``in_features``, a detector's ``.f`` and ``.i``."""
    for name, value in _plain_attributes(old, new).items():
        setattr(new, name, value)


def _plain_attributes(old: nn.Module, new: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(old).items()
        if not name.startswith("_") and not hasattr(new, name)
    }


class Absent(nn.Module):
    """Checks that an argument has the value None which a graph was traced for.

    A module, because unpickling traces once more: it keeps calls of modules, but neither torch.fx's own check nor :class:`Made`.
    """

    def __init__(self, message: str) -> None:
        super().__init__()
        self.message = message

    def forward(self, value: object) -> None:
        """Raise AssertionError unless ``value`` is None."""
        if value is not None:
            raise AssertionError(self.message)


class Made(nn.Module):
    """Makes a dictionary of the kind that a model returns."""

    def __init__(self, kind: type[dict[str, Any]]) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, items: dict[str, Any]) -> dict[str, Any]:
        """``items`` as one of that kind."""
        return self.kind(**items) if dataclasses.is_dataclass(self.kind) else self.kind(items)


class _Tracer(ForwardTracer):
    """Keeps the kinds of dictionaries, where torch.fx itself makes a plain one of each; may take what is left over (``*args``) as empty.

    Attributes:
        culprit: the innermost module whose code could not be traced.
    """

    def __init__(self, is_leaf: Callable[[nn.Module], bool], no_rest: bool) -> None:
        super().__init__()
        self._leaf, self._no_rest = is_leaf, no_rest
        self.culprit: nn.Module | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._leaf(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """A call of a module; see :meth:`torch.fx.Tracer.call_module`."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.culprit is None and not self._leaf(m):
                self.culprit = m
            raise

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> Any:
        """The arguments of the traced function; see :meth:`torch.fx.Tracer.create_args_for_root`."""
        function, values = super().create_args_for_root(*args, **kwargs)
        return function, [self._rest(value) if self._no_rest else value for value in values]

    def _rest(self, value: Any) -> Any:
        name = str(value.node.target) if isinstance(value, fx.Proxy) else ""
        if not name.startswith("*"):
            return value
        self.graph.erase_node(value.node)
        return {} if name.startswith("**") else ()

    def create_arg(self, a: Any) -> Any:
        """An argument or result as part of the graph; see :meth:`torch.fx.Tracer.create_arg`."""
        if (
            not isinstance(a, dict)
            or type(a) is dict
            or isinstance(a, fx.immutable_collections.immutable_dict)
        ):
            return super().create_arg(a)
        items = {name: self.create_arg(value) for name, value in a.items()}
        if type(a) is OrderedDict or dataclasses.is_dataclass(
            a
        ):  # a result of torchvision or of transformers
            return self.create_node("call_function", type(a), (items,), {})
        raise TypeError(f"{type(a).__name__} cannot be part of a traced model")


def trace(
    model: nn.Module, is_leaf: Callable[[nn.Module], bool], *, no_rest: bool = False
) -> fx.GraphModule | nn.Module:
    """Trace ``model`` in eval mode; see :func:`torchq.graph.trace`.

    Args:
        model: left unchanged.
        is_leaf: which modules stay single calls.
        no_rest: ``*args`` and ``**kwargs`` are empty; the result refuses arguments beyond the named ones. Without it their use cannot be
            traced.

    Returns:
        the traced model; or the module whose code cannot be traced: ``model`` or a part of it.
    """
    tracer = _Tracer(is_leaf, no_rest)
    try:
        with evaluating(model):
            graph = trace_call(tracer, model)
    except (
        Exception
    ) as error:  # a model's own code may raise anything when its control flow looks at a tensor
        culprit = model if tracer.culprit is None else tracer.culprit
        log.debug(
            "deploy: %s cannot be traced (%s: %s)",
            type(culprit).__name__,
            type(error).__name__,
            error,
        )
        return culprit
    # Tensors that the code makes are attributes of the model while it is traced, and copied from there.
    constants = {
        name: tensor
        for tensor, name in tracer.tensor_attrs.items()
        if not hasattr(model, name.partition(".")[0])
    }
    try:
        vars(model).update(constants)
        return fx.GraphModule(tracer.root, graph)
    finally:
        for name in constants:
            del vars(model)[name]

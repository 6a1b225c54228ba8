"""Tracing for lowering: tolerant of what models return, and able to name what it cannot trace."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from torchq.graph import ForwardTracer, trace_call
from torchq.utils import evaluating

__all__ = ["trace"]

log = logging.getLogger(__name__)


class _Tracer(ForwardTracer):
    """A tracer that keeps the types of dictionaries and remembers where it stopped.

    Attributes:
        culprit: the innermost module whose code could not be traced.
    """

    def __init__(self, is_leaf: Callable[[nn.Module], bool], assume_no_varargs: bool) -> None:
        super().__init__()
        self._leaf, self._assume_no_varargs = is_leaf, assume_no_varargs
        self.culprit: nn.Module | None = None

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True for modules that stay single calls."""
        return self._leaf(m)

    def call_module(self, m: nn.Module, forward: Any, args: Any, kwargs: Any) -> Any:
        """Trace a call of a module; see :meth:`torch.fx.Tracer.call_module`."""
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception:
            if self.culprit is None and not self._leaf(m):
                self.culprit = m
            raise

    def create_args_for_root(self, *args: Any, **kwargs: Any) -> Any:
        """Create the arguments of the model; see :meth:`torch.fx.Tracer.create_args_for_root`."""
        function, values = super().create_args_for_root(*args, **kwargs)
        if self._assume_no_varargs:
            values = [self._without_varargs(value) for value in values]
        return function, values

    def _without_varargs(self, value: Any) -> Any:
        """Return an empty tuple or dict in the place of ``*args`` and ``**kwargs``."""
        name = str(value.node.target) if isinstance(value, fx.Proxy) else ""
        if not name.startswith("*"):
            return value
        self.graph.erase_node(value.node)
        return {} if name.startswith("**") else ()

    def create_arg(self, a: Any) -> Any:
        """Turn a value into part of the graph; see :meth:`torch.fx.Tracer.create_arg`.

        torch.fx makes a plain dict of every mapping. Here ordered dictionaries (torchvision) and
        dictionaries that are dataclasses (transformers) keep their type.
        """
        plain = (dict, fx.immutable_collections.immutable_dict)
        if not isinstance(a, dict) or type(a) in plain:
            return super().create_arg(a)
        items = {name: self.create_arg(value) for name, value in a.items()}
        if type(a) is OrderedDict or dataclasses.is_dataclass(a):
            return self.create_node("call_function", type(a), (items,), {})
        raise TypeError(f"{type(a).__name__} cannot be part of a traced model")


def trace(
    model: nn.Module, is_leaf: Callable[[nn.Module], bool], *, assume_no_varargs: bool = False
) -> fx.GraphModule | nn.Module:
    """Trace ``model`` in eval mode; see :func:`torchq.graph.trace_modules`.

    Args:
        model: left unchanged.
        is_leaf: which modules stay single calls.
        assume_no_varargs: trace as if ``*args`` and ``**kwargs`` were empty. The result accepts
            the named arguments alone. Without this option their use cannot be traced.

    Returns:
        The traced model; or, if that fails, the module whose code cannot be traced: ``model``
        itself or one of its parts.
    """
    tracer = _Tracer(is_leaf, assume_no_varargs)
    try:
        with evaluating(model):
            graph = trace_call(tracer, model)
    except Exception as error:  # code whose control flow looks at a tensor may raise anything
        culprit = model if tracer.culprit is None else tracer.culprit
        name = type(culprit).__name__
        log.debug("deploy: %s cannot be traced (%s: %s)", name, type(error).__name__, error)
        return culprit
    return _with_constants(model, tracer, graph)


def _with_constants(model: nn.Module, tracer: fx.Tracer, graph: fx.Graph) -> fx.GraphModule:
    """Return the traced model, with the tensors that its code creates as attributes.

    ``fx.GraphModule`` copies attributes from ``model``, so they stand there for a moment.
    """
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

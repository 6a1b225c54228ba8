"""One run of a plan: the values live here, so that runs of one graph do not know each other."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Protocol

from torch import Tensor, fx

from torchq.errors import GraphError
from torchq.graph.runner.names import module_path, source_line
from torchq.graph.runner.plan import RunPlan

__all__ = ["Execution", "Hook", "NodeBackend", "PostHook", "PreHook"]

#: Called with the arguments of a node; returns None or the pair to use instead.
PreHook = Callable[
    [tuple[Any, ...], dict[str, Any]], "tuple[tuple[Any, ...], dict[str, Any]] | None"
]
#: Called with the value of a node; returns None or the value to use instead.
PostHook = Callable[[Any], Any]
#: A post hook, or a pre and a post hook, of which one may be None.
Hook = PostHook | tuple[PreHook | None, PostHook | None]

_CALLS = ("call_function", "call_method", "call_module")


class NodeBackend(Protocol):
    """What computes nodes in place of torch; :mod:`torchq.backends` has some."""

    def call(
        self,
        graph_module: fx.GraphModule,
        node: fx.Node,
        default: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the value of a node that calls something.

        Args:
            graph_module: the graph and its modules.
            node: the node.
            default: computes the value as torch does, from the arguments.
            args: the arguments.
            kwargs: the keyword arguments.
        """
        ...


class Execution(fx.Interpreter):
    """An interpreter that runs a plan instead of the whole graph.

    Args:
        module: the graph to run and what it calls.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._backend: NodeBackend | None = None

    def fresh(self) -> Execution:
        """Return an interpreter of the same graph that holds no values."""
        other = copy.copy(self)
        other.env = {}
        return other

    def execute(
        self,
        plan: RunPlan,
        fed: Mapping[fx.Node, Any],
        requested: frozenset[fx.Node],
        hooks: Mapping[fx.Node, tuple[PreHook | None, PostHook | None]],
        backend: NodeBackend | None = None,
    ) -> dict[fx.Node, Any]:
        """Run ``plan`` and return the requested values.

        Args:
            plan: made for these inputs and outputs.
            fed: values of nodes that do not run.
            requested: nodes whose values are returned.
            hooks: node -> pre hook and post hook.
            backend: what computes the nodes; None is torch.

        Raises:
            GraphError: A node failed; the message names it.
        """
        kept: dict[fx.Node, Any] = {}
        self._backend = backend
        try:
            for node, value in fed.items():
                value = _copied(value) if node in plan.copied else value
                self._keep(node, _after(value, hooks.get(node)), plan, requested, kept)
            for node in plan.nodes:
                self._keep(node, self._value(node, hooks.get(node)), plan, requested, kept)
                for dead in plan.released.get(node, ()):
                    del self.env[dead]
            return kept
        except BaseException:
            kept.clear()
            raise
        finally:
            self.env.clear()

    def _keep(
        self,
        node: fx.Node,
        value: Any,
        plan: RunPlan,
        requested: frozenset[fx.Node],
        kept: dict[fx.Node, Any],
    ) -> None:
        self.env[node] = value
        if node in requested:
            kept[node] = _copied(value) if node in plan.copied else value

    def _value(self, node: fx.Node, hooks: tuple[PreHook | None, PostHook | None] | None) -> Any:
        try:
            args, kwargs = self.fetch_args_kwargs_from_env(node)
            if hooks is None:
                return self._computed(node, args, kwargs)
            if hooks[0] is not None:
                args, kwargs = _before(hooks[0], args, kwargs)
            return _after(self._computed(node, args, kwargs), hooks)
        except Exception as error:
            raise GraphError(f"{_place(node)}: got {type(error).__name__}: {error}") from error

    def _computed(self, node: fx.Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        run = getattr(self, node.op)
        if self._backend is None or node.op not in _CALLS:
            return run(node.target, args, kwargs)
        default = partial(_called, run, node.target)
        assert isinstance(self.module, fx.GraphModule)
        return self._backend.call(self.module, node, default, args, kwargs)

    def placeholder(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the default of an argument that was not given; the runner has checked it."""
        return args[0]


def _called(run: Callable[..., Any], target: Any, *args: Any, **kwargs: Any) -> Any:
    """Return what a node computes from plain arguments."""
    return run(target, args, kwargs)


def _before(
    hook: PreHook, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found = hook(args, kwargs)
    if found is None:
        return args, kwargs
    pair = isinstance(found, tuple) and len(found) == 2
    if not pair or not isinstance(found[0], tuple) or not isinstance(found[1], dict):
        raise TypeError(
            f"its pre hook returned a {type(found).__name__}; expected None, or a tuple of "
            "arguments and a dict of keyword arguments"
        )
    return found


def _after(value: Any, hooks: tuple[PreHook | None, PostHook | None] | None) -> Any:
    if hooks is None or hooks[1] is None:
        return value
    found = hooks[1](value)
    return value if found is None else found


def _copied(value: Any) -> Any:
    return fx.node.map_aggregate(value, lambda v: v.clone() if isinstance(v, Tensor) else v)


def _place(node: fx.Node) -> str:
    """Return the module path, name and source line of ``node``, as far as they are known."""
    path, line = module_path(node), source_line(node)
    name = f"node {node.name}"
    where = f"{path} ({name})" if path else name
    return f"{where}, {line}" if line else where

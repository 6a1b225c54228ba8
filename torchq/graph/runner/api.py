"""The runner of traced models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx

from torchq.errors import ConfigError
from torchq.graph.runner.execution import Execution, Hook, NodeBackend, PostHook, PreHook
from torchq.graph.runner.meta import MetaRecorder, NodeMeta
from torchq.graph.runner.names import NameTable, module_path
from torchq.graph.runner.plan import RunPlan, plan_run

__all__ = ["GraphRunner"]

_MOST_PLANS = 64


class GraphRunner:
    """Runs a graph, or the part of it that some values are computed from.

    Values are named by their nodes, or by the path of a module: the value that this module
    returns. Where both exist, the node counts. A module that is called several times has no single
    value, so its nodes must be named.

    Nothing of a run is stored in the runner: hooks may start further runs, and threads may share
    one. Modules run in the training mode that they have. The graph must not be changed after the
    runner was made. The modules that it calls may be replaced by others that do not work in place.

    Args:
        graph_module: what :func:`torchq.graph.trace` or a reader of files returned.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU())
        >>> runner = GraphRunner(fx.symbolic_trace(model))
        >>> hidden, out = runner.run(torch.ones(1, 4), outputs=["0", "1"])
        >>> torch.equal(hidden.relu(), out)
        True
    """

    def __init__(self, graph_module: fx.GraphModule) -> None:
        self.graph_module = graph_module
        self._graph = graph_module.graph
        self._names = NameTable(self._graph)
        self._nodes = list(self._graph.nodes)
        self._output = self._nodes[-1]
        self._placeholders = [node for node in self._nodes if node.op == "placeholder"]
        self._execution = Execution(graph_module)
        self._plans: dict[tuple[Any, ...], RunPlan] = {}

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of all nodes, in the order of the graph."""
        return tuple(node.name for node in self._nodes)

    def run(
        self,
        inputs: Any,
        outputs: str | Sequence[str] | None = None,
        hooks: Mapping[str, Hook] | None = None,
        grad: bool = False,
        backend: NodeBackend | None = None,
    ) -> Any:
        """Run the graph and return the values asked for.

        A returned value is what its node computed, after its post hook, also where a later node
        overwrites it in place. The values in ``inputs`` are never overwritten. Other values are
        freed after their last use, and when the run ends with an error.

        Args:
            inputs: a tensor is the one argument; a tuple or list holds the first arguments in
                order; a mapping holds arguments by name. A mapping may also hold the values of
                other nodes, which then do not run.
            outputs: names of values. Only nodes run that these are computed from. A name may stand
                there twice. Default: what the model returns.
            hooks: name -> post hook ``fn(value)``, or a pair of ``pre(args, kwargs)`` and
                ``post(value)``, of which one may be None. A hook that returns None changes
                nothing. Otherwise a pre hook returns a tuple of arguments and a dict of keyword
                arguments, and a post hook returns a value. Hooks of nodes that do not run are not
                called; for given values only the post hook is.
            grad: record gradients.
            backend: what computes the nodes, such as a :class:`torchq.backends.Backend`; None is
                torch.

        Returns:
            A list of values in the order of ``outputs``; one value if ``outputs`` is a string;
            what the model returns if it is None.

        Raises:
            ConfigError: A name stands for nothing or for several values, or an argument is
                missing.
            GraphError: A node failed. The message names it, its module and its line of code.
        """
        where = "GraphRunner.run"
        fed = self._fed(where, inputs, self._placeholders)
        if outputs is None:
            values = self._execute(where, fed, [self._output], hooks, grad, backend, True)
            return self._graph.process_outputs(values[0])
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        nodes = [self._names.result(f"{where}: outputs", name) for name in names]
        values = self._execute(where, fed, nodes, hooks, grad, backend)
        return values[0] if isinstance(outputs, str) else values

    def run_range(
        self,
        first: str,
        last: str,
        feed: Any,
        hooks: Mapping[str, Hook] | None = None,
        grad: bool = False,
    ) -> Any:
        """Run from node ``first`` to node ``last`` and return the value of ``last``.

        Args:
            first: name of the node to start from, or path of a module: its first node.
            last: name of the value that is returned.
            feed: the values of :meth:`range_inputs`, in the form of the inputs of :meth:`run`.
            hooks: as for :meth:`run`.
            grad: record gradients.

        Returns:
            The value of ``last``.

        Raises:
            ConfigError: As :meth:`run`, and where ``last`` comes before ``first``.
            GraphError: A node failed.
        """
        where = "GraphRunner.run_range"
        boundary = self._boundary(where, first, last)
        fed = self._fed(where, feed, boundary)
        missing = [node.name for node in boundary if node not in fed]
        if missing:
            raise _missing(where, missing)
        target = self._names.result(where, last)
        return self._execute(where, fed, [target], hooks, grad)[0]

    def range_inputs(self, first: str, last: str) -> tuple[str, ...]:
        """Return the names of the values that :meth:`run_range` must be given, in order.

        Args:
            first: see :meth:`run_range`.
            last: see :meth:`run_range`.

        Raises:
            ConfigError: A name stands for nothing, or ``last`` comes before ``first``.
        """
        found = self._boundary("GraphRunner.range_inputs", first, last)
        return tuple(node.name for node in found)

    def trace_meta(self, example: Any) -> dict[str, NodeMeta]:
        """Run the whole graph on ``example`` and return the figures of each node that ran.

        Args:
            example: inputs as for :meth:`run`.

        Returns:
            Node name -> figures, in the order of the graph.
        """
        # The module imports Triton, which `import torchq` must not do.
        from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415

        with FlopCounterMode(display=False) as counter:
            recorder = MetaRecorder(counter)
            hooks: dict[str, Hook] = {
                node.name: (recorder.pre, partial(recorder.post, node, module_path(node)))
                for node in self._nodes
            }
            self.run(example, hooks=hooks)
        return recorder.found

    def _fed(self, where: str, inputs: Any, expected: Sequence[fx.Node]) -> dict[fx.Node, Any]:
        """Return the given values by node."""
        if isinstance(inputs, Mapping):
            named: dict[fx.Node, Any] = {}
            for name, value in inputs.items():
                node = self._names.result(f"{where}: inputs", name)
                if node in named:
                    raise _twice(f"{where}: inputs", node)
                named[node] = value
            return named
        values = list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]
        required = [node for node in expected if not (node.op == "placeholder" and node.args)]
        if not len(required) <= len(values) <= len(expected):
            names = ", ".join(node.name for node in expected) or "none"
            raise ConfigError(
                f"{where}: inputs: got {len(values)} values; expected {len(required)} "
                f"for {names}. Pass a mapping to give values by name"
            )
        return dict(zip(expected, values, strict=False))

    def _boundary(self, where: str, first: str, last: str) -> list[fx.Node]:
        """Return the nodes before ``first`` whose values the range reads, in order."""
        start, stop = self._names.first(where, first), self._names.result(where, last)
        if stop < start:
            raise ConfigError(
                f"{where}: got the range from {first!r} to {last!r}, whose end comes before its "
                "start. Swap the names"
            )
        position = {node: number for number, node in enumerate(self._nodes)}
        needed, found = {stop}, set()
        for node in reversed(self._nodes[: position[stop] + 1]):
            if node not in needed:
                continue
            if node.op == "placeholder" or (node < start and node.op != "get_attr"):
                found.add(node)
            else:
                needed.update(node.all_input_nodes)
        return sorted(found, key=position.__getitem__)

    def _execute(
        self,
        where: str,
        fed: dict[fx.Node, Any],
        nodes: Sequence[fx.Node],
        hooks: Mapping[str, Hook] | None,
        grad: bool,
        backend: NodeBackend | None = None,
        with_effects: bool = False,
    ) -> list[Any]:
        found: dict[fx.Node, tuple[PreHook | None, PostHook | None]] = {}
        for name, hook in (hooks or {}).items():
            node = self._names.result(f"{where}: hooks", name)
            if node in found:
                raise _twice(f"{where}: hooks", node)
            found[node] = _pair(f"{where}: hooks", name, hook)
        plan = self._plan(frozenset(fed), frozenset(nodes), with_effects)
        missing = [n.name for n in plan.nodes if n.op == "placeholder" and not n.args]
        if missing:
            raise _missing(where, missing)
        with torch.set_grad_enabled(grad):
            run = self._execution.fresh()
            kept = run.execute(plan, fed, frozenset(nodes), found, backend)
        return [kept[node] for node in nodes]

    def _plan(
        self, fed: frozenset[fx.Node], nodes: frozenset[fx.Node], with_effects: bool
    ) -> RunPlan:
        key = (fed, nodes, with_effects)
        plan = self._plans.get(key)
        if plan is None:
            modules = dict(self.graph_module.named_modules(remove_duplicate=False))
            plan = plan_run(self._graph, modules, fed, nodes, with_effects=with_effects)
            if len(self._plans) >= _MOST_PLANS:
                self._plans.clear()
            self._plans[key] = plan
        return plan


def _pair(where: str, name: str, hook: Any) -> tuple[PreHook | None, PostHook | None]:
    pair = hook if isinstance(hook, tuple) else (None, hook)
    if len(pair) != 2 or not all(part is None or callable(part) for part in pair):
        raise ConfigError(
            f"{where}: got {hook!r} for {name!r}; expected a function, or a pair of a pre hook "
            "and a post hook"
        )
    return pair


def _twice(where: str, node: fx.Node) -> ConfigError:
    return ConfigError(f"{where}: got two entries for node {node.name!r}. Drop one of them")


def _missing(where: str, names: Sequence[str]) -> ConfigError:
    shown = ", ".join(names)
    return ConfigError(f"{where}: inputs: got no value for {shown}. Give them by name or in order")

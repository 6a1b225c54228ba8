"""The runner of traced models: any value, parts of the graph, hooks, and other arithmetic."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
from torch import fx, nn

from torchq.errors import ConfigError, GraphError
from torchq.graph.calling import tensors_in, with_copies
from torchq.graph.operators import may_alias, may_write, operator_name, writes
from torchq.utils import counting_operations

#: Called with the arguments of a node; returns None or the pair to use instead.
PreHook = Callable[
    [tuple[Any, ...], dict[str, Any]], "tuple[tuple[Any, ...], dict[str, Any]] | None"
]
#: Called with the value of a node; returns None or the value to use instead.
PostHook = Callable[[Any], Any]
_Pair = tuple[PreHook | None, PostHook | None]
#: A post hook, or a pre and a post hook, of which one may be None.
Hook = PostHook | _Pair


class NodeBackend(Protocol):
    """What computes nodes in place of torch; :mod:`torchq.runtimes.emulation` has some."""

    def call(
        self,
        graph_module: fx.GraphModule,
        node: fx.Node,
        default: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Any:
        """Return the value of a node that calls something.

        ``default(*args, **kwargs)`` computes it as torch does.
        """
        ...


@dataclass(frozen=True)
class NodeMeta:
    """What one node computed for an example.

    Attributes:
        path: the module that the node is part of; empty for the model itself.
        shape: of the value, if it is a tensor; of its first tensor, if it holds several.
        dtype: of the same tensor.
        bytes: of all tensors in the value. Views count like copies.
        operations: additions and multiplications of products of matrices and convolutions, as
            ``torch.utils.flop_counter`` counts them: two per element of a product. Operators on
            single elements count 0.
    """

    path: str
    shape: tuple[int, ...] | None
    dtype: torch.dtype | None
    bytes: int
    operations: int


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
        self._names = _Names(self._graph)
        self._nodes = list(self._graph.nodes)
        self._output = self._nodes[-1]
        self._placeholders = [node for node in self._nodes if node.op == "placeholder"]
        modules = dict(graph_module.named_modules(remove_duplicate=False))
        called = [(node, _module_of(node, modules)) for node in self._nodes]
        self._writes = frozenset(
            node for node, module in called if writes(node, module)
        )
        self._may_write = frozenset(
            node for node, module in called if may_write(node, module)
        )
        self._may_alias = frozenset(
            node for node, module in called if may_alias(node, module)
        )
        self._schedules: dict[object, _Schedule] = {}

    @property
    def node_names(self) -> tuple[str, ...]:
        """The names of all nodes, in the order of the graph."""
        return tuple(node.name for node in self._nodes)

    def run(
        self,
        inputs: object,
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
            backend: what computes the nodes, such as a
                :class:`torchq.runtimes.emulation.Backend`; None is torch.

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
            values = self._execute(
                where, fed, [self._output], hooks, grad, backend, True
            )
            return self._graph.process_outputs(values[0])
        names = [outputs] if isinstance(outputs, str) else list(outputs)
        nodes = [self._names.result(f"{where}: outputs", name) for name in names]
        values = self._execute(where, fed, nodes, hooks, grad, backend)
        return values[0] if isinstance(outputs, str) else values

    def run_range(
        self,
        first: str,
        last: str,
        feed: object,
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
        return tuple(
            n.name for n in self._boundary("GraphRunner.range_inputs", first, last)
        )

    def trace_meta(self, example: object) -> dict[str, NodeMeta]:
        """Run the whole graph on ``example`` and return the figures of each node that ran.

        Args:
            example: inputs as for :meth:`run`.

        Returns:
            Node name -> figures, in the order of the graph.
        """
        meta_by_name: dict[str, NodeMeta] = {}
        with counting_operations(self.graph_module) as total:
            before = 0

            def pre(args: tuple[object, ...], kwargs: dict[str, object]) -> None:
                nonlocal before
                before = total()

            def post(node: fx.Node, value: object) -> None:
                tensors = list(tensors_in(value))
                meta_by_name[node.name] = NodeMeta(
                    path=_module_path(node),
                    shape=tuple(tensors[0].shape) if tensors else None,
                    dtype=tensors[0].dtype if tensors else None,
                    bytes=sum(t.numel() * t.element_size() for t in tensors),
                    operations=total() - before if node.op[:4] == "call" else 0,
                )

            self.run(
                example, hooks={n.name: (pre, partial(post, n)) for n in self._nodes}
            )
        return meta_by_name

    def _fed(
        self, where: str, inputs: object, expected: Sequence[fx.Node]
    ) -> dict[fx.Node, object]:
        """Return the given values by node."""
        if isinstance(inputs, Mapping):
            named: dict[fx.Node, object] = {}
            for name, value in inputs.items():
                node = self._names.result(f"{where}: inputs", name)
                if node in named:
                    raise _twice(f"{where}: inputs", node)
                named[node] = value
            return named
        values = list(inputs) if isinstance(inputs, (tuple, list)) else [inputs]
        required = [
            node for node in expected if not (node.op == "placeholder" and node.args)
        ]
        if not len(required) <= len(values) <= len(expected):
            names = ", ".join(node.name for node in expected) or "none"
            raise ConfigError(
                f"{where}: inputs: got {len(values)} values; expected {len(required)} "
                f"for {names}. Pass a mapping to give values by name"
            )
        return dict(zip(expected, values, strict=False))

    def _boundary(self, where: str, first: str, last: str) -> list[fx.Node]:
        """Return the nodes before ``first`` whose values the range reads, in order."""
        start = self._names.first(where, first)
        stop = self._names.result(where, last)
        if stop < start:
            raise ConfigError(
                f"{where}: got the range from {first!r} to {last!r}, whose end comes before its "
                "start. Swap the names"
            )
        position = {node: number for number, node in enumerate(self._nodes)}
        needed = {stop}
        boundary = set()
        for node in reversed(self._nodes[: position[stop] + 1]):
            if node not in needed:
                continue
            if node.op == "placeholder" or (node < start and node.op != "get_attr"):
                boundary.add(node)
            else:
                needed.update(node.all_input_nodes)
        return sorted(boundary, key=position.__getitem__)

    def _execute(
        self,
        where: str,
        fed: dict[fx.Node, object],
        nodes: Sequence[fx.Node],
        hooks: Mapping[str, Hook] | None,
        grad: bool,
        backend: NodeBackend | None = None,
        with_effects: bool = False,
    ) -> list[object]:
        hook_by_node: dict[fx.Node, _Pair] = {}
        for name, hook in (hooks or {}).items():
            node = self._names.result(f"{where}: hooks", name)
            if node in hook_by_node:
                raise _twice(f"{where}: hooks", node)
            hook_by_node[node] = _pair(f"{where}: hooks", name, hook)
        schedule = self._schedule(fed, nodes, with_effects)
        if schedule.missing:
            raise _missing(where, schedule.missing)
        with torch.set_grad_enabled(grad):
            results = _Run(self.graph_module, hook_by_node, backend).execute(
                schedule, fed
            )
        return [results[node] for node in nodes]

    def _schedule(
        self, fed: Collection[fx.Node], nodes: Sequence[fx.Node], with_effects: bool
    ) -> _Schedule:
        """Return what runs, made once for each choice of inputs and results."""
        key = (frozenset(fed), frozenset(nodes), with_effects)
        schedule = self._schedules.get(key)
        if schedule is None:
            running = self._running(fed, nodes, with_effects)
            schedule = _Schedule.of(running, frozenset(nodes), self._may_write)
            if len(self._schedules) >= _MOST_SCHEDULES:
                self._schedules.clear()
            self._schedules[key] = schedule
        return schedule

    def _running(
        self, fed: Collection[fx.Node], nodes: Sequence[fx.Node], with_effects: bool
    ) -> list[fx.Node]:
        """Return the nodes that run, in order.

        The wanted values are computed from them, or they overwrite such a value before it is read.
        ``with_effects``: and so are all that write or check, as in the model itself.
        """
        # The nodes whose memory a value may lie in.
        roots: dict[fx.Node, set[fx.Node]] = {}
        for node in self._nodes:
            shares = node not in fed and node in self._may_alias
            roots[node] = (_lies_in(node, roots) if shares else set()) or {node}
        needed = set(nodes)
        read = set[fx.Node]()
        running: list[fx.Node] = []
        for node in reversed(self._nodes):
            if node in fed:
                continue
            does_write = node in self._writes
            is_read = node in needed or (
                does_write and not _lies_in(node, roots).isdisjoint(read)
            )
            is_check = node.op == "call_function" and "_assert" in operator_name(
                node.target
            )
            if is_read or (with_effects and (does_write or is_check)):
                running.append(node)
                needed.update(node.all_input_nodes)
                read |= _lies_in(node, roots)
        return running[::-1]


#: The choices of inputs and results that a runner remembers.
_MOST_SCHEDULES = 16


@dataclass(frozen=True)
class _Schedule:
    """What runs for one choice of inputs and results; equal in every run.

    Attributes:
        steps: the nodes in order, each with what is freed after it, and whether the value is kept
            as a copy, since a later node may overwrite it.
        wanted: the nodes whose values are returned.
        has_writers: a node may overwrite what it is given.
        missing: names of arguments that have neither a value nor a default.
    """

    steps: tuple[tuple[fx.Node, tuple[fx.Node, ...], bool], ...]
    wanted: frozenset[fx.Node]
    has_writers: bool
    missing: tuple[str, ...]

    @classmethod
    def of(
        cls,
        running: Sequence[fx.Node],
        wanted: frozenset[fx.Node],
        may_write: Collection[fx.Node],
    ) -> _Schedule:
        """Return the schedule of some nodes."""
        writers = [number for number, node in enumerate(running) if node in may_write]
        last_writer = writers[-1] if writers else -1
        released = _last_uses(running)
        steps = tuple(
            (node, tuple(released.get(node, ())), number < last_writer)
            for number, node in enumerate(running)
        )
        missing = tuple(n.name for n in running if n.op == "placeholder" and not n.args)
        return cls(steps, wanted, bool(writers), missing)


def _module_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> nn.Module | None:
    return modules.get(str(node.target)) if node.op == "call_module" else None


def _lies_in(node: fx.Node, roots: Mapping[fx.Node, set[fx.Node]]) -> set[fx.Node]:
    """Return the nodes whose memory the inputs of ``node`` may lie in."""
    return set().union(*(roots[value] for value in node.all_input_nodes))


def _pair(where: str, name: str, hook: object) -> _Pair:
    pair = hook if isinstance(hook, tuple) else (None, hook)
    if len(pair) != 2 or not all(part is None or callable(part) for part in pair):
        raise ConfigError(
            f"{where}: got {hook!r} for {name!r}; expected a function, or a pair of a pre hook "
            "and a post hook"
        )
    return pair


def _twice(where: str, node: fx.Node) -> ConfigError:
    return ConfigError(
        f"{where}: got two entries for node {node.name!r}. Drop one of them"
    )


def _missing(where: str, names: Sequence[str]) -> ConfigError:
    shown = ", ".join(names)
    return ConfigError(
        f"{where}: inputs: got no value for {shown}. Give them by name or in order"
    )


class _Run:
    """One run of some nodes; its values live here, so that runs of one graph do not meet."""

    def __init__(
        self,
        module: fx.GraphModule,
        hooks: Mapping[fx.Node, _Pair],
        backend: NodeBackend | None,
    ) -> None:
        self._module, self._hooks, self._backend = module, hooks, backend
        self._values: dict[fx.Node, object] = {}

    def execute(
        self, schedule: _Schedule, fed: Mapping[fx.Node, object]
    ) -> dict[fx.Node, object]:
        """Run the nodes of a schedule and return the wanted values; see :meth:`GraphRunner.run`."""
        values, wanted = self._values, schedule.wanted
        results: dict[fx.Node, object] = {}
        try:
            for node, value in fed.items():
                fed_value = with_copies(value) if schedule.has_writers else value
                values[node] = _after(fed_value, self._hooks.get(node, _NO_HOOKS)[1])
                if node in wanted:
                    results[node] = (
                        with_copies(values[node])
                        if schedule.has_writers
                        else values[node]
                    )
            for node, freed, is_overwritten in schedule.steps:
                value = values[node] = self._value(node)
                if node in wanted:
                    results[node] = with_copies(value) if is_overwritten else value
                for dead in freed:
                    del values[dead]
            return results
        except BaseException:
            results.clear()
            raise
        finally:
            values.clear()

    def _value(self, node: fx.Node) -> object:
        pre, post = self._hooks.get(node, _NO_HOOKS)
        try:
            args, kwargs = _before(pre, *self._arguments(node))
            return _after(self._computed(node, args, kwargs), post)
        except Exception as error:
            raise GraphError(
                f"{_place(node)}: got {type(error).__name__}: {error}"
            ) from error

    def _arguments(self, node: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        values = self._values
        args = tuple(
            values[a]
            if type(a) is fx.Node
            else a
            if type(a) in _PLAIN
            else _filled(a, values)
            for a in node.args
        )
        return args, _filled(node.kwargs, values) if node.kwargs else {}

    def _computed(
        self, node: fx.Node, args: tuple[object, ...], kwargs: dict[str, object]
    ) -> object:
        if node.op == "output":
            return args[0]
        if node.op == "get_attr":
            return self._attribute(str(node.target))
        # The default; the runner has checked that there is one.
        if node.op == "placeholder":
            return args[0]
        if self._backend is None:
            return self._called(node)(*args, **kwargs)
        return self._backend.call(self._module, node, self._called(node), args, kwargs)

    def _called(self, node: fx.Node) -> Callable[..., object]:
        """Return what a node calls; a method is a function of the tensor."""
        target: Any = node.target
        if node.op == "call_module":
            return self._module.get_submodule(target)
        if node.op == "call_method":
            return lambda owner, *args, **kwargs: getattr(owner, target)(
                *args, **kwargs
            )
        return cast("Callable[..., Any]", target)

    def _attribute(self, path: str) -> object:
        value: Any = self._module
        for name in path.split("."):
            value = getattr(value, name)
        return value


_NO_HOOKS: _Pair = (None, None)
#: Types of arguments that hold no nodes.
_PLAIN = frozenset([int, float, bool, str, type(None), torch.dtype, torch.device])


def _filled(value: Any, values: Mapping[fx.Node, Any]) -> Any:
    return fx.node.map_arg(value, values.__getitem__)


def _last_uses(running: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Return the values that nothing reads after each node."""
    last: dict[fx.Node, fx.Node] = {}
    for node in running:
        last[node] = node
        last.update(dict.fromkeys(node.all_input_nodes, node))
    released: dict[fx.Node, list[fx.Node]] = {}
    for value, reader in last.items():
        released.setdefault(reader, []).append(value)
    return released


def _before(
    hook: PreHook | None, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    replaced = None if hook is None else hook(args, kwargs)
    if replaced is None:
        return args, kwargs
    pair = isinstance(replaced, tuple) and len(replaced) == 2
    if (
        not pair
        or not isinstance(replaced[0], tuple)
        or not isinstance(replaced[1], dict)
    ):
        raise TypeError(
            f"its pre hook returned a {type(replaced).__name__}; expected None, or a tuple of "
            "arguments and a dict of keyword arguments"
        )
    return replaced


def _after(value: object, hook: PostHook | None) -> object:
    replaced = None if hook is None else hook(value)
    return value if replaced is None else replaced


def _place(node: fx.Node) -> str:
    """Return the module path, name and source line of ``node``, as far as they are known."""
    path = _module_path(node)
    name = f"node {node.name}"
    return ", ".join(
        filter(None, [f"{path} ({name})" if path else name, _source_line(node)])
    )


_TORCH = os.path.dirname(torch.__file__)
_TRACER = os.path.dirname(__file__)


class _Names:
    """The nodes of a graph by their names, by their arguments' names and by paths of modules."""

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = {node.name: node for node in graph.nodes}
        self._scopes: dict[str, dict[str, list[fx.Node]]] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                self.nodes.setdefault(str(node.target), node)
            for call, path in _scopes(node):
                self._scopes.setdefault(path, {}).setdefault(call, []).append(node)

    def result(self, where: str, name: str) -> fx.Node:
        """Return the node whose value ``name`` stands for."""
        if name in self.nodes:
            result: fx.Node = self.nodes[name]
            return result
        inside = self._one_call(where, name)
        members = set(inside)
        results = [node for node in inside if not members.issuperset(node.users)]
        if len(results) != 1:
            raise _ambiguous(where, name, "returns several values", results or inside)
        return results[0]

    def first(self, where: str, name: str) -> fx.Node:
        """Return the node that runs first for ``name``; see :meth:`result`."""
        return (
            self.nodes[name] if name in self.nodes else self._one_call(where, name)[0]
        )

    def _one_call(self, where: str, name: str) -> list[fx.Node]:
        calls = list(self._scopes.get(name, {}).values())
        if not calls:
            raise _unknown(where, name, (*self.nodes, *self._scopes))
        if len(calls) > 1:
            last = [call[-1] for call in calls]
            raise _ambiguous(where, name, f"is called {len(calls)} times", last)
        return calls[0]


def _unknown(where: str, name: object, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that stands for nothing, with close ones."""
    names = sorted(set(known))
    close = difflib.get_close_matches(str(name), names, n=5, cutoff=0.5) or names[:5]
    return ConfigError(
        f"{where}: got {name!r}; expected the name of a node or the path of a module. "
        f"Close names: {', '.join(close) or 'none'}"
    )


def _ambiguous(
    where: str, name: str, reason: str, nodes: Iterable[fx.Node]
) -> ConfigError:
    shown = ", ".join(node.name for node in nodes)
    return ConfigError(
        f"{where}: got {name!r}, which {reason}; expected the name of one value. "
        f"Name one of the nodes: {shown}"
    )


def _scopes(node: fx.Node) -> list[tuple[str, str]]:
    """Return a key and the path of each call of a module that ``node`` is part of."""
    if node.op in ("placeholder", "output", "get_attr"):
        return []
    # torch.export puts a prefix that stands for the model in front of its paths.
    path_by_call = {
        str(call): str(value[0]).removeprefix("L['self']").removeprefix(".")
        for call, value in (node.meta.get("nn_module_stack") or {}).items()
    }
    if node.op == "call_module" and str(node.target) not in path_by_call.values():
        path_by_call[node.name] = str(node.target)
    return [(call, path) for call, path in path_by_call.items() if path]


def _module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that ``node`` is part of; empty for the model."""
    if node.op == "call_module":
        return str(node.target)
    scopes = _scopes(node)
    return scopes[-1][1] if scopes else ""


def _source_line(node: fx.Node) -> str:
    """Return the file, line and code that made ``node``, as its trace recorded; else empty.

    The place is the innermost one below the tracer that is no code of torch.
    """
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    places = [number for number, line in enumerate(lines) if line.startswith('File "')]
    for number in reversed(places):
        file = lines[number].split('"')[1]
        if file.startswith(_TRACER) and lines[number].endswith("in trace_call"):
            break
        if not file.startswith((_TORCH, _TRACER)):
            code = lines[number + 1 : number + 2]
            return ": ".join([lines[number], *code])
    return ""

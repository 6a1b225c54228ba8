"""Modules whose own operators (``+``, ``torch.cat``, ...) are calls of child modules.

Quantizers can sit in such children. The module object, its children, hooks and parameters stay, as
with every conversion (:mod:`torchq.nn.convert`), and no function or method of torch is patched.
There are three ways to redirect an operator:

Source
    The forward runs as its author wrote it, but for the operators, which a router carries out
    (:mod:`torchq.graph.source`). Branches, attributes and arguments stay dynamic.

Trace
    Where there is no source (code typed into an interpreter, decorated functions), the forward is
    traced with all children kept whole, once for training and once for evaluation, and the graph
    runs in its place. The trace is made again when an attribute of the module is set. A call with
    another value for an argument that the trace took for a constant runs the float forward.

Graph
    A :class:`torch.fx.GraphModule` computes what its graph says, and its copies, pickles, exports
    and edits start from that graph. So it gets a graph with other nodes, not another forward.
"""

from __future__ import annotations

import copy
import inspect
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any, ClassVar

from torch import fx, nn

from torchq.errors import QuantizationError
from torchq.graph import ForwardTracer, rewrite_forward, trace_call
from torchq.nn.convert import QuantModule, change_class
from torchq.nn.modules.operators import (
    Tap,
    function_of,
)
from torchq.nn.operator_routes import MARK, Recorder, Route, base_name
from torchq.utils import qualified_name

_META = "torchq_operators"
_TRACED = ("_eval_run", "_train_run", "_constants", "_stale")


class OperatorOwner(QuantModule):
    """Base of modules whose operators (``+``, ``torch.cat``, ...) are calls of their children.

    Attributes:
        replacements: Name of an operator (of a site in the source, or of a node of a graph) -> name
            of the child that is called instead.
    """

    input_slots = ()
    weight_slots = ()
    is_container = True

    replacements: Mapping[str, str] = types.MappingProxyType({})


class RewrittenForward(OperatorOwner):
    """Base of the classes that :func:`replace_operators_` makes, two for each float class.

    Attributes:
        replacements: Name of an operator (of a site, or of a node of the traced forward) -> name
            of the child that is called instead.
        replaced_sites: The names in ``replacements`` without numbers of visits.
        recorder: Where calls note their operators, or None.
    """

    #: The class's own forward, under a name that the tracer can ask for.
    float_forward: ClassVar[Callable[..., Any]]
    #: The forward is traced, not rewritten.
    is_traced: ClassVar[bool]

    replaced_sites: frozenset[str] = frozenset()
    recorder: Recorder | None = None

    def on_revert(self) -> None:
        """Remove the children and everything else that the class needs."""
        for child in self.replacements.values():
            delattr(self, child)
        for name in ("replacements", "replaced_sites", *_TRACED):
            vars(self).pop(name, None)

    def _set_replacements(self, replacements: Mapping[str, str]) -> None:
        self.replacements = dict(replacements)
        self.replaced_sites = frozenset(map(base_name, replacements))
        if type(self).is_traced:
            self._trace()

    def _trace(self) -> None:
        self._eval_run, self._train_run = (
            _rewritten(self, self.replacements, training) for training in (False, True)
        )
        parameters = inspect.signature(type(self).float_forward).parameters.values()
        self._constants = tuple(
            (p.name, _position(p, index), p.default)
            for index, p in enumerate(parameters)
            if _is_constant(p)
        )
        self._stale = False

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # The class is made at run time and the functions by exec: a copy makes them again.
        state = {name: value for name, value in vars(self).items() if name not in _TRACED}
        return _blank, (type(self).float_class, type(self).is_traced), state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._set_replacements(self.replacements)


def _is_constant(parameter: inspect.Parameter) -> bool:
    """Return True for an argument that a trace takes for a constant; see ``trace_call``."""
    return parameter.default is None or isinstance(parameter.default, (bool, int, float))


def _position(parameter: inspect.Parameter, index: int) -> int | None:
    """Return the place among the positional arguments behind ``self``, None for a keyword."""
    is_keyword = parameter.kind in (parameter.KEYWORD_ONLY, parameter.VAR_KEYWORD)
    return None if is_keyword else index - 1


@cache
def _traced_class(cls: type[Any]) -> type[RewrittenForward]:
    """Return the class for traced modules: one for each float class, so types of copies agree."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._stale:
            self._trace()
        if self._constants and _has_other_constants(self, args, kwargs):
            return self.float_forward(*args, **kwargs)
        return (self._train_run if self.training else self._eval_run)(self, *args, **kwargs)

    def set_attribute(self: Any, name: str, value: Any) -> None:
        is_known = name in vars(self) or hasattr(cls, name)
        super(twin, self).__setattr__(name, value)
        # torch.export hands the attributes of a module to a proxy of it, as its ``__dict__``.
        unrelated = (*_TRACED, "training", "__dict__")
        if is_known and "_stale" in vars(self) and name not in unrelated:
            self._stale = True

    # Exporters ask for the names of arguments, and torch.fx looks for them in the wrapped code.
    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    forward.__wrapped__ = cls.forward  # type: ignore[attr-defined]
    twin = _new_class(cls, forward, is_traced=True)
    twin.__setattr__ = set_attribute  # type: ignore[method-assign]
    return twin


@cache
def _routed_class(cls: type[Any]) -> type[RewrittenForward] | None:
    """Return the class for modules whose source is rewritten, or None where that is impossible."""
    forward = rewrite_forward(cls, Route)
    return None if forward is None else _new_class(cls, forward, is_traced=False)


def _new_class(
    cls: type[Any], forward: Callable[..., Any], *, is_traced: bool
) -> type[RewrittenForward]:
    body = {
        "float_class": cls,
        "float_forward": cls.forward,
        "forward": forward,
        "is_traced": is_traced,
        "__doc__": f":class:`{qualified_name(cls)}` with operators replaced by child modules.",
        "__module__": cls.__module__,
    }
    return types.new_class(
        f"Rewritten{cls.__name__}", (RewrittenForward, cls), {}, lambda space: space.update(body)
    )


def _blank(cls: type[nn.Module], is_traced: bool) -> RewrittenForward:
    twin: Any = _traced_class(cls) if is_traced else _routed_class(cls)  # type: ignore[arg-type]
    if twin is None:
        raise QuantizationError(
            f"{qualified_name(cls)}: the source of its forward cannot be read; expected the code "
            "that was quantized"
        )
    result: RewrittenForward = twin.__new__(twin)
    return result


def _has_other_constants(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return True if a call gives another value for an argument that the trace fixed."""
    different = []
    for name, position, default in module._constants:  # noqa: SLF001
        given = kwargs.get(name, default)
        if position is not None and position < len(args):
            given = args[position]
        if given is not default and not _equal(given, default):
            different.append(name)
    if different:
        warnings.warn(
            f"{qualified_name(type(module).float_class)}: is called with {', '.join(different)}, "
            "which its trace took for a constant; its operators are not quantized in this call",
            stacklevel=4,
        )
    return bool(different)


def _equal(value: Any, default: Any) -> bool:
    return type(value) is type(default) and bool(value == default)


@contextmanager
def recording_operators(modules: Iterable[nn.Module]) -> Iterator[dict[int, Recorder]]:
    """Let calls of the modules note their operators inside a ``with`` block."""
    found: dict[int, Recorder] = {}
    changed = []
    try:
        for module in modules:
            if isinstance(module, fx.GraphModule):
                continue
            cls = type(module)
            twin = _routed_class(cls)  # type: ignore[arg-type]
            if twin is not None and "forward" not in vars(module):
                change_class(module, twin)
                changed.append((module, cls))
                found[id(module)] = vars(module)["recorder"] = Recorder()
        yield found
    finally:
        for module, cls in changed:
            vars(module).pop("recorder", None)
            change_class(module, cls)


class _ShallowTracer(ForwardTracer):
    def __init__(self, function: str) -> None:
        super().__init__()
        self.traced_func_name = function

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def trace_forward(module: nn.Module, training: bool) -> fx.Graph:
    """Return the graph of the module's own forward, with its children kept whole."""
    if isinstance(module, fx.GraphModule):
        return copy.deepcopy(module.graph)
    before = module.training
    module.training = training
    is_routed = isinstance(module, RewrittenForward) and module.recorder is None
    function = "float_forward" if is_routed else "forward"
    try:
        return trace_call(_ShallowTracer(function), module)
    finally:
        module.training = before


def _rewritten(
    module: nn.Module, replacements: Mapping[str, str], training: bool
) -> Callable[..., Any]:
    """Return the forward with operators replaced, as a function of the module and its arguments."""
    children = {name: module.get_submodule(name) for name in replacements.values()}
    # A forward that iterates over its children must not meet the new ones.
    for name in children:
        delattr(module, name)
    try:
        graph = trace_forward(module, training)
    finally:
        for name, child in children.items():
            module.add_module(name, child)
    where = qualified_name(type(module))
    _call_children(graph, replacements, children, where)
    code = graph.python_code("self")
    namespace = dict(code.globals)
    exec(compile(code.src, f"<rewritten forward of {where}>", "exec"), namespace)
    function: Callable[..., Any] = namespace["forward"]
    return function


def _call_children(
    graph: fx.Graph,
    replacements: Mapping[str, str],
    children: Mapping[str, nn.Module],
    where: str,
) -> None:
    """Call children in the place of nodes, or, for taps, on the first operands of nodes."""
    nodes = {node.name: node for node in graph.nodes}
    for name in replacements:
        if name not in nodes:
            raise QuantizationError(
                f"{where}: its forward has no operator {name}; expected the code that was quantized"
            )
    for name, child in replacements.items():
        node = nodes[name]
        if isinstance(children[child], Tap):
            with graph.inserting_before(node):
                first = graph.call_module(child, (node.args[0],))
            node.args = (first, *node.args[1:])
        else:
            node.op, node.target = "call_module", child


def replace_operators_(module: nn.Module, replacements: Mapping[str, str]) -> nn.Module:
    """Make the module call its children in the place of operators, in place, and return it.

    :func:`torchq.nn.revert_` is the inverse.
    """
    where = qualified_name(type(module))
    if "forward" in vars(module):
        raise QuantizationError(
            f"{where}: forward was replaced on the instance; expected the class's own"
        )
    for child in replacements.values():
        if not child.isidentifier():
            raise QuantizationError(
                f"{where}: got {child!r} as the name of a child; expected a Python identifier"
            )
    if isinstance(module, fx.GraphModule):
        return replace_nodes_(module, replacements)
    cls, is_routed = type(module), all(name.startswith(MARK) for name in replacements)
    twin = _routed_class(cls) if is_routed else _traced_class(cls)  # type: ignore[arg-type]
    if twin is None:
        raise QuantizationError(
            f"{where}: the source of its forward cannot be read; expected the code that was "
            "quantized"
        )
    change_class(module, twin)
    rewritten: Any = module
    try:
        rewritten._set_replacements(replacements)  # noqa: SLF001
    except BaseException:
        for name in ("replacements", "replaced_sites", *_TRACED):
            vars(module).pop(name, None)
        change_class(module, cls)
        raise
    return module


class RewrittenGraph(OperatorOwner):
    """Base of graph modules in which nodes call children instead of operators.

    A class is made for each class of graph modules; torch adds one more for each object, which
    holds its forward.
    """

    graph: fx.Graph
    meta: dict[str, Any]

    @property
    def replacements(self) -> Mapping[str, str]:  # type: ignore[override]
        """Name of a node of the float graph -> name of the child that it calls now."""
        # Copies of a graph module keep ``meta``, and no other attributes.
        found: Mapping[str, str] = self.meta.get(_META, {})
        return found

    def on_revert(self) -> None:
        """Let the nodes call functions again, and remove the children."""
        children = set(self.replacements.values())
        graph = copy.deepcopy(self.graph)
        for node in list(graph.nodes):
            if node.op == "call_module" and node.target in children:
                self._revert_node(node)
        self.graph = graph
        for child in children:
            delattr(self, child)
        self.meta.pop(_META, None)

    def _revert_node(self, node: fx.Node) -> None:
        child = self.get_submodule(str(node.target))
        if isinstance(child, Tap):
            node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
            node.graph.erase_node(node)
            return
        node.op, node.target = "call_function", function_of(child)

    def __reduce__(self) -> Any:
        reduced: Any = super().__reduce__()
        function, arguments = reduced
        return _unpickled, (type(self).float_class, dict(self.replacements), function, arguments)


@cache
def _graph_class(cls: type[Any]) -> type[RewrittenGraph]:
    body = {
        "float_class": cls,
        "__doc__": f":class:`{qualified_name(cls)}` with operators replaced by child modules.",
        "__module__": cls.__module__,
    }
    bases = (RewrittenGraph, cls)
    return types.new_class(f"Rewritten{cls.__name__}", bases, {}, lambda space: space.update(body))


def _unpickled(
    cls: type[Any], replacements: dict[str, str], function: Any, arguments: Any
) -> fx.GraphModule:
    module: fx.GraphModule = function(*arguments)
    module.meta[_META] = replacements
    change_class(module, _graph_class(cls))  # type: ignore[arg-type]
    return module


def replace_nodes_(module: fx.GraphModule, replacements: Mapping[str, str]) -> fx.GraphModule:
    """Make nodes of the module's graph call its children, in place, and return the module."""
    # A copy is changed, so that an error further on leaves the module with the graph that it had.
    graph, cls = copy.deepcopy(module.graph), _float_class(module)
    children = {name: module.get_submodule(name) for name in replacements.values()}
    _call_children(graph, replacements, children, qualified_name(cls))
    # The class that the module had keeps the code of the graph that it had.
    change_class(module, _graph_class(cls))  # type: ignore[arg-type]
    module.graph = graph
    module.meta[_META] = dict(replacements)
    return module


def _float_class(module: fx.GraphModule) -> type[Any]:
    """Return the class of a graph module without the layer that torch adds for each object."""
    blank = type(module).__new__(type(module))
    return type(blank).__bases__[0]

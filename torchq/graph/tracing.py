"""Traces of models: at module level where torch.fx can follow the code, else of operators."""

import dataclasses
import inspect
import logging
import operator
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import fx, nn

from torchq.errors import GraphError
from torchq.graph.calling import call_arguments, tensors_in, version_of, with_copies
from torchq.graph.operators import OVERWRITES
from torchq.utils import evaluating, network_of, random_kept, state_kept, untouched

log = logging.getLogger(__name__)

#: Whether a traced forward stores values in its modules; see :func:`trace_modules`.
STORES_VALUES = "torchq_stores_values"


def is_torch_leaf(module: nn.Module) -> bool:
    """Return True if ``module`` is one call in a trace: a layer of ``torch.nn``, or no children.

    A module of the user's own without children (an activation, a drop path) is one call too: it
    holds no layer that a trace would have to show, and its ``forward`` is often what makes
    symbolic tracing fail. So is a module whose ``is_traced_whole`` is True: it decides in every
    call which of its children runs.
    """
    if getattr(module, "is_traced_whole", False):
        return True
    library = type(module).__module__.startswith("torch.nn.") and not isinstance(
        module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    )
    return library or next(module.children(), None) is None


class ForwardTracer(fx.Tracer):
    """A tracer that loops over the parts of a tensor where the code says how many there are.

    ``list(x.chunk(2, 1))`` gives two items. Fewer chunks are an IndexError when the graph runs. The
    nodes of ``x += y`` and its like, which torch.fx writes as ``x + y``, are marked by
    :data:`OVERWRITES`.

    Attributes:
        stores_values: True if the forward that was traced last left a value in a module, or
            changed a tensor there.
    """

    stores_values = False

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Return what stands for the result of ``node``; see :meth:`torch.fx.Tracer.proxy`."""
        return (_Value if _number_of_parts(node) is None else _Parts)(node, self)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., object],
        args: tuple[object, ...],
        kwargs: dict[str, object],
    ) -> Any:
        """Trace a call of a module; an error in a graph module goes to :func:`trace_call`."""
        if not isinstance(m, fx.GraphModule):
            return super().call_module(m, forward, args, kwargs)
        try:
            return super().call_module(m, forward, args, kwargs)
        except Exception as error:
            raise _GraphFailed(error) from error


class _GraphFailed(BaseException):
    """An error in the code of a graph module inside a model.

    The call around it would print the traceback of an Exception, whoever handles that.
    """


def _assigning(name: str) -> Callable[[fx.Proxy, Any], object]:
    function = getattr(operator, name)

    def assign(self: fx.Proxy, other: object) -> object:
        result = function(self, other)
        result.node.meta[OVERWRITES] = True
        return result

    return assign


class _Value(fx.Proxy):
    """A value whose assigning operators mark their nodes."""

    __iadd__ = _assigning("add")
    __isub__ = _assigning("sub")
    __imul__ = _assigning("mul")
    __imatmul__ = _assigning("matmul")
    __itruediv__ = _assigning("truediv")
    __ifloordiv__ = _assigning("floordiv")
    __imod__ = _assigning("mod")
    __ipow__ = _assigning("pow")
    __iand__ = _assigning("and_")
    __ior__ = _assigning("or_")


class _Parts(_Value):
    """A tuple of known length."""

    def __len__(self) -> int:
        return _number_of_parts(self.node) or 0

    def __iter__(self) -> Iterator[fx.Proxy]:
        parts: Any = self
        return (parts[i] for i in range(len(self)))


def _number_of_parts(node: fx.Node) -> int | None:
    name = getattr(node.target, "__name__", node.target)
    names = ("chunks", "split_size_or_sections", "split_size")
    keywords = [node.kwargs[key] for key in names if key in node.kwargs]
    parts = (*keywords, *node.args[1:2], None)[0]
    if name == "split" and isinstance(parts, (list, tuple)):
        return len(parts)
    return parts if name == "chunk" and isinstance(parts, int) else None


class ModuleTracer(ForwardTracer):
    """The tracer of whole models: calls of leaf modules stay whole."""

    def __init__(self, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._leaf = is_leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return True for modules that stay single calls."""
        return self._leaf(m)

    def create_arg(self, a: object) -> Any:
        """Turn a value into part of the graph; dictionaries of other classes keep their type."""
        plain = (dict, fx.immutable_collections.immutable_dict)
        if not isinstance(a, dict) or type(a) in plain:
            return super().create_arg(a)
        arguments = {name: self.create_arg(value) for name, value in a.items()}
        if type(a) is OrderedDict or dataclasses.is_dataclass(a):
            return self.create_node("call_function", type(a), (arguments,), {})
        raise TypeError(f"{type(a).__name__} cannot be part of a traced model")


def trace_call(
    tracer: fx.Tracer,
    module: nn.Module,
    given: Mapping[str, object] | None = None,
    *,
    restore: Callable[[], None] | None = None,
) -> fx.Graph:
    """Return the graph that ``tracer`` makes of the forward of ``module``.

    Calls of the graph give arguments by position or by name, as calls of the module do. Arguments
    with a default of None, a number or a flag keep that default: otherwise a Proxy would stand in
    for it, and ``if mask is not None`` would take a branch that ordinary calls do not take. A call
    with another value raises an AssertionError that names the argument.

    A forward may store proxies in its modules. ``restore`` takes them out, where a caller keeps the
    state of the module; None keeps it here.
    """
    function = getattr(type(module), tracer.traced_func_name)
    parameters = list(inspect.signature(function).parameters.values())
    values = {p.name: p.default for p in parameters} | dict(given or {})
    constants = {
        k: v
        for k, v in values.items()
        if v is None or isinstance(v, (bool, int, float))
    }
    with state_kept(module) if restore is None else nullcontext():
        before = [(tensor, version_of(tensor)) for tensor in _stored_tensors(module)]
        try:
            graph = tracer.trace(module, constants or None)
        except _GraphFailed as failed:
            raise failed.args[0] from None
        if isinstance(tracer, ForwardTracer):
            changed = any(version_of(tensor) != version for tensor, version in before)
            attributes = [v for part in module.modules() for v in vars(part).values()]
            tracer.stores_values = changed or any(map(_holds_proxy, attributes))
    if restore is not None:
        restore()
    names = [
        p.name
        for p in parameters[1:]
        if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    for node, name in zip(
        (n for n in graph.nodes if n.op == "placeholder"), names, strict=False
    ):
        # torch.fx numbers arguments that are constant, which would hide them from keyword calls.
        node.target = name
    return graph


def _stored_tensors(module: nn.Module) -> Iterator[torch.Tensor]:
    """Yield the tensors that a module holds, but for parameters."""
    yield from module.buffers()
    for part in module.modules():
        yield from (
            value for value in vars(part).values() if isinstance(value, torch.Tensor)
        )


def _holds_proxy(value: object) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    parts = value if isinstance(value, (list, tuple, set)) else [value]
    return any(isinstance(part, fx.Proxy) for part in parts)


def trace_modules(
    model: nn.Module,
    is_leaf: Callable[[nn.Module], bool] = is_torch_leaf,
    given: Mapping[str, object] | None = None,
    *,
    record_lines: bool = False,
) -> fx.GraphModule:
    """Trace ``model`` with torch.fx in eval mode, keeping calls of leaf modules whole.

    The entry :data:`STORES_VALUES` of the trace's ``meta`` says whether the forward stores values
    in its modules, which the trace does not.
    """
    tracer = ModuleTracer(is_leaf)
    tracer.record_stack_traces = record_lines
    with random_kept(), evaluating(model), state_kept(model) as restore:
        graph = trace_call(tracer, model, given, restore=restore)
        for tensor, name in tracer.tensor_attrs.items():
            if not hasattr(model, name.partition(".")[0]):
                vars(model)[name] = tensor
        traced = fx.GraphModule(tracer.root, graph)
    traced.meta[STORES_VALUES] = tracer.stores_values
    return traced


def trace_or_none(
    model: nn.Module, is_leaf: Callable[[nn.Module], bool]
) -> fx.GraphModule | None:
    """Trace ``model`` as :func:`trace_modules` does; return None if its code cannot be traced."""
    try:
        return trace_modules(model, is_leaf)
    # Code whose control flow looks at a tensor may raise anything.
    except Exception as error:
        log.debug(
            "%s cannot be traced (%s: %s)",
            type(model).__name__,
            type(error).__name__,
            error,
        )
        return None


def forward_hook_kind(module: nn.Module) -> str | None:
    """Return ``"a forward hook"``, ``"a forward pre-hook"`` or None: what ``module`` has."""
    if module._forward_hooks:
        return "a forward hook"
    return "a forward pre-hook" if module._forward_pre_hooks else None


_LIBRARY = torch.library.Library("torchq", "FRAGMENT")
_LIBRARY.define("call_whole(Tensor x, str path) -> Tensor")


torch.library.register_fake(
    "torchq::call_whole", lambda x, path: torch.empty_like(x), lib=_LIBRARY
)


@contextmanager
def opaque_calls(model: nn.Module) -> Iterator[None]:
    """Let modules whose ``keeps_tensor_type`` is True write one operator during an export.

    They take one tensor and return one of its type. Modules with hooks are traced as usual, since a
    call of the trace would run the hooks again.
    """
    chosen = [
        (path, module)
        for path, module in model.named_modules()
        if getattr(module, "keeps_tensor_type", False)
        and forward_hook_kind(module) is None
    ]
    try:
        for path, module in chosen:
            vars(module)["forward"] = partial(torch.ops.torchq.call_whole, path=path)
        yield
    finally:
        for _, module in chosen:
            del vars(module)["forward"]


def restore_calls(traced: fx.GraphModule, model: nn.Module) -> None:
    """Write calls of the modules of ``model`` in the place of the operators that stand for them."""
    for node in list(traced.graph.nodes):
        if node.target is not torch.ops.torchq.call_whole.default:
            continue
        x, path = node.args
        traced.add_submodule(path, model.get_submodule(path))
        with traced.graph.inserting_before(node):
            call = traced.graph.call_module(path, (x,))
        call.meta.update(node.meta)
        node.replace_all_uses_with(call)
        traced.graph.erase_node(node)


_GUARDS = "_guards_fn"


@dataclass(frozen=True)
class Trace:
    """A traced model.

    Attributes:
        graph_module: the trace. At module level it calls the modules of the model, not copies.
        level: ``"module"``: calls of modules, traced with torch.fx. ``"aten"``: calls of ATen
            operators on the parameters of the model, traced with torch.export; quantizers alone
            stay calls of modules.
        lost: sentences that say what the model does and the trace does not.
    """

    graph_module: fx.GraphModule
    level: Literal["module", "aten"]
    lost: tuple[str, ...]


def trace(model: nn.Module, example: object) -> Trace:
    """Trace ``model`` in eval mode, with torch.fx if possible and with torch.export otherwise.

    A trace of torch.fx counts only if it gives the results of the model on ``example``, bit for
    bit: code that asks for the type of an argument takes another branch while it is traced. So the
    model and the trace run once each, from the same state of the random number generators.

    Args:
        model: left unchanged, with its training modes and its buffers.
        example: the arguments of one call; see :func:`call_arguments`.

    Returns:
        The trace, with its level and what it lost.

    Raises:
        ConfigError: ``example`` does not tell which arguments it holds.
        GraphError: Neither torch.fx nor torch.export can trace the model.

    Example:
        >>> found = trace(torch.nn.Sequential(torch.nn.Linear(4, 2)), torch.zeros(1, 4))
        >>> found.level, [node.name for node in found.graph_module.graph.nodes]
        ('module', ['input_1', '_0', 'output'])
    """
    model = network_of(model)
    args, kwargs = call_arguments(model, example)
    try:
        return _with_fx(model, args, kwargs)
    except GraphError as error:
        reason = str(error)
    # Code whose control flow looks at a tensor may raise anything.
    except Exception as error:
        reason = why_untraceable(error)
    try:
        return _with_export(model, args, kwargs, reason)
    except Exception as error:
        raise GraphError(
            f"trace: got a {type(model).__name__} that torch.fx cannot follow ({reason}) and "
            f"torch.export cannot either ({type(error).__name__}: {_first_line(error)}). "
            "Trace the parts of the model that hold no such code"
        ) from error


#: Parts of the messages of torch.fx -> what the code of the user does.
_UNTRACEABLE = {
    "cannot be iterated": "its code loops over tensors whose number a trace does not know",
    "inputs to control flow": "its code decides by the values of tensors",
    "'len' is not supported": "its code asks for the length of a tensor or list",
}
#: What other code does: there are as many errors as ways to use a value.
_DEPENDS = "its code depends on what only a run with data has"


def why_untraceable(error: Exception) -> str:
    """Return in the words of a user why code cannot be traced, given what the trace raised."""
    message = _first_line(error)
    matching = (words for part, words in _UNTRACEABLE.items() if part in message)
    return next(matching, _DEPENDS)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _with_fx(
    model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> Trace:
    bound = inspect.signature(type(model).forward).bind(model, *args, **kwargs)
    arguments = dict(list(bound.arguments.items())[1:])
    traced = trace_modules(model, given=arguments, record_lines=True)
    results = []
    for module in (model, traced):
        with untouched(model), random_kept():
            results.append(module(*with_copies(args), **with_copies(kwargs)))
    if not _equal(*results):
        raise GraphError("the trace computes something else than the model")
    lost = ["Branches that the model takes in training are not in the graph."]
    hooks = forward_hook_kind(model)
    if hooks is not None:
        lost.append(f"The model itself has {hooks}, which is not in the graph.")
    for node in traced.graph.nodes:
        if node.op == "placeholder" and node.name != node.target and node.args:
            value = arguments.get(node.target, node.args[0])
            lost.append(
                f"Argument {node.target!r} is always {value!r}: other values are refused."
            )
    return Trace(traced, "module", tuple(lost))


def _with_export(
    model: nn.Module, args: tuple[object, ...], kwargs: dict[str, object], reason: str
) -> Trace:
    with random_kept(), untouched(model), opaque_calls(model):
        program = torch.export.export(
            model, with_copies(args), with_copies(kwargs), strict=False
        )
        exported = program.module()
    assert isinstance(exported, fx.GraphModule)
    restore_calls(exported, model)
    for node in exported.graph.find_nodes(op="call_module", target=_GUARDS):
        exported.graph.erase_node(node)
        exported.delete_submodule(_GUARDS)
    exported.graph.eliminate_dead_code()
    exported.recompile()
    lost = (
        f"Calls of modules are calls of operators, as torch.fx cannot follow the code ({reason}).",
        "Sizes are those of the example, and inputs of other sizes are not refused.",
        "Branches that the model takes in training are not in the graph.",
    )
    return Trace(exported, "aten", lost)


def _equal(got: object, expected: object) -> bool:
    ours = list(tensors_in(got))
    theirs = list(tensors_in(expected))
    return len(ours) == len(theirs) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))
        for a, b in zip(ours, theirs, strict=True)
    )

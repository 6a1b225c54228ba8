"""Graphs whose kernels are bound: what a call of a deployed model costs besides its kernels.

Looking up layers and kernels takes a third as long as the kernels of small layers. A bound graph is
a sequence of kernels, which holds until a layer is replaced, changed or hooked; each call looks.
Without gradients it runs in inference mode; the caller gets ordinary tensors, copies of small ones.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from operator import attrgetter, contains, is_
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.immutable_collections import immutable_dict, immutable_list

from torchq.graph import forward_hook_kind
from torchq.lowering.layer import KernelCacheMixin
from torchq.lowering.packed import MOST_SHAPES, drop_oldest
from torchq.utils import calls_are_recorded

#: The values of arguments that graphs are bound for, besides tensors.
_CONSTANTS = (type(None), bool, int, float, str)
#: Stands for inputs that a model has not been called with.
_NEW: Any = object()
#: The packages whose modules and functions keep no tensors of one call for the next, in eval mode.
_STATELESS = ("torch", "torchq", "_operator", "builtins", "math")
#: Bytes of the results that are copied in the time that inference mode saves for one node.
_COPIED = 4096

_kernels_of = attrgetter("_kernels")


class BoundGraphs:
    """The bound graphs of one model, by the shapes and dtypes of its inputs.

    Copies and files of a model start without any.
    """

    def __init__(self) -> None:
        self._graphs: dict[Any, _BoundGraph | None] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> BoundGraphs:
        return BoundGraphs()

    def __reduce__(self) -> tuple[Any, ...]:
        return BoundGraphs, ()

    def run(
        self,
        model: fx.GraphModule,
        forward: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Return the results of ``model``.

        The first call with inputs of new shapes leaves a note, the second one binds: a model that
        is called with ever new shapes never does.
        """
        graphs, key = self._graphs, _key(args, kwargs)
        if key is None:
            return forward(model, *args, **kwargs)
        found = graphs.get(key, _NEW)
        if found is _NEW:
            drop_oldest(graphs, MOST_SHAPES)
            graphs[key] = None
            return forward(model, *args, **kwargs)
        if found is None or not found.holds():
            graphs[key], results = _bind(model, args, kwargs)
            return results
        if not found.infers or torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return found.run(*args, **kwargs)
        with torch.inference_mode():
            results = found.run(*args, **kwargs)
        return _ordinary(results)


def forward_with_bound_graphs(forward: Callable[..., Any]) -> Callable[..., Any]:
    """Return the forward of a traced model that runs bound graphs where it can."""

    def bound_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if calls_are_recorded():
            return forward(self, *args, **kwargs)
        return self.bound_graphs.run(self, forward, args, kwargs)

    # Callers read the names of the arguments.
    bound_forward.__wrapped__ = forward  # type: ignore[attr-defined]
    return bound_forward


def _key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return what a bound graph depends on; None where the arguments are not plain tensors."""
    key: list[Any] = list(kwargs)
    for value in (*args, *kwargs.values()) if kwargs else args:
        if type(value) is Tensor and value.is_cpu:
            key.append((value.shape, value.dtype))
        elif isinstance(value, _CONSTANTS):
            key.append((type(value), value))
        else:
            return None
    return tuple(key)


class _BoundGraph:
    """The code of a graph whose layers are bound, and what it was made from.

    Attributes:
        run: computes the results.
        infers: inference mode is worth the copies of the results, and changes nothing else.
    """

    def __init__(
        self,
        code: fx.GraphModule,
        layers: Sequence[nn.Module],
        places: Iterable[tuple[nn.Module, str]],
        infers: bool,
    ) -> None:
        self.run: Callable[..., Any] = code.forward
        self.infers = infers
        self._layers, self._kernels = layers, [_kernels_of(layer) for layer in layers]
        self._attributes = [vars(layer) for layer in layers]
        hooks = ("_forward_hooks", "_forward_pre_hooks")
        self._hooks = [own[name] for own in self._attributes for name in hooks]
        self._parents, self._names, self._children = [], [], []
        for parent, name in places:
            self._parents.append(vars(parent)["_modules"])
            self._names.append(name)
            self._children.append(parent.get_submodule(name))

    def holds(self) -> bool:
        """Return True if nothing has changed that the graph was made from."""
        if any(self._hooks) or any(map(contains, self._attributes, repeat("forward"))):
            return False
        children = map(dict.get, self._parents, self._names)
        return all(map(is_, children, self._children)) and all(
            map(is_, map(_kernels_of, self._layers), self._kernels)
        )


class _Binder(fx.Interpreter):
    """Runs a graph once, and keeps a function for every node that calls a module.

    Attributes:
        functions: what to call instead of the module.
        layers: the modules that are not called any more.
        foreign: True if a module or function is called that is neither torch's nor torchq's, which
            might keep tensors from one call to the next.
    """

    def __init__(self, model: fx.GraphModule) -> None:
        super().__init__(model)
        self.functions: dict[fx.Node, Callable[..., Any]] = {}
        self.layers: list[nn.Module] = []
        self.foreign = False

    def run_node(self, n: fx.Node) -> Any:
        """Run a node; see :class:`torch.fx.Interpreter`."""
        if n.op == "get_attr":
            self.functions[n] = _reading(self.module, str(n.target))
        if n.op == "call_function":
            self.foreign |= _is_foreign(n.target)
        if n.op != "call_module":
            return super().run_node(n)
        module = self.fetch_attr(str(n.target))
        self.foreign |= _is_foreign(type(module))
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        result = module(*args, **kwargs)
        bound = None
        if isinstance(module, KernelCacheMixin) and not kwargs and _is_plain(module):
            bound = module.bound(*args)
        if bound is not None:
            self.layers.append(module)
        self.functions[n] = _calling(module) if bound is None else bound
        return result


def _bind(
    model: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[_BoundGraph, Any]:
    """Return the graph of ``model``, bound for these arguments, and its results for them."""
    binder = _Binder(model)
    names = [str(node.target) for node in model.graph.nodes if node.op == "placeholder"]
    given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
    results = binder.run(*given)
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in model.graph.nodes:
        new = copies[node] = graph.node_copy(node, copies.__getitem__)
        if node in binder.functions:
            arguments = new.args if node.op == "call_module" else ()
            new.op, new.target, new.args = "call_function", binder.functions[node], arguments
    code = fx.GraphModule(nn.Module(), graph)
    infers = not binder.foreign and _bytes(results) <= _COPIED * len(graph.nodes)
    return _BoundGraph(code, binder.layers, _places(model, binder.functions), infers), results


def _is_foreign(called: Any) -> bool:
    """Return True for a class or function that may keep tensors of one call for the next."""
    package = getattr(called, "__module__", None) or "torch"  # builtin functions have none
    return package.partition(".")[0] not in _STATELESS


def _bytes(results: Any) -> float:
    """Return the size of the tensors in results; infinite where there is anything else."""
    if isinstance(results, Tensor):
        return results.numel() * results.element_size()
    if type(results) in (dict, immutable_dict):
        return sum(map(_bytes, results.values()))
    plain = type(results) in (tuple, list, immutable_list)
    return sum(map(_bytes, results)) if plain else math.inf


def _ordinary(results: Any) -> Any:
    """Return results whose tensors are copies, where inference mode has made them."""
    if isinstance(results, Tensor):
        return results.clone() if results.is_inference() else results
    if isinstance(results, dict):
        return {key: _ordinary(value) for key, value in results.items()}
    return type(results)(map(_ordinary, results))


def _places(model: nn.Module, nodes: Iterable[fx.Node]) -> Iterator[tuple[nn.Module, str]]:
    """Yield every module on the way to those that nodes call, once, as (parent, name)."""
    seen = set[str]()
    for node in nodes:
        parts = str(node.target).split(".")
        for count in range(1, len(parts) + (node.op == "call_module")):
            path = ".".join(parts[:count])
            if path not in seen:
                seen.add(path)
                yield model.get_submodule(".".join(parts[: count - 1])), parts[count - 1]


def _is_plain(module: nn.Module) -> bool:
    """Return True if calling the module runs the forward of its class, and nothing else."""
    return "forward" not in vars(module) and forward_hook_kind(module) is None


def _calling(module: nn.Module) -> Callable[..., Any]:
    """Return a function that calls a module; generated code wants the name of a function."""

    def call_module(*args: Any, **kwargs: Any) -> Any:
        return module(*args, **kwargs)

    return call_module


def _reading(model: nn.Module, path: str) -> Callable[[], Any]:
    """Return a function that reads a tensor of a model."""
    owner, _, name = path.rpartition(".")
    module = model.get_submodule(owner)

    def read_tensor() -> Any:
        return getattr(module, name)

    return read_tensor

"""Symbolic tracing at module level."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from torchq.utils import evaluating

__all__ = [
    "ForwardTracer",
    "forward_hook_kind",
    "is_torch_leaf",
    "trace",
    "trace_call",
]


def is_torch_leaf(module: nn.Module) -> bool:
    """Whether ``module`` is one call in a module-level trace: a layer of ``torch.nn``, or anything without children.

    A module of the user's own without children (an activation, a drop path) is a leaf too: it holds no layer that a trace
    would have to show, and its ``forward`` is often what makes symbolic tracing fail.
    """
    library = type(module).__module__.startswith("torch.nn.") and not isinstance(
        module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)
    )
    return library or next(module.children(), None) is None


class ForwardTracer(fx.Tracer):
    """A tracer that can also loop over the parts of a tensor where the code says how many there are.

    ``list(x.chunk(2, 1))`` and ``for part in torch.split(x, [8, 8])`` (the C2f block of YOLOv8) give two items each. A dimension that
    has fewer chunks than asked for raises an IndexError when the traced graph runs.
    """

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """What stands for the result of ``node``; see :meth:`torch.fx.Tracer.proxy`."""
        return super().proxy(node) if _number_of_parts(node) is None else _Parts(node, self)


class _Parts(fx.Proxy):
    """A tuple of known length."""

    def __len__(self) -> int:
        return _number_of_parts(self.node) or 0

    def __iter__(self) -> Iterator[fx.Proxy]:
        parts: Any = self
        return (parts[i] for i in range(len(self)))


def _number_of_parts(node: fx.Node) -> int | None:
    name = getattr(node.target, "__name__", node.target)
    given = [
        node.kwargs[key]
        for key in ("chunks", "split_size_or_sections", "split_size")
        if key in node.kwargs
    ]
    parts = given[0] if given else node.args[1] if len(node.args) > 1 else None
    if name == "split" and isinstance(parts, (list, tuple)):
        return len(parts)
    return parts if name == "chunk" and isinstance(parts, int) else None


class _Tracer(ForwardTracer):
    def __init__(self, is_leaf: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self._leaf = is_leaf

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return self._leaf(m)


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Afterwards no module keeps what its forward stored in it: the first call of torchvision's RoI pooling notes scales, here proxies."""
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def trace_call(tracer: fx.Tracer, module: nn.Module) -> fx.Graph:
    """What ``tracer`` makes of the forward of ``module``; calls give arguments by position or by name as before.

    Arguments with a default of None, a number or a flag keep that default: otherwise a Proxy stands in for it and ``if mask is not None``
    takes a branch that ordinary calls do not. A call with another value raises an AssertionError that names the argument.

    Raises:
        Exception: whatever the forward raises when its control flow looks at a tensor.
    """
    function = getattr(type(module), tracer.traced_func_name)
    parameters = list(inspect.signature(function).parameters.values())
    constants = {
        p.name: p.default
        for p in parameters
        if p.default is None or isinstance(p.default, (bool, int, float))
    }
    with _attributes_kept(module):
        graph = tracer.trace(module, constants or None)
    names = [p.name for p in parameters[1:] if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    for node, name in zip((n for n in graph.nodes if n.op == "placeholder"), names, strict=False):
        node.target = (
            name  # fx numbers those with a constant, which would hide them from keyword calls
        )
    return graph


def trace(model: nn.Module, is_leaf: Callable[[nn.Module], bool] = is_torch_leaf) -> fx.GraphModule:
    """Trace ``model`` with torch.fx in eval mode, keeping calls of leaf modules whole; see :func:`trace_call` for its arguments.

    Args:
        model: left unchanged; its modules' training modes are given back.
        is_leaf: which modules stay one ``call_module`` node.

    Raises:
        Exception: whatever the model raises when its control flow looks at a tensor.
    """
    tracer = _Tracer(is_leaf)
    with evaluating(model):
        graph = trace_call(tracer, model)
    return fx.GraphModule(tracer.root, graph)


def forward_hook_kind(module: nn.Module) -> str | None:
    """Return ``"a forward hook"``, ``"a forward pre-hook"`` or None: what ``module`` has.

    torch offers no public way to ask, so this is the one place that reads its hook dictionaries.
    """
    if module._forward_hooks:
        return "a forward hook"
    return "a forward pre-hook" if module._forward_pre_hooks else None

"""Operators of graph modules whose operands no quantizer could read, as a run shows them.

The code of a graph module is no source that could be rewritten, so that its nodes are run instead.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import fx, nn

from torchq.graph import operator_of
from torchq.nn.calls.routes import have_ranges


class _Noting(fx.Interpreter):
    """Runs a graph, and notes the nodes with operands that no quantizer could read."""

    def __init__(self, module: fx.GraphModule, names: set[str]) -> None:
        super().__init__(module)
        self.extra_traceback = False
        self._names = names

    def run_node(self, node: fx.Node) -> Any:
        """Carry out one node."""
        is_call = node.op in ("call_function", "call_method")
        row = operator_of(node.target) if is_call else None
        if row is not None and row.module:
            operands = self.fetch_args_kwargs_from_env(node)
            if not have_ranges(operands):
                self._names.add(node.name)
        return super().run_node(node)


@contextmanager
def noting_ranges(modules: Iterable[nn.Module]) -> Iterator[set[tuple[int, str]]]:
    """Note in the block which operators of graph modules have operands without a range.

    They are known by the id of the module and the name of the node.
    """
    names_by_id: dict[int, set[str]] = {}
    changed = []
    without_ranges: set[tuple[int, str]] = set()
    try:
        for module in modules:
            if not isinstance(module, fx.GraphModule) or "forward" in vars(module):
                continue
            names = names_by_id[id(module)] = set()
            vars(module)["forward"] = _noted_forward(module, names)
            changed.append(module)
        yield without_ranges
    finally:
        for module in changed:
            vars(module).pop("forward", None)
        without_ranges |= {
            (key, name) for key, names in names_by_id.items() for name in names
        }


def _noted_forward(module: fx.GraphModule, names: set[str]) -> Any:
    """Return a forward that runs the nodes of a module one by one."""
    signature = inspect.signature(type(module).forward)

    def forward(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(module, *args, **kwargs)
        bound.apply_defaults()
        if bound.kwargs:
            return type(module).forward(module, *args, **kwargs)
        return _Noting(module, names).run(*bound.args[1:])

    return forward

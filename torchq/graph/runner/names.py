"""The names of values in a graph: node names, and paths of modules."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterable

import torch
from torch import fx

from torchq.errors import ConfigError

__all__ = ["NameTable", "module_path", "source_line", "unknown_name"]

_TORCH = os.path.dirname(torch.__file__)
_TRACER = os.path.dirname(os.path.dirname(__file__))


class NameTable:
    """The nodes of a graph by their names, by their arguments' names and by paths of modules.

    Args:
        graph: not changed afterwards.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.nodes = {node.name: node for node in graph.nodes}
        self._scopes: dict[str, dict[str, list[fx.Node]]] = {}
        for node in graph.nodes:
            if node.op == "placeholder":
                self.nodes.setdefault(str(node.target), node)
            for call, path in _scopes(node):
                self._scopes.setdefault(path, {}).setdefault(call, []).append(node)

    def result(self, where: str, name: str) -> fx.Node:
        """Return the node whose value ``name`` stands for.

        Args:
            where: starts the message of an error.
            name: of a node, or of a module that is called once: the value that it returns.

        Raises:
            ConfigError: There is no such name, or it stands for several values.
        """
        if name in self.nodes:
            return self.nodes[name]
        inside = self._one_call(where, name)
        members = set(inside)
        results = [node for node in inside if not members.issuperset(node.users)]
        if len(results) != 1:
            raise _ambiguous(where, name, "returns several values", results or inside)
        return results[0]

    def first(self, where: str, name: str) -> fx.Node:
        """Return the node that runs first for ``name``; see :meth:`result`."""
        return self.nodes[name] if name in self.nodes else self._one_call(where, name)[0]

    def _one_call(self, where: str, name: str) -> list[fx.Node]:
        calls = list(self._scopes.get(name, {}).values())
        if not calls:
            raise unknown_name(where, name, (*self.nodes, *self._scopes))
        if len(calls) > 1:
            last = [call[-1] for call in calls]
            raise _ambiguous(where, name, f"is called {len(calls)} times", last)
        return calls[0]


def unknown_name(where: str, name: object, known: Iterable[str]) -> ConfigError:
    """Return the error for a name that stands for nothing, with close ones."""
    names = sorted(set(known))
    close = difflib.get_close_matches(str(name), names, n=5, cutoff=0.5) or names[:5]
    return ConfigError(
        f"{where}: got {name!r}; expected the name of a node or the path of a module. "
        f"Close names: {', '.join(close) or 'none'}"
    )


def _ambiguous(where: str, name: str, reason: str, nodes: Iterable[fx.Node]) -> ConfigError:
    shown = ", ".join(node.name for node in nodes)
    return ConfigError(
        f"{where}: got {name!r}, which {reason}; expected the name of one value. "
        f"Name one of the nodes: {shown}"
    )


def _scopes(node: fx.Node) -> list[tuple[str, str]]:
    """Return a key and the path of each call of a module that ``node`` is part of."""
    if node.op in ("placeholder", "output", "get_attr"):
        return []
    found = {
        str(call): _plain(str(value[0]))
        for call, value in (node.meta.get("nn_module_stack") or {}).items()
    }
    if node.op == "call_module" and str(node.target) not in found.values():
        found[node.name] = str(node.target)
    return [(call, path) for call, path in found.items() if path]


def _plain(path: str) -> str:
    """Return a path of torch.export without the prefix that stands for the model."""
    return path.removeprefix("L['self']").removeprefix(".")


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost module that ``node`` is part of; empty for the model."""
    if node.op == "call_module":
        return str(node.target)
    scopes = _scopes(node)
    return scopes[-1][1] if scopes else ""


def source_line(node: fx.Node) -> str:
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

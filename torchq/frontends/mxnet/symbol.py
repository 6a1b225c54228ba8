"""Reading ``-symbol.json`` files of MXNet, in the dialects of versions up to 0.8, 0.9 and 1.0.

Up to 0.8 a node has ``param`` and ``attr``, and auxiliary states are not in the file. From 0.9 on
``attr`` holds both and auxiliary states are inputs; from 1.0 on it is called ``attrs``.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torchq.errors import ConfigError, FrontendError
from torchq.utils import parse_json, short_repr

_VARIABLE = "null"
#: Auxiliary states that files up to version 0.8 leave out: inputs without, and suffixes.
_HIDDEN_STATES = {"BatchNorm": (3, ("_moving_mean", "_moving_var"))}


@dataclass(frozen=True)
class SymbolNode:
    """One node of a symbol.

    Attributes:
        op: the operator; ``"null"`` for a variable.
        name: of the node.
        attributes: as text, as the file has them.
        inputs: (number of a node, number of its output).
    """

    op: str
    name: str
    attributes: Mapping[str, str] = field(default_factory=dict)
    inputs: tuple[tuple[int, int], ...] = ()

    @property
    def is_variable(self) -> bool:
        """Return True for an input or a parameter."""
        return self.op == _VARIABLE


@dataclass(frozen=True)
class Symbol:
    """A network.

    Attributes:
        nodes: an operator comes after the operators that it reads.
        heads: the outputs, as (number of a node, number of its output).
    """

    nodes: tuple[SymbolNode, ...]
    heads: tuple[tuple[int, int], ...]


def read_symbol(source: Any, where: str) -> Symbol:
    """Read a symbol.

    Args:
        source: a path, or the JSON text.
        where: how errors begin.

    Raises:
        FrontendError: the file cannot be read, or is not a symbol.
    """
    try:
        data = parse_json(_text_of(source, where), where)
    except ConfigError as error:
        raise FrontendError(str(error)) from None
    if not isinstance(data, dict) or not isinstance(data.get("nodes"), list):
        raise FrontendError(f"{where}: got no list of nodes; expected the JSON text of a symbol")
    nodes = [_node(entry, number, where) for number, entry in enumerate(data["nodes"])]
    heads = _entries(data.get("heads"), len(nodes), f"{where}: heads")
    if not heads:
        raise FrontendError(f"{where}: got a symbol without heads; expected an output")
    return Symbol(tuple(_with_hidden_states(nodes)), heads)


def _text_of(source: Any, where: str) -> str:
    if isinstance(source, str) and source.lstrip()[:1] == "{":
        return source
    try:
        return Path(os.fspath(source)).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise FrontendError(f"{where}: cannot read the symbol ({error})") from None


def _node(entry: Any, number: int, where: str) -> SymbolNode:
    where = f"{where}: node {number}"
    if not isinstance(entry, dict):
        raise FrontendError(f"{where}: got {short_repr(entry)}; expected a JSON object")
    op, name = entry.get("op"), entry.get("name")
    if not isinstance(op, str) or not isinstance(name, str):
        raise FrontendError(f"{where}: got {short_repr(entry)}; expected 'op' and 'name' as text")
    if entry.get("subgraphs"):
        raise FrontendError(f"{where}: {op} {name!r} holds a graph, which is not supported")
    attributes: dict[str, str] = {}
    for key in ("attr", "attrs", "param"):
        part = entry.get(key) or {}
        if not isinstance(part, dict):
            raise FrontendError(f"{where}: got {short_repr(part)} as {key!r}; expected an object")
        attributes |= {str(k): v if isinstance(v, str) else str(v) for k, v in part.items()}
    inputs = _entries(entry.get("inputs", []), number, f"{where}: inputs")
    return SymbolNode(op, name, attributes, inputs)


def _entries(value: Any, count: int, where: str) -> tuple[tuple[int, int], ...]:
    """Return references to outputs of the first ``count`` nodes."""
    if not isinstance(value, list):
        raise FrontendError(f"{where}: got {short_repr(value)}; expected a list")
    result = []
    for entry in value:
        good = isinstance(entry, list) and 1 < len(entry) < 4
        if not good or not all(type(item) is int and item >= 0 for item in entry[:2]):
            raise FrontendError(f"{where}: got {short_repr(entry)}; expected [node, output]")
        if entry[0] >= count:
            raise FrontendError(
                f"{where}: got node {entry[0]}; expected one of the {count} nodes before"
            )
        result.append((entry[0], entry[1]))
    return tuple(result)


def _with_hidden_states(nodes: list[SymbolNode]) -> list[SymbolNode]:
    """Append the variables of auxiliary states that old files leave out."""
    extra: list[SymbolNode] = []
    result = list(nodes)
    for number, node in enumerate(nodes):
        count, suffixes = _HIDDEN_STATES.get(node.op, (0, ()))
        if not suffixes or len(node.inputs) != count:
            continue
        first = len(nodes) + len(extra)
        extra += [SymbolNode(_VARIABLE, node.name + suffix) for suffix in suffixes]
        states = tuple((first + i, 0) for i in range(len(suffixes)))
        result[number] = replace(node, inputs=node.inputs + states)
    return result + extra

"""The loop over the nodes of a network, for formats whose nodes are numbered."""

import collections
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import fx

from torchq.errors import FrontendError
from torchq.frontends.building.graph import Converters, FileNode, GraphBuilder, Value
from torchq.utils import why_no_model

#: (number of a node, number of its output).
Output = tuple[int, int]


def origin(function: str, description: Any) -> str:
    """Return how errors begin: with the path of a description, unless it is the text itself."""
    is_path = isinstance(description, os.PathLike) or "{" not in str(description)
    return f"{function}: {os.fspath(description)}" if is_path else function


#: Bytes that tell a model from what downloads leave in its place.
_HEAD = 64


def text_of(source: Any, where: str, what: str) -> str:
    """Return the text of a description: it holds a brace, which no path does."""
    if isinstance(source, str) and "{" in source:
        return source
    try:
        content = Path(os.fspath(source)).read_text(encoding="utf-8")
    except (OSError, ValueError, TypeError) as error:
        raise FrontendError(f"{where}: cannot read the {what} ({error})") from None
    if reason := why_no_model(content[:_HEAD].encode()):
        raise FrontendError(f"{where}: the {what} {reason}")
    return content


def bytes_of(source: Any, where: str, what: str) -> tuple[bytes, str]:
    """Return the bytes of a file, and how errors in them begin."""
    if isinstance(source, bytes):
        return source, f"{where}: the {what}"
    try:
        path = Path(os.fspath(source))
        content = path.read_bytes()
    except (OSError, TypeError) as error:
        raise FrontendError(f"{where}: cannot read the {what} ({error})") from None
    if reason := why_no_model(content[:_HEAD]):
        raise FrontendError(f"{where}: the {what} {reason}")
    return content, f"{where}: {path.name}"


class NetworkImporter:
    """Converts the nodes of a network in order; each reads outputs of those before it."""

    format: ClassVar[str]
    kinds: ClassVar[str]  # the word of errors for several nodes
    converters: ClassVar[Converters]

    def __init__(self, where: str) -> None:
        self.where = where
        self.builder = GraphBuilder(where)
        self.values: dict[Output, Value] = {}

    def context(self, number: int) -> FileNode:
        """Return a node as converters see it."""
        raise NotImplementedError

    def convert(self, number: int, kind: str) -> None:
        """Write what a node computes, and note the values of its outputs."""
        results = self.context(number).converted(self.converters[kind].convert)
        self.values.update(
            {(number, place): value for place, value in enumerate(results)}
        )

    def refuse_unknown(self, kinds: Iterable[str]) -> None:
        """Refuse nodes that have no converter, all at once."""
        unknown = collections.Counter(
            kind for kind in kinds if kind not in self.converters
        )
        if unknown:
            counts = ", ".join(
                f"{kind} ({count})" for kind, count in sorted(unknown.items())
            )
            raise FrontendError(
                f"{self.where}: got {self.kinds} that cannot be converted: {counts}. Register a "
                f"converter with torchq.frontends.{self.format}.converter, or cut the network"
            )

    def input(self, output: Output, name: str) -> None:
        """Make an argument of ``forward`` for an input of the file."""
        node = self.builder.input(name)
        node.meta[f"{self.format}_name"] = name
        self.values[output] = node

    def value(self, output: Output, name: str) -> Value:
        """Return what a node before gives, which has a name for errors."""
        if output not in self.values:
            raise FrontendError(
                f"{self.where}: output {output[1]} of {name!r} is not supported"
            )
        return self.values[output]

    def finish(
        self,
        title: str,
        inputs: Sequence[tuple[str, Any]],
        outputs: Sequence[tuple[Output, str]],
    ) -> fx.GraphModule:
        """Return the result: inputs come with their shapes, if known, and outputs with names."""
        end = FileNode(self.builder, "output", "output", {}, [])
        output_nodes = [
            end.tensor(self.value(output, name)) for output, name in outputs
        ]
        names = [name for name, _ in inputs]
        shapes = [shape for _, shape in inputs]
        return self.builder.finish(
            output_nodes, title, names, [name for _, name in outputs], shapes
        )

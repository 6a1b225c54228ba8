"""The package read as text, and the house rules that neither ruff nor import-linter can say.

Nothing here imports torchq. Every rule reads modules (dotted name -> :class:`Source`) and returns
one sentence for each offender, so the same rule runs over the real tree and over snippets that it
must catch.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True)
class Source:
    """A module's text and syntax tree."""

    name: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        """The parsed text."""
        return ast.parse(self.text)


def read_package(folder: Path) -> dict[str, Source]:
    """Return every module below ``folder``, by dotted name."""
    sources = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        sources[name] = Source(name, path.read_text(encoding="utf-8"), is_package)
    return sources


def functions(source: Source) -> Iterator[Function]:
    """Yield every function and method of a module, nested ones too."""
    for node in ast.walk(source.tree):
        if isinstance(node, Function):
            yield node


def assigning_class(modules: dict[str, Source]) -> list[str]:
    """Name modules that assign some object's ``__class__``, by statement or by ``setattr``."""

    def assigns(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "__class__" and isinstance(node.ctx, ast.Store)
        return (
            isinstance(node, ast.Call)
            and "setattr" in ast.unparse(node.func)
            and "'__class__'" in map(ast.unparse, node.args)
        )

    return [
        source.name
        for source in modules.values()
        if any(assigns(node) for node in ast.walk(source.tree))
    ]


def long_files(modules: dict[str, Source], limit: int) -> list[str]:
    """Name files of more than ``limit`` lines."""
    return [
        f"{source.name}: {count} lines"
        for source in modules.values()
        if (count := len(source.text.splitlines())) > limit
    ]


def _lines_of(node: ast.AST) -> int:
    return (getattr(node, "end_lineno", None) or 0) - getattr(node, "lineno", 0) + 1


def long_functions(modules: dict[str, Source], limit: int) -> list[str]:
    """Name functions of more than ``limit`` lines, not counting the docstring."""
    problems = []
    for source in modules.values():
        for node in functions(source):
            documented = ast.get_docstring(node, clean=False) is not None
            count = _lines_of(node) - (_lines_of(node.body[0]) if documented else 0)
            if count > limit:
                problems.append(f"{source.name}.{node.name}: {count} lines")
    return problems

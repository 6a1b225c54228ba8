"""Reading the package as text: which module imports what, and the rules of style that a linter does not know.

Nothing here imports torchq. Every rule takes ``modules`` (dotted name -> :class:`Source`) and returns sentences about offenders, so the
same rule runs over the real tree and over snippets that must be caught.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

__all__ = [
    "Import",
    "Source",
    "assigning_class",
    "find_cycle",
    "long_files",
    "long_functions",
    "missing_docstrings",
    "missing_exports",
    "printing",
    "read_package",
    "local_imports",
    "star_imports",
    "third_party_imports",
    "unit_of",
    "upward_imports",
]


@dataclass(frozen=True)
class Import:
    """One imported thing: ``from a.b import c`` has target ``a.b`` and name ``c``."""

    target: str
    name: str | None
    line: int
    in_function: bool

    @property
    def full(self) -> str:
        """``a.b.c``, or ``a.b`` for a plain import."""
        return self.target if self.name in (None, "*") else f"{self.target}.{self.name}"


@dataclass(frozen=True)
class Source:
    """A module's text and syntax tree."""

    name: str
    text: str
    is_package: bool = False

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self, self.tree, in_function=False))


def read_package(folder: Path) -> dict[str, Source]:
    """Every module below ``folder``, by dotted name."""
    sources = {}
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        sources[name] = Source(name, path.read_text(encoding="utf-8"), is_package)
    return sources


def _imports(source: Source, node: ast.AST, in_function: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (
                Import(alias.name, None, child.lineno, in_function) for alias in child.names
            )
        elif isinstance(child, ast.ImportFrom):
            target = child.module or ""
            if child.level:
                base = source.name.split(".")
                base = base[: len(base) - child.level + source.is_package]
                target = ".".join([*base, *([target] if target else [])])
            yield from (
                Import(target, alias.name, child.lineno, in_function) for alias in child.names
            )
        elif isinstance(child, ast.Call) and ast.unparse(child.func).endswith(
            ("import_module", "__import__")
        ):
            if child.args and isinstance(child.args[0], ast.Constant):
                yield Import(str(child.args[0].value), None, child.lineno, in_function)
        elif isinstance(child, ast.Attribute) and ast.unparse(child).startswith(
            ("torch.ao.", "torch.onnx.")
        ):
            yield Import(
                ast.unparse(child), None, child.lineno, in_function
            )  # reached through ``import torch``, but used all the same
            continue
        yield from _imports(
            source,
            child,
            in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda),
        )


def _within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def _torchq_target(entry: Import, modules: dict[str, Source]) -> str | None:
    """The torchq module an import runs: ``from torchq.a import b`` is ``torchq.a.b`` if that is a module, else ``torchq.a``."""
    if not _within(entry.target, "torchq"):
        return None
    return entry.full if entry.full in modules else entry.target


def unit_of(module: str, layers: Sequence[Sequence[str]]) -> tuple[int, str] | None:
    """Row and unit of a module: the unit with the longest matching name; None where the table has none."""
    found = [
        (row, unit)
        for row, units in enumerate(layers)
        for unit in units
        if _within(module, unit) and unit != "torchq"
    ]
    if module == "torchq":
        return next((row, "torchq") for row, units in enumerate(layers) if "torchq" in units)
    return max(found, key=lambda entry: len(entry[1]), default=None)


def upward_imports(modules: dict[str, Source], layers: Sequence[Sequence[str]]) -> list[str]:
    """Modules outside the table, and imports that point neither to a lower row nor into the own unit."""
    problems = []
    for source in modules.values():
        own = unit_of(source.name, layers)
        if own is None:
            problems.append(f"{source.name}: in no layer; enter it in LAYERS")
            continue
        for entry in source.imports:
            target = _torchq_target(entry, modules)
            other = unit_of(target, layers) if target else None
            if target and other is None:
                problems.append(
                    f"{source.name}:{entry.line}: imports {target}, which is in no layer"
                )
            elif other and other != own and other[0] >= own[0]:
                problems.append(
                    f"{source.name}:{entry.line}: imports {target}, which is not in a lower layer"
                )
    return problems


def find_cycle(modules: dict[str, Source]) -> list[str]:
    """Module names along an import cycle, or nothing."""
    graph = {
        name: {_torchq_target(entry, modules) for entry in source.imports} & modules.keys()
        for name, source in modules.items()
    }
    done: set[str] = set()

    def visit(name: str, path: list[str]) -> list[str]:
        if name in path:
            return [*path[path.index(name) :], name]
        if name not in done:
            for target in sorted(graph[name]):
                if cycle := visit(target, [*path, name]):
                    return cycle
            done.add(name)
        return []

    return next((cycle for name in sorted(graph) if (cycle := visit(name, []))), [])


def star_imports(modules: dict[str, Source]) -> list[str]:
    """``from x import *``."""
    return [
        f"{source.name}:{entry.line}"
        for source in modules.values()
        for entry in source.imports
        if entry.name == "*"
    ]


def local_imports(modules: dict[str, Source]) -> list[str]:
    """Imports of torchq inside a function: they hide a cycle."""
    return [
        f"{source.name}:{entry.line}"
        for source in modules.values()
        for entry in source.imports
        if entry.in_function and _within(entry.target, "torchq")
    ]


def third_party_imports(
    modules: dict[str, Source],
    package: str,
    allowed: Sequence[str],
    *,
    in_function: bool | None = None,
) -> list[str]:
    """Uses of ``package`` outside the units ``allowed``; with ``in_function=False`` only those that run at import."""
    return [
        f"{source.name}:{entry.line}: {entry.full}"
        for source in modules.values()
        for entry in source.imports
        if _within(entry.full, package)
        and not any(_within(source.name, unit) for unit in allowed)
        and in_function in (None, entry.in_function)
    ]


def _printable(source: Source, nodes: Sequence[ast.AST]) -> list[str]:
    return [f"{source.name}:{getattr(node, 'lineno', 1)}" for node in nodes]


def printing(modules: dict[str, Source], allowed: Sequence[str]) -> list[str]:
    """Calls of ``print`` outside ``allowed``."""
    return [
        place
        for source in modules.values()
        if not any(_within(source.name, unit) for unit in allowed)
        for place in _printable(
            source,
            [
                n
                for n in ast.walk(source.tree)
                if isinstance(n, ast.Call) and ast.unparse(n.func) == "print"
            ],
        )
    ]


def assigning_class(modules: dict[str, Source]) -> list[str]:
    """Names of modules that assign some object's ``__class__``, by statement or by ``setattr``."""

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
    """Files of more than ``limit`` lines."""
    return [
        f"{s.name}: {count} lines"
        for s in modules.values()
        if (count := len(s.text.splitlines())) > limit
    ]


def long_functions(modules: dict[str, Source], limit: int) -> list[str]:
    """Functions of more than ``limit`` lines, not counting the docstring."""
    problems = []
    for source in modules.values():
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                documentation = (
                    node.body[0] if ast.get_docstring(node, clean=False) is not None else None
                )
                hidden = (
                    (documentation.end_lineno or 0) - documentation.lineno + 1
                    if documentation
                    else 0
                )
                if (count := (node.end_lineno or 0) - node.lineno + 1 - hidden) > limit:
                    problems.append(f"{source.name}.{node.name}: {count} lines")
    return problems


def _exports(source: Source) -> list[str] | None:
    for node in source.tree.body:
        if isinstance(node, ast.Assign) and any(
            isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets
        ):
            return list(ast.literal_eval(node.value))
    return None


def _defined(source: Source) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.Module(source.tree.body, [])):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
    return names


def missing_exports(modules: dict[str, Source]) -> list[str]:
    """Public modules with more than a docstring but no literal ``__all__``, and exported names that are not there or there twice."""
    problems = []
    for source in modules.values():
        leaf = source.name.rpartition(".")[2]
        is_bare = len(source.tree.body) == (ast.get_docstring(source.tree) is not None)
        if leaf.startswith("_") or is_bare:
            continue
        exports = _exports(source)
        if exports is None:
            problems.append(f"{source.name}: no __all__")
            continue
        submodules = {
            name.rpartition(".")[2] for name in modules if name.rpartition(".")[0] == source.name
        }
        unknown = sorted(
            set(exports) - _defined(source) - (submodules if source.is_package else set())
        )
        problems += [
            f"{source.name}: __all__ names {name}, which it does not define" for name in unknown
        ]
        problems += [f"{source.name}: __all__ repeats a name"] * (len(set(exports)) != len(exports))
    return problems


def missing_docstrings(modules: dict[str, Source]) -> list[str]:
    """Modules with code, and exported functions and classes, that say nothing about themselves."""
    problems = [
        f"{s.name}: no module docstring"
        for s in modules.values()
        if s.tree.body and ast.get_docstring(s.tree) is None
    ]
    for source in modules.values():
        exports = _exports(source) or []
        for node in source.tree.body:
            is_definition = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            if is_definition and node.name in exports and ast.get_docstring(node) is None:
                problems.append(f"{source.name}.{node.name}: no docstring")
    return problems

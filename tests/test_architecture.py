"""The import contracts hold, and the house rules that can be read off the text."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MAX_FILE = 700  # lines
MAX_FUNCTION = 40  # lines of code, the docstring not counted


@cache
def sources(*folders: str) -> dict[str, str]:
    """Return the text of every module below some folders, by path."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def assigns_class(tree: ast.Module) -> bool:
    """Return True if some object's ``__class__`` is assigned, by statement or by ``setattr``."""

    def assigns(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "__class__" and isinstance(node.ctx, ast.Store)
        is_setattr = isinstance(node, ast.Call) and "setattr" in ast.unparse(node.func)
        return is_setattr and "'__class__'" in map(ast.unparse, node.args)

    return any(map(assigns, ast.walk(tree)))


def length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return the lines of a function without its docstring."""
    first = function.body[0]
    documented = ast.get_docstring(function, clean=False) is not None
    lines = (function.end_lineno or 0) - function.lineno + 1
    return lines - ((first.end_lineno or 0) - first.lineno + 1 if documented else 0)


def test_import_contracts_hold() -> None:
    """Run ``lint-imports`` over the contracts in pyproject.toml."""
    pytest.importorskip("importlinter")
    program = "import sys; from importlinter.cli import lint_imports_command as run; run()"
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_file_changes_the_class_of_objects() -> None:
    assert assigns_class(ast.parse("object.__setattr__(m, '__class__', cls)"))
    texts = {path: text for path, text in sources("torchq").items() if "__class__" in text}
    found = [path for path, text in texts.items() if assigns_class(ast.parse(text))]
    assert found == ["torchq/nn/convert.py"]


def test_files_and_functions_are_short() -> None:
    long = []
    for path, text in sources("torchq", "tests", "benchmarks").items():
        if len(text.splitlines()) > MAX_FILE:
            long.append(f"{path}: {len(text.splitlines())} lines")
        for node in ast.walk(ast.parse(text)):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and (count := length(node)) > MAX_FUNCTION:
                long.append(f"{path}: {node.name}, {count} lines")
    assert long == []

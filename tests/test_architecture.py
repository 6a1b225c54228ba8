"""The import contracts hold, and the house rules that can be read off the text."""

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


@cache
def sources(*folders: str) -> dict[str, str]:
    """Return the text of every module below some folders, by path."""
    paths = [
        path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return {
        path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths
    }


def assigns_class(tree: ast.Module) -> bool:
    """Return True if some object's ``__class__`` is assigned, by statement or by ``setattr``."""

    def assigns(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute):
            return node.attr == "__class__" and isinstance(node.ctx, ast.Store)
        is_setattr = isinstance(node, ast.Call) and "setattr" in ast.unparse(node.func)
        return is_setattr and "'__class__'" in map(ast.unparse, node.args)

    return any(map(assigns, ast.walk(tree)))


def test_import_contracts_hold() -> None:
    """Run ``lint-imports`` over the contracts in pyproject.toml."""
    pytest.importorskip("importlinter")
    program = (
        "import sys; from importlinter.cli import lint_imports_command as run; run()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "--no-cache"],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_one_file_changes_the_class_of_objects() -> None:
    assert assigns_class(ast.parse("object.__setattr__(m, '__class__', cls)"))
    texts = {
        path: message
        for path, message in sources("torchq").items()
        if "__class__" in message
    }
    actual = [
        path for path, message in texts.items() if assigns_class(ast.parse(message))
    ]
    assert actual == ["torchq/nn/convert.py"]

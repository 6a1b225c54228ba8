"""All that is known of a runtime is in torchq/runtimes: no other module names one."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import torchq
from torchq.runtimes import RUNTIMES

ROOT = Path(torchq.__file__).parent
#: Names as in ``target=`` and as their makers write them, so with spaces. Everything names torch.
NAMES = re.compile(
    rf"\b({'|'.join(' ?'.join(name) for name in RUNTIMES if name != 'torch')})\b",
    re.IGNORECASE,
)
MODULES = [
    path for path in sorted(ROOT.rglob("*.py")) if ROOT / "runtimes" not in path.parents
]


def names_in(source: str) -> list[str]:
    """Return the identifiers and texts, without docstrings, that name a runtime."""
    tree = ast.parse(source)
    actual = []
    docstrings = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
            docstrings.add(body[0].value)
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            texts = [] if node in docstrings else [node.value]
        elif isinstance(node, ast.alias):
            texts = [node.name]
        else:
            fields = ("id", "attr", "name", "arg", "module")
            texts = [
                message
                for f in fields
                if isinstance(message := getattr(node, f, None), str)
            ]
        actual += [
            message for message in texts if NAMES.search(message.replace("_", " "))
        ]
    return actual


def test_the_pattern_knows_every_runtime() -> None:
    source = '"""ONNX Runtime."""\nimport openvino\nfor_qnn = f(tensorrt=1)["an FPGA", "Open VINO"]'
    assert sorted(names_in(source)) == [
        "Open VINO",
        "an FPGA",
        "for_qnn",
        "openvino",
        "tensorrt",
    ]


def test_no_other_module_names_a_runtime() -> None:
    names = {
        str(path.relative_to(ROOT)): names_in(path.read_text("utf-8"))
        for path in MODULES
    }
    assert len(names) > 100
    assert {path: actual for path, actual in names.items() if actual} == {}

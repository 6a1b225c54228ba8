"""The papers around the code say the truth: commands agree, files that are named exist, names that are shown are there."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import torchq

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ["README.md", "CHANGELOG.md", "docs/architecture.md", "benchmarks/README.md"]


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def readme_commands() -> list[str]:
    return [
        line
        for line in read("README.md").splitlines()
        if line.startswith("python3 -m venv .venv && ")
    ]


def test_readme_has_one_command_to_see_it_and_one_to_test_it() -> None:
    first, second = readme_commands()
    install = 'python3 -m venv .venv && . .venv/bin/activate && pip install -e ".[all]" && '
    assert first == install + "torchq demo"
    assert second == install + "python -m pytest -n 2"


def test_makefile_runs_the_commands_of_readme() -> None:
    recipes = [
        line.removeprefix("\t") for line in read("Makefile").splitlines() if line.startswith("\t")
    ]
    assert [
        recipe for recipe in recipes if recipe.startswith("python3 -m venv .venv && ")
    ] == readme_commands()


def test_ci_takes_its_commands_from_readme() -> None:
    script = read(".ci/run")
    pattern = re.search(r"mapfile -t commands < <\(grep '(.+)' README.md\)", script)
    assert pattern
    assert [
        line for line in read("README.md").splitlines() if re.match(pattern[1], line)
    ] == readme_commands()
    assert all(f'-c "${{commands[{index}]}}"' in script for index in (0, 1))
    assert (ROOT / ".ci/run").stat().st_mode & 0o111


def test_ci_checks_what_make_check_checks() -> None:
    def tools(text: str, prefix: str) -> set[str]:
        return {
            line.strip().removeprefix(prefix)
            for line in text.splitlines()
            if line.strip().startswith(prefix)
        }

    checks = tools(read("Makefile"), "$(BIN)/")
    assert {
        "ruff check .",
        "ruff format --check .",
        "mypy",
        "python -m pytest -q --doctest-modules torchq",
    } <= checks
    assert tools(read(".ci/run"), ".venv/bin/") == checks - {"python -m pytest -n 2"}


def test_ci_script_is_valid_bash() -> None:
    found = subprocess.run(["bash", "-n", str(ROOT / ".ci/run")], capture_output=True, text=True)
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("document", DOCUMENTS)
def test_named_files_exist(document: str) -> None:
    named = re.findall(
        r"(?<![\w/.-])(?:tests|benchmarks|torchq|docs)/[\w./-]*\w(?:\.py|\.md|/)", read(document)
    )
    named += [
        target
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", read(document))
        if "://" not in target
    ]
    base = (ROOT / document).parent
    assert [
        name for name in named if not (ROOT / name).exists() and not (base / name).exists()
    ] == []


def python_blocks(document: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", read(document), re.MULTILINE | re.DOTALL)


def readme_model() -> nn.Sequential:
    """Something with the layer names that README's examples mention."""
    parts = {
        "stem": nn.Conv2d(3, 4, 3),
        "layer4": nn.Sequential(),
        "pool": nn.AdaptiveAvgPool2d(1),
        "flat": nn.Flatten(),
    }
    model = nn.Sequential()
    for name, part in parts.items():
        model.add_module(name, part)
    model.layer4.add_module("downsample", nn.Sequential(nn.Conv2d(4, 4, 1)))
    model.layer4.add_module("conv", nn.Conv2d(4, 4, 3))
    model.add_module("head", nn.Sequential(nn.Linear(4, 2)))
    return model


@pytest.mark.parametrize(
    "block", python_blocks("README.md"), ids=lambda block: block.splitlines()[-1][:40]
)
def test_readme_code_runs(
    block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if ".onnx" in block:
        pytest.importorskip("onnxscript")
    monkeypatch.chdir(tmp_path)
    example = torch.randn(2, 3, 8, 8)
    names = {
        "model": readme_model(),
        "loader": [(example, None)],
        "example": example,
        "build_model": readme_model,
    }
    names |= {
        "train": lambda model: model(example).sum().backward(),
        "evaluate": lambda model: model(example),
    }
    exec(compile(block, "README.md", "exec"), names)
    assert isinstance(names["model"], nn.Module)
    if "print(" in block:
        assert "stem" in capsys.readouterr().out
    if "torchq.patch" in block:
        assert isinstance(names["model"].stem, torchq.nn.QuantConv2d)


def test_metadata_is_read_without_importing_torch() -> None:
    """A build machine has no torch: setup.py must run with torch made impossible to import."""
    program = "import sys; sys.modules['torch'] = None; sys.modules['torchq'] = None; sys.argv = ['setup.py', '--version']; "
    program += "exec(compile(open('setup.py').read(), 'setup.py', 'exec'), {'__name__': '__main__', '__file__': 'setup.py'})"
    pytest.importorskip("setuptools")
    found = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True
    )
    assert found.stdout.strip().endswith(torchq.__version__), found.stderr

"""One word for each concept: forbidden synonyms stay out of names, docstrings and documents.

docs/architecture.md gives the vocabulary. The tables below are the words that were replaced, each
with the word to use instead.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.architecture import Source, functions, read_package

ROOT = Path(__file__).resolve().parent.parent

# Names of files say what they hold to a person who knows the field.
FILE_NAMES = {
    "attending": "attention",
    "bound": "kernel_cache",
    "inputs": "input_quantized",
    "joined": "traced_module",
    "nodes": "qdq",
    "pixels": "float_pointwise_conv",
    "seed": "legacy_scale",
    "separate": "insert_qdq",
    "settle": "propagate_qparams",
    "special": "custom_rules",
    "wired": "operator_modules",
}

# Names of parameters, variables, attributes, functions and classes, alone or behind an operand.
NAMES = {
    "hi": "quant_max",
    "judge": "check",
    "lo": "quant_min",
    "settle": "propagate",
    "step": "scale",
    "zero": "zero_point",
}

OPERAND = re.compile(r"_*(?:(?:in|input|out|output|residual|weight|x|y)_)?")

# Where a word is right after all: (file, name) and the reason.
ALLOWED: dict[tuple[str, str], str] = {
    ("torchq/frontends/onnx/converters/movement.py", "step"): "of a slice",
    ("torchq/frontends/onnx/functions/movement.py", "step"): "of a slice",
    ("torchq/frontends/onnx/functions/convolution.py", "step"): "from one row to the next",
    ("torchq/functional/lstm.py", "step"): "of a sequence",
    ("torchq/functional/recurrent.py", "step"): "of a sequence",
    ("torchq/functional/rnn.py", "step"): "of a sequence",
    ("torchq/lowering/modules/recurrent.py", "step"): "of a sequence",
    ("torchq/nn/modules/recurrent.py", "step"): "of a sequence",
    ("torchq/qat/schedule.py", "step"): "of training",
}

# compat repeats the names of another library.
FOREIGN = "torchq/compat/"


# Patterns in docstrings, comments and documents.
PHRASES = {
    r"\bat hand\b": "given, or the name of the thing",
    r"\bjudges?\b": "check",
    r"\bmade anew\b": "rebuilt",
    r"\bsettl(?:e|es|ed|er|ing)\b": "propagate, decide, finish",
    r"\bso many\b": "the number, named",
    r"\btak(?:e|es|en|ing) in\b": "read, accept, fuse",
    r"\bwhichever of\b": "any of",
}

# A function's docstring begins with a verb in the imperative.
OPENINGS = {"A", "An", "How", "The", "What", "Where", "Whether", "Which", "Who", "Why"}


@pytest.fixture(scope="module")
def package() -> dict[str, Source]:
    return read_package(ROOT / "torchq")


def path_of(source: Source) -> str:
    return source.name.replace(".", "/") + ("/__init__.py" if source.is_package else ".py")


def defined_names(source: Source) -> Iterator[tuple[str, int]]:
    """Yield every name that a module gives to something, with its line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.lineno
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno


def forbidden_names(source: Source) -> list[str]:
    """Name what a module calls by a forbidden word."""
    path = path_of(source)
    problems = []
    for name, line in defined_names(source):
        word = OPERAND.sub("", name.lower(), count=1)
        if word in NAMES and (path, name) not in ALLOWED:
            problems.append(f"{path}:{line}: {name}; expected {NAMES[word]}")
    return problems


def prose(source: Source) -> Iterator[tuple[str, int]]:
    """Yield the docstrings and comments of a module, each with its line."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield text, node.body[0].lineno
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type == tokenize.COMMENT:
            yield token.string, token.start[0]


def forbidden_phrases(path: str, passages: Iterator[tuple[str, int]]) -> list[str]:
    """Name passages that hold a forbidden phrase."""
    return [
        f"{path}:{line}: {found[0]!r}; expected {better}"
        for text, line in passages
        for pattern, better in PHRASES.items()
        if (found := re.search(pattern, " ".join(text.split()), re.IGNORECASE))
    ]


def is_property(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any("property" in ast.unparse(decorator) for decorator in node.decorator_list)


def bad_openings(source: Source) -> list[str]:
    """Name functions whose docstring does not begin with a verb; a property may name a thing."""
    problems = []
    for node in functions(source):
        first = (ast.get_docstring(node) or "Return").split()[0]
        allowed = {"A", "An", "The"} if is_property(node) else set()
        if first in OPENINGS - allowed:
            problems.append(f"{path_of(source)}:{node.lineno}: {node.name} begins with {first!r}")
    return problems


def test_files_are_named_for_what_they_hold() -> None:
    """The modules of compat are named by another library."""
    found = [path.relative_to(ROOT).as_posix() for path in (ROOT / "torchq").rglob("*.py")]
    bad = [path for path in found if Path(path).stem in FILE_NAMES and FOREIGN not in path]
    assert bad == []


def test_names_are_the_words_of_the_field(package: dict[str, Source]) -> None:
    own = [source for source in package.values() if not path_of(source).startswith(FOREIGN)]
    assert [problem for source in own for problem in forbidden_names(source)] == []


def test_exceptions_are_needed(package: dict[str, Source]) -> None:
    used = {
        (path_of(source), name) for source in package.values() for name, _ in defined_names(source)
    }
    assert sorted(set(ALLOWED) - used) == []


def test_prose_of_the_code(package: dict[str, Source]) -> None:
    assert [
        problem
        for source in package.values()
        for problem in forbidden_phrases(path_of(source), prose(source))
    ] == []


@pytest.mark.parametrize(
    "path",
    [
        "README.md",
        "CONTRIBUTING.md",
        *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
    ],
)
def test_prose_of_the_documents(path: str) -> None:
    lines = (ROOT / path).read_text(encoding="utf-8").splitlines()
    passages = ((line, number) for number, line in enumerate(lines, 1))
    assert forbidden_phrases(path, passages) == []


def test_docstrings_of_functions_begin_with_a_verb(package: dict[str, Source]) -> None:
    assert [problem for source in package.values() for problem in bad_openings(source)] == []


# --- the rules themselves: each must catch the snippet written for it ---------------------------


def module(text: str) -> Source:
    return Source("torchq.nn.sample", text)


@pytest.mark.parametrize(
    "text", ["def f(step): ...", "x_zero = 1", "def f(self):\n    self.lo = 1", "class Judge: ..."]
)
def test_names_are_caught(text: str) -> None:
    assert len(forbidden_names(module(text))) == 1


@pytest.mark.parametrize("text", ["x_zero_point = 1", "steps = 2", "optimizer.step()", "zeros = 3"])
def test_good_names_pass(text: str) -> None:
    assert forbidden_names(module(text)) == []


@pytest.mark.parametrize(
    "text", ["# the tensor at hand", "def f():\n    '''Return so\n    many rows.'''"]
)
def test_phrases_are_caught(text: str) -> None:
    assert len(forbidden_phrases("sample", prose(module(text)))) == 1


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("def f():\n    '''Whether x holds.'''", 1),
        ("@property\ndef f(self):\n    '''What f is.'''", 1),
        ("@property\ndef f(self):\n    '''The range.'''", 0),
        ("def f():\n    '''Return the range.'''", 0),
        ("class A:\n    '''The range.'''", 0),
        ("def f(): ...", 0),
    ],
)
def test_openings_are_caught(text: str, count: int) -> None:
    assert len(bad_openings(module(text))) == count

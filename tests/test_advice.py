"""What errors, warnings and reports advise exists, and takes the arguments that are shown.

Every string of the package that names something of torchq is read from the syntax trees, so no
message has to be provoked. A value that a message fills in stands there as ``HOLE``.
"""

import ast
import dataclasses
import importlib
import inspect
import re
import typing
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import torchq
from torchq.cli.main import COMMANDS, build_parser
from torchq.errors import ConfigError
from torchq.runtime import RUNTIMES, Runtime

ROOT = Path(__file__).resolve().parent.parent
HOLE = "HOLE"
PATH = re.compile(r"(?<![\w.@/-])torchq(?:\.[A-Za-z_]\w*)+")
BARE = re.compile(r"(?<![\w.])([a-z]\w*_)\(")
EXTRA = re.compile(r"torchq\[([\w,-]+)\]")
COMMAND = re.compile(r"(?<![\w.])torchq ([a-z]+)((?: (?!\. )[^\s;,]+)*)")
OPTION = re.compile(r"(?<!\S)--[a-z][\w-]*")
#: The extras of the package; Python 3.10 has no reader of such files.
EXTRAS = set(
    re.findall(
        r"^([\w-]+) = \[",
        (ROOT / "pyproject.toml")
        .read_text()
        .partition("[project.optional-dependencies]")[2]
        .partition("\n[")[0],
        re.MULTILINE,
    )
)


def texts() -> Iterator[tuple[str, str]]:
    """Yield the place of each string of several words that is no docstring, and the string."""
    for path in sorted((ROOT / "torchq").rglob("*.py")):
        tree = ast.parse(path.read_text())
        place = path.relative_to(ROOT).as_posix()
        parts = {
            id(part)
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in node.values
        }
        documentation = {
            id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)
        }
        for node in ast.walk(tree):
            if id(node) in parts or id(node) in documentation:
                continue
            text = text_of(node)
            if " " in text and "torchq" in text:
                yield f"{place}:{getattr(node, 'lineno', 0)}", text


def text_of(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if not isinstance(node, ast.JoinedStr):
        return ""
    return "".join(
        str(part.value) if isinstance(part, ast.Constant) else HOLE
        for part in node.values
    )


def problems(text: str) -> list[str]:
    """Return what a reader of a message could not do as it says."""
    found = [problem_of_call(text, match) for match in PATH.finditer(text)]
    bare = {match[1] for match in BARE.finditer(text)}
    found += [f"no function {name}" for name in sorted(bare - underscored_names())]
    for match in EXTRA.finditer(text):
        unknown = set(match[1].split(",")) - EXTRAS - {HOLE}
        found += [f"no extra {name}" for name in sorted(unknown)]
    for match in COMMAND.finditer(text):
        found.append(problem_of_command(match[1], match[2]))
    return [problem for problem in found if problem]


def problem_of_call(text: str, match: re.Match[str]) -> str:
    """Return what is wrong with a dotted path, and with the arguments behind it."""
    names = match[0].split(".")[1:]
    thing: Any = torchq
    for number, name in enumerate(names):
        if HOLE in name:
            return ""
        child = child_of(thing, name)
        if child is None:
            return f"no {'.'.join(['torchq', *names[: number + 1]])}"
        thing = child
    rest = text[match.end() :]
    is_method = False
    while rest.startswith("("):
        arguments = arguments_in(rest)
        if arguments is None:
            return ""
        if problem := problem_of_arguments(
            match[0], thing, arguments, is_method=is_method
        ):
            return problem
        rest = rest[len(arguments) + 2 :]
        attribute = re.match(r"\.([a-z]\w*)", rest)
        result = result_of(thing)
        if attribute is None or result is None:
            return ""
        thing = child_of(result, attribute[1])
        if thing is None:
            return f"{match[0]} returns no {attribute[1]}"
        rest = rest[attribute.end() :]
        is_method = True
    return ""


def child_of(thing: Any, name: str) -> Any:
    """Return an attribute, a module below a package, or True for a field of a dataclass."""
    if dataclasses.is_dataclass(thing) and name in {
        field.name for field in dataclasses.fields(thing)
    }:
        return True
    if hasattr(thing, name):
        return getattr(thing, name)
    if not isinstance(thing, ModuleType):
        return None
    try:
        return importlib.import_module(f"{thing.__name__}.{name}")
    except ImportError:
        return None


def arguments_in(text: str) -> str | None:
    """Return what stands between a parenthesis at the begin and the one that closes it."""
    depth = 0
    for position, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return text[1:position]
    return None


def problem_of_arguments(
    path: str, function: Any, arguments: str, *, is_method: bool
) -> str:
    if not callable(function):
        return f"{path} cannot be called"
    try:
        call = ast.parse(f"function({arguments})", mode="eval").body
    except SyntaxError:
        return f"{path}({arguments}) is no Python"
    assert isinstance(call, ast.Call)
    # A hole, and an ellipsis, may stand for any arguments.
    positional = [node for node in call.args if ast.unparse(node) not in (HOLE, "...")]
    named = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
    is_whole = len(positional) == len(call.args)
    signature = inspect.signature(function)
    if is_method:
        positional.insert(0, ast.Constant(None))
    bind = signature.bind if is_whole and arguments else signature.bind_partial
    try:
        bind(*positional, **named)
    except TypeError as error:
        return f"{path}({arguments}): {error}"
    return ""


def result_of(function: Any) -> Any:
    """Return the class of what a function returns, if it says one."""
    if inspect.isclass(function):
        return function
    try:
        hint = typing.get_type_hints(function).get("return")
    except (NameError, TypeError):
        return None
    return hint if inspect.isclass(hint) else None


def underscored_names() -> set[str]:
    """Return the public functions that change a model in place."""
    places = ["", ".ptq", ".qat", ".workflow", ".hugging_face", ".swap", ".nn", ".onnx"]
    names: set[str] = set()
    for place in places:
        module = importlib.import_module(f"torchq{place}")
        names |= {name for name in dir(module) if name.endswith("_")}
    # Those of torch.
    return names | {name for name in dir(torch.Tensor) if name.endswith("_")}


def problem_of_command(command: str, rest: str) -> str:
    options = set(OPTION.findall(rest))
    if command not in COMMANDS:
        return f"no command torchq {command}" if options else ""
    known = {
        option
        for action in build_parser().children[command]._actions
        for option in action.option_strings
    }
    unknown = sorted(options - known)
    return f"torchq {command} has no {', '.join(unknown)}" if unknown else ""


TEXTS = dict(texts())


def test_what_is_advised_exists_and_takes_its_arguments() -> None:
    wrong = {place: found for place, text in TEXTS.items() if (found := problems(text))}
    assert not wrong, wrong
    named = sum(len(PATH.findall(text)) for text in TEXTS.values())
    assert named > 100  # They are read at all.


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Run torchq.calibrat(model, batches)", "no torchq.calibrat"),
        ("Run torchq.quantize_(model, images=x) first", "unexpected keyword"),
        ("Run torchq.export_onnx(model, x) first", "missing a required argument"),
        ("Use torchq.recipes.int9()", "no torchq.recipes.int9"),
        ("See torchq.swap.plan_of(model).tell(x)", "returns no tell"),
        ("Run quantise_(model) first", "no function quantise_"),
        ("Run pip install torchq[speed]", "no extra speed"),
        ("Use torchq quantize --into x.onnx", "torchq quantize has no --into"),
        ("Use torchq export --model x", "no command torchq export"),
    ],
)
def test_what_does_not_exist_is_found(text: str, problem: str) -> None:
    assert problem in " ".join(problems(text))


@pytest.mark.parametrize(
    ("name", "ending"),
    [(name, ending) for name in RUNTIMES for ending in RUNTIMES[name].writers()],
)
def test_the_line_that_writes_a_runtimes_own_file_is_public(
    name: str, ending: str
) -> None:
    runtime = RUNTIMES[name]
    line = runtime.writing_line(ending)
    assert problems(f"Use {line}") == []
    called, _, arguments = line.rpartition("(")
    assert arguments == "model, example, path)"
    assert not called.rpartition(".")[2].startswith("_")
    functions = {
        getattr(writer, "__func__", writer)
        for writer in (eval(called, {"torchq": torchq}), runtime.writers()[ending])
    }
    assert len(functions) == 1
    with pytest.raises(ConfigError, match=re.escape(line)):
        torchq.export_onnx(torch.nn.Identity(), None, f"net{ending}", target=name)


def test_settings_stand_in_that_line() -> None:
    (runtime,) = (
        r for r in map(RUNTIMES.__getitem__, RUNTIMES) if ".qnn" in r.writers()
    )
    assert isinstance(runtime, Runtime)
    line = dataclasses.replace(runtime, limit=5.0).writing_line(".qnn")
    assert line == "torchq.runtimes.Qnn(limit=5.0).write_context(model, example, path)"

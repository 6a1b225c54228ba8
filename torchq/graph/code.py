"""Functions as code: their trees, whether these are what runs, and hashes of them."""

import __future__

import ast
import copy
import dis
import functools
import hashlib
import inspect
import logging
import operator
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import starmap
from typing import Any

import torch
from torch import fx, nn

from torchq.graph.operators import operator_name

_FUNCTION = "__torchq_function__"
#: What shows the children of a module, those of torchq among them.
_CHILDREN = ("modules", "named_modules", "_modules")


@dataclass(frozen=True)
class Lookup:
    """What a name in the code of a forward stood for when the code was read.

    Attributes:
        find: returns what it stands for now.
        value: what it stood for.
        code: the code of that, where it is a function.
    """

    find: Callable[[], object]
    value: Any
    code: types.CodeType | None

    @classmethod
    def of(cls, find: Callable[[], object]) -> "Lookup":
        """Look something up."""
        value = find()
        return cls(find, value, getattr(value, "__code__", None))

    @property
    def is_current(self) -> bool:
        """True if the same object, with the same code, would be found again."""
        value = self.find()
        return value is self.value and getattr(value, "__code__", None) is self.code


def source_text(node: object) -> str:
    """Return the structure of code as text that is equal in every version of Python.

    ``ast.unparse`` spells the same tree in ways that differ by version, and ``ast.dump`` shows the
    fields that a version has. Positions, docstrings and annotations are left out.
    """
    if isinstance(node, ast.AST):
        fields = (
            f"{name}={source_text(_said(node, name, value))}"
            for name, value in sorted(ast.iter_fields(node))
            if name not in _LEFT_OUT and value not in (None, [])
        )
        return f"{type(node).__name__}({','.join(fields)})"
    if isinstance(node, list):
        return f"[{','.join(map(source_text, node))}]"
    return ascii(node)


def graph_digest(graph: fx.Graph) -> str:
    """Return a hash of a graph of torch.fx: its nodes with their names, targets and arguments."""
    lines = [
        f"{n.name} {n.op} {operator_name(n.target)} {n.args} {sorted(n.kwargs.items())}"
        for n in graph.nodes
    ]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:32]


#: Fields of trees that say nothing, or that only some versions of Python have.
_LEFT_OUT = frozenset(
    ["ctx", "kind", "type_comment", "type_params", "annotation", "returns"]
)


def _said(node: ast.AST, name: str, value: Any) -> object:
    """Return a field without docstrings, and without the empty parts of strings with formats.

    Some releases of Python 3.12 put these where others put nothing.
    """
    if isinstance(node, ast.JoinedStr):
        return [part for part in value if getattr(part, "value", None) != ""]
    if name == "body" and isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return value if ast.get_docstring(node, clean=False) is None else value[1:]
    return value


def is_function(value: object) -> bool:
    """Return True for a function that is written in Python."""
    return isinstance(value, types.FunctionType)


def rewrapped(
    wrapper: types.FunctionType, inner: types.FunctionType, new: Callable[..., object]
) -> Callable[..., Any] | None:
    """Return what a decorator made of ``inner``, around ``new`` instead; None if that is hidden."""
    cells = wrapper.__closure__ or ()
    try:
        contents = [cell.cell_contents for cell in cells]
    except ValueError:  # a name that is not bound yet
        return None
    held = [content is inner for content in contents]
    others = [c for c, is_inner in zip(contents, held, strict=True) if not is_inner]
    others += [*(wrapper.__defaults__ or ()), *(wrapper.__kwdefaults__ or {}).values()]
    # A cache, or another wrapper around the function, would go on with the one that it has.
    if not any(held) or not all(map(_keeps_no_function, others)):
        return None
    pairs = zip(cells, held, strict=True)
    closure = tuple(
        types.CellType(new) if is_inner else cell for cell, is_inner in pairs
    )
    copy = _like(wrapper, wrapper.__code__, closure)
    vars(copy).update({**vars(wrapper), "__wrapped__": new})
    return copy


_SIMPLE = (type(None), bool, int, float, complex, str, bytes, type, types.ModuleType)


def _keeps_no_function(value: object) -> bool:
    """Return True for what a decorator holds that cannot call the function or keep its results."""
    if isinstance(value, (tuple, frozenset)):
        return all(map(_keeps_no_function, value))
    # Such as the one that clones torch.no_grad().
    if isinstance(value, types.MethodType):
        return _keeps_no_function(value.__self__) and _keeps_no_function(value.__func__)
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        return "__wrapped__" not in vars(value) and all(map(_keeps_no_function, cells))
    is_torchs = type(value).__module__.partition(".")[0] == "torch"
    is_settled = is_torchs and not isinstance(value, (nn.Module, torch.Tensor))
    return is_settled or isinstance(
        value, (*_SIMPLE, types.BuiltinFunctionType, logging.Logger)
    )


def hands_on_keywords(wrapper: types.FunctionType) -> bool:
    """Return True if what a decorator made passes on all keywords: the router is one of them."""
    try:
        tree = _tree_of(inspect.getsource(wrapper.__code__)).body[0]
    except (OSError, SyntaxError):
        return False
    keywords_argument = tree.args.kwarg if isinstance(tree, ast.FunctionDef) else None
    if keywords_argument is None:
        return False
    names = []
    unpacked = []  # what stands behind ** in calls
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id == keywords_argument.arg:
            names.append(node)
        elif isinstance(node, ast.Call):
            unpacked += [
                keyword.value for keyword in node.keywords if keyword.arg is None
            ]
    is_only_read = all(isinstance(name.ctx, ast.Load) for name in names)
    return is_only_read and any(value in names for value in unpacked)


def _like(
    function: types.FunctionType,
    code: types.CodeType,
    closure: tuple[types.CellType, ...],
) -> types.FunctionType:
    """Return a function of other code with the globals and defaults of ``function``."""
    settings = (function.__globals__, function.__name__, function.__defaults__)
    new = types.FunctionType(code, *settings, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def _tree_of(source: str) -> Any:
    """Return the tree of code that may be indented; strings over several lines stay as they are."""
    if source[:1].isspace():
        return ast.parse(f"if True:\n{source}").body[0]
    return ast.parse(source)


def tree_of_function(function: types.FunctionType) -> ast.FunctionDef | None:
    """Return the tree of a function without its decorators; None where it cannot be rewritten."""
    try:
        module = _tree_of(inspect.getsource(function))
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    tree = module.body[0] if len(module.body) == 1 else None
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return None
    tree.decorator_list = []  # Those that wrap the function were taken off by the caller.
    for node in ast.walk(tree):
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
            return None
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if isinstance(node, ast.Attribute) and name in _CHILDREN:
            return None
        if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
            return None  # a private name, which the compiler changes inside a class
    first = min(n.lineno for n in ast.walk(tree) if hasattr(n, "lineno"))
    ast.increment_lineno(tree, function.__code__.co_firstlineno - first)
    return tree if _is_current(function, tree) else None


def forget_declarations(tree: ast.FunctionDef) -> None:
    """Leave out defaults and annotations, which are not evaluated again: the function keeps its."""
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [d and ast.Constant(None) for d in tree.args.kw_defaults]
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    tree.returns = None


def compiled_like(
    function: types.FunctionType, tree: ast.FunctionDef, hidden: dict[str, object]
) -> Callable[..., Any]:
    """Compile ``tree`` to a function with the globals, defaults and closure of ``function``."""
    inner = _code(function, tree, hidden)
    cells = dict(
        zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    )
    cells |= {name: types.CellType(value) for name, value in hidden.items()}
    new = _like(function, inner, tuple(cells[name] for name in inner.co_freevars))
    new.__qualname__, new.__module__ = function.__qualname__, function.__module__
    new.__annotations__ = function.__annotations__
    return new


def _code(
    function: types.FunctionType, tree: ast.FunctionDef, hidden: Iterable[str]
) -> types.CodeType:
    """Return the code of ``tree`` with its free variables, as those of ``function`` and hidden."""
    names = ", ".join([*function.__code__.co_freevars, *hidden])
    module = ast.parse(f"def factory({names}): pass")
    module.body[0].body = [tree]  # type: ignore[attr-defined]
    name = tree.name
    tree.name = _FUNCTION  # its own name in it must stay a global one
    source: Any = ast.fix_missing_locations(module)
    flags = function.__code__.co_flags & _FUTURE
    code = compile(
        source, function.__code__.co_filename, "exec", flags, dont_inherit=True
    )
    tree.name = name
    outer = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    codes = [c for c in outer.co_consts if isinstance(c, types.CodeType)]
    return next(c for c in codes if c.co_name == _FUNCTION).replace(co_name=name)


#: The flags of code that ``from __future__ import`` sets.
_FUTURE = functools.reduce(
    operator.or_,
    (getattr(__future__, name).compiler_flag for name in __future__.all_feature_names),
)


def _is_current(function: types.FunctionType, tree: ast.FunctionDef) -> bool:
    """Return True if the source that was read is that of the function.

    It is not where a file was edited after it was imported, or where an import hook changes code.
    """
    running = function.__code__
    read = _code(function, copy.deepcopy(tree), ())
    # Pytest rewrites assertions.
    if any(name.startswith("@py") for name in running.co_names):
        names_fit = set(read.co_names) <= set(running.co_names)
        return names_fit and set(read.co_varnames) <= set(running.co_varnames)
    return _same_code(running, read)


def _same_code(one: types.CodeType, other: types.CodeType) -> bool:
    """Return True for codes that do the same, wherever they stand."""
    attributes = ("co_argcount", "co_varnames", "co_freevars", "co_cellvars")
    if any(getattr(one, name) != getattr(other, name) for name in attributes):
        return False
    pairs = zip(_steps(one), _steps(other), strict=False)
    return len(_steps(one)) == len(_steps(other)) and all(starmap(_same_step, pairs))


#: How the same call is compiled where the name of a module is imported in the same file, and where
#: it is not.
_METHOD_FORMS = {"LOAD_METHOD": "LOAD_ATTR", "CALL_METHOD": "CALL_FUNCTION"}
_NO_STEPS = frozenset(["PUSH_NULL", "EXTENDED_ARG", "CACHE", "NOP"])


def _steps(code: types.CodeType) -> list[tuple[str, object]]:
    """Return the operations of a code with what they read; jumps without their distance."""
    jumps = {*dis.hasjrel, *dis.hasjabs}
    return [
        (
            _METHOD_FORMS.get(step.opname, step.opname),
            None if step.opcode in jumps else step.argval,
        )
        for step in dis.get_instructions(code)
        if step.opname not in _NO_STEPS
    ]


def _same_step(one: tuple[str, object], other: tuple[str, object]) -> bool:
    (name, value), (other_name, other_value) = one, other
    if isinstance(value, types.CodeType) and isinstance(other_value, types.CodeType):
        return name == other_name and _same_code(value, other_value)
    # The qualified name of a nested function was a constant until Python 3.10.
    is_name = isinstance(value, str) and "<locals>" in value
    is_set = isinstance(value, frozenset)
    is_same = value == other_value if is_set else repr(value) == repr(other_value)
    return name == other_name and (is_name or is_same)

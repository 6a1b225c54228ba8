"""Parameters that the code of a user's class overwrites, as its source says.

A forward may write into parameters, as one that normalises its prototypes does. To put all
parameters back they would have to be kept twice; these are the few that have to be.
"""

import ast
import functools
import inspect
import textwrap
import tokenize
import types
from collections.abc import Collection, Iterator
from typing import Any

from torch import nn

#: Attributes from ``self`` on: ``("head", "weight")`` for ``self.head.weight``.
_Chain = tuple[str, ...]
_LIBRARIES = ("torch", "torchq")
#: What runs before any forward.
_OF_MAKING = ("__init__", "init", "_init", "reset")
#: Methods that yield parameters, or the modules that hold them.
_SOURCES = frozenset(
    f"{prefix}{name}"
    for prefix in ("", "named_")
    for name in ("parameters", "modules", "children")
)
#: They end as methods that write do, and write no numbers.
_HARMLESS = ("requires_grad_", "share_memory_")


def written_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that methods of a model's own classes may overwrite in place.

    Seen are ``self.weight.mul_(2)``, ``self.head.weight.data[0] = 1``,
    ``init.zeros_(self.weight)``, ``out=self.weight``, names that stand for such a tensor, and loops
    over ``self.parameters()`` or over modules in a container, of which all parameters count; code
    without a source is not. Tables with ``max_norm`` shorten their rows when these are looked up.
    """
    parameters: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if (
            isinstance(module, (nn.Embedding, nn.EmbeddingBag))
            and module.max_norm is not None
        ):
            parameters |= {id(p): p for p in module.parameters(recurse=False)}
        for chain in _chains_of(type(module)):
            parameters |= {id(p): p for p in _parameters_at(module, chain)}
    return list(parameters.values())


def _parameters_at(module: nn.Module, chain: _Chain) -> Iterator[nn.Parameter]:
    value: Any = module
    for name in chain:
        is_part = isinstance(value, nn.Module) and hasattr(value, name)
        if isinstance(value, nn.Module) and (name in _SOURCES or not is_part):
            break  # A loop over its parts, or one of them by its place.
        value = getattr(value, name, None)
    if isinstance(value, nn.Parameter):
        yield value
    elif isinstance(value, nn.Module) and value is not module:
        yield from value.parameters()
    elif value is module and chain[0] in _SOURCES:
        yield from module.parameters()


def _chains_of(cls: type[nn.Module]) -> Iterator[_Chain]:
    for base in cls.__mro__:
        if base.__module__.partition(".")[0] in _LIBRARIES:
            continue
        for name, function in vars(base).items():
            if isinstance(function, types.FunctionType) and not name.startswith(
                _OF_MAKING
            ):
                decorated = inspect.unwrap(function)
                if isinstance(decorated, types.FunctionType):
                    yield from _chains_written_in(decorated.__code__)


@functools.lru_cache(maxsize=4096)
def _chains_written_in(code: types.CodeType) -> tuple[_Chain, ...]:
    """Return what a function overwrites of its first argument."""
    if not code.co_argcount:
        return ()
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(code)))
    # There is no source to read, or it is part of a line, or it was edited since.
    except (OSError, SyntaxError, ValueError, tokenize.TokenError):
        return ()
    names: dict[str, _Chain] = {code.co_varnames[0]: ()}
    for node in ast.walk(tree):
        names |= dict(_names_given_in(node, names))
    targets = (
        t for node in ast.walk(tree) for t in _written_in(node, code.co_varnames)
    )
    chains = (_chain(target, names) for target in targets)
    return tuple(dict.fromkeys(chain for chain in chains if chain))


def _names_given_in(
    node: ast.AST, names: dict[str, _Chain]
) -> Iterator[tuple[str, _Chain]]:
    """Yield names that an assignment or a loop gives to what belongs to the module."""
    if isinstance(node, ast.Assign):
        targets = node.targets
        value = node.value
    elif isinstance(node, (ast.For, ast.comprehension)):
        targets = [node.target]
        value = node.iter
    else:
        return
    chain = _chain(value, names)
    if chain:
        for target in targets:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            for part in parts:
                if isinstance(part, ast.Name) and part.id not in names:
                    yield part.id, chain


def _written_in(node: ast.AST, variables: Collection[str]) -> Iterator[ast.expr]:
    """Yield the expressions whose tensor a statement or call overwrites.

    A function of a library, which is no method of a variable, overwrites its first argument.
    """
    if isinstance(node, ast.AugAssign):
        yield node.target
    elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
        yield node.value
    elif isinstance(node, ast.Call):
        yield from (keyword.value for keyword in node.keywords if keyword.arg == "out")
        if isinstance(node.func, ast.Attribute) and _is_in_place(node.func.attr):
            yield node.func.value
            if _root(node.func) not in variables:
                yield from node.args[:1]


def _root(node: ast.expr) -> str:
    """Return the name that an expression begins with; "" for one that begins with no name."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def _is_in_place(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__") and name not in _HARMLESS


def _chain(node: ast.expr, names: dict[str, _Chain]) -> _Chain:
    """Return the attributes that an expression is, or is a view of; () for any other."""
    attributes: list[str] = []
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            attributes.insert(0, node.attr)
            node = node.value
        elif isinstance(node, ast.Subscript):
            attributes.clear()
            node = node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            # A method may return a view; those that yield parameters are told by their names.
            is_source = node.func.attr in _SOURCES
            attributes = [node.func.attr] if is_source else []
            node = node.func.value
        else:
            return ()
    if node.id not in names:
        return ()
    chain = (*names[node.id], *attributes)
    return chain[: chain.index("data")] if "data" in chain else chain

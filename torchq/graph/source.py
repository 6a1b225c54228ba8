"""Rewriting the source of a forward so that its operators can be redirected.

Everything else of the forward stays what it is: Python code that runs at every call, with its
branches, attributes and arguments. Each operator becomes a *site* with a name that depends on the
code alone, so that it can be found again in another process:

    def forward(self, x):              def forward(self, x):
        y = self.conv(x)                   route = start(self)
        return x + self._tail(y)           y = self.conv(x)
                                           return route.binary("1", "add", x,
    def _tail(self, y):                        route.follow("0", self._tail, _tail, tail, y))
        return F.silu(y)
                                       def tail(self, y, *, route):
                                           return route.call("0", F.silu, y)

A function is known by its code object. Each call of a followed function asks what its name stands
for then: where that is another one, as a method of the object itself, this one runs as it is.
"""

import ast
import functools
import hashlib
import inspect
import types
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchq.graph.code import (
    Lookup,
    compiled_like,
    forget_declarations,
    hands_on_keywords,
    is_function,
    rewrapped,
    source_text,
    tree_of_function,
)
from torchq.graph.operators import OPERATORS, Operator, operator_of

_ROUTE, _START = "__torchq_route__", "__torchq_start__"
_ROWS = [OPERATORS[name] for name in OPERATORS]
_BINARY = {getattr(ast, row.syntax): row.name for row in _ROWS if row.syntax}
#: The kinds of sites that share one count; other operators have their own, so that a new row of
#: the table renames no site.
_NUMBERED = frozenset(
    ["add", "mul", "matmul", "cat", "pool", "activation", "attention"]
)
#: Classes of torch whose methods are followed from those of subclasses.
_FOLLOWED = frozenset(["Sequential", "_ConvNd", *(row.layer for row in _ROWS)])
#: What lists the children of a module, beside the items of a container.
_OWN = ("children", "named_children")
_DEEPEST = 8


@dataclass(frozen=True)
class SourceSite:
    """A place in the code of a forward where an operator or a product with a weight stands.

    Attributes:
        name: the places of the calls that lead there and its own, joined by dots.
        operator: the name of the row.
        left, right: the path of the attribute that each operand of a product is; "" if unknown.
    """

    name: str
    operator: str
    left: str = ""
    right: str = ""


@dataclass(frozen=True, eq=False)
class Rewritten:
    """A forward whose operators are handed to a router.

    Attributes:
        forward: the function; None where the source does not allow it.
        sites: the places of the operators, in the order of the code.
        digest: a hash of the source of the forward and of all functions that it follows, equal in
            every process and version of Python.
        lookups: what the code found by name: the forward, its functions, and the operators.
    """

    forward: Callable[..., Any] | None
    sites: tuple[SourceSite, ...]
    digest: str
    lookups: tuple[Lookup, ...]

    @property
    def is_current(self) -> bool:
        """True if reading the forward again would give the same."""
        return all(lookup.is_current for lookup in self.lookups)


def rewrite_forward(cls: type[nn.Module], start: Callable[[Any], object]) -> Rewritten:
    """Return the forward of ``cls`` with its operators handed to a router.

    ``start`` is called with the module at the beginning of each call and returns the router, which
    has the methods of :class:`torchq.nn.calls.routes.Route`. Functions and methods that the
    forward calls by name are followed. The signature stays.
    """
    itself = Lookup.of(functools.partial(inspect.getattr_static, cls, "forward", None))
    reading = _Reading(cls, [itself])
    rewritten = None
    if isinstance(itself.value, types.FunctionType) and not _has_own_attributes(cls):
        # Code that cannot leave its class.
        with suppress(SyntaxError, RecursionError, _Opaque):
            rewritten = _rewrite(itself.value, reading, (), start)
    lookups = tuple(reading.lookups)
    if rewritten is None:
        return Rewritten(None, (), "", lookups)
    return Rewritten(rewritten.forward, rewritten.sites, reading.digest(), lookups)


def _has_own_attributes(cls: type[nn.Module]) -> bool:
    """Return True where a class decides in every access what its attributes are."""
    return cls.__getattribute__ is not object.__getattribute__


class _Opaque(Exception):
    """The code does something with its module that another object in its place would change."""


class _Reading:
    """What was read for one forward: the names it looked up, and the sources."""

    def __init__(self, cls: type[nn.Module], lookups: list[Lookup]) -> None:
        self.cls, self.lookups = cls, lookups
        self._sources: list[str] = []

    def look_up(self, find: Callable[[], object]) -> object:
        """Return what is found, and note it."""
        lookup = Lookup.of(find)
        self.lookups.append(lookup)
        return lookup.value

    def note_source(self, function: types.FunctionType, tree: ast.FunctionDef) -> None:
        """Note the source of a function; what torch itself is made of differs by its version."""
        if not function.__module__ or function.__module__.partition(".")[0] != "torch":
            self._sources.append(source_text(tree))

    def digest(self) -> str:
        """Return a hash of the sources."""
        return hashlib.sha256("\n".join(self._sources).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class _Function:
    """A function of a forward after rewriting; some of its sites may be numbered."""

    forward: Callable[..., object]
    sites: tuple[SourceSite, ...]
    is_numbered: bool
    lists_children: bool


def _rewrite(
    function: types.FunctionType,
    reading: _Reading,
    callers: tuple[types.FunctionType, ...],
    start: Callable[[Any], object] | None = None,
    paths: Mapping[str, str] = types.MappingProxyType({}),
) -> _Function | None:
    """Return ``function`` rewritten, or None; ``paths`` are its arguments that are known."""
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:  # The code of a decorator runs around the rewritten function.
        reaches = is_function(inner) and (
            start is not None or hands_on_keywords(function)
        )
        rewritten = _rewrite(inner, reading, callers, start, paths) if reaches else None
        around = (
            None if rewritten is None else rewrapped(function, inner, rewritten.forward)
        )
        return (
            None
            if rewritten is None or around is None
            else replace(rewritten, forward=around)
        )
    tree = tree_of_function(function)
    if tree is None:
        return None
    reading.note_source(function, tree)
    forget_declarations(tree)
    sites = _Sites(function, tree, reading, callers, paths)
    body = [sites.visit(statement) for statement in tree.body]
    if not sites.found and (start is not None or not sites.lists_children):
        return None
    hidden: dict[str, object] = dict(sites.helpers)
    if start is None:
        tree.args.kwonlyargs.append(ast.arg(_ROUTE))
        tree.args.kw_defaults.append(None)
    else:
        hidden[_START] = start
        begin = ast.Call(_name(_START), [_name(tree.args.args[0].arg)], [])
        body.insert(0, ast.Assign([ast.Name(_ROUTE, ast.Store())], begin))
    tree.body = body
    new = compiled_like(function, tree, hidden)
    return _Function(new, tuple(sites.found), "" in sites.counts, sites.lists_children)


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


class _Sites(ast.NodeTransformer):
    """Replaces each operator of one function by a call of the router.

    Attributes:
        counts: how many sites there are, by the groups of their names.
        found: the sites, with those of functions that are called.
        helpers: hidden name -> function that the code calls, rewritten, and as it was.
        lists_children: True if the code asks for the children of the module.
    """

    def __init__(
        self,
        function: types.FunctionType,
        tree: ast.FunctionDef,
        reading: _Reading,
        callers: tuple[types.FunctionType, ...],
        paths: Mapping[str, str],
    ) -> None:
        cls = reading.cls
        self.cls, self.function, self._reading = cls, function, reading
        self.callers = (*callers, function)
        self.counts: Counter[str] = Counter()
        self.found: list[SourceSite] = []
        self.helpers: dict[str, object] = {}
        self.lists_children = False
        is_method = any(_defines(c, function) for c in cls.__mro__)
        self._self = tree.args.args[0].arg if is_method else None
        self._depth = 0
        stored = {
            n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not _is_load(n)
        }
        self._local = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | stored
        self._paths = {name: path for name, path in paths.items() if name not in stored}
        self._assignable = {
            *function.__code__.co_varnames,
            *function.__code__.co_cellvars,
        }

    def _name(self, group: str) -> str:
        """Return the name of the next site of a group; it ends in ``f`` in a nested function."""
        self.counts[group] += 1
        return f"{group}{self.counts[group] - 1}{'f' if self._depth else ''}"

    def _site(
        self,
        row: Operator,
        args: Sequence[ast.expr],
        keywords: Sequence[ast.keyword] = (),
    ) -> str:
        """Return the name of the next site of an operator, and note it."""
        name = self._name("" if row.module and row.word in _NUMBERED else row.name)
        named = {keyword.arg: keyword.value for keyword in keywords}
        operands = [
            args[place] if place < len(args) else named.get(word)
            for place, word in (row.left, row.right)
        ]
        paths = ["" if operand is None else self._path(operand) for operand in operands]
        self.found.append(SourceSite(name, row.name, *paths))
        return name

    def _path(self, node: ast.expr) -> str:
        """Return ``a.b`` for the expression ``self.a.b``, also where an argument holds it."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return ""
        if node.id == self._self and self._self is not None:
            return ".".join(names)
        return (
            ".".join([self._paths[node.id], *names]) if node.id in self._paths else ""
        )

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Note that sites inside belong to a nested function, which may run again at any time."""
        self._depth += 1
        self.generic_visit(node)
        self._depth -= 1
        return node

    visit_Lambda = visit_FunctionDef  # type: ignore[assignment]

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Replace ``a + b``, ``a * b`` and ``a @ b``."""
        name = _BINARY.get(type(node.op))
        if name is None:
            return self.generic_visit(node)
        site = self._site(OPERATORS[name], [node.left, node.right])
        self.generic_visit(node)
        result: ast.AST = _routed(
            node, "binary", site, ast.Constant(name), node.left, node.right
        )
        return result

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Replace ``a += b`` and the like, where ``a`` is a name."""
        name = _BINARY.get(type(node.op))
        if name is None or not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        site = self._site(OPERATORS[name], [node.target, node.value])
        self.generic_visit(node)
        old = _name(node.target.id)
        new = _routed(node, "binary", site, ast.Constant(f"i{name}"), old, node.value)
        return ast.copy_location(ast.Assign([node.target], new), node)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        """Bind the result of the statement ``a.add_(b)`` to ``a``, as ``a += b`` does."""
        overwritten = _overwritten(node.value)
        before = node.value
        self.generic_visit(node)
        is_routed = node.value is not before and not self._depth
        if is_routed and overwritten in self._assignable:
            target = ast.Name(overwritten, ast.Store())
            return ast.copy_location(ast.Assign([target], node.value), node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace calls of functions and methods that have a row, and follow others."""
        target = self._resolve(node.func)
        row = _routed_row(target)
        if row is not None:
            site = self._site(row, node.args, node.keywords)
            self.generic_visit(node)
            result: ast.AST = _routed(
                node, "call", site, node.func, *node.args, keywords=node.keywords
            )
            return result
        if target is None and isinstance(node.func, ast.Attribute):
            return self._visit_method(node, node.func)
        return self._follow(node, target)

    def _visit_method(self, node: ast.Call, callee: ast.Attribute) -> ast.AST:
        """Replace ``x.add(y)`` and the like, where ``x`` is not the module itself."""
        if self._is_self(callee):
            if callee.attr in _OWN and not node.args:
                self.lists_children = True
                call = ast.Call(
                    _attribute(_ROUTE, "own"), [ast.Constant(callee.attr)], []
                )
                return ast.copy_location(call, node)
            return self._follow(node, None)
        row = _routed_row(callee.attr)
        if row is None:
            return self._follow(node, None)
        site = self._site(row, [callee.value, *node.args], node.keywords)
        self.generic_visit(node)
        arguments = (ast.Constant(callee.attr), callee.value, *node.args)
        result: ast.AST = _routed(
            node, "method", site, *arguments, keywords=node.keywords
        )
        return result

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Leave attributes of the module itself; ``self`` alone stands for its children."""
        if not self._is_self(node):
            return self.generic_visit(node)
        if node.attr in _OWN:
            raise _Opaque
        return node

    def _follow(self, node: ast.Call, target: object) -> ast.AST:
        """Call the rewritten form of a function of the user's, with a router of its own."""
        is_method = False
        if target is None and isinstance(node.func, ast.Attribute):
            target = self._method(node.func)
            if isinstance(target, staticmethod):
                target = target.__func__
            else:
                is_method = True
        rewritten = self._rewritten(target, node, is_method)
        if rewritten is None:
            return self.generic_visit(node)
        site = self._name(
            "" if rewritten.is_numbered and not _is_torchs(target) else "call"
        )
        self.lists_children |= rewritten.lists_children
        self.found += [
            replace(inner, name=f"{site}.{inner.name}") for inner in rewritten.sites
        ]
        self.generic_visit(node)
        names = [f"__torchq_{kind}_{len(self.helpers)}__" for kind in ("known", "new")]
        self.helpers |= zip(names, (target, rewritten.forward), strict=True)
        callee: list[ast.expr] = [node.func]
        if isinstance(node.func, ast.Attribute) and isinstance(
            node.func.value, ast.Call
        ):
            # Dynamo compares no super().method.
            callee = [
                _name(names[0]),
                _name(str(self._self)),
            ]
        expected, new = map(_name, names)
        arguments = (callee[0], expected, new, *callee[1:], *node.args)
        result: ast.AST = _routed(
            node, "follow", site, *arguments, keywords=node.keywords
        )
        return result

    def _rewritten(
        self, target: object, node: ast.Call, is_method: bool
    ) -> _Function | None:
        if not isinstance(target, types.FunctionType) or target in self.callers:
            return None
        library = (target.__module__ or "").split(".")[0]
        is_foreign = library in ("torch", "builtins") and not _is_torchs(target)
        if is_foreign or len(self.callers) > _DEEPEST:
            return None
        code = inspect.unwrap(target).__code__
        names = code.co_varnames[is_method : code.co_argcount]
        value_by_name = dict(zip(names, node.args, strict=False))
        value_by_name |= {
            keyword.arg: keyword.value for keyword in node.keywords if keyword.arg
        }
        paths = {
            name: path
            for name, value in value_by_name.items()
            if (path := self._path(value))
        }
        return _rewrite(target, self._reading, self.callers, paths=paths)

    def _resolve(self, node: ast.expr) -> object:
        """Return the object that a name or a dotted name outside of the function stands for."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id in self._local:
            return None
        find = functools.partial(_outside, self.function, node.id, tuple(names))
        return self._reading.look_up(find)

    def _is_self(self, node: ast.Attribute) -> bool:
        is_name = isinstance(node.value, ast.Name)
        return is_name and node.value.id == self._self  # type: ignore[attr-defined]

    def _method(self, node: ast.Attribute) -> object:
        """Return the function that ``self.name`` or ``super().name`` stands for."""
        if self._self is None:
            return None
        if self._is_self(node):
            find = functools.partial(inspect.getattr_static, self.cls, node.attr, None)
            return self._reading.look_up(find)
        call: Any = node.value
        is_super = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if not is_super or call.func.id != "super" or call.args:
            return None
        return self._reading.look_up(
            functools.partial(_inherited, self.cls, self.function, node.attr)
        )


def _outside(
    function: types.FunctionType, name: str, attributes: tuple[str, ...]
) -> object:
    """Return what a name, and attributes of the module that it is, stand for; None for others."""
    free = function.__code__.co_freevars
    if name in free:
        try:
            value = (function.__closure__ or ())[free.index(name)].cell_contents
        except ValueError:  # a name that is not bound yet
            return None
    else:
        value = function.__globals__.get(name)
    for attribute in attributes:
        if not isinstance(value, types.ModuleType):
            return None
        value = getattr(value, attribute, None)
    return value


def _inherited(cls: type[nn.Module], function: types.FunctionType, name: str) -> object:
    """Return what ``super().name`` stands for in a function of a class, or of one of its bases."""
    line = cls.__mro__
    defining = [c for c in line if _defines(c, function)]
    after = line[line.index(defining[0]) + 1 :] if defining else ()
    return next((vars(c)[name] for c in after if name in vars(c)), None)


def _defines(cls: type, function: types.FunctionType) -> bool:
    """Return True if a function is defined in a class, decorated or not."""
    return any(
        inspect.unwrap(value) is function
        for value in vars(cls).values()
        if is_function(value)
    )


def _is_load(node: ast.Name | ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Load)


def _overwritten(node: ast.expr) -> str:
    """Return the name that ``a.add_(b)`` or ``F.silu(a, inplace=True)`` overwrites; "" for none."""
    if not isinstance(node, ast.Call):
        return ""
    callee: Any = node.func
    is_method = isinstance(callee, ast.Attribute) and isinstance(callee.value, ast.Name)
    if is_method and callee.attr.endswith("_") and _routed_row(callee.attr) is not None:
        return str(callee.value.id)
    flags = [k.value for k in node.keywords if k.arg == "inplace"]
    is_in_place = any(
        isinstance(flag, ast.Constant) and flag.value is True for flag in flags
    )
    first = node.args[0] if node.args else None
    return first.id if is_in_place and isinstance(first, ast.Name) else ""


def _attribute(name: str, attribute: str) -> ast.expr:
    return ast.Attribute(_name(name), attribute, ast.Load())


def _routed(
    node: ast.AST,
    action: str,
    site: str,
    *args: ast.expr,
    keywords: Sequence[ast.keyword] = (),
) -> Any:
    call = ast.Call(
        _attribute(_ROUTE, action), [ast.Constant(site), *args], [*keywords]
    )
    return ast.copy_location(call, node)


def _routed_row(target: object) -> Operator | None:
    """Return the row of a function or method that a router carries out."""
    row = (
        None if target is None or isinstance(target, nn.Module) else operator_of(target)
    )
    return row if row is not None and (row.module or row.layer) else None


def _is_torchs(target: Any) -> bool:
    """Return True for methods of the layers of torch, which subclasses call."""
    home = getattr(target, "__module__", None) or ""
    owner = target.__qualname__.partition(".")[0]
    return home.startswith("torch.nn.modules.") and owner in _FOLLOWED

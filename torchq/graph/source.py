"""Rewriting the source of a forward so that its operators can be redirected.

Everything else of the forward stays what it is: Python code that runs at every call, with its
branches, attributes and arguments. Each operator becomes a *site* with a name that depends on the
code alone, so that it can be found again in another process:

    def forward(self, x):              def forward(self, x):
        y = self.conv(x)                   route = start(self)
        return x + self._tail(y)           y = self.conv(x)
                                           return route.binary("1", "add", x,
    def _tail(self, y):                        tail(self, y, route=route.enter("0")))
        return F.silu(y)
                                       def tail(self, y, *, route):
                                           return route.call("0", F.silu, y)
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Protocol

from torch import nn

from torchq.graph.operators import OPERATORS, operator_kind

_ROUTE, _START, _FUNCTION = "__torchq_route__", "__torchq_start__", "__torchq_function__"
_ROWS = [OPERATORS[name] for name in OPERATORS]
_BINARY = {getattr(ast, row.syntax): row.name for row in _ROWS if row.syntax}
#: The kinds of sites that share one count, as in files of torchq 0.2; other kinds have their own,
#: so that a new row of the table renames no site. The empty one is a call of a function with such.
_NUMBERED = frozenset(["", "add", "mul", "matmul", "cat", "pool", "activation", "attention"])
_STATIC = ast.dump(ast.Name("staticmethod", ast.Load()))
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_CHILDREN = ("children", "named_children", "modules", "named_modules", "_modules")
_DEEPEST = 8


class Router(Protocol):
    """The object that rewritten code asks to carry out its operators, one for each call."""

    def enter(self, site: str) -> Router:
        """Return the router of a function that is called at ``site``."""

    def binary(self, site: str, name: str, first: Any, second: Any) -> Any:
        """Carry out ``operator.<name>(first, second)``."""

    def call(self, site: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Carry out ``function(*args, **kwargs)``."""

    def method(self, site: str, name: str, owner: Any, *args: Any, **kwargs: Any) -> Any:
        """Carry out ``owner.<name>(*args, **kwargs)``."""


def rewrite_forward(
    cls: type[nn.Module], start: Callable[[Any], Router]
) -> Callable[..., Any] | None:
    """Return the forward of ``cls`` with its operators handed to a router, or None.

    ``start`` is called with the module at the beginning of each call and returns the router.

    Functions and methods that the forward calls by name are followed. The signature stays.
    """
    function = inspect.getattr_static(cls, "forward", None)
    if not isinstance(function, types.FunctionType) or issubclass(cls, _CONTAINERS):
        return None
    try:
        found = _Rewriting(cls, ()).rewrite(function, start)
    except (SyntaxError, RecursionError):  # code that cannot stand outside of its class
        return None
    return None if found is None else found[0]


class _Rewriting:
    """The rewriting of one function; functions that it calls have their own."""

    def __init__(self, cls: type[nn.Module], callers: tuple[types.FunctionType, ...]) -> None:
        self.cls = cls
        self.callers = callers

    def rewrite(
        self, function: types.FunctionType, start: Callable[[Any], Router] | None = None
    ) -> tuple[Callable[..., Any], bool] | None:
        """Return ``function`` rewritten, and whether it has numbered sites; or None."""
        tree = _parse(function)
        if tree is None:
            return None
        sites = _Sites(self.cls, function, tree, self.callers)
        body = [sites.visit(statement) for statement in tree.body]
        if not sites.counts:
            return None
        hidden: dict[str, Any] = dict(sites.helpers)
        if start is None:
            tree.args.kwonlyargs.append(ast.arg(_ROUTE))
            tree.args.kw_defaults.append(None)
        else:
            hidden[_START] = start
            first = ast.Name(tree.args.args[0].arg, ast.Load())
            begin = ast.Call(ast.Name(_START, ast.Load()), [first], [])
            body.insert(0, ast.Assign([ast.Name(_ROUTE, ast.Store())], begin))
        tree.body = body
        return _compile(function, tree, hidden), "" in sites.counts


def _parse(function: types.FunctionType) -> ast.FunctionDef | None:
    if hasattr(function, "__wrapped__"):
        return None
    try:
        source = textwrap.dedent(inspect.getsource(function))
        module = ast.parse(source)
    except (OSError, TypeError, SyntaxError, ValueError):
        return None
    tree = module.body[0] if len(module.body) == 1 else None
    if not isinstance(tree, ast.FunctionDef) or not tree.args.args:
        return None
    if [ast.dump(d) for d in tree.decorator_list] not in ([], [_STATIC]):
        return None
    tree.decorator_list = []
    for node in ast.walk(tree):
        if isinstance(node, (ast.Yield, ast.YieldFrom, ast.Await)):
            return None
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if isinstance(node, ast.Attribute) and name in _CHILDREN:
            return None
        if isinstance(name, str) and name.startswith("__") and not name.endswith("__"):
            return None  # a private name, which the compiler changes inside a class
    # Neither is evaluated again: the function keeps its defaults.
    tree.args.defaults = [ast.Constant(None) for _ in tree.args.defaults]
    tree.args.kw_defaults = [d and ast.Constant(None) for d in tree.args.kw_defaults]
    for argument in ast.walk(tree.args):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    tree.returns = None
    ast.increment_lineno(tree, function.__code__.co_firstlineno - 1)
    return tree if _is_current(function, tree) else None


def _compile(
    function: types.FunctionType, tree: ast.FunctionDef, hidden: dict[str, Any]
) -> Callable[..., Any]:
    """Compile ``tree`` to a function with the globals, defaults and closure of ``function``."""
    inner = _code(function, tree, hidden)
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    cells |= {name: types.CellType(value) for name, value in hidden.items()}
    closure = tuple(cells[name] for name in inner.co_freevars)
    new = types.FunctionType(
        inner, function.__globals__, function.__name__, function.__defaults__, closure
    )
    new.__kwdefaults__ = function.__kwdefaults__
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
    name, tree.name = tree.name, _FUNCTION  # its own name in it must stay a global one
    code = compile(ast.fix_missing_locations(module), function.__code__.co_filename, "exec")
    tree.name = name
    outer = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    codes = [c for c in outer.co_consts if isinstance(c, types.CodeType)]
    return next(c for c in codes if c.co_name == _FUNCTION).replace(co_name=name)


def _is_current(function: types.FunctionType, tree: ast.FunctionDef) -> bool:
    """Return False where the file was edited after ``function`` was imported.

    A function may know more names than its source, as test tools rewrite assertions.
    """
    own, read = function.__code__, _code(function, tree, ())
    return set(read.co_names) <= set(own.co_names) and set(read.co_varnames) <= set(own.co_varnames)


class _Sites(ast.NodeTransformer):
    """Replaces each operator of one function by a call of the router.

    Attributes:
        counts: how many sites there are, by the groups of their names: a number in the order of the
            code, alone for the kinds that are :data:`_NUMBERED`, behind the kind for others.
        helpers: hidden name -> rewritten function that the code calls.
    """

    def __init__(
        self,
        cls: type[nn.Module],
        function: types.FunctionType,
        tree: ast.FunctionDef,
        callers: tuple[types.FunctionType, ...],
    ) -> None:
        self.cls, self.function = cls, function
        self.callers = (*callers, function)
        self.counts: Counter[str] = Counter()
        self.helpers: dict[str, Any] = {}
        is_method = any(function in vars(c).values() for c in cls.__mro__)
        self._self = tree.args.args[0].arg if is_method else None
        self._depth = 0
        self._local = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | {
            n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not _is_load(n)
        }

    def _name(self, kind: str) -> str:
        """Return the name of the next site of a kind; it ends in ``f`` in a nested function."""
        group = "" if kind in _NUMBERED else kind
        self.counts[group] += 1
        return f"{group}{self.counts[group] - 1}{'f' if self._depth else ''}"

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
        site = self._name(name)
        self.generic_visit(node)
        return _routed(node, "binary", site, ast.Constant(name), node.left, node.right)

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        """Replace ``a += b`` and the like, where ``a`` is a name."""
        name = _BINARY.get(type(node.op))
        if name is None or not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        site = self._name(name)
        self.generic_visit(node)
        old = ast.Name(node.target.id, ast.Load())
        new = _routed(node, "binary", site, ast.Constant(f"i{name}"), old, node.value)
        return ast.copy_location(ast.Assign([node.target], new), node)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace calls of functions and methods that have a kind, and follow others."""
        target = self._resolve(node.func)
        kind = operator_kind(target)
        if kind:
            site = self._name(kind)
            self.generic_visit(node)
            return _routed(node, "call", site, node.func, *node.args, keywords=node.keywords)
        if target is None and isinstance(node.func, ast.Attribute):
            return self._visit_method(node, node.func)
        return self._follow(node, target)

    def _visit_method(self, node: ast.Call, callee: ast.Attribute) -> ast.AST:
        """Replace ``x.add(y)`` and the like, where ``x`` is not the module itself."""
        kind = operator_kind(callee.attr)
        if self._is_self(callee) or not kind:
            return self._follow(node, None)
        site = self._name(kind)
        self.generic_visit(node)
        arguments = (ast.Constant(callee.attr), callee.value, *node.args)
        return _routed(node, "method", site, *arguments, keywords=node.keywords)

    def _follow(self, node: ast.Call, target: Any) -> ast.AST:
        """Call the rewritten form of a function of the user's, with a router of its own."""
        receiver = None
        if target is None and isinstance(node.func, ast.Attribute):
            target = self._method(node.func)
            if isinstance(target, staticmethod):
                target = target.__func__
            elif self._self is not None:
                receiver = ast.Name(self._self, ast.Load())
        found = self._rewritten(target)
        if found is None:
            return self.generic_visit(node)
        helper, is_numbered = found
        site = self._name("" if is_numbered else "call")
        self.generic_visit(node)
        name = f"__torchq_helper_{len(self.helpers)}__"
        self.helpers[name] = helper
        route = ast.Call(_attribute(_ROUTE, "enter"), [ast.Constant(site)], [])
        first = [] if receiver is None else [receiver]
        new = ast.Call(
            ast.Name(name, ast.Load()),
            [*first, *node.args],
            [*node.keywords, ast.keyword(_ROUTE, route)],
        )
        return ast.copy_location(new, node)

    def _rewritten(self, target: Any) -> tuple[Callable[..., Any], bool] | None:
        if not isinstance(target, types.FunctionType) or target in self.callers:
            return None
        library = (target.__module__ or "").split(".")[0]
        if library in ("torch", "builtins") or len(self.callers) > _DEEPEST:
            return None
        return _Rewriting(self.cls, self.callers).rewrite(target)

    def _resolve(self, node: ast.expr) -> Any:
        """Return the object that a name or a dotted name outside of the function stands for."""
        if isinstance(node, ast.Name) and node.id not in self._local:
            free = self.function.__code__.co_freevars
            if node.id in free:
                cell = (self.function.__closure__ or ())[free.index(node.id)]
                try:
                    return cell.cell_contents
                except ValueError:
                    return None
            return self.function.__globals__.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._resolve(node.value)
            if isinstance(owner, types.ModuleType):
                return getattr(owner, node.attr, None)
        return None

    def _is_self(self, node: ast.Attribute) -> bool:
        is_name = isinstance(node.value, ast.Name)
        return is_name and node.value.id == self._self  # type: ignore[attr-defined]

    def _method(self, node: ast.Attribute) -> Any:
        """Return the function that ``self.name`` or ``super().name`` stands for."""
        if self._self is None:
            return None
        if self._is_self(node):
            return inspect.getattr_static(self.cls, node.attr, None)
        call = node.value
        is_super = isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
        if not is_super or call.func.id != "super" or call.args:  # type: ignore[attr-defined]
            return None
        line = self.cls.__mro__
        here = [c for c in line if self.function in vars(c).values()]
        after = line[line.index(here[0]) + 1 :] if here else ()
        return next((vars(c)[node.attr] for c in after if node.attr in vars(c)), None)


def _is_load(node: ast.Name) -> bool:
    return isinstance(node.ctx, ast.Load)


def _attribute(name: str, attribute: str) -> ast.expr:
    return ast.Attribute(ast.Name(name, ast.Load()), attribute, ast.Load())


def _routed(
    node: ast.AST,
    action: str,
    site: str,
    *args: ast.expr,
    keywords: list[ast.keyword] | None = None,
) -> Any:
    call = ast.Call(_attribute(_ROUTE, action), [ast.Constant(site), *args], keywords or [])
    return ast.copy_location(call, node)

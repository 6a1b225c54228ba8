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

import ast
import inspect
import textwrap
import types
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from torchq.graph.operators import OPERATORS, Operator, operator_of

_ROUTE, _START, _FUNCTION = "__torchq_route__", "__torchq_start__", "__torchq_function__"
_ROWS = [OPERATORS[name] for name in OPERATORS]
_BINARY = {getattr(ast, row.syntax): row.name for row in _ROWS if row.syntax}
#: The kinds of sites that share one count; other operators have their own, so that a new row of
#: the table renames no site.
_NUMBERED = frozenset(["add", "mul", "matmul", "cat", "pool", "activation", "attention"])
#: Classes of torch whose methods are followed from those of subclasses.
_FOLLOWED = frozenset(["Sequential", "_ConvNd", *(row.layer for row in _ROWS)])
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
_OWN = ("children", "named_children")
_LISTING = ("enumerate", "zip", "list", "tuple", "reversed", "iter", "len", "map")
_ITEMS = ("items", "values", "keys")
_CHILDREN = ("modules", "named_modules", "_modules")
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


@dataclass(frozen=True)
class Rewritten:
    """A function whose operators are handed to a router, and their places in the order of code.

    Some of them may be numbered, and the code may iterate over the children of the module.
    """

    forward: Callable[..., Any]
    sites: tuple[SourceSite, ...]
    is_numbered: bool
    lists_children: bool


def rewrite_forward(cls: type[nn.Module], start: Callable[[Any], Any]) -> Rewritten | None:
    """Return the forward of ``cls`` with its operators handed to a router, or None.

    ``start`` is called with the module at the beginning of each call and returns the router, which
    has the methods of :class:`torchq.nn.calls.routes.Route`. Functions and methods that the
    forward calls by name are followed. The signature stays.
    """
    function = inspect.getattr_static(cls, "forward", None)
    if not isinstance(function, types.FunctionType):
        return None
    try:
        return _rewrite(function, cls, (), start)
    except (SyntaxError, RecursionError, _Opaque):  # code that cannot stand outside of its class
        return None


class _Opaque(Exception):
    """The code does something with its module that another object in its place would change."""


def _rewrite(
    function: types.FunctionType,
    cls: type[nn.Module],
    callers: tuple[types.FunctionType, ...],
    start: Callable[[Any], Any] | None = None,
    paths: Mapping[str, str] = types.MappingProxyType({}),
) -> Rewritten | None:
    """Return ``function`` rewritten, or None; ``paths`` are its arguments that are known."""
    inner = getattr(function, "__wrapped__", None)
    if inner is not None:  # The code of a decorator runs around the rewritten function.
        reaches = _is_function(inner) and (start is not None or _hands_on_keywords(function))
        found = _rewrite(inner, cls, callers, start, paths) if reaches else None
        around = None if found is None else _rewrapped(function, inner, found.forward)
        return None if found is None or around is None else replace(found, forward=around)
    tree = _parse(function)
    if tree is None:
        return None
    sites = _Sites(cls, function, tree, callers, paths)
    body = [sites.visit(statement) for statement in tree.body]
    if not sites.found and (start is not None or not sites.lists_children):
        return None
    hidden: dict[str, Any] = dict(sites.helpers)
    if start is None:
        tree.args.kwonlyargs.append(ast.arg(_ROUTE))
        tree.args.kw_defaults.append(None)
    else:
        hidden[_START] = start
        begin = ast.Call(_name(_START), [_name(tree.args.args[0].arg)], [])
        body.insert(0, ast.Assign([ast.Name(_ROUTE, ast.Store())], begin))
    tree.body = body
    new = _compile(function, tree, hidden)
    return Rewritten(new, tuple(sites.found), "" in sites.counts, sites.lists_children)


def _name(name: str) -> ast.Name:
    return ast.Name(name, ast.Load())


def _is_function(value: Any) -> bool:
    return isinstance(value, types.FunctionType)


def _rewrapped(
    wrapper: types.FunctionType, inner: types.FunctionType, new: Callable[..., Any]
) -> Callable[..., Any] | None:
    """Return what a decorator made of ``inner``, around ``new`` instead; None if that is hidden."""
    cells = wrapper.__closure__ or ()
    try:
        held = [cell.cell_contents is inner for cell in cells]
    except ValueError:  # a name that is not bound yet
        return None
    if not any(held):
        return None
    pairs = zip(cells, held, strict=True)
    closure = tuple(types.CellType(new) if is_inner else cell for cell, is_inner in pairs)
    copy = _like(wrapper, wrapper.__code__, closure)
    vars(copy).update({**vars(wrapper), "__wrapped__": new})
    return copy


def _hands_on_keywords(wrapper: types.FunctionType) -> bool:
    """Return True if what a decorator made passes on all keywords: the router is one of them."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(wrapper.__code__))).body[0]
    except (OSError, SyntaxError):
        return False
    rest = tree.args.kwarg if isinstance(tree, ast.FunctionDef) else None
    if rest is None:
        return False
    names = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == rest.arg]
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call)]
    handed = [k.value in names for call in calls for k in call.keywords if k.arg is None]
    return all(map(_is_load, names)) and any(handed)


def _like(
    function: types.FunctionType, code: types.CodeType, closure: tuple[types.CellType, ...]
) -> types.FunctionType:
    """Return a function of other code with the globals and defaults of ``function``."""
    own = (function.__globals__, function.__name__, function.__defaults__)
    new = types.FunctionType(code, *own, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


def _parse(function: types.FunctionType) -> ast.FunctionDef | None:
    try:
        source = textwrap.dedent(inspect.getsource(function))
        module = ast.parse(source)
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
    name, tree.name = tree.name, _FUNCTION  # its own name in it must stay a global one
    code = compile(ast.fix_missing_locations(module), function.__code__.co_filename, "exec")
    tree.name = name
    outer = next(c for c in code.co_consts if isinstance(c, types.CodeType))
    codes = [c for c in outer.co_consts if isinstance(c, types.CodeType)]
    return next(c for c in codes if c.co_name == _FUNCTION).replace(co_name=name)


def _is_current(function: types.FunctionType, tree: ast.FunctionDef) -> bool:
    """Return False where the file was edited after ``function`` was imported."""
    own, read = function.__code__, _code(function, tree, ())
    return set(read.co_names) <= set(own.co_names) and set(read.co_varnames) <= set(own.co_varnames)


class _Sites(ast.NodeTransformer):
    """Replaces each operator of one function by a call of the router.

    Attributes:
        counts: how many sites there are, by the groups of their names.
        found: the sites, with those of functions that are called.
        helpers: hidden name -> rewritten function that the code calls.
        lists_children: True if the code iterates over the children of the module.
    """

    def __init__(
        self,
        cls: type[nn.Module],
        function: types.FunctionType,
        tree: ast.FunctionDef,
        callers: tuple[types.FunctionType, ...],
        paths: Mapping[str, str],
    ) -> None:
        self.cls, self.function = cls, function
        self.callers = (*callers, function)
        self.counts: Counter[str] = Counter()
        self.found: list[SourceSite] = []
        self.helpers: dict[str, Any] = {}
        self.lists_children = False
        is_method = any(_defines(c, function) for c in cls.__mro__)
        self._self = tree.args.args[0].arg if is_method else None
        self._is_container = issubclass(cls, _CONTAINERS)
        self._depth = 0
        stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not _is_load(n)}
        self._local = {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)} | stored
        self._paths = {name: path for name, path in paths.items() if name not in stored}

    def _name(self, group: str) -> str:
        """Return the name of the next site of a group; it ends in ``f`` in a nested function."""
        self.counts[group] += 1
        return f"{group}{self.counts[group] - 1}{'f' if self._depth else ''}"

    def _site(
        self, row: Operator, args: Sequence[ast.expr], keywords: Sequence[ast.keyword] = ()
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
        return ".".join([self._paths[node.id], *names]) if node.id in self._paths else ""

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
        return _routed(node, "binary", site, ast.Constant(name), node.left, node.right)

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

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Replace calls of functions and methods that have a row, and follow others."""
        target = self._resolve(node.func)
        row = _routed_row(target)
        if row is not None:
            site = self._site(row, node.args, node.keywords)
            self.generic_visit(node)
            return _routed(node, "call", site, node.func, *node.args, keywords=node.keywords)
        if target is None and isinstance(node.func, ast.Attribute):
            return self._visit_method(node, node.func)
        return self._follow(node, target)

    def _visit_method(self, node: ast.Call, callee: ast.Attribute) -> ast.AST:
        """Replace ``x.add(y)`` and the like, where ``x`` is not the module itself."""
        if self._is_self(callee):
            listed = callee.attr in _OWN or (self._is_container and callee.attr in _ITEMS)
            if listed and not node.args:
                return self._own(node, callee.attr)
            return self._follow(node, None)
        row = _routed_row(callee.attr)
        if row is None:
            return self._follow(node, None)
        site = self._site(row, [callee.value, *node.args], node.keywords)
        self.generic_visit(node)
        arguments = (ast.Constant(callee.attr), callee.value, *node.args)
        return _routed(node, "method", site, *arguments, keywords=node.keywords)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Leave attributes of the module itself; ``self`` alone stands for its children."""
        if not self._is_self(node):
            return self.generic_visit(node)
        if node.attr in _OWN:
            raise _Opaque
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        """Refuse a container that is handed on: another object would meet the new children."""
        if self._is_container and node.id == self._self and _is_load(node):
            raise _Opaque
        return node

    def _own(self, node: ast.AST, how: str) -> Any:
        self.lists_children = True
        call = ast.Call(_attribute(_ROUTE, "own"), [ast.Constant(how)], [])
        return ast.copy_location(call, node)

    def _listed(self, node: ast.expr, how: str = "iterated") -> ast.expr:
        """Return what has the author's children alone, for ``self`` where it is a container."""
        is_self = isinstance(node, ast.Name) and node.id == self._self
        found: ast.expr = self._own(node, how) if is_self and self._is_container else node
        return found

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        """Replace ``self[index]`` where the module is a container."""
        if not isinstance(node.slice, ast.Slice) and _is_load(node):
            is_keyed = issubclass(self.cls, nn.ModuleDict)
            node.value = self._listed(node.value, "children" if not is_keyed else "mapping")
        return self.generic_visit(node)

    def visit_For(self, node: ast.For) -> ast.AST:
        """Replace ``for child in self`` where the module is a container."""
        node.iter = self._listed(node.iter)
        return self.generic_visit(node)

    visit_comprehension = visit_For  # type: ignore[assignment]

    def _follow(self, node: ast.Call, target: Any) -> ast.AST:
        """Call the rewritten form of a function of the user's, with a router of its own."""
        if isinstance(node.func, ast.Name) and node.func.id in _LISTING:
            node.args = [self._listed(argument) for argument in node.args]
        receiver = None
        if target is None and isinstance(node.func, ast.Attribute):
            target = self._method(node.func)
            if isinstance(target, staticmethod):
                target = target.__func__
            elif self._self is not None:
                receiver = _name(self._self)
        found = self._rewritten(target, node, receiver is not None)
        if found is None:
            return self.generic_visit(node)
        site = self._name("" if found.is_numbered and not _is_torchs(target) else "call")
        self.lists_children |= found.lists_children
        self.found += [replace(inner, name=f"{site}.{inner.name}") for inner in found.sites]
        self.generic_visit(node)
        name = f"__torchq_helper_{len(self.helpers)}__"
        self.helpers[name] = found.forward
        route = ast.Call(_attribute(_ROUTE, "enter"), [ast.Constant(site)], [])
        args = node.args if receiver is None else [receiver, *node.args]
        new = ast.Call(_name(name), args, [*node.keywords, ast.keyword(_ROUTE, route)])
        return ast.copy_location(new, node)

    def _rewritten(self, target: Any, node: ast.Call, is_method: bool) -> Rewritten | None:
        if not isinstance(target, types.FunctionType) or target in self.callers:
            return None
        library = (target.__module__ or "").split(".")[0]
        is_foreign = library in ("torch", "builtins") and not _is_torchs(target)
        if is_foreign or len(self.callers) > _DEEPEST:
            return None
        code = inspect.unwrap(target).__code__
        names = code.co_varnames[is_method : code.co_argcount]
        given = dict(zip(names, node.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in node.keywords if keyword.arg}
        paths = {name: path for name, value in given.items() if (path := self._path(value))}
        return _rewrite(target, self.cls, self.callers, paths=paths)

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
        here = [c for c in line if _defines(c, self.function)]
        after = line[line.index(here[0]) + 1 :] if here else ()
        return next((vars(c)[node.attr] for c in after if node.attr in vars(c)), None)


def _defines(cls: type, function: types.FunctionType) -> bool:
    """Return True if a function is defined in a class, decorated or not."""
    return any(
        inspect.unwrap(value) is function for value in vars(cls).values() if _is_function(value)
    )


def _is_load(node: ast.Name | ast.Subscript) -> bool:
    return isinstance(node.ctx, ast.Load)


def _attribute(name: str, attribute: str) -> ast.expr:
    return ast.Attribute(_name(name), attribute, ast.Load())


def _routed(
    node: ast.AST, action: str, site: str, *args: ast.expr, keywords: Sequence[ast.keyword] = ()
) -> Any:
    call = ast.Call(_attribute(_ROUTE, action), [ast.Constant(site), *args], [*keywords])
    return ast.copy_location(call, node)


def _routed_row(target: Any) -> Operator | None:
    """Return the row of a function or method that a router carries out."""
    row = None if target is None or isinstance(target, nn.Module) else operator_of(target)
    return row if row is not None and (row.module or row.layer) else None


def _is_torchs(target: Any) -> bool:
    """Return True for methods of the layers of torch, which subclasses call."""
    home, owner = getattr(target, "__module__", None) or "", target.__qualname__.partition(".")[0]
    return home.startswith("torch.nn.modules.") and owner in _FOLLOWED

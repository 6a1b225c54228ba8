"""Small faults in Python sources, as text: what benchmarks/mutation.py plants one at a time.

A mutant replaces one stretch of a source line. Kinds are the ones of the literature on mutation
testing (arithmetic, relational, logical and constant replacement, statement deletion) and a swap of
functions that come in pairs, such as ``amin`` and ``amax``. Annotations, docstrings, what stands
inside ``raise``, ``assert`` or a call of ``warnings.warn``, and the functions in ``SENTENCES`` are
left alone: a wrong sentence is no wrong number.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass

ARITHMETIC: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "/"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "*"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
}
RELATIONAL: dict[type[ast.cmpop], tuple[str, str]] = {
    ast.Lt: ("<", "<="),
    ast.LtE: ("<=", "<"),
    ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"),
    ast.Eq: ("==", "!="),
    ast.NotEq: ("!=", "=="),
    ast.Is: ("is", "is not"),
    ast.IsNot: ("is not", "is"),
    ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"),
}
# Functions of torch and Python that are called alike and mean the opposite.
OPPOSITES = [
    ("min", "max"),
    ("amin", "amax"),
    ("minimum", "maximum"),
    ("argmin", "argmax"),
    ("floor", "ceil"),
    ("all", "any"),
    ("zeros", "ones"),
    ("zeros_like", "ones_like"),
    ("startswith", "endswith"),
]
# Methods that say what an object is.
SENTENCES = ("__str__", "__repr__", "extra_repr")
OPPOSITE = {a: b for pair in OPPOSITES for a, b in (pair, pair[::-1])}


@dataclass(frozen=True)
class Mutant:
    """One fault: in ``path`` the text from ``start`` to ``end`` becomes ``replacement``.

    ``line`` and ``column`` say where the text begins, ``source`` is that line as it is, and
    ``function`` the dotted name of the function around it. ``text`` is what is replaced.
    """

    path: str
    line: int
    column: int
    function: str
    kind: str
    source: str
    start: int
    end: int
    text: str
    replacement: str

    @property
    def key(self) -> str:
        """A name that stays when lines are added elsewhere in the file."""
        column = self.column - (len(self.source) - len(self.source.lstrip()))
        change = f"{self.text} at {column} -> {self.replacement or 'nothing'}"
        return f"{self.path}:{self.function}: {self.source.strip()}: {change}"

    def apply(self, source: str) -> str:
        """Return the text of the file with this fault."""
        return source[: self.start] + self.replacement + source[self.end :]


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Return every mutant of one file; a few may be no Python, see :func:`is_valid`."""
    finder = _Finder(path, source)
    finder.visit(ast.parse(source))
    return finder.mutants


def is_valid(mutant: Mutant, source: str) -> bool:
    """Return True if the file with a mutant is still Python, and another program."""
    try:
        return ast.dump(ast.parse(mutant.apply(source))) != ast.dump(ast.parse(source))
    except SyntaxError:
        return False


class _Finder(ast.NodeVisitor):
    """Walks over one file and notes the mutants of each node."""

    def __init__(self, path: str, source: str) -> None:
        self.mutants: list[Mutant] = []
        self._path = path
        self._source = source
        self._lines = source.splitlines(keepends=True)
        self._line_starts = [0]
        for line in self._lines:
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._scope: list[str] = []

    # What is left alone.

    def visit_Raise(self, node: ast.Raise) -> None:
        """Leave errors alone."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """Leave assertions alone."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Leave formatted texts alone."""

    def visit_arg(self, node: ast.arg) -> None:
        """Leave annotations of parameters alone."""

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Read the value, not the annotation."""
        if node.value is not None:
            self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        """Leave imports for type checkers alone."""
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        """Read defaults and statements of a function, under its name."""
        if node.name in SENTENCES:
            return
        self._scope.append(node.name)
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        for statement in node.body:
            self.visit(statement)
        self._scope.pop()

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        """Read the statements of a class, under its name."""
        self._scope.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self._scope.pop()

    # What is replaced.

    def visit_BinOp(self, node: ast.BinOp) -> None:
        """Replace an arithmetic operator."""
        if (
            type(node.op) in ARITHMETIC
            and not _is_text(node.left)
            and not _is_text(node.right)
        ):
            self._operator(
                "arithmetic", node.left, node.right, *ARITHMETIC[type(node.op)]
            )
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        """Replace a comparison by its neighbour."""
        operands = [node.left, *node.comparators]
        for operator, left, right in zip(
            node.ops, operands, operands[1:], strict=False
        ):
            self._operator("relational", left, right, *RELATIONAL[type(operator)])
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        """Replace ``and`` by ``or``, and the reverse."""
        before, after = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        self._operator("logical", node.values[0], node.values[1], before, after)
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        """Take ``not`` or a sign away."""
        if isinstance(node.op, (ast.Not, ast.USub)):
            begin = self._offset(node.lineno, node.col_offset)
            end = self._offset(node.operand.lineno, node.operand.col_offset)
            self._add("logical", node.lineno, begin, end, "")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        """Move a number by one, turn a truth value around."""
        if isinstance(node.value, bool):
            self._replace("constant", node, str(not node.value))
        elif isinstance(node.value, (int, float)):
            self._replace("constant", node, repr(node.value + 1))

    def visit_keyword(self, node: ast.keyword) -> None:
        """Leave alone what only refuses wrong programs: ``zip(strict=)``, ``field(kw_only=)``."""
        if node.arg not in ("strict", "kw_only"):
            self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> None:
        """Swap a function of Python for its opposite; amax is a variable as often as not."""
        if node.id in ("min", "max", "all", "any") and isinstance(node.ctx, ast.Load):
            self._replace("opposite", node, OPPOSITE[node.id])

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """Swap a method for its opposite."""
        if node.attr in OPPOSITE and isinstance(node.ctx, ast.Load):
            end = self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
            begin = end - len(node.attr)
            self._add(
                "opposite",
                node.end_lineno or node.lineno,
                begin,
                end,
                OPPOSITE[node.attr],
            )
        self.generic_visit(node)

    def visit_Expr(self, node: ast.Expr) -> None:
        """Delete a call that stands alone; a docstring or a warning stays."""
        if isinstance(node.value, ast.Constant):
            return
        if (
            isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "warnings.warn"
        ):
            return
        self._replace("statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        """Delete an assignment like ``a += b``, and replace its operator."""
        if _is_text(node.value):
            return
        self._replace("statement", node, "pass")
        if type(node.op) in ARITHMETIC:
            before, after = ARITHMETIC[type(node.op)]
            self._operator("arithmetic", node.target, node.value, before, after)
        self.generic_visit(node)

    def _operator(
        self, kind: str, left: ast.expr, right: ast.expr, before: str, after: str
    ) -> None:
        """Replace the operator that stands between two operands."""
        begin = self._offset(left.end_lineno or left.lineno, left.end_col_offset or 0)
        end = self._offset(right.lineno, right.col_offset)
        pattern = re.escape(before).replace(r"\ ", r"\s+")
        where = re.search(pattern, self._source[begin:end])
        if where is not None:
            line = left.end_lineno or left.lineno
            line += self._source[begin : begin + where.start()].count("\n")
            self._add(kind, line, begin + where.start(), begin + where.end(), after)

    def _replace(self, kind: str, node: ast.expr | ast.stmt, replacement: str) -> None:
        begin = self._offset(node.lineno, node.col_offset)
        end = self._offset(node.end_lineno or node.lineno, node.end_col_offset or 0)
        self._add(kind, node.lineno, begin, end, replacement)

    def _add(
        self, kind: str, line: int, begin: int, end: int, replacement: str
    ) -> None:
        function = ".".join(self._scope)
        source = self._lines[line - 1].rstrip("\n")
        replaced = self._source[begin:end]
        column = begin - self._line_starts[line - 1]
        self.mutants.append(
            Mutant(
                self._path,
                line,
                column,
                function,
                kind,
                source,
                begin,
                end,
                replaced,
                replacement,
            )
        )

    def _offset(self, line: int, column: int) -> int:
        """Return the place in the text of a line and a column, which ast counts in bytes."""
        before = self._lines[line - 1].encode()[:column].decode()
        return self._line_starts[line - 1] + len(before)


def _is_text(node: ast.expr) -> bool:
    """Tell whether an operand is a text, whose sums are sentences."""
    return isinstance(node, ast.JoinedStr) or (
        isinstance(node, ast.Constant) and isinstance(node.value, str)
    )

"""The shared meaning of "pass": a plain function that rewrites a graph.

A pass states in its docstring which pattern it needs (its precondition) and what it leaves (its
postcondition), as two small pictures or sentences::

    def cancel_qdq(editor: GraphEditor, node: fx.Node) -> bool:
        '''Cancel a Dequantize whose result is quantized to the same codes.

        Before::

            codes -> Dequantize(q) -> Quantize(q) -> reader

        After::

            codes -> reader
        '''

A pass returns whether it changed anything. Passes are kept in explicit ordered lists, so that a
program can list them with :func:`describe_pass` and run them with :func:`run_to_fixpoint`.
"""

from __future__ import annotations

import inspect
import itertools
import re
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

__all__ = ["PassInfo", "describe_pass", "run_to_fixpoint"]

Pass = TypeVar("Pass")


@dataclass(frozen=True)
class PassInfo:
    """The description of a pass.

    Attributes:
        name: the name of the function.
        summary: the first line of its docstring.
        before: the pattern that the pass replaces, its precondition.
        after: what stands there afterwards, its postcondition.
    """

    name: str
    summary: str
    before: str
    after: str


def describe_pass(function: Callable[..., Any]) -> PassInfo:
    """Return what the docstring of a pass says about it.

    Args:
        function: a pass, whose docstring has a ``Before::`` and an ``After::`` picture, or
            sentences that start with ``Before:`` and ``After:``.

    Returns:
        The description; a part that the docstring lacks is an empty string.
    """
    text = inspect.getdoc(function) or ""
    return PassInfo(
        name=getattr(function, "__name__", type(function).__name__),
        summary=text.partition("\n")[0],
        before=_condition(text, "Before"),
        after=_condition(text, "After"),
    )


def _condition(text: str, title: str) -> str:
    """Return the indented block below ``title::``, or the sentences after ``title:``."""
    lines = iter(text.splitlines())
    if any(line.strip() == f"{title}::" for line in lines):
        block = itertools.takewhile(lambda line: not line or line.startswith(" "), lines)
        return textwrap.dedent("\n".join(block)).strip("\n")
    found = re.search(rf"\b{title}: (.+?)(?=\s+(?:Before|After):|\n\n|\Z)", text, re.DOTALL)
    return "" if found is None else " ".join(found.group(1).split())


def run_to_fixpoint(passes: Sequence[Pass], apply: Callable[[Pass], bool]) -> None:
    """Apply passes until none of them changes anything.

    After a pass that changed something, the first one is tried again: it may have found new work.

    Args:
        passes: in order of precedence.
        apply: runs one pass on the whole graph and returns whether it changed anything.

    Example:
        >>> words = ["b", "a"]
        >>> def sort(words): before = list(words); words.sort(); return words != before
        >>> run_to_fixpoint([sort], lambda rewrite: rewrite(words))
        >>> words
        ['a', 'b']
    """
    while any(apply(rewrite) for rewrite in passes):
        pass

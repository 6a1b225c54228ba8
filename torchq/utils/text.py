"""Text for the terminal: aligned tables and wrapped paragraphs, as wide as the window."""

import ast
import shutil
import textwrap
from collections.abc import Sequence

_GAP = "  "
_NARROWEST = 8
#: How many places with the same finding are named.
_NAMED = 6


def _terminal_width() -> int:
    """Return the columns of the terminal; 120 where the output goes to a file or a pipe."""
    return shutil.get_terminal_size(fallback=(120, 24)).columns


def table(
    rows: Sequence[Sequence[str]], footer: str = "", *, width: int | None = None
) -> str:
    """Return ``rows`` as aligned columns above a footer; wide cells wrap between words."""
    limit = _terminal_width() if width is None else width
    columns = list(zip(*rows, strict=True))
    longest = [
        max(len(word) for cell in cells for word in cell.split() or [""])
        for cells in columns
    ]
    widths = _fit([max(map(len, cells)) for cells in columns], longest, limit)
    lines = []
    for row in rows:
        cells = [
            [cell]
            if len(cell) <= size
            else textwrap.wrap(
                cell, size, break_long_words=False, break_on_hyphens=False
            )
            for cell, size in zip(row, widths, strict=True)
        ]
        for number in range(max(map(len, cells))):
            parts = [cell[number] if number < len(cell) else "" for cell in cells]
            padded = (
                part.ljust(size) for part, size in zip(parts, widths, strict=True)
            )
            lines.append(_GAP.join(padded).rstrip())
    return "\n".join([*lines, footer] if footer else lines)


def _fit(widths: list[int], longest: list[int], limit: int) -> list[int]:
    """Narrow the widest columns, one character at a time, until the row fits or words are left."""
    widths = list(widths)
    excess = sum(widths) + len(_GAP) * (len(widths) - 1) - limit
    for _ in range(excess):
        wide = [
            i for i, size in enumerate(widths) if size > max(longest[i], _NARROWEST)
        ]
        if not wide:
            break
        widths[max(wide, key=widths.__getitem__)] -= 1
    return widths


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return ``rows`` as a Markdown table; the first one holds the headings."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [rows[0], ["-" * size for size in widths], *rows[1:]]
    return "\n".join(
        "| "
        + " | ".join(cell.ljust(size) for cell, size in zip(line, widths, strict=True))
        + " |"
        for line in lines
    )


def wrap(text: str, *, indent: str = "", width: int | None = None) -> str:
    """Return ``text``, lines broken at ``width`` too, where later lines begin with ``indent``."""
    limit = _terminal_width() if width is None else width
    return "\n".join(
        textwrap.fill(line, limit, subsequent_indent=indent, break_on_hyphens=False)
        for line in text.splitlines()
    )


def wrap_code(
    text: str, *, first: str = "", indent: str = "", width: int | None = None
) -> str:
    """Return lines of code, broken at ``width`` where they stay what they are to Python.

    That is inside brackets, where later lines begin with ``indent``, and in comments. What is no
    code is wrapped between words. The text begins with ``first``, code on later lines with nothing,
    so that all of it can be pasted.
    """
    limit = _terminal_width() if width is None else width
    lines = []
    for number, line in enumerate(text.splitlines()):
        begin = "" if number else first
        if _is_code(line):
            lines += _broken_code(line, begin, indent, limit)
        else:
            lines.append(wrap(begin + line, indent=indent, width=width))
    return "\n".join(lines)


def _is_code(line: str) -> bool:
    try:
        ast.parse(line.strip())
    except SyntaxError:
        return False
    return True


def _broken_code(line: str, first: str, indent: str, limit: int) -> list[str]:
    """Return a line of code as several, no longer than the limit where there is a place."""
    code, mark, comment = line.partition("  # ")
    head, *parts = _parts_of_code(code)
    lines = [first + head]
    for part in parts:
        if len(lines[-1]) + 1 + len(part) <= limit:
            lines[-1] += f" {part}"
        else:
            lines.append(indent + part)
    if mark:
        in_one_line = f"{lines[-1]}  # {comment}"
        if len(in_one_line) <= limit:
            lines[-1] = in_one_line
        else:
            begin = f"{indent}# "
            lines += textwrap.wrap(
                begin + comment, limit, subsequent_indent=begin, break_on_hyphens=False
            )
    return lines


def _parts_of_code(code: str) -> list[str]:
    """Return code, split at the spaces inside brackets and outside of strings."""
    parts = [""]
    depth = 0
    quote = ""
    for character in code:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        else:
            depth += (character in "([{") - (character in ")]}")
        if character == " " and depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many there are beside them."""
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(name or "(root)" for name in names[:_NAMED]) + more


def bullets(findings: Sequence[str], *, width: int | None = None) -> str:
    """Return findings as a list, one line or paragraph each, the places of one finding together."""
    places: dict[str, list[str]] = {}
    for finding in findings:
        place, _, message = finding.partition(": ")
        places.setdefault(message, []).append(place)
    lines = []
    for message, names in places.items():
        row = f"- {listed(names)}: {message}" if message else f"- {listed(names)}"
        lines.append(wrap(row, indent="  ", width=width))
    return "\n".join(lines)

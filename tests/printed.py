"""Compare what a page shows with what its code prints.

Words must be equal. Numbers may be those of another machine: trained weights and what follows from
them differ a little where sums are added in another order. So a number may be off by a tenth, or by
what the caller says, or by two units of its last digit. One in exponent notation, which is a
rounding error or estimates one, may be any number. White space, rulers and bars of ``#`` behind a
number do not count, and ``...`` stands for any words.
"""

from __future__ import annotations

import re
from itertools import zip_longest

__all__ = ["differences"]

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")
_RULER = re.compile(r"-{3,}")
_BAR = re.compile(r" #+$")


def differences(shown: str, printed: str, tolerance: float = 0.1) -> list[str]:
    """Return one sentence for each line that is not as shown; no sentence if all agree.

    Args:
        shown: by a page.
        printed: by its code.
        tolerance: the largest relative difference of numbers.
    """
    lines = zip_longest(_lines(shown), _lines(printed), fillvalue="(no line)")
    return [
        f"shown {ours!r}, printed {theirs!r}"
        for ours, theirs in lines
        if not _same(ours, theirs, tolerance)
    ]


def _lines(text: str) -> list[str]:
    lines = (_RULER.sub("---", " ".join(line.split())) for line in text.splitlines())
    return [_BAR.sub("", line) for line in lines if line]


def _same(shown: str, printed: str, tolerance: float) -> bool:
    words = r"(.*)".join(
        re.escape(part) for part in _NUMBER.sub("#", shown).split("...")
    )
    if "..." in shown:
        return re.fullmatch(words, _NUMBER.sub("#", printed)) is not None
    if _NUMBER.sub("#", shown) != _NUMBER.sub("#", printed):
        return False
    pairs = zip(
        _NUMBER.findall(shown),
        _NUMBER.findall(printed),
        strict=True,
    )
    return all(_near(ours, theirs, tolerance) for ours, theirs in pairs)


def _near(shown: str, printed: str, tolerance: float) -> bool:
    if "e" in shown or "e" in printed:
        return True
    ours = float(shown.replace(",", ""))
    theirs = float(printed.replace(",", ""))
    last_digit = 10.0 ** -len(shown.partition(".")[2])
    return abs(ours - theirs) <= max(tolerance * abs(ours), 2 * last_digit)

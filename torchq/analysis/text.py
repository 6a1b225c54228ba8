"""Numbers of reports as text and as JSON data."""

from __future__ import annotations

import math
from typing import Any


def bar(share: float, width: int = 20) -> str:
    """Return a bar of at most ``width`` characters for a share between 0 and 1."""
    if not math.isfinite(share):
        return "?"
    return "#" * round(min(max(share, 0.0), 1.0) * width)


def decibel_text(value: float) -> str:
    """Return a ratio in dB for a reader: ``exact`` without noise, ``not finite`` for NaN."""
    if math.isnan(value):
        return "not finite"
    return "exact" if value == math.inf else f"{value:.1f} dB"


def percent_text(share: float) -> str:
    """Return a share between 0 and 1 in percent; tiny ones are not rounded to 0."""
    if share == 0:
        return "0"
    return f"{share:.2%}" if share >= 0.0001 else f"{share:.1e}"


def plain(value: Any, digits: int | None = None) -> Any:
    """Return JSON data of so many significant digits; None stands for what is not finite."""
    if isinstance(value, dict):
        return {key: plain(item, digits) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item, digits) for item in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return value if digits is None else float(f"{value:.{digits}g}")

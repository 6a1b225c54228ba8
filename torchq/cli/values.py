"""Types of arguments: each raises an error that says what was expected."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

__all__ = ["image_size", "number", "whole"]

#: More than any count of batches, images or pixels; less than what C libraries refuse.
_MOST = 2**31 - 1


def whole(least: int, most: int = _MOST) -> Callable[[str], int]:
    """Return a type for whole numbers from ``least`` to ``most``."""
    expected = f"{least} or more" if most == _MOST else f"{least} to {most}"

    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(f"got {text!r}; expected a whole number, {expected}")
        return value

    return convert


def number(*, above: float = -math.inf, least: float = -math.inf) -> Callable[[str], float]:
    """Return a type for finite numbers that are larger than ``above`` and at least ``least``."""
    bounds = [f" > {above:g}"] * math.isfinite(above) + [f" >= {least:g}"] * math.isfinite(least)

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value > above and value >= least):
            raise argparse.ArgumentTypeError(
                f"got {text!r}; expected a finite number{''.join(bounds)}"
            )
        return value

    return convert


def image_size(text: str) -> tuple[int, int]:
    """Return height and width, from ``224`` or ``HEIGHTxWIDTH``."""
    if not re.fullmatch(r"[1-9]\d{0,3}(x[1-9]\d{0,3})?", text, re.ASCII):
        raise argparse.ArgumentTypeError(
            f"got {text!r}; expected pixels such as 224, or HEIGHTxWIDTH such as 480x640"
        )
    height, _, width = text.partition("x")
    return int(height), int(width or height)

"""The values of a descriptor in one form: numbers, tuples of numbers, sorted pairs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchq.errors import ConfigError
from torchq.formats import CATALOG
from torchq.utils import short_repr

__all__ = [
    "FLOAT32_MAX",
    "Range",
    "finite_float",
    "largest",
    "normalize_amin",
    "normalize_axes",
    "normalize_bits",
    "normalize_options",
    "normalize_range",
    "shape_of",
    "tuples_to_lists",
]

Range = float | tuple[Any, ...]

FLOAT32_MAX = 3.4028234663852886e38
_MAX_DIMS = 8


def _is_sequence(value: Any) -> bool:
    """Return True for a list, tuple or the like, False for a string."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def normalize_bits(value: Any) -> int | tuple[int, int]:
    """Return an integer width, or a pair of exponent and mantissa bits that is a format."""
    if type(value) is int:
        return value
    if not _is_sequence(value):
        raise ConfigError(
            f"num_bits: got {short_repr(value)} ({type(value).__name__}); "
            "expected an integer or (exponent, mantissa) bits"
        )
    pair = tuple(value[:3])
    is_pair = len(pair) == 2 and all(type(bits) is int and 0 <= bits < 16 for bits in pair)
    if not is_pair or "e{}m{}".format(*pair) not in CATALOG:
        raise ConfigError(
            f"num_bits: got {short_repr(tuple(value))}; "
            "expected (4, 3), (5, 2), (3, 2), (2, 3) or (2, 1) for a float format"
        )
    return pair[0], pair[1]


def normalize_axes(value: Any) -> tuple[int, ...] | None:
    """Return the axes as a tuple of distinct integers, or None."""
    if value is None:
        return None
    axes = tuple(value) if _is_sequence(value) else (value,)
    if not axes or any(type(axis) is not int for axis in axes) or len(set(axes)) != len(axes):
        raise ConfigError(
            f"axis: got {short_repr(value)}; expected None, an integer or distinct integers: "
            "the axes that keep their own amax"
        )
    return axes


def normalize_range(
    field: str, value: Any, *, minimum: float = 0.0, maximum: float = FLOAT32_MAX, depth: int = 0
) -> Range:
    """Return a float, or nested tuples of floats with equal lengths.

    Args:
        field: the name of the field, for error texts.
        value: a number, nested sequences, or anything with ``tolist``.
        minimum: the smallest number allowed.
        maximum: the largest number allowed.
        depth: the number of dimensions around ``value``.

    Raises:
        ConfigError: not such numbers; the text names the field.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not _is_sequence(value):
        return finite_float(field, value, minimum=minimum, maximum=maximum)
    if depth == _MAX_DIMS or not len(value):
        what = "an empty sequence" if depth < _MAX_DIMS else f"more than {_MAX_DIMS} dimensions"
        raise ConfigError(f"{field}: got {what}; expected a number or a sequence of numbers")
    items = tuple(
        normalize_range(field, item, minimum=minimum, maximum=maximum, depth=depth + 1)
        for item in value
    )
    if len({shape_of(item) for item in items}) > 1:
        raise ConfigError(
            f"{field}: got rows of different lengths in {short_repr(value)}; expected equal lengths"
        )
    return items


def normalize_amin(value: Any) -> Range:
    """Return the lower ends of ranges, which are at most 0; see :func:`normalize_range`."""
    return normalize_range("amin", value, minimum=-FLOAT32_MAX, maximum=0.0)


def shape_of(value: Range) -> tuple[int, ...]:
    """Return the shape of nested tuples."""
    return (len(value), *shape_of(value[0])) if isinstance(value, tuple) else ()


def largest(value: Range) -> float:
    """Return the largest magnitude of nested tuples."""
    return max(map(largest, value)) if isinstance(value, tuple) else abs(value)


def finite_float(
    field: str, value: Any, *, minimum: float = 0.0, maximum: float = FLOAT32_MAX
) -> float:
    """Return ``value`` as a float that float32 can hold.

    Args:
        field: the name of the field, for error texts.
        value: what was given for it.
        minimum: the smallest value allowed.
        maximum: the largest value allowed.

    Raises:
        ConfigError: not a number, too small, too large, NaN, or beyond the largest float32.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(
            f"{field}: got {short_repr(value)} ({type(value).__name__}); "
            "expected a number, a sequence, an array or a tensor"
        )
    if not minimum <= value <= maximum:
        bound = f">= {minimum:g}" if maximum == FLOAT32_MAX else f"<= {maximum:g}"
        raise ConfigError(
            f"{field}: got {short_repr(value)}; "
            f"expected a finite number {bound} that float32 can hold"
        )
    return float(value)


def normalize_options(value: Any) -> tuple[tuple[str, Any], ...]:
    """Return the options as sorted pairs, which can be hashed and saved."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    is_valid = _is_sequence(pairs) and all(
        _is_sequence(pair)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], (int, float, str, type(None)))
        for pair in pairs
    )
    if not is_valid or len({pair[0] for pair in pairs}) != len(pairs):
        raise ConfigError(
            f"calib_options: got {short_repr(value)}; "
            "expected a mapping of keyword arguments to numbers or strings"
        )
    return tuple(sorted((str(name), option) for name, option in pairs))


def tuples_to_lists(value: Any) -> Any:
    """Return ``value`` with lists in place of tuples."""
    return [tuples_to_lists(item) for item in value] if isinstance(value, tuple) else value

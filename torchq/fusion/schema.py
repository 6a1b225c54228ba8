"""Checked reading of fusion records, which may come from a file that anybody wrote."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchq.errors import ConfigError

__all__ = ["count", "counts", "damaged", "expect_keys", "flag", "text", "texts"]

#: No channel count, kernel size, stride or padding of a real layer is larger.
_LARGEST = 2**24


def damaged(record: Any, key: str | None, expected: str) -> ConfigError:
    """Return the error for an entry that is not as :func:`torchq.fusion.fusion_record` writes it.

    Args:
        record: the entry, or what stands in its place.
        key: the key whose value is wrong; None where the whole entry is.
        expected: what should be there.
    """
    got = record if key is None or not isinstance(record, Mapping) else record.get(key)
    where = "" if key is None else f" for {key!r}"
    shown = repr(got)
    shown = shown if len(shown) <= 80 else f"{shown[:77]}..."
    return ConfigError(f"apply_fusion_record_: got {shown}{where}; expected {expected}")


def expect_keys(record: Any, *keys: str) -> None:
    """Raise :class:`ConfigError` unless ``record`` is a mapping with exactly these keys."""
    if not isinstance(record, Mapping) or set(record) != set(keys):
        raise damaged(record, None, f"an entry with the keys {', '.join(keys)}")


def _value(record: Any, key: str, expected: str) -> Any:
    if not isinstance(record, Mapping) or key not in record:
        raise damaged(record, None, f"an entry with {key!r}: {expected}")
    return record[key]


def text(record: Any, key: str) -> str:
    """Return a string of an entry."""
    value = _value(record, key, "a string")
    if not isinstance(value, str):
        raise damaged(record, key, "a string")
    return value


def texts(record: Any, key: str) -> tuple[str, ...]:
    """Return a non-empty list of strings of an entry."""
    value = _value(record, key, "a list of strings")
    if not isinstance(value, (list, tuple)) or not value:
        raise damaged(record, key, "a list of strings")
    if not all(isinstance(item, str) for item in value):
        raise damaged(record, key, "a list of strings")
    return tuple(value)


def flag(record: Any, key: str) -> bool:
    """Return a truth value of an entry."""
    value = _value(record, key, "true or false")
    if not isinstance(value, bool):
        raise damaged(record, key, "true or false")
    return value


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= _LARGEST


def count(record: Any, key: str) -> int:
    """Return a positive whole number of an entry."""
    value = _value(record, key, "a positive whole number")
    if not _is_count(value, 1):
        raise damaged(record, key, "a positive whole number")
    assert isinstance(value, int)
    return value


def counts(record: Any, key: str, length: int, least: int = 1) -> tuple[int, ...]:
    """Return ``length`` whole numbers of at least ``least``."""
    expected = f"{length} whole numbers of at least {least}"
    value = _value(record, key, expected)
    if not isinstance(value, (list, tuple)) or len(value) != length:
        raise damaged(record, key, expected)
    if not all(_is_count(item, least) for item in value):
        raise damaged(record, key, expected)
    return tuple(value)

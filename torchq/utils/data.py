"""Reading of plain data (JSON, YAML, checkpoints) into configuration objects.

Whatever the data holds, the result is an object or one :class:`~torchq.errors.ConfigError`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from torchq.errors import ConfigError

__all__ = ["check_fields", "parse_json", "short_repr"]

_MAX_CHARACTERS = 80


def short_repr(value: object) -> str:
    """Return a ``repr`` for error texts that is short and never fails.

    >>> short_repr("skip"), short_repr(10**5000)
    ("'skip'", 'a value of type int that cannot be printed')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # A huge integer, or deeply nested lists.
        return f"a value of type {type(value).__name__} that cannot be printed"
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."


def parse_json(text: str, where: str) -> Any:
    """Return the value of a JSON text.

    Args:
        text: the JSON text.
        where: the start of error texts, such as ``"config"``.

    Raises:
        ConfigError: the text is not JSON, is nested too deeply, or gives a key twice.
    """
    if not isinstance(text, str):
        raise ConfigError(f"{where}: got a {type(text).__name__}; expected JSON text")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        data = dict(pairs)
        if len(data) != len(pairs):
            keys = [key for key, _ in pairs]
            twice = sorted({key for key in keys if keys.count(key) > 1})
            raise ConfigError(f"{where}: got the keys {short_repr(twice)} twice; expected once")
        return data

    try:
        return json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error})") from None
    except ConfigError:
        raise
    except ValueError as error:  # An integer of thousands of digits.
        raise ConfigError(f"{where}: not usable JSON ({error})") from None
    except RecursionError:
        raise ConfigError(f"{where}: JSON that is nested too deeply") from None


def check_fields(
    data: Any, where: str, *, known: Iterable[str], required: Iterable[str] = ()
) -> Mapping[str, Any]:
    """Return ``data`` after checking that it is a mapping with the right keys.

    Args:
        data: the value to check.
        where: the start of error texts, such as ``"rule"``.
        known: all keys that are allowed.
        required: the keys that must be present.

    Raises:
        ConfigError: not a mapping, an unknown key, or a required key that is missing.
    """
    allowed = sorted(known)
    if not isinstance(data, Mapping):
        raise ConfigError(
            f"{where}: got a {type(data).__name__}; expected a mapping with some of {allowed}"
        )
    unknown = sorted(short_repr(key) for key in data if key not in allowed)
    if unknown:
        raise ConfigError(
            f"{where}: got unknown keys [{', '.join(unknown)}]; expected some of {allowed}"
        )
    for key in required:
        if key not in data:
            raise ConfigError(f"{where}: got {short_repr(dict(data))}; expected a {key!r}")
    return data

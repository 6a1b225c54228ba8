"""Checking the parts of a stored plan, which may come from a file of an unknown author.

Nothing in it is executed; every error says where the file is damaged.
"""

import keyword
from collections.abc import Mapping, Sequence
from typing import Any

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.nn.calls.functions import CallSite

MODES = frozenset(["off", "observe", "quantize", "observe+quantize"])
#: The largest number of ranges that a concatenation can have.
_MOST_RANGES = 256


def damaged(where: str, got: Any, expected: str) -> ConfigError:
    """Return the error for a part of a file that is not as expected."""
    text = repr(got)
    shown = text if len(text) <= 60 else f"{text[:57]}..."
    return ConfigError(f"load: {where}: got {shown}; expected {expected}. The file is damaged")


def mapping(value: Any, where: str, required: Sequence[str] | None = None) -> dict[str, Any]:
    """Return a dictionary with names as keys, and with exactly the ``required`` ones if given."""
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise damaged(where, value, "a dictionary with names as keys")
    if required is not None and set(value) != set(required):
        raise damaged(where, sorted(value), f"the entries {', '.join(required)}")
    return value


def text(value: Any, where: str) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise damaged(where, value, "a string")
    return value


def texts(value: Any, where: str, allowed: frozenset[str] | None = None) -> dict[str, str]:
    """Return a dictionary of strings, each of them ``allowed``."""
    for key, found in mapping(value, where).items():
        if not isinstance(found, str) or (allowed is not None and found not in allowed):
            expected = "a string" if allowed is None else f"one of {', '.join(sorted(allowed))}"
            raise damaged(f"{where}[{key!r}]", found, expected)
    return dict(value)


def paths(value: Any, where: str, least: int = 1) -> tuple[str, ...]:
    """Return a list of ``least`` paths or more."""
    is_valid = isinstance(value, list) and len(value) >= least
    if not is_valid or not all(isinstance(path, str) for path in value):
        raise damaged(where, value, f"a list of {'two' if least > 1 else 'one'} or more paths")
    return tuple(value)


def entries(value: Any, where: str) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise damaged(where, value, "a list")
    return value


def descriptor(value: Any, where: str) -> QuantDescriptor:
    """Return how a quantizer quantizes."""
    try:
        return QuantDescriptor.from_dict(mapping(value, where))
    except ConfigError as error:
        raise ConfigError(f"load: {where}: {error}") from None


def call_sites(value: Any, where: str) -> tuple[CallSite, ...]:
    """Return the calls of a forward."""
    try:
        return tuple(CallSite.from_dict(mapping(site, where)) for site in entries(value, where))
    except ConfigError as error:
        raise ConfigError(f"load: {where}: {error}. The file is damaged") from None


def ranges(value: Any, where: str) -> int:
    """Return the number of ranges of a concatenation."""
    if type(value) is not int or not 1 <= value <= _MOST_RANGES:
        raise damaged(where, value, f"a number from 1 to {_MOST_RANGES}")
    return value


def children(value: Any, where: str) -> dict[str, str]:
    """Return the place of each operator in a forward -> the child that computes it."""
    sites = texts(value, where)
    for child in sites.values():
        # The names become attributes in generated code.
        if not (child.isidentifier() and child.isascii()) or keyword.iskeyword(child):
            raise damaged(where, child, "names that are Python identifiers")
    if len(set(sites.values())) != len(sites):
        raise damaged(where, sorted(sites.values()), "every child once")
    return sites


def amounts(value: Any, where: str) -> dict[str, float]:
    """Return a dictionary of finite numbers >= 0."""
    for key, number in mapping(value, where).items():
        if type(number) not in (int, float) or not 0 <= number < float("inf"):
            raise damaged(f"{where}[{key!r}]", number, "a number >= 0")
    return dict(value)


def version_of(data: Any) -> int | None:
    """Return the version of a stored plan, if it says one."""
    version = data.get("version") if isinstance(data, Mapping) else None
    return version if type(version) is int else None

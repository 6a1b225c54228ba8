"""Parts of a plan as JSON data, and back from a file of an unknown author.

The fields of the dataclasses and their types are the schema. Nothing in a file is executed; every
error says where the file is damaged.
"""

from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.nn.calls.routes import CallSite

_WORDS = {
    str: "a string",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
}


def plain(value: object) -> Any:
    """Return a part of a plan as JSON data; fields with their defaults are left out."""
    if isinstance(value, (QuantDescriptor, CallSite)):
        return value.to_dict()
    if is_dataclass(value):
        parts = [(f, getattr(value, f.name)) for f in fields(value)]
        return {_key(f.name): plain(part) for f, part in parts if part != f.default}
    if isinstance(value, Mapping):
        return {key: plain(part) for key, part in value.items()}
    return [plain(part) for part in value] if isinstance(value, tuple) else value


def _key(name: str) -> str:
    """Return the entry of a field in a file."""
    return "class" if name == "cls" else name


def damaged(where: str, got: object, expected: str) -> ConfigError:
    """Return the error for a part of a file that is not as expected."""
    printed = repr(got)
    shown = printed if len(printed) <= 60 else f"{printed[:57]}..."
    return ConfigError(
        f"load: {where}: got {shown}; expected {expected}. The file is damaged"
    )


def read(kind: object, value: object, where: str) -> Any:
    """Return the value of a type that JSON data stand for, the inverse of :func:`plain`."""
    parts = get_args(kind)
    if kind is Any or kind is object:
        return value
    if get_origin(kind) is UnionType:
        return None if value is None else read(parts[0], value, where)
    if get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise damaged(where, value, "a list")
        return tuple(
            read(parts[0], part, f"{where}[{i}]") for i, part in enumerate(value)
        )
    if kind in _WORDS:
        if type(value) is not kind and not (kind is float and type(value) is int):
            raise damaged(where, value, _WORDS[kind])
        return value
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise damaged(where, value, "a dictionary with names as keys")
    if get_origin(kind) is Mapping:
        return {
            key: read(parts[1], part, f"{where}[{key!r}]")
            for key, part in value.items()
        }
    return _object(kind, value, where)


def _object(cls: Any, entries: dict[str, object], where: str) -> object:
    """Return a dataclass of its entries."""
    if cls in (QuantDescriptor, CallSite):
        try:
            return cls.from_dict(entries)
        except ConfigError as error:
            raise ConfigError(f"load: {where}: {error}. The file is damaged") from None
    needed = {
        _key(f.name)
        for f in fields(cls)
        if (f.default, f.default_factory) == 2 * (MISSING,)
    }
    kinds = {_key(name): (name, kind) for name, kind in get_type_hints(cls).items()}
    if not needed <= set(entries) <= set(kinds):
        raise damaged(where, sorted(entries), f"the entries {', '.join(kinds)}")
    arguments = ((*kinds[key], key, part) for key, part in entries.items())
    return cls(
        **{
            name: read(kind, part, f"{where}.{key}")
            for name, kind, key, part in arguments
        }
    )

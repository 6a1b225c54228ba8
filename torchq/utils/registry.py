"""A dictionary that refuses duplicates and explains unknown keys."""

import importlib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torchq.errors import ConfigError

K = TypeVar("K")
V = TypeVar("V")


class Registry(Generic[K, V]):
    """A mapping that decorators fill at import.

    Args:
        kind: names the entries in error texts.
        filled_by: the package of a higher layer that enters what torchq brings. Whoever uses the
            registry need not have imported it: each use loads it by its name, as ``codecs`` of
            Python loads ``encodings``. So its entries come before those of users.
    """

    def __init__(self, kind: str, filled_by: str = "") -> None:
        self.kind = kind
        self.filled_by = filled_by
        self._entries: dict[K, V] = {}

    def _filled(self) -> dict[K, V]:
        """Return the entries, with those of the package that fills the registry.

        While the package itself is imported, import_module returns at once in its own thread; other
        threads wait until it is whole.
        """
        if self.filled_by:
            importlib.import_module(self.filled_by)
        return self._entries

    def add(self, key: K, value: V) -> V:
        """Enter ``value`` under ``key`` and return it."""
        entries = self._filled()
        if key in entries:
            raise ConfigError(
                f"{self.kind} {_label(key)} is registered already, as {entries[key]!r}; "
                "expected a new key"
            )
        entries[key] = value
        return value

    def register(self, key: K) -> Callable[[V], V]:
        """Return a decorator that enters what it decorates under ``key``."""
        return lambda value: self.add(key, value)

    def remove(self, key: K) -> None:
        """Remove an entry, which tests and notebooks need."""
        self[key]  # explains an unknown key
        del self._filled()[key]

    def __getitem__(self, key: K) -> V:
        entries = self._filled()
        try:
            return entries[key]
        except KeyError:
            labels = ", ".join(sorted(_label(k) for k in entries))
            raise ConfigError(
                f"unknown {self.kind} {_label(key)}; expected one of: {labels}"
            ) from None

    def get(self, key: K) -> V | None:
        """Return the entry of ``key``, or None."""
        return self._filled().get(key)

    def values(self) -> tuple[V, ...]:
        """Return the entries in the order in which they came."""
        return tuple(self._filled().values())

    def __contains__(self, key: object) -> bool:
        return key in self._filled()

    def __iter__(self) -> Iterator[K]:
        return iter(self._filled())

    def __len__(self) -> int:
        return len(self._filled())


def _label(key: object) -> str:
    return (
        f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else repr(key)
    )

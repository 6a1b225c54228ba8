"""A dictionary that refuses duplicates and explains unknown keys."""

from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from torchq.errors import ConfigError

K = TypeVar("K")
V = TypeVar("V")


class Registry(Generic[K, V]):
    """A mapping that decorators fill at import; ``kind`` names the entries in error texts."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[K, V] = {}

    def add(self, key: K, value: V) -> V:
        """Enter ``value`` under ``key`` and return it."""
        if key in self._entries:
            raise ConfigError(
                f"{self.kind} {_label(key)} is registered already, as {self._entries[key]!r}; "
                "expected a new key"
            )
        self._entries[key] = value
        return value

    def register(self, key: K) -> Callable[[V], V]:
        """Return a decorator that enters what it decorates under ``key``."""
        return lambda value: self.add(key, value)

    def remove(self, key: K) -> None:
        """Remove an entry, which tests and notebooks need."""
        self[key]  # explains an unknown key
        del self._entries[key]

    def __getitem__(self, key: K) -> V:
        try:
            return self._entries[key]
        except KeyError:
            labels = ", ".join(sorted(_label(k) for k in self._entries))
            raise ConfigError(
                f"unknown {self.kind} {_label(key)}; expected one of: {labels}"
            ) from None

    def get(self, key: K) -> V | None:
        """Return the entry of ``key``, or None."""
        return self._entries.get(key)

    def values(self) -> tuple[V, ...]:
        """Return the entries in the order in which they came."""
        return tuple(self._entries.values())

    def __contains__(self, key: object) -> bool:
        return key in self._entries

    def __iter__(self) -> Iterator[K]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _label(key: object) -> str:
    return (
        f"{key.__module__}.{key.__qualname__}" if isinstance(key, type) else repr(key)
    )

"""Entering converters into a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

from torchq.utils import Registry

F = TypeVar("F", bound=Callable[..., Any])


def entering(
    registry: Registry[Any, Any], keys: Iterable[Any], entry: Callable[[F], Any] | None = None
) -> Callable[[F], F]:
    """Return a decorator that enters a function under several keys.

    Args:
        registry: of the converters of one format.
        keys: operators.
        entry: makes an entry of the function, which by default is the entry itself.

    Raises:
        ConfigError: one of the keys is taken.
    """

    def enter(function: F) -> F:
        for key in keys:
            registry.add(key, function if entry is None else entry(function))
        return function

    return enter

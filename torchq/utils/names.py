"""Names of modules, and the patterns that select them.

A *pattern* is a glob on the dotted path (``"layer1.*.conv?"``, ``*`` also crosses dots), a regular expression
(``"re:^head\\."``, searched), a type by qualified name (``"type:torch.nn.modules.conv.Conv2d"`` or a glob of it), a class
(exact type or subclass), or a callable ``(name, module) -> bool``.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Union

from torch import nn

from torchq.errors import ConfigError

__all__ = [
    "Pattern",
    "matches",
    "pattern_text",
    "modules_with_names",
    "qualified_name",
    "check_pattern",
]

Pattern = Union[str, type, Callable[[str, nn.Module], bool]]


def qualified_name(cls: type) -> str:
    """``torch.nn.modules.conv.Conv2d`` for :class:`torch.nn.Conv2d`."""
    return f"{cls.__module__}.{cls.__qualname__}"


def check_pattern(pattern: Pattern) -> Pattern:
    """Return ``pattern``, or raise :class:`ConfigError` where it can never be one."""
    if isinstance(pattern, str):
        if not pattern:
            raise ConfigError(
                "pattern: got an empty string; expected a glob, 're:...', 'type:...', a class or a callable"
            )
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ConfigError(
                    f"pattern {pattern!r}: not a regular expression ({error})"
                ) from None
        return pattern
    if isinstance(pattern, type) or callable(pattern):
        return pattern
    raise ConfigError(
        f"pattern: got {pattern!r} ({type(pattern).__name__}); expected a glob, 're:...', 'type:...', a class or a callable"
    )


def matches(
    pattern: Pattern, names: Iterable[str], module: nn.Module, cls: type | None = None
) -> bool:
    """Whether ``pattern`` selects ``module``, known under ``names`` (a shared module has several).

    Args:
        pattern: see the module docstring.
        names: dotted paths of the module; ``""`` is the root.
        module: the module itself, given to callables.
        cls: the class to judge type patterns by; default the module's own. A quantized module is judged by its float class.
    """
    cls = cls or type(module)
    if isinstance(pattern, type):
        return issubclass(cls, pattern)
    if not isinstance(pattern, str):
        return any(bool(pattern(name, module)) for name in names)
    if pattern.startswith("re:"):
        return any(re.search(pattern[3:], name) for name in names)
    if pattern.startswith("type:"):
        wanted = pattern[5:]
        return any(
            fnmatch.fnmatchcase(text, wanted) for text in (qualified_name(cls), cls.__name__)
        )
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def pattern_text(pattern: Pattern) -> str:
    """A short readable form for reports: the string itself, ``type:...`` for a class, the function's name for a callable."""
    if isinstance(pattern, str):
        return pattern
    if isinstance(pattern, type):
        return "type:" + qualified_name(pattern)
    return getattr(pattern, "__qualname__", repr(pattern))


def modules_with_names(model: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.Module]]:
    """Every distinct module of ``model`` in registration order, with all the dotted paths it is reachable by."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        modules[id(module)] = module
    for key, module in modules.items():
        yield tuple(names[key]), module

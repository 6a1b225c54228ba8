"""Names of modules, and the patterns that select them.

A *pattern* is one of these:

- a glob on the dotted path, such as ``"layer1.*.conv?"``, in which ``*`` also crosses dots;
- a regular expression that is searched in the path, such as ``"re:^head[.]"``;
- a type by qualified name or a glob of it, such as ``"type:torch.nn.modules.conv.Conv2d"``;
- a class, which selects it and its subclasses;
- a callable ``(name, module) -> bool``.
"""

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Union

from torch import fx, nn

from torchq.errors import ConfigError

Pattern = Union[str, type, Callable[[str, nn.Module], bool]]


def qualified_name(cls: type) -> str:
    """Return the full name of a class: ``torch.nn.modules.conv.Conv2d`` for ``nn.Conv2d``."""
    if issubclass(cls, fx.GraphModule) and "<locals>" in cls.__qualname__:
        cls = cls.__bases__[0]
    return f"{cls.__module__}.{cls.__qualname__}"


def check_pattern(pattern: Pattern) -> Pattern:
    """Return ``pattern``; a ConfigError says that it is none, whatever the model."""
    if not (pattern if isinstance(pattern, str) else callable(pattern)):
        got = (
            "an empty string"
            if pattern == ""
            else f"{pattern!r} ({type(pattern).__name__})"
        )
        raise ConfigError(
            f"pattern: got {got}; expected a glob, 're:...', 'type:...', a class or a callable"
        )
    if isinstance(pattern, str) and pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ConfigError(
                f"pattern {pattern!r}: not a regular expression ({error})"
            ) from None
    return pattern


def matches(
    pattern: Pattern, names: Iterable[str], module: nn.Module, cls: type | None = None
) -> bool:
    """Return True if ``pattern`` selects a float or quantized module with these dotted paths."""
    cls = cls or type(module)
    if isinstance(pattern, type):
        return issubclass(cls, pattern)
    if not isinstance(pattern, str):
        return any(bool(pattern(name, module)) for name in names)
    if pattern.startswith("re:"):
        return any(re.search(pattern[3:], name) for name in names)
    if pattern.startswith("type:"):
        class_pattern = pattern[5:]
        return any(
            fnmatch.fnmatchcase(class_name, class_pattern)
            for class_name in (qualified_name(cls), cls.__qualname__, cls.__name__)
        )
    return any(fnmatch.fnmatchcase(name, pattern) for name in names)


def pattern_text(pattern: Pattern) -> str:
    """Return a pattern for reports: a string, ``type:...`` for a class, a callable's name."""
    if isinstance(pattern, str):
        return pattern
    if isinstance(pattern, type):
        return "type:" + qualified_name(pattern)
    return getattr(pattern, "__qualname__", repr(pattern))


def child_path(path: str, child: str) -> str:
    """Return the dotted path of a child, or of what is below one; the path of the root is empty."""
    return f"{path}.{child}" if path else child


def modules_with_names(model: nn.Module) -> Iterator[tuple[tuple[str, ...], nn.Module]]:
    """Yield every distinct module of ``model`` once, in order, after all its dotted paths."""
    names: dict[int, list[str]] = {}
    modules: dict[int, nn.Module] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
        modules[id(module)] = module
    for key, module in modules.items():
        yield tuple(names[key]), module

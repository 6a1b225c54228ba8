"""Optional packages: imported where they are used, with an error that says how to get them."""

import importlib
from types import ModuleType
from typing import Any

from torchq.errors import MissingExtraError


def import_optional(module: str, needed_by: str, extra: str = "export") -> Any:
    """Import and return ``module``."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(
            f"{needed_by}: {package} is not installed ({error}). Run pip install torchq[{extra}]"
        ) from None


class OptionalModule(ModuleType):
    """A module that is imported when one of its names is read for the first time."""

    def __init__(self, name: str, needed_by: str, extra: str = "export") -> None:
        super().__init__(name)
        self._source = (name, needed_by, extra)

    def __getattr__(self, name: str) -> Any:
        """Import the real module, and return its attribute ``name``."""
        return getattr(import_optional(*self._source), name)

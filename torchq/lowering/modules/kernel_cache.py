"""What layers make of their attributes and keep: kernels with bound arguments, larger tables."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

__all__ = ["KeepsBound"]

#: How many things a layer keeps: kernels are bound to one input shape.
_MOST = 8


class KeepsBound(nn.Module):
    """Mixin for layers that keep things made from their attributes and tensors, until one of these changes.

    Copies and files do without them: packed tensors can be neither copied nor saved.
    """

    _runs: dict[Any, Any]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._forget()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._forget()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_runs": {}}

    def _load_from_state_dict(self, *args: Any) -> None:
        self._forget()  # tensors are copied into in place
        super()._load_from_state_dict(*args)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        self._forget()
        return super()._apply(fn, recurse)

    def _forget(self) -> None:
        """Drop what was made, as something in it has changed."""
        self.__dict__["_runs"] = dict[Any, Any]()

    def _bound(self, key: Any, bind: Callable[[], Any]) -> Any:
        """What ``bind`` gives, made once for each ``key``."""
        runs = self._runs
        found = runs.get(key)
        if found is None:
            if len(runs) >= _MOST:
                runs.clear()
            found = runs[key] = bind()
        return found

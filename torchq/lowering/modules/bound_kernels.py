"""The mixin of modules that keep kernels, and that can be called without their module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from torchq.lowering.ops.kernel_cache import MOST_SHAPES, drop_oldest
from torchq.lowering.ops.onednn import Run

__all__ = ["KernelCacheMixin"]


class KernelCacheMixin(nn.Module):
    """Mixin for modules that keep what they derive from their attributes and tensors.

    Derived are kernels with their arguments bound, and larger tables. There is one rule: whatever
    changes a module (assigning any attribute, loading a state dict, moving it) drops all of them.
    Copies and files do without them, since packed tensors can be neither copied nor saved.
    """

    _kernels: dict[Any, Any]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._drop_kernels()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        self._drop_kernels()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kernels": {}}

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self._drop_kernels()  # the tensors were copied into in place

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        super()._apply(fn, recurse)
        self._drop_kernels()
        return self

    def bound(self, *inputs: Any) -> Run | None:
        """Return the module as a function of inputs like these, for :mod:`..graph.bound_graph`.

        The function computes what the module does for any inputs, and is fast for those of the
        same shapes. It is current until the module drops its kernels.

        Returns:
            None where calling the module is the best way.
        """
        return None

    def _drop_kernels(self) -> None:
        """Drop everything derived, as something that it was made from has changed."""
        self.__dict__["_kernels"] = dict[Any, Any]()

    def _kernel(self, key: Any, build: Callable[[], Any]) -> Any:
        """Return what ``build`` returned for ``key``, which is called once."""
        kernels = self._kernels
        found = kernels.get(key)
        if found is None:
            drop_oldest(kernels, MOST_SHAPES)
            found = kernels[key] = build()
        return found

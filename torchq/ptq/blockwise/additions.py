"""Additions of the output of a layer and another tensor, such as the shortcut of a block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.nn import Add

__all__ = ["AdditionWatch"]

_NAMES = frozenset(["add", "add_", "__add__", "__radd__", "__iadd__"])


class AdditionWatch(TorchFunctionMode):
    """Reports, before it is computed, each addition of a watched tensor and one of its shape.

    It sees functions and methods of tensors; :meth:`hook` lets it see the calls of a
    :class:`torchq.nn.Add` as well.

    Args:
        report: called with the name of the watched tensor and the other operand.
    """

    def __init__(self, report: Callable[[str, Tensor], None]) -> None:
        super().__init__()
        self._report = report
        self._watched: dict[int, tuple[str, Tensor]] = {}

    def watch(self, name: str, tensor: Tensor) -> None:
        """Watch ``tensor`` from now on, until the next addition that reads it."""
        self._watched[id(tensor)] = (name, tensor)  # the tensor lives, so its id stays its own

    def hook(self, module: nn.Module) -> Any:
        """Watch the operands of an :class:`torchq.nn.Add`; return the handle of the hook."""
        assert isinstance(module, Add)
        return module.register_forward_pre_hook(lambda _, args: self._look(args))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") in _NAMES and not kwargs:
            self._look(args)
        return func(*args, **(kwargs or {}))

    def _look(self, operands: Any) -> None:
        if len(operands) != 2 or not all(isinstance(o, Tensor) for o in operands):
            return
        for one, other in (operands, operands[::-1]):
            if id(one) in self._watched and one.shape == other.shape and one is not other:
                name, _ = self._watched.pop(id(one))
                self._report(name, other)

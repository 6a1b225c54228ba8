"""Which outputs of finished blocks nothing reads any more."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from torchq.graph import tensors_in
from torchq.ptq.blockwise.blocks import Block

__all__ = ["OutputWatch"]

# Functions and attributes of a tensor that do not read its values.
_SHAPES = frozenset(["shape", "dtype", "device", "ndim", "size", "dim", "numel", "is_cuda"])


class OutputWatch(TorchFunctionMode):
    """Watches one run of a model up to a block, and finds what no later run needs.

    The code between blocks is the same in every run. So an output that no function and no module
    outside the running block read, and that is gone when the next block begins, is not needed once
    the running block is finished. Reading nothing but the shape of an output does not count.

    Args:
        blocks: all blocks.
        number: of the block that runs; earlier ones give outputs that were kept.
    """

    def __init__(self, blocks: Sequence[Block], number: int) -> None:
        super().__init__()
        self._blocks, self._number = blocks, number
        self._owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
        self._kept: set[int] = set()
        self._read: set[int] = set()
        self._is_inside = False
        #: Numbers of the blocks before this one whose outputs are not needed any more.
        self.unneeded: set[int] = set()

    @contextmanager
    def hooked(self, model: nn.Module) -> Iterator[None]:
        """Watch the functions and the calls of the modules of ``model``."""
        blocks = [block.module for block in self._blocks]
        inside = {part for block in blocks for part in block.modules()}
        running = blocks[self._number]
        with self, ExitStack() as stack:
            stack.callback(running.register_forward_pre_hook(self._begin).remove)
            stack.callback(running.register_forward_hook(self._end).remove)
            for module in model.modules():
                if inside.isdisjoint(module.modules()):
                    handle = module.register_forward_pre_hook(self._look, with_kwargs=True)
                    stack.callback(handle.remove)
            yield

    def kept(self, number: int, output: Any) -> None:
        """Watch the output of a finished block, which is about to be returned."""
        self._kept.add(number)
        for tensor in tensors_in(output):
            self._owners[tensor] = number

    def next_begins(self) -> None:
        """Decide, when the block after the running one is called."""
        self.unneeded = self._kept - self._read - set(self._owners.values())

    def _begin(self, *_: Any) -> None:
        self._is_inside = True

    def _end(self, *_: Any) -> None:
        self._is_inside = False

    def _look(self, module: nn.Module, *values: Any) -> None:
        self._read |= {self._owners[t] for t in tensors_in(values) if t in self._owners}

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        if name == "__get__":
            name = func.__self__.__name__
        if not self._is_inside and name not in _SHAPES:
            self._read |= {self._owners[t] for t in tensors_in((args, kwargs)) if t in self._owners}
        return func(*args, **(kwargs or {}))

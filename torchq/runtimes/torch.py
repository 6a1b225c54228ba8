"""torch itself: the integer kernels that it ships for CPUs, through torchq.lowering."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from torchq.lowering.api import lower_model
from torchq.runtimes.engine import Engine, Task
from torchq.utils import copy_module


@dataclass(frozen=True, kw_only=True, repr=False)
class Torch(Engine):
    """The kernels of torch; needs no other package.

    Attributes:
        quantized: see :class:`Engine`.
        reduce_range: see :func:`torchq.deploy`.
        fuse: see :func:`torchq.deploy`.
    """

    name: str = "torch"
    reduce_range: bool = False
    fuse: bool = True

    def build(self, task: Task) -> nn.Module:
        """See :meth:`Engine.build`; the task may have no example."""
        if not self.quantized:
            return copy_module(task.float_model)
        return lower_model(
            task.model,
            task.example,
            reduce_range=self.reduce_range,
            fuse=self.fuse,
            progress=task.progress,
        )

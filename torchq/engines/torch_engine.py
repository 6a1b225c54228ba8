"""torch itself: the integer kernels that it ships for CPUs and GPUs, through torchq.lowering."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from torchq.engines.registry import Engine, register
from torchq.lowering import float_copy, lower_model

__all__ = ["TorchEngine"]


@register("torch")
@dataclass(frozen=True)
class TorchEngine(Engine):
    """The kernels of torch; needs no other package.

    Attributes:
        quantized: see :class:`Engine`.
        reduce_range: see :func:`torchq.deploy`.
        fuse: see :func:`torchq.deploy`.
    """

    reduce_range: bool = False
    fuse: bool = True

    def check(self) -> None:
        """See :meth:`Engine.check`; torch is always there."""

    def build(self, model: nn.Module, example: Any) -> nn.Module:
        """See :meth:`Engine.build`; ``example`` may be None."""
        if not self.quantized:
            return float_copy(model)
        return lower_model(model, example, reduce_range=self.reduce_range, fuse=self.fuse)

    def candidates(self) -> tuple[Engine, ...]:
        """See :meth:`Engine.candidates`."""
        return self, TorchEngine(quantized=False)

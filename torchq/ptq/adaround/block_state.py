"""What is learned of a block: which ranges, and how everything was before."""

from __future__ import annotations

import torch
from torch import nn

from torchq.nn import TensorQuantizer
from torchq.ptq.blockwise import Block, weight_quantizer
from torchq.workflow import weight_quantizers

__all__ = ["BlockState", "learnable_ranges"]


def learnable_ranges(model: nn.Module, part: nn.Module) -> list[TensorQuantizer]:
    """Return the activation quantizers that only ``part`` uses and whose ranges can be learned.

    Args:
        model: all of it.
        part: a module of it, or the model itself.
    """
    inside = [m for m in part.modules() if isinstance(m, TensorQuantizer)]
    own = {id(m) for m in part.modules()}
    outside = {
        id(child)
        for module in model.modules()
        if id(module) not in own
        for child in module.children()
        if child is not part
    }
    weights = weight_quantizers(model)
    return [q for q in inside if id(q) not in outside | weights and _can_learn(q)]


def _can_learn(quantizer: TensorQuantizer) -> bool:
    d = quantizer.descriptor
    is_on = quantizer.quantizing and quantizer.calibrated and not d.dynamic and d.fake_quant
    return is_on and d.format.is_integer and d.block_scale_format is None


class BlockState:
    """The tensors of a block that are learned, as they were when this object was made.

    Args:
        block: it.
        ranges: the activation quantizers whose ranges are learned.
    """

    def __init__(self, block: Block, ranges: list[TensorQuantizer]) -> None:
        self.block, self.ranges = block, ranges
        self._saved = [t.detach().clone() for t in self._parameters()]
        self._ends = [quantizer.ends() for quantizer in self._quantizers()]

    def _quantizers(self) -> list[TensorQuantizer]:
        """Return the quantizers whose ranges may change."""
        return [*map(weight_quantizer, self.block.layers.values()), *self.ranges]

    def _parameters(self) -> list[nn.Parameter]:
        layers = self.block.layers.values()
        return [t for m in layers for t in (m.weight, m.bias) if t is not None]

    def restore(self) -> None:
        """Bring all tensors back."""
        with torch.no_grad():
            for parameter, saved in zip(self._parameters(), self._saved, strict=True):
                parameter.copy_(saved)
        for quantizer, ends in zip(self._quantizers(), self._ends, strict=True):
            if ends[0].numel():
                quantizer.set_ends(ends)
            else:
                quantizer.forget_amax()

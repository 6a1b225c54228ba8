"""What is learned of a block: which ranges, and how everything was before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

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
        biases: what else is learned, beside weights and biases of the layers.
    """

    def __init__(
        self,
        block: Block,
        ranges: list[TensorQuantizer],
        biases: Sequence[nn.Parameter] = (),
    ) -> None:
        self.block, self.ranges, self.biases = block, ranges, list(biases)
        self._saved = [t.detach().clone() for t in self.tensors()]

    def quantizers(self) -> list[TensorQuantizer]:
        """Return the quantizers whose ranges may change."""
        return [*map(weight_quantizer, self.block.layers.values()), *self.ranges]

    def tensors(self) -> list[Any]:
        """Return the weights, the biases and the ranges as they are now."""
        ends = [end for quantizer in self.quantizers() for end in quantizer.ends()]
        return [*self._parameters(), *ends]

    def _parameters(self) -> list[nn.Parameter]:
        layers = self.block.layers.values()
        found = [t for m in layers for t in (m.weight, m.bias) if t is not None]
        return [*found, *self.biases]

    def restore(self) -> None:
        """Bring all tensors back."""
        self.write(self._saved)

    def write(self, tensors: Sequence[torch.Tensor]) -> None:
        """Write tensors in the order of :meth:`tensors`."""
        left = list(tensors)
        with torch.no_grad():
            for parameter in self._parameters():
                parameter.copy_(left.pop(0))
        for quantizer in self.quantizers():
            ends = tuple(left.pop(0).clone() for _ in quantizer.ends())
            if ends[0].numel():
                quantizer.set_ends(ends)
            else:
                quantizer.forget_amax()

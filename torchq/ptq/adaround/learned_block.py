"""The learned part of one block: soft weights, activation ranges and biases, in its own forward."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchq.functional import learned_fake_quantize
from torchq.nn import TensorQuantizer
from torchq.ptq.adaround.soft_rounding import SoftWeight, start_near
from torchq.ptq.blockwise import (
    Block,
    check_on_grid,
    grid_of,
    replaced_forward,
    weight_quantizer,
)
from torchq.workflow.layer_matrices import weight_from_matrix

__all__ = ["LearnedBlock", "biases_learned"]


class LearnedRange:
    """The range of an activation quantizer; each end is learned as a logarithm.

    Args:
        quantizer: calibrated.
    """

    def __init__(self, quantizer: TensorQuantizer) -> None:
        self.quantizer = quantizer
        self._start = quantizer.ends()
        self.logs = [torch.zeros_like(end, requires_grad=True) for end in self._start]

    def ends(self) -> list[Tensor]:
        """Return the ends of the range now: amax, after amin if the range is asymmetric."""
        return [end * log.exp() for end, log in zip(self._start, self.logs, strict=True)]

    def apply_(self) -> None:
        """Write the learned range into the quantizer."""
        ends = [end.detach() for end in self.ends()]
        if self.quantizer.descriptor.symmetric:
            self.quantizer.set_amax(*ends)
        else:
            self.quantizer.set_range(*ends)

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` fake quantized in the learned range."""
        q = self.quantizer
        if q.pre_quant_scale is not None:
            x = x * q.pre_quant_scale.to(x.dtype)
        d = q.descriptor
        *low, amax = [end * (d.scale_amax or 1.0) for end in self.ends()]
        amin = low[0] if low else None
        return learned_fake_quantize(x, amax, d.format, d.granularity, d.block_scale_format, amin)


class LearnedBlock:
    """What is learned of a block.

    Args:
        block: its layers are quantized with integer formats.
        wanted: path of a layer -> the weight matrix that its weight was rounded from.
        ranges: the activation quantizers whose ranges are learned.
    """

    def __init__(
        self, block: Block, wanted: dict[str, Tensor], ranges: list[TensorQuantizer]
    ) -> None:
        self.block = block
        self.weights = {n: _soft_weight(m, wanted[n]) for n, m in block.layers.items()}
        self.ranges = [LearnedRange(q) for q in ranges]
        self.biases = [m.bias for m in block.layers.values() if m.bias is not None]

    def others(self) -> list[Tensor]:
        """Return what is learned beside the weights."""
        return [*(log for learned in self.ranges for log in learned.logs), *self.biases]

    def run(self, args: Any, kwargs: Any) -> Any:
        """Return the output of the block with its soft weights; differentiable."""
        with ExitStack() as stack:
            for name, soft in self.weights.items():
                quantizer = weight_quantizer(self.block.layers[name])
                stack.enter_context(replaced_forward(quantizer, lambda w, s=soft: s.value().to(w)))
            for learned in self.ranges:
                stack.enter_context(replaced_forward(learned.quantizer, learned.forward))
            return self.block.module(*args, **kwargs)

    def apply_(self, where: str) -> None:
        """Write the rounded weights and the learned ranges into the block."""
        for name, soft in self.weights.items():
            layer = self.block.layers[name]
            weight = soft.rounded().to(layer.weight.dtype)
            check_on_grid(where, name, layer, weight)
            layer.weight.copy_(weight)
        for learned in self.ranges:
            learned.apply_()


def _soft_weight(layer: Any, wanted: Tensor) -> SoftWeight:
    """Return the soft weight of a layer, which starts from its rounding."""
    grid, weight = grid_of(layer), layer.weight.detach()
    scale, divisor = (weight_from_matrix(layer, t) for t in (grid.scale, grid.divisor))
    start = weight_from_matrix(layer, wanted).to(scale.dtype)
    start = start_near(weight.to(scale.dtype), start, scale)
    # A dead range has an infinite divisor, and all of its codes are 0.
    start = torch.where(divisor.isinf(), 0.0, start)
    return SoftWeight(start, scale, grid.format.quant_min, grid.format.quant_max)


@contextmanager
def biases_learned(biases: list[nn.Parameter]) -> Iterator[None]:
    """Let gradients reach the biases; give them their flags and gradients back."""
    before = [(bias, bias.requires_grad, bias.grad) for bias in biases]
    try:
        for bias in biases:
            bias.requires_grad_()
            bias.grad = None
        yield
    finally:
        for bias, required, grad in before:
            bias.requires_grad_(required)
            bias.grad = grad

"""The reconstruction of one block: its quantized output becomes that of the float block.

Every weight is learned between the grid values below and above it. The target is the output of the
float block on the float input (asymmetric reconstruction).

References: Li et al., BRECQ: Pushing the Limit of Post-Training Quantization by Block
Reconstruction (ICLR 2021), algorithm 1; Nagel et al., Up or Down? Adaptive Rounding for
Post-Training Quantization (ICML 2020), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import CalibrationError
from torchq.functional import Range, learned_fake_quantize
from torchq.graph import map_tensors, tensors_in
from torchq.nn import TensorQuantizer
from torchq.ptq.blocks import Block
from torchq.ptq.layers import check_on_grid, grid_of, weight_quantizer
from torchq.ptq.replay import replaced_forward
from torchq.workflow.layer_matrices import weight_from_matrix

# Learning rates of Adam and the weight of the penalty, as in BRECQ, but for the first one: 0.02
# decides roundings in a few hundred steps.
_RATE_WEIGHTS, _RATE = 2e-2, 1e-3
_PENALTY = 0.01
# The penalty begins after a fifth of the steps; its exponent falls from 20 to 2.
_WARMUP, _BETA_START, _BETA_END = 0.2, 20.0, 2.0
# The stretch of the sigmoid of the paper, so that it reaches 0 and 1.
_GAMMA, _ZETA = -0.1, 1.1
# How far a start value stays away from 0 and 1, where the gradient would vanish.
_MARGIN = 0.02
# Rows of a batch in one step of a block.
_ROWS = 32


def rectified_sigmoid(v: Tensor) -> Tensor:
    """Return ``clip(sigmoid(v) (zeta - gamma) + gamma, 0, 1)`` (equation 23)."""
    return (v.sigmoid() * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def _inverse(h: Tensor) -> Tensor:
    p = (h - _GAMMA) / (_ZETA - _GAMMA)
    return p.log() - (1 - p).log()


def decision_penalty(h: Tensor, beta: float) -> Tensor:
    """Return the sum of ``1 - |2 h - 1|^beta`` (equation 24), 0 where all h are 0 or 1."""
    return (1 - (2 * h - 1).abs().pow(beta)).sum()


class SoftWeight:
    """A weight ``scale * clip(floor(weight / scale) + h(v), qmin, qmax)``; v is learned."""

    def __init__(self, weight: Tensor, scale: Tensor, quant_min: float, quant_max: float) -> None:
        self._scale, self._bounds = scale, (quant_min, quant_max)
        codes = (weight / scale).clamp(quant_min, quant_max)
        self._floor = codes.floor()
        rest = (codes - self._floor).clamp(_MARGIN, 1 - _MARGIN)
        self.v = _inverse(rest).requires_grad_()

    def value(self) -> Tensor:
        """Return the soft weight, differentiable by :attr:`v`."""
        return (self._floor + rectified_sigmoid(self.v)).clamp(*self._bounds) * self._scale

    def rounded(self) -> Tensor:
        """Return the weight on the grid, each h rounded to 0 or 1."""
        up = (self.v.detach() >= 0).to(self._scale.dtype)
        return (self._floor + up).clamp(*self._bounds) * self._scale

    def undecided(self) -> int:
        """Return how many weights still lie between 0.05 and 0.95 of the way up."""
        h = rectified_sigmoid(self.v.detach())
        return int(((h > 0.05) & (h < 0.95)).sum())


def start_near(rounded: Tensor, wanted: Tensor, scale: Tensor) -> Tensor:
    """Return a weight that rounds to ``rounded`` and lies as near to ``wanted`` as it can.

    ``rounded`` may be several values of the grid away from ``wanted``, what it was rounded from.
    """
    return rounded + (wanted - rounded).clamp(-0.45 * scale, 0.45 * scale)


class LearnedRange:
    """The range of a calibrated activation quantizer; each end is learned as a logarithm."""

    def __init__(self, quantizer: TensorQuantizer) -> None:
        self.quantizer = quantizer
        self._start = quantizer.range.map(lambda end: end.detach().clone())
        ends = self._start.ends()
        self.logs = [torch.zeros_like(end, requires_grad=True) for _, end in ends]

    def range(self) -> Range:
        """Return the range now."""
        pairs = zip(self._start.ends(), self.logs, strict=True)
        ends = {name: end * log.exp() for (name, end), log in pairs}
        return Range(ends["amax"], ends.get("amin"))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` fake quantized in the learned range."""
        q = self.quantizer
        if q.pre_quant_scale is not None:
            x = x * q.pre_quant_scale.to(x.dtype)
        d = q.descriptor
        amax, amin = self.range().map(lambda end: end * (d.scale_amax or 1.0))
        return learned_fake_quantize(x, amax, d.format, d.granularity, d.block_scale_format, amin)


class LearnedBlock:
    """What is learned of a block whose weights have integer formats.

    ``wanted`` is the weight matrix that the weight of each layer was rounded from, and ``ranges``
    are the activation quantizers whose ranges are learned.
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
            learned.quantizer.range = learned.range()


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


#: Of each batch: a function to the arguments of a block, from the quantized blocks before, and to
#: the output of the float block.
BlockData = Sequence[Callable[[], tuple[tuple[Any, dict[str, Any]], Any]]]


def output_error(out: Any, target: Any) -> Tensor:
    """Return the squared error, summed over channels and averaged over everything else."""
    total = torch.zeros((), device="cpu")
    for o, t in zip(tensors_in(out), tensors_in(target), strict=True):
        if t.is_floating_point():
            channels = t.shape[1] if t.dim() > 3 else t.shape[-1] if t.dim() else 1
            total = total.to(o.device) + (o - t).square().mean() * channels
    return total


def learn(
    name: str,
    learned: LearnedBlock,
    data: BlockData,
    steps: int,
    generator: torch.Generator,
) -> None:
    """Learn roundings, ranges and biases of a block, whose path is ``name``.

    ``learned`` is changed in place; the weights of the block are not. A loss that is NaN or
    infinite is an error.
    """
    weights, others = [soft.v for soft in learned.weights.values()], learned.others()
    parameters = [*weights, *others]
    with torch.enable_grad(), biases_learned(learned.biases):
        # Steps of 16-bit values would be rounded away, and their squares would be 0.
        exact = [p.detach().to(torch.promote_types(p.dtype, torch.float32)) for p in parameters]
        optimizer = torch.optim.Adam(
            [
                {"params": exact[: len(weights)], "lr": _RATE_WEIGHTS},
                {"params": exact[len(weights) :], "lr": _RATE},
            ]
        )
        for number in range(steps):
            optimizer.param_groups[1]["lr"] = _RATE * 0.5 * (1 + math.cos(math.pi * number / steps))
            loss = _loss(learned, data, number / steps, generator)
            if not bool(loss.isfinite()):
                raise CalibrationError(
                    f"adaround_: {name}: the error became NaN or infinite after {number} "
                    "steps; expected finite inputs and outputs. The block keeps its former weights"
                )
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for copy, gradient in zip(exact, gradients, strict=True):
                copy.grad = None if gradient is None else gradient.to(copy.dtype)
            optimizer.step()
            for parameter, copy in zip(parameters, exact, strict=True):
                parameter.detach().copy_(copy)


def _loss(
    learned: LearnedBlock,
    data: BlockData,
    done: float,
    generator: torch.Generator,
) -> Tensor:
    """Return the loss after a share of the steps: the error of some rows, and the penalty."""
    (args, kwargs), target = _some_rows(data, generator)
    out = learned.run(args, kwargs)
    loss = output_error(out, target)
    progress = (done - _WARMUP) / (1 - _WARMUP)
    if progress >= 0:
        beta = _BETA_START + (_BETA_END - _BETA_START) * progress
        for soft in learned.weights.values():
            loss = loss + _PENALTY * decision_penalty(rectified_sigmoid(soft.v), beta)
    return loss


def _some_rows(data: BlockData, generator: torch.Generator) -> tuple[Any, Any]:
    """Return the inputs and the target of random rows of a random batch."""
    index = int(torch.randint(len(data), (), generator=generator, device="cpu"))
    inputs, target = data[index]()
    first = next((t for t in tensors_in(inputs) if t.dim()), None)
    if first is None or len(first) <= _ROWS:
        return inputs, target
    order = torch.randperm(len(first), generator=generator, device="cpu")
    rows = order[:_ROWS].to(first.device)

    def choose(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.dim() and len(tensor) == len(first) else tensor

    return map_tensors(inputs, choose), map_tensors(target, choose)


def mean_error(block: Any, data: BlockData) -> float:
    """Return the error of the block as it is now, over all batches."""
    errors = []
    for read in data:
        (args, kwargs), target = read()
        errors.append(output_error(block(*args, **kwargs), target).item())
    return sum(errors) / len(errors)

"""AdaRound and BRECQ: learned rounding, block after block.

Every weight is learned between the grid values below and above it, so that the output of the block
on quantized inputs becomes that of the float block on float inputs (asymmetric reconstruction).

References: Li et al., BRECQ: Pushing the Limit of Post-Training Quantization by Block
Reconstruction (ICLR 2021), algorithm 1; Nagel et al., Up or Down? Adaptive Rounding for
Post-Training Quantization (ICML 2020), section 3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import CalibrationError, ConfigError
from torchq.formats import SCALE_TYPES
from torchq.functional import Range, learned_fake_quantize
from torchq.graph import Forward, map_tensors, tensors_in
from torchq.nn import TensorQuantizer
from torchq.ptq.gptq import BlockRounding
from torchq.ptq.judging import Judge
from torchq.ptq.layers import check_on_grid, find_layers, grid_of, weight_quantizer
from torchq.ptq.replay import Block, Replay, copied, replaced_forward
from torchq.utils import Pattern, evaluating, network_of, undone_on_error
from torchq.workflow import weight_quantizers
from torchq.workflow.layer_changes import own_tensors, report_text
from torchq.workflow.layer_matrices import weight_from_matrix
from torchq.workflow.runs import Comparison

# Learning rates of Adam and the weight of the penalty, as in BRECQ, but for the first one: 0.02
# decides roundings in a few hundred steps.
_RATE_WEIGHTS, _RATE = 2e-2, 1e-3
_PENALTY = 0.01
# The penalty begins after a fifth of the steps; its exponent falls from 20 to 2.
_WARMUP, _BETA_START, _BETA_END = 0.2, 20.0, 2.0
# The stretch of the sigmoid of the paper, so that it reaches 0 and 1.
_GAMMA = -0.1
_ZETA = 1.1
# How far a start value stays away from 0 and 1, where the gradient would vanish.
_MARGIN = 0.02
# Rows of a batch in one step of a block.
_ROWS = 32

#: Of each batch: the arguments of a block, from the quantized blocks before, and its float output.
BlockData = Sequence[tuple[tuple[Any, dict[str, Any]], Any]]


@dataclass(frozen=True)
class AdaRoundBlock:
    """What happened to one block.

    Attributes:
        layers: the paths of its layers.
        error_before: the squared error of its output on the batches it learns from, at the start,
            summed over channels and averaged over everything else.
        error_after: the same afterwards, with rounded weights.
        undecided: the share of weights that were still undecided when they were rounded.
    """

    layers: tuple[str, ...]
    error_before: float
    error_after: float
    undecided: float


@dataclass(frozen=True)
class AdaRoundReport:
    """The result of :func:`adaround_`.

    Attributes:
        blocks: path of each block, in running order -> what happened.
        skipped: path of each quantized layer that was left alone -> the reason.
        batches: the number of batches that were read.
        outputs: what the new weights do to the outputs of the model. Where they make them worse,
            the model is as it was before the call.
        comparison: the same in a sentence; "" where nothing was compared.
    """

    blocks: Mapping[str, AdaRoundBlock]
    skipped: Mapping[str, str]
    batches: int
    outputs: Comparison = field(default_factory=Comparison)
    comparison: str = ""

    def __str__(self) -> str:
        rows = [
            (name, f"{b.error_before:.3g} -> {b.error_after:.3g}", f"{b.undecided:.1%}")
            for name, b in self.blocks.items()
        ]
        header = ("block", "error of the output", "undecided weights")
        last = f"{len(self.blocks)} blocks from {self.batches} batches"
        last += f"; {self.comparison}" if self.comparison else ""
        return report_text(header, rows, self.skipped, last)


def adaround_(
    model: nn.Module,
    batches: Iterable[object],
    *,
    block: Pattern | Sequence[Pattern] | None = None,
    steps: int = 500,
    seed: int = 0,
    num_batches: int | None = None,
    forward: Forward | None = None,
    compare: bool = True,
    progress: bool = True,
) -> AdaRoundReport:
    """Learn the rounding of the weights of Linear and Conv layers, in place; no labels are needed.

    Call it after :func:`torchq.fuse_`, :func:`torchq.quantize_` and :func:`torchq.calibrate`. For
    one block after the other, the roundings of all its weights, the ranges of its activations and
    its biases are learned together, so that its output on quantized inputs becomes the output of
    the float block on float inputs. It starts from the rounding of :func:`gptq_`. Blocks before it
    are quantized already. Afterwards the weights are values of the quantizers' grids.

    A block is changed as a whole or not at all, and never for the worse on the batches. A call
    that fails or is interrupted leaves finished blocks as they are, with a warning. At the end the
    outputs of the model are compared as :func:`gptq_` does, and undone where they got worse.

    Args:
        model: a calibrated model.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            512 to 1,024 images are enough. All are kept in memory.
        block: patterns of the modules that are blocks; None finds them in the structure (BRECQ).
        steps: training steps of each block, each on 32 rows of a batch, at least 1. More than the
            default bring outputs nearer in proportionally more time: see docs/ptq.md.
        seed: of the random choices. The result depends on it and on the batches alone.
        num_batches: the number of batches to read; default all.
        forward: called as ``forward(model, batch)`` in place of the model.
        compare: False learns from all batches, and keeps the result whatever it does to the
            outputs.
        progress: show a progress bar.

    Returns:
        The report.

    Raises:
        ConfigError: no layer can be treated, an input is not calibrated, or an argument is
            invalid.
        CalibrationError: there is no batch, or NaN or infinity appears.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> _ = torchq.quantize_(model, torchq.recipes.integer(3, 8))
        >>> batches = [torch.rand(64, 8)]
        >>> _ = torchq.calibrate(model, batches, progress=False)
        >>> list(torchq.ptq.adaround_(model, batches, steps=2, progress=False).blocks)
        ['0', '1']
    """
    model = network_of(model)
    if steps < 1:
        raise ConfigError(f"adaround_: got steps={steps}; expected at least 1")
    layers_and_skipped = find_layers("adaround_", model, integer=True)
    done: dict[str, AdaRoundBlock] = {}
    finished: list[str] = []
    with torch.no_grad(), evaluating(model):
        judge = Judge(
            "adaround_", model, batches, num_batches, forward, compares=compare
        )
        replay = Replay("adaround_", model, judge.learned, None, forward)
        rounding = BlockRounding(replay)

        def treat(number: int, one: Block) -> None:
            replay.finish(number, "float")
            ranges = _learnable_ranges(model, one.module)
            generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
            with _kept(one):
                learned = _treat(number, one, ranges, rounding, steps, generator)
            done[one.name] = AdaRoundBlock(tuple(one.layers), *learned)
            finished.extend(one.layers)
            replay.finish(number, "quantized")

        with judge.trial():
            skipped = replay.treat(layers_and_skipped, block, treat, finished, progress)
    return AdaRoundReport(done, skipped, len(judge.learned), judge.outputs, judge.line)


def _treat(
    number: int,
    block: Block,
    ranges: list[TensorQuantizer],
    rounding: BlockRounding,
    steps: int,
    generator: torch.Generator,
) -> tuple[float, float, float]:
    """Learn the block in place; return both errors and the share of undecided weights."""
    replay = rounding.replay
    inputs = [replay.arguments(number, index) for index in range(len(replay.batches))]

    def with_targets() -> BlockData:
        return [(x, replay.outputs["float", number, i]) for i, x in enumerate(inputs)]

    before = _mean_error(block.module, with_targets())
    rounding.treat(number, block)
    data = with_targets()  # Rounding ran the float block again.
    error = _mean_error(block.module, data)
    with _kept(block) as restore:
        learned = _LearnedBlock(block, rounding.wanted, ranges)
        _learn(learned, data, steps, generator)
        learned.apply_()
        after = _mean_error(block.module, data)
        if not after < error:
            restore()
            for layer in block.layers.values():
                layer.weight.copy_(weight_quantizer(layer)(layer.weight))
            after = error
    weights = learned.weights.values()
    total = sum(soft.v.numel() for soft in weights)
    return before, after, sum(soft.undecided() for soft in weights) / total


def _kept(block: Block) -> AbstractContextManager[Callable[[], None]]:
    """Bring a block back where the body raises; the context is a function that does so too."""
    return undone_on_error(block.module, written=own_tensors(block.module.modules()))


def _learnable_ranges(model: nn.Module, part: nn.Module) -> list[TensorQuantizer]:
    """Return the activation quantizers that only ``part`` uses and whose ranges can be learned."""
    part_modules = set(part.modules())
    outside = {
        child
        for module in model.modules()
        if module not in part_modules
        for child in module.children()
        if child is not part
    }
    weights = weight_quantizers(model)
    return [
        q
        for q in part.modules()
        if isinstance(q, TensorQuantizer)
        if q not in outside and id(q) not in weights and _can_learn(q)
    ]


def _can_learn(quantizer: TensorQuantizer) -> bool:
    d = quantizer.descriptor
    is_on = (
        quantizer.quantizing and quantizer.calibrated and not d.dynamic and d.fake_quant
    )
    usual = not d.power_of_two and d.scale_format in (None, *SCALE_TYPES)
    return is_on and d.format.is_integer and usual


def rectified_sigmoid(v: Tensor) -> Tensor:
    """Return ``clip(sigmoid(v) (zeta - gamma) + gamma, 0, 1)`` (equation 23)."""
    return (v.sigmoid() * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def decision_penalty(h: Tensor, beta: float) -> Tensor:
    """Return the sum of ``1 - |2 h - 1|^beta`` (equation 24), 0 where all h are 0 or 1."""
    return (1 - (2 * h - 1).abs().pow(beta)).sum()


class SoftWeight:
    """A weight ``scale * clip(floor(weight / scale) + h(v), qmin, qmax)``; v is learned."""

    def __init__(
        self, weight: Tensor, scale: Tensor, quant_min: float, quant_max: float
    ) -> None:
        self._scale = scale
        self._bounds = (quant_min, quant_max)
        codes = (weight / scale).clamp(quant_min, quant_max)
        self._floor = codes.floor()
        fraction = (codes - self._floor).clamp(_MARGIN, 1 - _MARGIN)
        p = (fraction - _GAMMA) / (_ZETA - _GAMMA)
        self.v = (p.log() - (1 - p).log()).requires_grad_()

    @classmethod
    def of(cls, layer: Any, wanted: Tensor) -> SoftWeight:
        """Return the soft weight of a layer that was rounded from ``wanted``, a matrix.

        It rounds to the weight and lies as near to what was wanted, perhaps several values of the
        grid away, as it can.
        """
        grid = grid_of(layer)
        weight = layer.weight.detach()
        scale, divisor = (
            weight_from_matrix(layer, t) for t in (grid.scale, grid.divisor)
        )
        weight, target = (
            t.to(scale.dtype) for t in (weight, weight_from_matrix(layer, wanted))
        )
        start = weight + (target - weight).clamp(-0.45 * scale, 0.45 * scale)
        # A dead range has an infinite divisor, and all of its codes are 0.
        start = torch.where(divisor.isinf(), 0.0, start)
        return cls(start, scale, grid.format.quant_min, grid.format.quant_max)

    def value(self) -> Tensor:
        """Return the soft weight, differentiable by :attr:`v`."""
        return (self._floor + rectified_sigmoid(self.v)).clamp(
            *self._bounds
        ) * self._scale

    def rounded(self) -> Tensor:
        """Return the weight on the grid, each h rounded to 0 or 1."""
        up = (self.v.detach() >= 0).to(self._scale.dtype)
        return (self._floor + up).clamp(*self._bounds) * self._scale

    def undecided(self) -> int:
        """Return how many weights still lie between 0.05 and 0.95 of the way up."""
        h = rectified_sigmoid(self.v.detach())
        return int(((h > 0.05) & (h < 0.95)).sum())


class _LearnedRange:
    """The range of a calibrated activation quantizer; each end is learned as a logarithm."""

    def __init__(self, quantizer: TensorQuantizer) -> None:
        self.quantizer = quantizer
        self._start = quantizer.range.map(lambda end: end.detach().clone())
        self.logs = [
            torch.zeros_like(end, requires_grad=True) for _, end in self._start.ends()
        ]

    def range(self) -> Range:
        """Return the range now."""
        pairs = zip(self._start.ends(), self.logs, strict=True)
        ends = {name: end * log.exp() for (name, end), log in pairs}
        return Range(ends["amax"], ends.get("amin"))

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` fake quantized in the learned range."""
        q, d = self.quantizer, self.quantizer.descriptor
        x = q.scaled(x)
        amax, amin = self.range().map(lambda end: end * (d.scale_amax or 1.0))
        return learned_fake_quantize(
            x, amax, d.format, d.granularity, d.block_scale_format, amin
        )


class _LearnedBlock:
    """What is learned of a block whose weights have integer formats.

    ``wanted`` is the weight matrix that the weight of each layer was rounded from, and ``ranges``
    are the activation quantizers whose ranges are learned.
    """

    def __init__(
        self, block: Block, wanted: dict[str, Tensor], ranges: list[TensorQuantizer]
    ) -> None:
        self.block = block
        self.weights = {n: SoftWeight.of(m, wanted[n]) for n, m in block.layers.items()}
        self.ranges = [_LearnedRange(q) for q in ranges]
        self.biases = [m.bias for m in block.layers.values() if m.bias is not None]

    def run(self, args: Sequence[object], kwargs: Mapping[str, object]) -> Any:
        """Return the output of the block with its soft weights; differentiable."""
        with ExitStack() as stack:
            for name, soft in self.weights.items():
                quantizer = weight_quantizer(self.block.layers[name])
                stack.enter_context(
                    replaced_forward(quantizer, lambda w, s=soft: s.value().to(w))
                )
            for learned in self.ranges:
                stack.enter_context(
                    replaced_forward(learned.quantizer, learned.forward)
                )
            return self.block.module(*args, **kwargs)

    def apply_(self) -> None:
        """Write the rounded weights and the learned ranges into the block."""
        for name, soft in self.weights.items():
            layer = self.block.layers[name]
            weight = soft.rounded().to(layer.weight.dtype)
            check_on_grid("adaround_", name, layer, weight)
            layer.weight.copy_(weight)
        for learned in self.ranges:
            learned.quantizer.range = learned.range()


@contextmanager
def _biases_learned(biases: list[nn.Parameter]) -> Iterator[None]:
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


def _output_error(out: object, target: object) -> Tensor:
    """Return the squared error, summed over channels and averaged over everything else."""
    total = torch.zeros((), device="cpu")
    for o, t in zip(tensors_in(out), tensors_in(target), strict=True):
        if t.is_floating_point():
            channels = t.shape[1] if t.dim() > 3 else t.shape[-1] if t.dim() else 1
            total = total.to(o.device) + (o - t).square().mean() * channels
    return total


def _mean_error(block: nn.Module, data: BlockData) -> float:
    """Return the error of the block as it is now, over all batches."""
    errors = []
    for inputs, target in data:
        args, kwargs = copied(inputs)
        errors.append(_output_error(block(*args, **kwargs), target).item())
    return sum(errors) / len(errors)


def _learn(
    learned: _LearnedBlock, data: BlockData, steps: int, generator: torch.Generator
) -> None:
    """Learn roundings, ranges and biases of a block.

    ``learned`` is changed in place; the weights of the block are not. A loss that is NaN or
    infinite is an error.
    """
    weights = [soft.v for soft in learned.weights.values()]
    logs = [log for one in learned.ranges for log in one.logs]
    parameters = [*weights, *logs, *learned.biases]
    with torch.enable_grad(), _biases_learned(learned.biases):
        # Steps of 16-bit values would be rounded away, and their squares would be 0.
        exact = [
            p.detach().to(torch.promote_types(p.dtype, torch.float32))
            for p in parameters
        ]
        of_weights = {"params": exact[: len(weights)], "lr": _RATE_WEIGHTS}
        optimizer = torch.optim.Adam(
            [of_weights, {"params": exact[len(weights) :], "lr": _RATE}]
        )
        for number in range(steps):
            optimizer.param_groups[1]["lr"] = (
                _RATE * 0.5 * (1 + math.cos(math.pi * number / steps))
            )
            loss = _loss(learned, data, number / steps, generator)
            if not bool(loss.isfinite()):
                raise CalibrationError(
                    f"adaround_: {learned.block.name}: the error became NaN or infinite after "
                    f"{number} steps; expected finite inputs and outputs. The block keeps its "
                    "former weights"
                )
            gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
            for copy, gradient in zip(exact, gradients, strict=True):
                copy.grad = None if gradient is None else gradient.to(copy.dtype)
            optimizer.step()
            for parameter, copy in zip(parameters, exact, strict=True):
                parameter.detach().copy_(copy)


def _loss(
    learned: _LearnedBlock, data: BlockData, done: float, generator: torch.Generator
) -> Tensor:
    """Return the loss after a share of the steps: the error of some rows, and the penalty."""
    (args, kwargs), target = _some_rows(data, generator)
    loss = _output_error(learned.run(args, kwargs), target)
    progress = (done - _WARMUP) / (1 - _WARMUP)
    if progress >= 0:
        beta = _BETA_START + (_BETA_END - _BETA_START) * progress
        for soft in learned.weights.values():
            loss = loss + _PENALTY * decision_penalty(rectified_sigmoid(soft.v), beta)
    return loss


def _some_rows(data: BlockData, generator: torch.Generator) -> tuple[Any, Any]:
    """Return the inputs and the target of random rows of a random batch."""
    index = int(torch.randint(len(data), (), generator=generator, device="cpu"))
    inputs, target = data[index]
    inputs = copied(inputs)
    first = next((t for t in tensors_in(inputs) if t.dim()), None)
    if first is None or len(first) <= _ROWS:
        return inputs, target
    order = torch.randperm(len(first), generator=generator, device="cpu")
    rows = order[:_ROWS].to(first.device)

    def choose(tensor: Tensor) -> Tensor:
        return tensor[rows] if tensor.dim() and len(tensor) == len(first) else tensor

    return map_tensors(inputs, choose), map_tensors(target, choose)

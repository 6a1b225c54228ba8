"""AdaRound and BRECQ: learned rounding, block after block."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from torchq.errors import ConfigError
from torchq.graph import Forward
from torchq.nn import TensorQuantizer
from torchq.ptq.blocks import Block
from torchq.ptq.gptq.api import BlockRounding
from torchq.ptq.gptq.layer import Options
from torchq.ptq.layers import find_layers, own_tensors, report_text, weight_quantizer
from torchq.ptq.reconstruction import BlockData, LearnedBlock, learn, mean_error
from torchq.ptq.replay import Replay, treat_blocks
from torchq.utils import Pattern, evaluating, undone_on_error
from torchq.workflow import weight_quantizers


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
    """

    blocks: Mapping[str, AdaRoundBlock]
    skipped: Mapping[str, str]
    batches: int

    def __str__(self) -> str:
        rows = []
        for name, block in self.blocks.items():
            error = f"{block.error_before:.3g} -> {block.error_after:.3g}"
            rows.append((name, error, f"{block.undecided:.1%}"))
        header = ("block", "error of the output", "undecided weights")
        last = f"{len(self.blocks)} blocks from {self.batches} batches"
        return report_text(header, rows, self.skipped, last)


def adaround_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    block: Pattern | Sequence[Pattern] | None = None,
    steps: int = 500,
    seed: int = 0,
    num_batches: int | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> AdaRoundReport:
    """Learn the rounding of the weights of Linear and Conv layers, in place; no labels are needed.

    Call it after :func:`torchq.fuse_`, :func:`torchq.quantize_` and :func:`torchq.calibrate`. For
    one block after the other, the roundings of all its weights, the ranges of its activations and
    its biases are learned together, so that its output on quantized inputs becomes the output of
    the float block on float inputs. It starts from the rounding of :func:`gptq_`. Blocks before it
    are quantized already. Afterwards the weights are values of the quantizers' grids.

    A block is changed as a whole or not at all, and never for the worse on the batches. A call
    that fails or is interrupted leaves finished blocks as they are, with a warning.

    Args:
        model: a calibrated model.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            512 to 1,024 images are enough. All are kept in memory.
        block: patterns of the modules that are blocks; None finds them in the structure (BRECQ).
        steps: training steps of each block, each on 32 rows of a batch, at least 1.
        seed: of the random choices. The result depends on it and on the batches alone.
        num_batches: the number of batches to read; default all.
        forward: called as ``forward(model, batch)`` in place of the model.
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
    if steps < 1:
        raise ConfigError(f"adaround_: got steps={steps}; expected at least 1")
    found = find_layers("adaround_", model, integer=True)
    with torch.no_grad(), evaluating(model):
        replay = Replay("adaround_", model, batches, num_batches, forward)
        work = _Work(replay, steps, seed)
        skipped = treat_blocks(replay, found, block, work.treat, work.finished, progress)
    return AdaRoundReport(work.done, skipped, len(replay.batches))


class _Work:
    """The treatment of the blocks, one after the other."""

    def __init__(self, replay: Replay, steps: int, seed: int) -> None:
        self.replay, self.steps, self.seed = replay, steps, seed
        self.done: dict[str, AdaRoundBlock] = {}
        self.finished: list[str] = []
        self._rounding = BlockRounding(replay, Options("block", 0.01, refine=True))

    def treat(self, number: int, block: Block) -> None:
        """Learn one block."""
        replay, store = self.replay, self.replay.store
        replay.finish(number, "float")
        ranges = _learnable_ranges(replay.model, block.module)
        with _block_kept(block):
            result = self._learn(number, block, ranges)
        self.done[block.name] = AdaRoundBlock(tuple(block.layers), *result)
        self.finished += block.layers
        replay.finish(number, "quantized")
        for index in range(len(replay.batches)):
            store.drop(("inputs", index))

    def _learn(
        self, number: int, block: Block, ranges: list[TensorQuantizer]
    ) -> tuple[float, float, float]:
        """Learn the block in place; return both errors and the share of undecided weights."""
        data = self._data(number)
        before = mean_error(block.module, data)
        self._rounding.treat(number, block)
        error = mean_error(block.module, data)
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        with _block_kept(block) as restore:
            learned = LearnedBlock(block, self._rounding.wanted, ranges)
            learn(block.name, learned, data, self.steps, generator)
            learned.apply_("adaround_")
            after = mean_error(block.module, data)
            if not after < error:
                restore()
                for layer in block.layers.values():
                    layer.weight.copy_(weight_quantizer(layer)(layer.weight))
                after = error
        weights = learned.weights.values()
        total = sum(soft.v.numel() for soft in weights)
        return before, after, sum(soft.undecided() for soft in weights) / total

    def _data(self, number: int) -> BlockData:
        """Keep the inputs of a block; return them with its outputs."""
        replay, store = self.replay, self.replay.store

        def read(index: int) -> Any:
            return store.get(("inputs", index)), store.get(("float", number, index))

        indices = range(len(replay.batches))
        for index in indices:
            store.put(("inputs", index), replay.block_inputs(number, index, "quantized"))
        return [partial(read, index) for index in indices]


def _block_kept(block: Block) -> AbstractContextManager[Callable[[], None]]:
    """Bring a block back where the body raises; the context is a function that does so too."""
    return undone_on_error(block.module, written=own_tensors(block.module.modules()))


def _learnable_ranges(model: nn.Module, part: nn.Module) -> list[TensorQuantizer]:
    """Return the activation quantizers that only ``part`` uses and whose ranges can be learned."""
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

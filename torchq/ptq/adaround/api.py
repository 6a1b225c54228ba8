"""AdaRound and BRECQ: learned rounding, block after block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchq.errors import ConfigError
from torchq.ptq.adaround.block_state import BlockState, learnable_ranges
from torchq.ptq.adaround.learned_block import LearnedBlock
from torchq.ptq.adaround.reconstruction import BlockData, Settings, learn, mean_error
from torchq.ptq.blockwise import (
    Block,
    Replay,
    RunOptions,
    TensorStore,
    check_ready,
    find_blocks,
    find_layers,
    said_how_far,
    weight_quantizer,
)
from torchq.ptq.gptq.block import BlockRounding
from torchq.ptq.gptq.layer import Options
from torchq.ptq.ranks import rank_in
from torchq.ptq.reports import report_text
from torchq.utils import Pattern, evaluating, progress_bar

__all__ = ["AdaRoundBlock", "AdaRoundReport", "adaround_"]

#: Rows of a batch in one step of a block.
_ROWS = 32


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
    run: RunOptions | None = None,
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
        run: how the model is run; see :class:`RunOptions`. With ``run.group`` the gradients of all
            processes are averaged, each has its own batches, and all get the same weights.
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
    run = run or RunOptions()
    layers, skipped = find_layers(model)
    layers, skipped = _without_float_formats(layers, skipped)
    check_ready("adaround_", model, layers, skipped)
    settings = Settings(steps, _ROWS, run.group)
    with torch.no_grad(), evaluating(model), TensorStore(run.memory_limit) as store:
        replay = Replay(model, batches, run, store, "adaround_")
        blocks, more = find_blocks(model, layers, replay.count_calls(), block)
        replay.use_blocks(blocks)
        work = _Work(model, replay, settings, seed)
        with said_how_far("adaround_", work.finished, blocks):
            for number, one in progress_bar(
                list(enumerate(blocks)), description="adaround_", enabled=progress, unit="block"
            ):
                work.treat(number, one)
    skipped |= more
    ordered = {name: skipped[name] for name in dict(model.named_modules()) if name in skipped}
    return AdaRoundReport(work.done, ordered, len(replay.batches))


def _without_float_formats(
    layers: dict[str, Any], skipped: dict[str, str]
) -> tuple[dict[str, Any], dict[str, str]]:
    """Move layers whose weights have no integer codes to the skipped ones."""
    for name, layer in list(layers.items()):
        if not weight_quantizer(layer).descriptor.format.is_integer:
            skipped[name] = "its weight has no integer codes"
            del layers[name]
    return layers, skipped


class _Work:
    """The treatment of the blocks, one after the other."""

    def __init__(self, model: nn.Module, replay: Replay, settings: Settings, seed: int) -> None:
        self.model, self.replay, self.settings, self.seed = model, replay, settings, seed
        self.done: dict[str, AdaRoundBlock] = {}
        self.finished: list[str] = []
        options = Options("block", True, 0.01, refine=True)
        self._rounding = BlockRounding(replay, options, settings.group, keep_wanted=True)

    def treat(self, number: int, block: Block) -> None:
        """Learn one block."""
        replay, store = self.replay, self.replay.store
        replay.finish(number, "float")
        state = BlockState(block, learnable_ranges(self.model, block.module))
        try:
            result = self._learn(number, block, state)
        except BaseException:
            state.restore()
            raise
        self.done[block.name] = AdaRoundBlock(tuple(block.layers), *result)
        self.finished += block.layers
        replay.finish(number, "quantized")
        for index in range(len(replay.batches)):
            store.drop(("inputs", index))

    def _learn(self, number: int, block: Block, state: BlockState) -> tuple[float, float, float]:
        """Learn the block in place; return both errors and the share of undecided weights."""
        data = self._data(number)
        before = mean_error(block.module, data, self.settings)
        self._rounding.treat(number, block)
        error = mean_error(block.module, data, self.settings)
        rounded = BlockState(block, state.ranges)
        own_seed = self.seed * 1_000_003 + number + 1_000_000_007 * rank_in(self.settings.group)
        generator = torch.Generator().manual_seed(own_seed)
        learned = LearnedBlock(block, self._rounding.wanted, state.ranges)
        learn(block.name, learned, data, self.settings, generator)
        learned.apply_("adaround_")
        after = mean_error(block.module, data, self.settings)
        if not after < error:
            rounded.restore()
            for layer in block.layers.values():
                layer.weight.copy_(weight_quantizer(layer)(layer.weight))
            after = error
        weights = learned.weights.values()
        total = sum(soft.v.numel() for soft in weights)
        return before, after, sum(soft.undecided() for soft in weights) / total

    def _data(self, number: int) -> BlockData:
        """Keep the inputs of a block; return them with its outputs."""
        replay, store = self.replay, self.replay.store
        count = len(replay.batches)
        for index in range(count):
            store.put(("inputs", index), replay.block_inputs(number, index, "quantized"))
        return BlockData(
            count,
            lambda index: store.get(("inputs", index)),
            lambda index: store.get(("float", number, index)),
        )

"""AdaRound, BRECQ and QDrop: learned rounding, block after block."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from torchq.errors import ConfigError
from torchq.ptq.adaround.block_state import BlockState, learnable_ranges
from torchq.ptq.adaround.checkpoint import Checkpoint
from torchq.ptq.adaround.finish import Finish
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
from torchq.utils import NotebookText, Pattern, evaluating, progress_bar

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
class AdaRoundReport(NotebookText):
    """The result of :func:`adaround_`.

    Attributes:
        blocks: path of each block, in running order -> what happened.
        skipped: path of each quantized layer that was left alone -> the reason.
        batches: the number of batches that were read.
        output: the error of the output of the model before the last part and after it: the squared
            error over the variance, and for class scores the divergence of the probabilities in
            nats added; None if there was no such part.
    """

    blocks: Mapping[str, AdaRoundBlock]
    skipped: Mapping[str, str]
    batches: int
    output: tuple[float, float] | None = None

    def __str__(self) -> str:
        rows = []
        for name, block in self.blocks.items():
            error = f"{block.error_before:.3g} -> {block.error_after:.3g}"
            rows.append((name, error, f"{block.undecided:.1%}"))
        if self.output is not None:
            rows.append(("the model", "{:.3g} -> {:.3g}".format(*self.output), ""))
        header = ("block", "error of the output", "undecided weights")
        last = f"{len(self.blocks)} blocks from {self.batches} batches"
        return report_text(header, rows, self.skipped, last)


def adaround_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    block: Pattern | Sequence[Pattern] | Literal["layer"] | None = None,
    steps: int = 500,
    start: Literal["gptq", "nearest"] = "gptq",
    drop: float = 0.0,
    finish: int = 0,
    seed: int = 0,
    checkpoint: str | Path | None = None,
    run: RunOptions | None = None,
    progress: bool = True,
) -> AdaRoundReport:
    """Learn the rounding of the weights of Linear and Conv layers, in place; no labels are needed.

    Call it after :func:`torchq.fuse_`, :func:`torchq.quantize_` and :func:`torchq.calibrate`. For
    one block after the other, the roundings of all its weights, the ranges of its activations and
    its biases are learned together, so that its output on quantized inputs becomes the output of
    the float block on float inputs. Blocks before it are quantized already. Afterwards the weights
    are values of the quantizers' grids. With ``finish``, the ranges of activations and the biases
    of all layers are learned together last, for the output of the float model; outputs
    (N, classes) are also compared as probabilities. This last part has the second half of the
    batches to itself, because on batches that the blocks have learned from there is little left to
    see.

    A block is changed as a whole or not at all, and never for the worse on the batches. A call
    that fails or is interrupted leaves finished blocks as they are, with a warning; with
    ``checkpoint`` the same call goes on from there.

    Args:
        model: a calibrated model.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            512 to 1,024 images are enough. All are kept in memory.
        block: patterns of the modules that are blocks; None finds them in the structure (BRECQ);
            ``"layer"`` treats every layer alone (AdaRound).
        steps: training steps of each block, each on 32 rows of a batch; 0 leaves blocks as
            :func:`gptq_` rounds them, and learns in the last part alone.
        start: ``"gptq"`` rounds the block by :func:`gptq_` first and learns from there, and
            ``"nearest"`` starts from the float weights and the ranges of calibration.
        drop: the probability that an element of an activation is not quantized, while learning
            (QDrop, Wei et al. 2022); 0.5 in the paper. It costs time and helps most where
            activations have few bits and images are few.
        finish: training steps of the last part, each on 64 rows of a batch, through the whole
            model. 0 leaves it out.
        seed: of the random choices. The result depends on it and on the batches alone.
        checkpoint: a file that keeps finished blocks. If it exists, its blocks are read from it.
        run: how the model is run; see :class:`RunOptions`. With ``run.group`` the gradients of all
            processes are averaged, each has its own batches, and all get the same weights; a
            checkpoint needs a file of each rank's own.
        progress: show a progress bar.

    Returns:
        The report.

    Raises:
        ConfigError: no layer can be treated, an input is not calibrated, an argument is invalid,
            or the checkpoint is of another call.
        CalibrationError: there is no batch, or NaN or infinity appears.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> _ = torchq.quantize_(model, torchq.recipes.integer(3, 8))
        >>> batches = [torch.rand(64, 8)]
        >>> _ = torchq.calibrate(model, batches, progress=False)
        >>> list(torchq.ptq.adaround_(model, batches, steps=2, progress=False).blocks)
        ['0', '1']
    """
    _check(steps, start, drop, finish)
    run = run or RunOptions()
    layers, skipped = find_layers(model)
    layers, skipped = _without_float_formats(layers, skipped)
    check_ready("adaround_", model, layers, skipped)
    settings = Settings(steps, _ROWS, drop, run.group)
    with torch.no_grad(), evaluating(model), TensorStore(run.memory_limit) as store:
        replay = Replay(model, batches, run, store, "adaround_")
        count, last = len(replay.batches), None
        if finish:
            last = Finish(replay, replay.hold_out(), replace(settings, steps=finish), seed)
        patterns = _each_layer(layers) if block == "layer" else block
        blocks, more = find_blocks(model, layers, replay.count_calls(), patterns)
        replay.use_blocks(blocks)
        saved = Checkpoint(checkpoint, {"seed": seed, "steps": steps, "start": start, "drop": drop})
        work = _Work(model, replay, settings, start, seed, saved)
        with said_how_far("adaround_", work.finished, blocks):
            for number, one in progress_bar(
                list(enumerate(blocks)), description="adaround_", enabled=progress, unit="block"
            ):
                work.treat(number, one)
            output = last.learn() if last is not None else None
    skipped |= more
    ordered = {name: skipped[name] for name in dict(model.named_modules()) if name in skipped}
    return AdaRoundReport(work.done, ordered, count, output)


def _check(steps: int, start: str, drop: float, finish: int) -> None:
    """Raise an error for an argument that is out of range."""
    if finish < 0:
        raise ConfigError(f"adaround_: got finish={finish}; expected at least 0")
    if steps < 0:
        raise ConfigError(f"adaround_: got steps={steps}; expected at least 0")
    if start not in ("gptq", "nearest"):
        raise ConfigError(f"adaround_: got start={start!r}; expected 'gptq' or 'nearest'")
    if steps == 0 and start == "nearest":
        raise ConfigError(
            "adaround_: got steps=0 and start='nearest'; expected steps >= 1, or start='gptq', "
            "because nothing would round the weights"
        )
    if not 0 <= drop < 1:
        raise ConfigError(f"adaround_: got drop={drop}; expected at least 0 and less than 1")


def _each_layer(layers: Mapping[str, Any]) -> Pattern:
    """Return the pattern that selects every layer."""
    return lambda name, module: name in layers


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

    def __init__(
        self,
        model: nn.Module,
        replay: Replay,
        settings: Settings,
        start: str,
        seed: int,
        saved: Checkpoint,
    ) -> None:
        self.model, self.replay, self.settings = model, replay, settings
        self.start, self.seed, self.saved = start, seed, saved
        self.done: dict[str, AdaRoundBlock] = {}
        self.finished: list[str] = []
        options = Options("block", True, 0.01, refine=True)
        self._rounding = BlockRounding(replay, options, settings.group, keep_wanted=True)

    def treat(self, number: int, block: Block) -> None:
        """Learn one block, or read it from the checkpoint."""
        replay, store = self.replay, self.replay.store
        replay.finish(number, "float")
        state = BlockState(block, learnable_ranges(self.model, block.module))
        result = self.saved.load(block.name, state)
        if result is None:
            try:
                found = self._learn(number, block, state)
            except BaseException:
                state.restore()
                raise
            result = self.saved.save(block.name, state, found)
        self.done[block.name] = AdaRoundBlock(tuple(block.layers), *result)
        self.finished += block.layers
        replay.finish(number, "quantized")
        for index in range(len(replay.batches)):
            for kind in ("inputs", "float inputs"):
                store.drop((kind, index))

    def _learn(self, number: int, block: Block, state: BlockState) -> tuple[float, float, float]:
        """Learn the block in place; return both errors and the share of undecided weights."""
        data, wanted = self._data(number), {}
        before = mean_error(block.module, data, self.settings)
        if self.start == "gptq":
            self._rounding.treat(number, block)
            wanted = self._rounding.wanted
        error = mean_error(block.module, data, self.settings)
        if not self.settings.steps:
            return before, error, 0.0
        rounded = BlockState(block, state.ranges)
        own_seed = self.seed * 1_000_003 + number + 1_000_000_007 * rank_in(self.settings.group)
        generator = torch.Generator().manual_seed(own_seed)
        learned = LearnedBlock(block, wanted, state.ranges, self.settings.drop, generator)
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
            if self.settings.drop:
                store.put(("float inputs", index), replay.block_inputs(number, index, "float"))
        return BlockData(
            count,
            lambda index: store.get(("inputs", index)),
            lambda index: store.get(("float inputs", index)),
            lambda index: store.get(("float", number, index)),
        )

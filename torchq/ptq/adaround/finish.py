"""The last part of learning: ranges and biases of all layers, for the output of the model."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import TorchqError
from torchq.graph import tensors_in
from torchq.nn import QuantModule
from torchq.ptq.adaround.block_state import BlockState, learnable_ranges
from torchq.ptq.adaround.learned_block import LearnedBlock
from torchq.ptq.adaround.reconstruction import (
    BlockData,
    Settings,
    learn,
    mean_error,
)
from torchq.ptq.blockwise import Block, Replay
from torchq.ptq.modes import quantizers_off
from torchq.ptq.ranks import rank_in

__all__ = ["Finish"]

_RATE = 1e-3
# Rows of a batch in one step.
_ROWS = 64


class Finish:
    """Learns ranges and biases of a whole model; make it while the weights are still float.

    The blocks must not have learned from its batches: on those the error is too small to tell what
    is left to learn.

    Args:
        replay: runs the model.
        batches: what is learned from.
        settings: of the training; its rows and its rate are not used.
        seed: of the random choices.
    """

    def __init__(
        self, replay: Replay, batches: Sequence[Any], settings: Settings, seed: int
    ) -> None:
        self._replay, self._batches, self._seed = replay, batches, seed
        self._settings = replace(settings, rows=_ROWS, rate=_RATE, drop=0.0, loss=output_distance)
        self._module = WholeModel(replay)
        with quantizers_off(replay.model):
            for index, batch in enumerate(batches):
                replay.store.put(("float output", index), self._module(batch))

    def learn(self) -> tuple[float, float] | None:
        """Learn in place, unless it makes the error larger.

        Returns:
            The error before and after; None, with a warning, if the output has no gradient, or not
            the shape of that of the float model, as the boxes of a detector.
        """
        replay, settings = self._replay, self._settings
        data = BlockData(
            len(self._batches),
            lambda index: ((self._batches[index],), {}),
            lambda index: ((self._batches[index],), {}),
            lambda index: replay.store.get(("float output", index)),
        )
        block, biases = Block("", self._module, {}), layer_biases(replay.model)
        ranges = learnable_ranges(replay.model, replay.model)
        seed = self._seed + 1_000_000_007 * rank_in(settings.group)
        generator = torch.Generator().manual_seed(seed)
        learned = LearnedBlock(block, {}, ranges, 0.0, generator, biases)
        state = BlockState(block, ranges, biases)
        try:
            before = mean_error(self._module, data, settings)
            learn("the model", learned, data, settings, generator)
            learned.apply_("adaround_")
            after = mean_error(self._module, data, settings)
            if not after < before:
                state.restore()
        except BaseException as error:
            state.restore()
            if isinstance(error, TorchqError) or not isinstance(error, (RuntimeError, ValueError)):
                raise
            warnings.warn(
                f"adaround_: the last part, through the whole model, was left out ({error}). Pass "
                "finish=0 to do without it",
                stacklevel=3,
            )
            return None
        return before, min(before, after)


class WholeModel(nn.Module):
    """A model as a block: its one argument is a batch."""

    def __init__(self, replay: Replay) -> None:
        super().__init__()
        self._run = replay.whole_model()

    def forward(self, batch: Any) -> Any:
        """Return the output of the model for a batch."""
        return self._run(batch)


def output_distance(out: Any, target: Any) -> Tensor:
    """Return how far an output is from that of the float model.

    It is the squared error over the variance. To outputs (N, classes) the divergence of the
    probabilities is added, which decides about the largest scores; alone it would let all scores of
    a row move together.
    """
    total = torch.zeros((), device="cpu")
    for o, t in zip(tensors_in(out), tensors_in(target), strict=True):
        if not t.is_floating_point() or not t.numel():
            continue
        error = (o - t).float().square().mean() / t.float().var(correction=0).clamp(min=1e-12)
        if t.dim() == 2 and t.shape[1] > 1:
            known = t.float().log_softmax(1)
            lost = (known - o.float().log_softmax(1)) * known.exp()
            error = error + lost.sum(1).mean()
        total = total.to(error.device) + error
    return total


def layer_biases(model: nn.Module) -> list[nn.Parameter]:
    """Return the biases of quantized layers."""
    layers = [module for module in model.modules() if isinstance(module, QuantModule)]
    found = [getattr(layer, "bias", None) for layer in layers]
    return list({id(b): b for b in found if isinstance(b, nn.Parameter)}.values())

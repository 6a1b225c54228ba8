"""The rounding of the layers of one block."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchq.ptq.blockwise import Block, Replay
from torchq.ptq.gptq.layer import GPTQLayer, Options, round_layer_
from torchq.ptq.gptq.statistics import MomentSums
from torchq.workflow.layer_matrices import input_matrix, output_matrix

__all__ = ["BlockRounding"]


class BlockRounding:
    """Rounds the layers of one block after the other.

    Args:
        replay: runs the model.
        options: how to round.
        group: processes whose statistics are summed.
        keep_wanted: keep the weight matrices that were rounded.

    Attributes:
        done: path of each layer that was rounded -> what happened.
        wanted: path of each layer of the last block -> the weight matrix that was rounded, if
            these are kept.
    """

    def __init__(
        self,
        replay: Replay,
        options: Options,
        group: dist.ProcessGroup | None,
        *,
        keep_wanted: bool = False,
    ) -> None:
        self.replay, self.options, self.group = replay, options, group
        self._keep_wanted = keep_wanted
        self.done: dict[str, GPTQLayer] = {}
        self.wanted: dict[str, Tensor] = {}

    def treat(self, number: int, block: Block) -> None:
        """Round the layers of block ``number``; all blocks before it are finished."""
        self.wanted = {}
        if self.options.target == "weight":
            shortcuts: set[str] = set()
        else:
            shortcuts = self._keep_targets(number, block)
        for names in self.replay.layers_by_input(number):
            self._treat_layers(number, block, names, shortcuts)

    def _keep_targets(self, number: int, block: Block) -> set[str]:
        """Keep the float outputs of the layers; return those that are added to a shortcut."""
        replay, names = self.replay, list(block.layers)
        wanted = names if self.options.target == "block" else []
        repairing: set[str] = set()
        for index in range(len(replay.batches)):
            got = replay.run(number, index, "float", want_outputs=names, want_shortcuts=wanted)
            for name, out in got.outputs.items():
                shortcut = got.shortcuts.get(name)
                replay.store.put(
                    ("target", name, index), out if shortcut is None else out + shortcut
                )
            repairing |= got.shortcuts.keys()
        return repairing

    def _treat_layers(
        self, number: int, block: Block, names: Sequence[str], repairing: set[str]
    ) -> None:
        """Treat layers that read the same input."""
        replay = self.replay
        sums = {name: MomentSums() for name in names}
        wanted = [name for name in names if name in repairing]
        for index in range(len(replay.batches)):
            got = replay.run(number, index, "quantized", want_inputs=names, want_shortcuts=wanted)
            for name in names:
                layer = block.layers[name]
                x = input_matrix(layer, layer.input_quantizer(got.inputs.pop(name)))
                target = self._target(name, layer, index, got.shortcuts.get(name))
                sums[name].add(x, target)
        for name in names:
            total = sums.pop(name)
            total.reduce(self.group)
            self.done[name] = round_layer_(
                name,
                block.layers[name],
                total,
                self.options,
                repairs_shortcut=name in repairing,
                keep=partial(self.wanted.__setitem__, name) if self._keep_wanted else None,
            )

    def _target(self, name: str, layer: Any, index: int, shortcut: Tensor | None) -> Tensor | None:
        """Return the target of a layer for one batch, None where it is that of its weight."""
        key = ("target", name, index)
        if key not in self.replay.store:
            return None
        out = self.replay.store.get(key)
        self.replay.store.drop(key)
        return output_matrix(layer, out if shortcut is None else out - shortcut)

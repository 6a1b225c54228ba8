"""GPTQ block by block: every layer is rounded for the inputs that the quantized model gives it.

References: Frantar et al., GPTQ (ICLR 2023); for the asymmetric target, Li et al., GPTAQ (2025);
for the bias, Nagel et al., Data-Free Quantization (ICCV 2019), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.graph import Forward
from torchq.ptq.blocks import Block
from torchq.ptq.gptq.layer import GPTQLayer, MomentSums, Options, Target, round_layer_
from torchq.ptq.layers import find_layers, report_text
from torchq.ptq.replay import Replay, treat_blocks
from torchq.utils import Pattern, evaluating
from torchq.workflow.layer_matrices import input_matrix, output_matrix

_TARGETS = ("weight", "layer", "block")


@dataclass(frozen=True)
class GPTQReport:
    """The result of :func:`gptq_`.

    Attributes:
        layers: path of each layer that was rounded, in the order of the work -> what happened.
        skipped: path of each quantized layer that was left alone -> the reason.
        batches: the number of batches that were read.
    """

    layers: Mapping[str, GPTQLayer]
    skipped: Mapping[str, str]
    batches: int

    def __str__(self) -> str:
        rows = []
        for name, layer in self.layers.items():
            notes = ["repairs a shortcut"] if layer.repairs_shortcut else []
            notes += [f"damping {layer.damping:g}"]
            error = f"{layer.error_before:.3%} -> {layer.error_after:.3%}"
            rows.append((name, error, ", ".join(notes)))
        header = ("layer", "error of the output, relative", "notes")
        last = f"{len(self.layers)} layers from {self.batches} batches"
        return report_text(header, rows, self.skipped, last)


def gptq_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    target: Target = "block",
    damping: float = 0.01,
    refine: bool = True,
    block: Pattern | Sequence[Pattern] | None = None,
    num_batches: int | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> GPTQReport:
    """Round the weights of Linear and Conv layers for the least error of their outputs, in place.

    Call it after :func:`torchq.fuse_`, :func:`torchq.quantize_` and :func:`torchq.calibrate`; no
    labels are needed. Afterwards the weights are values of the quantizers' grids, so saving,
    exporting and deploying see exactly these codes. The published algorithm is
    ``gptq_(..., target="weight", refine=False)``.

    Layers are treated one block after the other, in running order, on inputs from the quantized
    blocks before. A layer is changed as a whole or not at all; a call that fails or is interrupted
    leaves the layers that were finished as they are, with a warning that names their number.

    Args:
        model: a calibrated model.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            A few hundred images are enough. All are kept in memory.
        target: ``"weight"`` keeps the output of the float weights on the quantized inputs.
            ``"layer"`` wants the output of the float layer on the float inputs, so that the layer
            makes up for the rounding of its inputs: ridge regression gives the weights that are
            rounded, moments are centred, and the bias follows in closed form. ``"block"`` wants
            the same, and a layer whose output is added to a shortcut also makes up for the error
            of the shortcut.
        damping: the fraction of the mean diagonal of the Hessian that is added to the diagonal,
            > 0. Where the sum is not positive definite, it grows tenfold; the report has it. Unless
            the target is ``"weight"``, it grows for layers with fewer than 20 samples for each
            input, as moments of few samples say little about others.
        refine: search the ranges of the weights for the least error of the output, and improve
            the rounding by coordinate descent. Without it the ranges are those of calibration.
        block: patterns of the modules that are blocks; None finds them in the structure.
        num_batches: the number of batches to read; default all.
        forward: called as ``forward(model, batch)`` in place of the model.
        progress: show a progress bar.

    Returns:
        The report.

    Raises:
        ConfigError: no layer can be treated, an input is not calibrated, or an argument is
            invalid.
        CalibrationError: there is no batch, or a layer sees NaN or infinity.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 2))
        >>> _ = torchq.quantize_(model, torchq.recipes.integer(3, 8))
        >>> batches = [torch.rand(64, 8)]
        >>> _ = torchq.calibrate(model, batches, progress=False)
        >>> list(torchq.ptq.gptq_(model, batches, progress=False).layers)
        ['0', '1']
    """
    options = Options(target, damping, refine)
    _check(options)
    found = find_layers("gptq_", model)
    with torch.no_grad(), evaluating(model):
        replay = Replay("gptq_", model, batches, num_batches, forward)
        rounding = BlockRounding(replay, options)

        def treat(number: int, one: Block) -> None:
            rounding.treat(number, one)
            replay.finish(number, "quantized")

        skipped = treat_blocks(replay, found, block, treat, rounding.done, progress)
    return GPTQReport(rounding.done, skipped, len(replay.batches))


def _check(options: Options) -> None:
    """Raise an error for an argument that is out of range."""
    if options.target not in _TARGETS:
        raise ConfigError(
            f"gptq_: got target={options.target!r}; expected one of {', '.join(_TARGETS)}"
        )
    if not 0 < options.damping < float("inf"):
        raise ConfigError(f"gptq_: got damping={options.damping}; expected a number > 0")


class BlockRounding:
    """Rounds the layers of one block after the other.

    ``done`` holds what happened to each, ``wanted`` the matrices that the last block rounded.
    """

    def __init__(self, replay: Replay, options: Options) -> None:
        self.replay, self.options = replay, options
        self.done: dict[str, GPTQLayer] = {}
        self.wanted: dict[str, Tensor] = {}

    def treat(self, number: int, block: Block) -> None:
        """Round the layers of block ``number``; all blocks before it are finished."""
        self.wanted = {}
        if self.options.target == "weight":
            shortcuts: set[str] = set()
        else:
            shortcuts = self._keep_targets(number, block)
        for name, layer in block.layers.items():
            sums = self._sums(number, name, layer, name in shortcuts)
            self.done[name], self.wanted[name] = round_layer_(
                name, layer, sums, self.options, name in shortcuts
            )

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

    def _sums(self, number: int, name: str, layer: Any, repairs: bool) -> MomentSums:
        """Return the statistics of the quantized inputs of a layer, and of its targets if any."""
        store, sums, names = self.replay.store, MomentSums(), [name]
        for index in range(len(self.replay.batches)):
            got = self.replay.run(
                number, index, "quantized", want_inputs=names, want_shortcuts=names * repairs
            )
            x = input_matrix(layer, layer.input_quantizer(got.inputs.pop(name)))
            key, target = ("target", name, index), None
            if key in store:
                out, shortcut = store.get(key), got.shortcuts.get(name)
                store.drop(key)
                target = output_matrix(layer, out if shortcut is None else out - shortcut)
            sums.add(x, target)
        return sums

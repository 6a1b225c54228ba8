"""GPTQ block by block: every layer is rounded for the inputs that the quantized model gives it.

References: Frantar et al., GPTQ (ICLR 2023); for the asymmetric target, Li et al., GPTAQ (2025);
for the bias, Nagel et al., Data-Free Quantization (ICCV 2019), section 4.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchq.errors import ConfigError
from torchq.ptq.blockwise import (
    Replay,
    RunOptions,
    TensorStore,
    check_ready,
    find_blocks,
    find_layers,
    said_how_far,
)
from torchq.ptq.gptq.block import BlockRounding
from torchq.ptq.gptq.layer import GPTQLayer, Options, Target
from torchq.ptq.reports import report_text
from torchq.utils import Pattern, evaluating, progress_bar

__all__ = ["GPTQReport", "gptq_"]


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
    act_order: bool = True,
    damping: float = 0.01,
    refine: bool = True,
    block: Pattern | Sequence[Pattern] | None = None,
    run: RunOptions | None = None,
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
        act_order: round columns in the order of falling diagonals of the Hessian.
        damping: the fraction of the mean diagonal of the Hessian that is added to the diagonal,
            > 0. Where the sum is not positive definite, it grows tenfold; the report has it. Unless
            the target is ``"weight"``, it grows for layers with fewer than 20 samples for each
            input, as moments of few samples say little about others.
        refine: search the ranges of the weights for the least error of the output, and improve
            the rounding by coordinate descent. Without it the ranges are those of calibration.
        block: patterns of the modules that are blocks; None finds them in the structure.
        run: how the model is run; see :class:`RunOptions`. With ``run.group`` the statistics of
            all processes are summed, and every rank gets the same weights.
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
    options, run = Options(target, act_order, damping, refine), run or RunOptions()
    _check(options)
    layers, skipped = find_layers(model)
    check_ready("gptq_", model, layers, skipped)
    with torch.no_grad(), evaluating(model), TensorStore(run.memory_limit) as store:
        replay = Replay(model, batches, run, store, "gptq_")
        blocks, more = find_blocks(model, layers, replay.count_calls(), block)
        replay.use_blocks(blocks)
        rounding = BlockRounding(replay, options, run.group)
        with said_how_far("gptq_", rounding.done, blocks):
            for number, one in progress_bar(
                list(enumerate(blocks)), description="gptq_", enabled=progress, unit="block"
            ):
                rounding.treat(number, one)
                replay.finish(number, "quantized")
    skipped |= more
    ordered = {name: skipped[name] for name in dict(model.named_modules()) if name in skipped}
    return GPTQReport(rounding.done, ordered, len(replay.batches))


def _check(options: Options) -> None:
    """Raise an error for an argument that is out of range."""
    if options.target not in _TARGETS:
        raise ConfigError(
            f"gptq_: got target={options.target!r}; expected one of {', '.join(_TARGETS)}"
        )
    if not 0 < options.damping < float("inf"):
        raise ConfigError(f"gptq_: got damping={options.damping}; expected a number > 0")

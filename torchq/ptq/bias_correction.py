"""Bias correction in the order in which layers run, with or without a gain of each channel.

``calibrate`` corrects with its defaults; this is the same algorithm with other settings. The
correction stays beside the weights: see :mod:`torchq.nn.correction`.

Reference: Nagel et al., Data-Free Quantization Through Weight Equalization and Bias Correction
(ICCV 2019), section 4.2.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from torchq.errors import ConfigError
from torchq.graph import Forward
from torchq.ptq.layers import check_calibrated
from torchq.utils import kept_batches, network_of, progress_bar
from torchq.workflow import Correction
from torchq.workflow.correction import correct, needs_gains
from torchq.workflow.runs import Runs


class _Shown:
    """Batches with a bar for each time that they are read."""

    def __init__(self, batches: list[Any], enabled: bool) -> None:
        self._batches, self._enabled = batches, enabled

    def __iter__(self) -> Iterator[object]:
        yield from progress_bar(
            self._batches, description="correct_bias_", enabled=self._enabled
        )


def correct_bias_(
    model: nn.Module,
    batches: Iterable[object],
    *,
    gains: bool | None = None,
    num_batches: int | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> Correction:
    """Correct the results of quantized convolutions and linear layers; no labels are needed.

    Each layer is fitted behind the corrected ones before it, so that it also takes back what these
    add. It is sharper than what ``calibrate`` does at 8 bits where the images are those of the
    task, and worse where they show none of its objects. A correction that is there is replaced. A
    call that fails or is interrupted changes nothing.

    Args:
        model: a calibrated model whose BatchNorms are fused (:func:`torchq.fuse_`).
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
        gains: fit what the results of each output channel are multiplied by, too. None: with 4
            bits and fewer. Ranges that clip want gains: they shrink results.
        num_batches: the number of batches to read; default all.
        forward: called as ``forward(model, batch)`` in place of the model.
        progress: show a progress bar.

    Returns:
        The report.

    Raises:
        ConfigError: no quantized layer can be corrected, or an input is not calibrated.
        CalibrationError: there is no batch, or a result is NaN or infinite.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 2))
        >>> _ = torchq.quantize_(model, torchq.recipes.integer(3, 8))
        >>> batches = [torch.rand(16, 4)]
        >>> _ = torchq.calibrate(model, batches, correct=False, progress=False)
        >>> print(torchq.ptq.correct_bias_(model, batches, progress=False).line)
        corrected gain and bias of 1 layers; output ... dB -> ... dB on 1 batch
    """
    model = network_of(model)
    check_calibrated("correct_bias_", model)
    kept = kept_batches("correct_bias_", batches, num_batches)
    runs = Runs(model, _Shown(kept, progress), forward)
    with_gains = needs_gains(model) if gains is None else gains
    found = correct(runs, gains=with_gains, in_order=True)
    if not found.layers and not found.outputs.batches:
        reasons = "; ".join(
            sorted({f"{n}: {why}" for n, why in found.skipped.items()})[:5]
        )
        raise ConfigError(
            f"correct_bias_: got no layer to correct ({reasons or 'none is quantized'}); "
            "expected a calibrated model whose layers have biases"
        )
    return found

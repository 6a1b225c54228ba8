"""What quantizers that a target adds cost at the output of a model, measured on an example."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import CalibrationError
from torchq.graph import call_model, state_kept, tensors_in
from torchq.nn import TensorQuantizer
from torchq.utils import evaluating
from torchq.utils.progress import progress_bar

__all__ = ["HARMLESS", "HARMLESS_ALONE", "MOST", "Costs", "costs_of_placements"]

#: The largest loss of signal-to-noise ratio at the output, in dB, that a quantizer which a target
#: adds may cause, and that all of them may cause together.
MOST = 3.0
#: The ratios in dB from which on the loss does not count: of one placement beside the layers, and
#: of all. In shallow models, whose layers add next to no noise, 8 bits for the two operands of one
#: addition cost tens of dB and leave 30 to 40.
HARMLESS_ALONE = 30.0
HARMLESS = 25.0
#: The noise over signal, 100 dB, below which a model counts as exact: float32 alone gives more.
SILENT = 1e-10


@dataclass(frozen=True)
class Costs:
    """What placements do to the output of a model.

    Attributes:
        costly: name of each placement that should be left out -> its cost in dB, alone.
        unreached: the placements that no tensor reached: the operator had numbers as operands.
    """

    costly: Mapping[str, float]
    unreached: tuple[str, ...] = ()


def costs_of_placements(
    model: nn.Module,
    placements: Mapping[str, Sequence[TensorQuantizer]],
    example: Any,
    *,
    progress: bool = False,
) -> Costs:
    """Return the placements that should be left out, and those that see no tensor.

    The model runs with its other quantizers alone, and with those of all placements. Where these
    cost more than :data:`MOST` and leave less than :data:`HARMLESS_ALONE`, the model runs with each
    placement alone and all other quantizers off. Errors of different quantizers are independent,
    so their powers add: a placement that costs too much beside the layers is left out, and then
    those with the largest errors, until a run shows that the rest costs no more than it may. That
    is four runs for a model without costly placements, and about n more for n placements otherwise.
    Quantizers that are not calibrated have the range of the example for the time.

    Args:
        model: quantized; left unchanged.
        placements: name -> quantizers that exist for a target alone.
        example: the arguments of one call; see :func:`torchq.graph.call_arguments`.
        progress: show a bar.

    Returns:
        The costs; none where the output says nothing, as it is not finite or no number.
    """
    if not placements:
        return Costs({})
    known = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    modes = [(quantizer, quantizer.mode) for quantizer in known]
    fresh = [q for q in known if not q.calibrated and not q.descriptor.dynamic]
    try:
        with torch.no_grad(), evaluating(model), state_kept(model):
            unseen = _calibrate(model, known, fresh, example)
            unreached = [name for name, found in placements.items() if unseen.issuperset(found)]
            reached = {name: placements[name] for name in placements if name not in unreached}
            costly = _Measurement(model, reached, example, modes).run(progress)
            return Costs(costly, tuple(unreached))
    except CalibrationError:
        return Costs({})
    finally:
        for quantizer in fresh:
            quantizer.forget_amax()
            quantizer.calibrator = None
        for quantizer, mode in modes:
            quantizer.mode = mode


def _calibrate(
    model: nn.Module,
    known: Sequence[TensorQuantizer],
    fresh: Sequence[TensorQuantizer],
    example: Any,
) -> set[TensorQuantizer]:
    """Give quantizers without a range that of the example; return those that no tensor reached.

    Raises:
        CalibrationError: A tensor of the example holds NaN or infinity.
    """
    for quantizer in known:
        quantizer.mode = "off"
    for quantizer in fresh:
        quantizer.start_calibration("max")
    call_model(model, example)
    unseen = set()
    for quantizer in fresh:
        if quantizer.calibrator is not None and quantizer.calibrator.seen:
            quantizer.finish_calibration()
        else:
            unseen.add(quantizer)
    return unseen


class _Measurement:
    """Runs of one model with some of its quantizers off."""

    def __init__(
        self,
        model: nn.Module,
        placements: Mapping[str, Sequence[TensorQuantizer]],
        example: Any,
        modes: Sequence[tuple[TensorQuantizer, str]],
    ) -> None:
        self.model, self.placements = model, placements
        self.example, self.modes = example, modes
        self.expected = self._outputs(set())

    def run(self, progress: bool) -> dict[str, float]:
        """Return the placements to leave out, with the cost of each alone."""
        usual = {id(q) for q, _ in self.modes}
        added = {id(q) for quantizers in self.placements.values() for q in quantizers}
        others = usual - added
        baseline = self._noise(others)
        least = baseline * 10 ** (MOST / 10)
        alone, together = (max(least, 10 ** (-h / 10)) for h in (HARMLESS_ALONE, HARMLESS))
        kept = list(self.placements)
        everything = self._noise(others | self._quantizers(kept))
        if not self.expected or math.isnan(baseline) or everything <= alone:
            return {}
        bar = progress_bar(
            list(kept), description="measure placements", unit="operator", enabled=progress
        )
        noise = {name: self._noise(self._quantizers([name])) for name in bar}
        noise = {name: math.inf if math.isnan(value) else value for name, value in noise.items()}
        left_out = {}
        for name in sorted(noise, key=lambda name: noise[name], reverse=True):
            expected = baseline + sum(noise[other] for other in kept)
            fits = baseline + noise[name] <= alone and expected <= together
            if fits and self._noise(others | self._quantizers(kept)) <= together:
                break
            kept.remove(name)
            left_out[name] = _decibels((baseline + noise[name]) / max(baseline, SILENT))
        return left_out

    def _quantizers(self, names: Sequence[str]) -> set[int]:
        return {id(quantizer) for name in names for quantizer in self.placements[name]}

    def _outputs(self, active: set[int]) -> list[Tensor]:
        for quantizer, mode in self.modes:
            quantizer.mode = mode if id(quantizer) in active else "off"
        found = tensors_in(call_model(self.model, self.example))
        return [tensor.double() for tensor in found if tensor.is_floating_point()]

    def _noise(self, active: set[int]) -> float:
        """Return noise over signal, the mean over all outputs; NaN if it is unknown."""
        shares = [
            float((got - expected).square().sum() / expected.square().sum().clamp_min(1e-300))
            for got, expected in zip(self._outputs(active), self.expected, strict=True)
            if got.shape == expected.shape and expected.numel()
        ]
        return sum(shares) / len(shares) if shares else math.nan


def _decibels(ratio: float) -> float:
    return 10 * math.log10(max(ratio, 1.0))

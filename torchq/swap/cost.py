"""What quantizers that a target adds cost at the output of a model, measured on an example."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import CalibrationError
from torchq.graph import call_model, state_kept, tensors_in
from torchq.nn import TensorQuantizer
from torchq.utils import evaluating

__all__ = ["HARMLESS", "MOST", "costs_of_placements"]

#: The largest loss of signal-to-noise ratio at the output, in dB, that a placement may cause.
MOST = 3.0
#: The ratio in dB from which on a placement is harmless, whatever it costs: about what 8 bits give
#: where the other layers add next to no noise.
HARMLESS = 25.0


def costs_of_placements(
    model: nn.Module, placements: Mapping[str, Sequence[TensorQuantizer]], example: Any
) -> dict[str, float]:
    """Return the placements that cost more than they may, with their cost in dB.

    The model runs with its other quantizers, and with those of some placements: first of all of
    them, and where these cost too much, of ever smaller groups. Quantizers that are not calibrated
    have the range of the example for the time.

    Args:
        model: quantized; left unchanged.
        placements: name -> quantizers that exist for a target alone.
        example: the arguments of one call; see :func:`torchq.graph.call_arguments`.

    Returns:
        Name -> cost; empty where the output says nothing, as it is not finite or no number.
    """
    if not placements:
        return {}
    known = [m for m in model.modules() if isinstance(m, TensorQuantizer)]
    modes = [(quantizer, quantizer.mode) for quantizer in known]
    fresh = [q for q in known if not q.calibrated and not q.descriptor.dynamic]
    try:
        with torch.no_grad(), evaluating(model), state_kept(model):
            _calibrate(model, known, fresh, example)
            return _Measurement(model, placements, example, modes).run()
    except CalibrationError:
        return {}
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
) -> None:
    """Give quantizers without a range that of the example.

    Raises:
        CalibrationError: A tensor of the example holds NaN or infinity.
    """
    for quantizer in known:
        quantizer.mode = "off"
    for quantizer in fresh:
        quantizer.start_calibration("max")
    call_model(model, example)
    for quantizer in fresh:
        if quantizer.calibrator is not None and quantizer.calibrator.seen:
            quantizer.finish_calibration()


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

    def run(self) -> dict[str, float]:
        usual = {id(q) for q, _ in self.modes}
        added = {id(q) for quantizers in self.placements.values() for q in quantizers}
        self.others = usual - added
        self.baseline = self._ratio(self._outputs(self.others))
        if not self.expected or math.isnan(self.baseline):
            return {}
        return self._costly(list(self.placements))

    def _costly(self, names: list[str]) -> dict[str, float]:
        """Return the placements of a group that cost too much, by dividing it."""
        active = {id(q) for name in names for q in self.placements[name]}
        ratio = self._ratio(self._outputs(self.others | active))
        cost = self.baseline - ratio
        if ratio >= HARMLESS or cost <= MOST:
            return {}
        if len(names) == 1:
            return {names[0]: cost}
        middle = len(names) // 2
        return self._costly(names[:middle]) | self._costly(names[middle:])

    def _outputs(self, active: set[int]) -> list[Tensor]:
        for quantizer, mode in self.modes:
            quantizer.mode = mode if id(quantizer) in active else "off"
        found = tensors_in(call_model(self.model, self.example))
        return [tensor.double() for tensor in found if tensor.is_floating_point()]

    def _ratio(self, outputs: list[Tensor]) -> float:
        """Return signal over noise in dB, the mean over all outputs; NaN if it is unknown."""
        shares = [
            float((got - expected).square().sum() / expected.square().sum().clamp_min(1e-300))
            for got, expected in zip(outputs, self.expected, strict=True)
            if got.shape == expected.shape and expected.numel()
        ]
        mean = sum(shares) / len(shares) if shares else math.nan
        if mean == 0:
            return math.inf
        return -10 * math.log10(mean) if math.isfinite(mean) else math.nan

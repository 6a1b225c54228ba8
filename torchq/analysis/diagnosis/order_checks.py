"""Checks for steps in the wrong order: ranges that were found before the model was finished."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from torchq.analysis.diagnosis.finding import Finding
from torchq.analysis.diagnosis.registry import Patient, check
from torchq.functional import reduce_amax
from torchq.nn import QuantModule, TensorQuantizer

__all__ = ["CHANGED", "STALE"]

#: Ratio of a weight's magnitude to its range from which on the weight has changed since.
CHANGED = 1.05
#: Ratio from which on the range is that of another weight.
STALE = 2.0
#: How far other methods than "max" may cut a range on purpose.
_CUT = 8.0


@check("wrong_order")
def wrong_order(patient: Patient) -> Iterator[Finding]:
    """Yield calibrations that did not finish, and weights that changed after theirs."""
    for path, quantizer in patient.quantizers.items():
        if quantizer.observing:
            text = f"is in mode {quantizer.mode!r}: a calibration began and did not finish"
            yield Finding("wrong_order", "error", path, text, "torchq.calibrate(model, batches)")
    paths = {id(q): path for path, q in patient.quantizers.items()}
    for module in patient.model.modules():
        if not isinstance(module, QuantModule):
            continue
        for quantizer, weight in module.quantized_weights():
            if quantizer.quantizing and id(quantizer) in paths:
                yield from _stale(paths[id(quantizer)], quantizer, weight.detach())


def _stale(path: str, quantizer: TensorQuantizer, weight: Tensor) -> Iterator[Finding]:
    descriptor = quantizer.descriptor
    if descriptor.dynamic or descriptor.learn_amax or not quantizer.calibrated or weight.is_meta:
        return
    wide, narrow = _ratios(quantizer.amax.detach(), reduce_amax(weight, descriptor.granularity))
    # Other methods than "max" cut the range on purpose, but none makes it wider than the weight.
    worst = max(wide, narrow if descriptor.calib_method == "max" else narrow / _CUT)
    if worst > CHANGED:
        text = f"its range is off by a factor of {max(wide, narrow):.3g}: the weight changed after "
        text += "it was calibrated (fused, loaded or trained)"
        remedy = "fuse and load weights first; then torchq.calibrate(model, batches, force=True)"
        severe = worst > STALE
        yield Finding("wrong_order", "error" if severe else "warning", path, text, remedy)


def _ratios(known: Tensor, now: Tensor) -> tuple[float, float]:
    """Return the largest ratio of range to weight, and of weight to range, over all channels."""
    if now.numel() != known.numel():
        return 1.0, 1.0
    now, known = now.reshape(-1), known.reshape(-1)
    live = (now > 0) & (known > 0) & torch.isfinite(known)
    if not bool(live.any()):
        return 1.0, 1.0
    ratio = now[live] / known[live]
    return float(1 / ratio.min()), float(ratio.max())

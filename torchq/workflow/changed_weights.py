"""Weights that changed after their ranges were found: merged, averaged, loaded or trained.

What lies beyond a range is cut off, and nothing in a forward looks at that.
"""

import warnings

import torch
from torch import Tensor, nn

from torchq.functional import reduce_amax
from torchq.nn import TensorQuantizer
from torchq.workflow.modes import quantized_weights, quantizers

#: How far the largest weight of half of the channels reaches, as a multiple of their ranges, where
#: more than training that holds the ranges has changed them: at 8 bits a weight that far outside
#: loses as much as rounding 60 of them does.
_FAR = 1.25
#: How far it may reach where a method cut the ranges on purpose: with three levels the best range
#: of a normal distribution ends at 1.2 of its deviation, and its largest values are near 5.
_FAR_OF_CUT = 5.0
_SHOWN = 5


def reach(quantizer: TensorQuantizer, weight: Tensor) -> Tensor:
    """Return how far a weight reaches, as a multiple of its range, for each slice with a range.

    Args:
        quantizer: one with a range.
        weight: what it quantizes now.

    Returns:
        Ratios, 1-d, > 0. Slices of zeros and ranges that are 0 or not finite are left out; none is
        left where the ranges are those of a weight of another shape.
    """
    ends = [end.detach().abs().reshape(-1) for _, end in quantizer.range.ends()]
    calibrated = torch.stack(ends).amax(0)  # the farther one of two
    scaled = quantizer.scaled(weight.detach())
    if len(ends) == 1 and quantizer.descriptor.unsigned is True:
        # Such a range has no lower side, from the start; its calibration warns of that.
        scaled = scaled.clamp(min=0)
    now = reduce_amax(scaled, quantizer.descriptor.granularity).reshape(-1)
    if now.numel() != calibrated.numel():
        return now.new_empty(0)
    live = (now > 0) & (calibrated > 0) & torch.isfinite(calibrated)
    return now[live] / calibrated[live]


def has_range_of_its_weight(quantizer: TensorQuantizer, weight: Tensor) -> bool:
    """Return True if a weight is quantized with a range that was found on it, and not learned."""
    descriptor = quantizer.descriptor
    is_found = quantizer.calibrated and not (
        descriptor.dynamic or descriptor.learn_amax
    )
    return is_found and quantizer.quantizing and not weight.is_meta


def _is_beyond(quantizer: TensorQuantizer, weight: Tensor) -> bool:
    if (
        not has_range_of_its_weight(quantizer, weight)
        or quantizer.descriptor.amax is not None
    ):
        return False
    ratios = reach(quantizer, weight)
    limit = _FAR if quantizer.descriptor.calib_method == "max" else _FAR_OF_CUT
    return bool(ratios.numel()) and float(ratios.median()) > limit


def warn_of_changed_weights(function: str, model: nn.Module) -> None:
    """Warn of weights that lie far beyond the ranges that were found on them.

    Args:
        function: what the user called.
        model: a quantized model; read once, layer by layer.
    """
    paths = {id(quantizer): path for path, quantizer in quantizers(model).items()}
    changed = [paths[id(q)] for q, w in quantized_weights(model) if _is_beyond(q, w)]
    if changed:
        more = f", ... ({len(changed)} in all)" if len(changed) > _SHOWN else ""
        warnings.warn(
            f"{function}: {', '.join(changed[:_SHOWN])}{more}: the weight reaches far beyond the "
            "range that was found on it, and is cut off there: it was merged, averaged, loaded or "
            "trained since. Run torchq.calibrate(model, batches, force=True)",
            stacklevel=3,
        )

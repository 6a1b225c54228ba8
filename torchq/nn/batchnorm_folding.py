"""Folding a BatchNorm into a calibrated layer without changing a code.

The layer's output channels are scaled, and the ranges of its weight with them.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchq.formats import Granularity, PerTensor
from torchq.functional import quantize
from torchq.fusion.algebra import fold_affine_after
from torchq.nn.tensor_quantizer import TensorQuantizer

#: The fraction of weight codes that may differ after a fold, by rounding.
CHANGED_CODES = 1e-4


class OutputScaling(nn.Module):
    """Mixin that makes a quantized layer a :class:`torchq.fusion.RescalesOutput`.

    With ``weight * s`` and ``amax * |s|`` per output channel every code keeps its magnitude and
    takes the sign of ``s``. That needs a range per output channel, or one scale for all channels.
    """

    channel_axis: ClassVar[int]
    weight: Tensor
    input_quantizer: nn.Module
    weight_quantizer: nn.Module

    def output_scale_obstacle(self, scale: Tensor) -> str | None:
        """Return why the weight's codes could not keep their magnitude, or None if they can."""
        quantizer = self.weight_quantizer
        if any(getattr(q, "observing", False) for q in (self.input_quantizer, quantizer)):
            return "is being calibrated; finish the calibration first, or fuse before quantizing"
        if not isinstance(quantizer, TensorQuantizer):
            return None
        if not quantizer.calibrated and not quantizer.descriptor.dynamic:
            return None  # its range will be that of the folded weight
        if not quantizer.descriptor.symmetric:
            return (
                "has asymmetric weight ranges, which BatchNorm may turn round; expected symmetric "
                "ones. Fuse before quantizing"
            )
        granularity = quantizer.descriptor.granularity
        ratio = _largest_ratio(self._per_weight(scale.abs()), granularity)
        if ratio is not None:
            unit = "ranges that several output channels share"
            if isinstance(granularity, PerTensor):
                unit = "one range for the whole weight"
            return (
                f"has {unit}, but BatchNorm scales its channels by factors up to {ratio:.3g}"
                " apart; expected a range per output channel. Fuse before quantizing"
            )
        changed = self._changed_codes(quantizer, scale)
        if changed > CHANGED_CODES:
            return (
                f"would change {changed:.1%} of its weight codes ({quantizer.descriptor});"
                " expected none. Fuse before quantizing"
            )
        return None

    def rescale_output_(self, scale: Tensor) -> None:
        """Multiply the ranges of the weight by ``|scale|``; the caller has scaled the weight."""
        quantizer = self.weight_quantizer
        if isinstance(quantizer, TensorQuantizer) and quantizer.calibrated:
            factor = quantizer.descriptor.granularity.amax(self._per_weight(scale.abs()))
            amax = quantizer.amax.detach()
            quantizer.set_amax(amax.double() * factor.reshape(amax.shape))

    def _per_weight(self, channelwise: Tensor) -> Tensor:
        """Return one value per output channel laid out over the weight, in float64."""
        module: Any = self
        ones = torch.ones(self.weight.shape, dtype=torch.float64, device=self.weight.device)
        groups, channelwise = getattr(module, "groups", 1), channelwise.to(ones.device)
        zeros, transposed = torch.zeros_like(channelwise), self.channel_axis == 1
        folded = fold_affine_after(
            ones, None, channelwise, zeros, groups=groups, transposed=transposed
        )
        return folded.kernel

    def _changed_codes(self, quantizer: TensorQuantizer, scale: Tensor) -> float:
        """Return the fraction of weight codes that change in more than their sign."""
        d, weight = quantizer.descriptor, self.weight.detach()
        factor = self._per_weight(scale)
        amax = quantizer.range_for(weight).high
        folded = (weight.double() * factor).to(weight.dtype)
        new_amax = (amax.double() * d.granularity.amax(factor).reshape(amax.shape)).float()
        before, after = (
            quantize(w, a.float(), d.format, d.granularity, d.block_scale_format)
            for w, a in ((weight, amax), (folded, new_amax))
        )
        expected = before * factor.sign().to(before.dtype)
        return (after != expected).double().mean().item() if expected.numel() else 0.0


def _largest_ratio(factor: Tensor, granularity: Granularity) -> float | None:
    """Return the largest ratio of factors >= 0 within one range; None if equal up to rounding."""
    largest = granularity.amax(factor)
    smallest = factor.max() - granularity.amax(factor.max() - factor)
    if not bool((largest - smallest > 1e-6 * largest).any()):
        return None
    return (largest / smallest.clamp_min(1e-30)).max().item()

"""Scaling the output channels of a quantized weight on the grid of its own codes.

A quantized weight is ``code * scale``. With its channels multiplied by factors it is ``code *
(scale * |factor|)``, where the code takes the sign of the factor. So the new weight is written as
the old codes times the new scales: nothing is rounded again, no weight on a tie between two codes
can fall to the other side, and the precision of a checkpoint does not matter.

In float32 ``code * scale`` and the quotient by the same scale are each off by 2**-24 of the code
at most, so a code moves by less than half a step up to 2**22.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchq.formats import FloatFormat, ScaleType
from torchq.functional import QParams, Range
from torchq.nn.tensor_quantizer import TensorQuantizer

#: A float32 scale is the product of two numbers, which are each rounded once.
_FLOAT32_ROUNDING = 2.0**-22


@dataclass(frozen=True)
class ScaledWeight:
    """A weight whose output channels were scaled.

    Attributes:
        values: of the dtype, the device and the shape of the weight.
        saturated: bool, like ``values``: codes that the grid lacks with the other sign, such as
            -128 of int8; they are the outermost code on the other side now.
        rounded: bool, like ``values``: codes that were rounded anew and are others now, as the type
            of the scales cannot hold the scale of their range.
        inexact: bool, like ``values``: all codes of such ranges, and those that are saturated.
        dead: bool, like ``values``: where the scale has become 0, and with it the code.
    """

    values: Tensor
    saturated: Tensor
    rounded: Tensor
    inexact: Tensor
    dead: Tensor


def scale_weight_(
    quantizer: TensorQuantizer, weight: Tensor, factor: Tensor
) -> ScaledWeight:
    """Multiply the range of a weight by factors, in place, and return the weight on its new grid.

    Args:
        quantizer: of the weight. It is on, has a range or takes that of each call, and every range
            has one factor; of an asymmetric one the sign is one too.
        weight: floating point; left unchanged.
        factor: float64, the shape of ``weight``.
    """
    old = quantizer.qparams(weight)
    codes = quantizer.codes(quantizer.scaled(weight))
    mirrored = _mirrored(quantizer, codes, factor)
    low, high = old.quant_min, old.quant_max
    signed = mirrored.clamp(low, high)
    saturated = signed != mirrored
    new = scale_range_(quantizer, weight, factor)
    centered = new.centered(signed).to(codes.dtype)
    rounded = torch.zeros_like(saturated)
    inexact = saturated
    if isinstance(quantizer.descriptor.block_scale_format, ScaleType):
        exact_scale = old.aligned(old.scale, codes).double() * factor.abs()
        ratio = exact_scale / new.aligned(new.scale, codes).double()
        anew = (ratio - 1).abs() > scale_rounding(quantizer)
        moved = torch.where(anew, new.round(centered * ratio.to(codes.dtype)), centered)
        rounded = moved != centered
        inexact = inexact | anew
        centered = moved
    dead = _is_dead(old, factor, codes)
    values = torch.where(dead, 0.0, new.dequantize(centered))
    if quantizer.pre_quant_scale is not None:
        values = values / quantizer.pre_quant_scale  # which the quantizer multiplies by
    return ScaledWeight(
        values.to(weight.dtype),
        saturated=saturated & ~dead,
        rounded=rounded & ~dead,
        inexact=inexact & ~dead,
        dead=dead,
    )


def scale_range_(quantizer: TensorQuantizer, weight: Tensor, factor: Tensor) -> QParams:
    """Multiply the range of a weight by factors, in place; return what it is quantized with then.

    The arguments are those of :func:`scale_weight_`.
    """
    d = quantizer.descriptor
    old = quantizer.qparams(weight)
    exact = old.scale.double() * d.granularity.amax(factor).reshape(old.scale.shape)
    typed = d.block_scale_format
    scale = typed.snap_(exact.clone()) if isinstance(typed, ScaleType) else exact
    point = old.zero_point
    if not d.symmetric:
        is_negative = d.granularity.amax((factor < 0).double()).reshape(point.shape) > 0
        other_side = int(d.format.quant_min + d.format.quant_max) - point
        point = torch.where(is_negative, other_side, point)
    if not quantizer.calibrated or d.dynamic:
        return replace(old, scale=scale.to(old.scale.dtype), zero_point=point)
    gone = exact < torch.finfo(torch.float32).tiny
    if "held_scale" in dict(quantizer.named_buffers()):
        live = torch.where(gone, 1.0, scale)
        quantizer.set_qparams(live.float(), None if d.symmetric else point)
    else:
        gone = gone | quantizer.dead_ranges().reshape(gone.shape)
        ends = Range.of_qparams(
            replace(old, scale=scale, zero_point=point), symmetric=d.symmetric
        )
        in_use = d.scale_amax or 1.0
        quantizer.range = ends.map(
            lambda end: torch.where(gone, 0.0, end / in_use).float()
        )
    return quantizer.qparams(weight)


def separate_channels_(quantizer: TensorQuantizer, weight: Tensor, axis: int) -> None:
    """Give each channel along ``axis`` the range that all have now, in place.

    A learned range stays the same parameter; its gradient is dropped.
    """
    quantizer.descriptor = quantizer.descriptor.replace(axis=(axis,))
    shape = quantizer.descriptor.granularity.amax_shape(weight.shape)

    def spread(numbers: Tensor) -> Tensor:
        return numbers.detach().reshape([1] * len(shape)).expand(shape).clone()

    if not quantizer.calibrated:
        return
    if "held_scale" in dict(quantizer.named_buffers()):
        qparams = quantizer.qparams()
        point = None if quantizer.descriptor.symmetric else spread(qparams.zero_point)
        quantizer.set_qparams(spread(qparams.scale), point)
        return
    quantizer.range = quantizer.range.map(spread)
    for _, end in quantizer.range.ends():
        end.grad = None


def shares_factors(quantizer: TensorQuantizer, factor: Tensor) -> bool:
    """Return True if every range of a weight has one factor.

    That is one magnitude, and one sign too if the range has two ends.

    Args:
        quantizer: of the weight.
        factor: float64, the shape of the weight.
    """
    d = quantizer.descriptor
    grid = d.granularity
    inside = grid.split(torch.ones_like(factor)) > 0  # the last block may be filled up
    magnitudes = grid.split(factor.abs())
    largest = grid.align(grid.amax(factor), factor.shape)
    is_other = (largest - magnitudes > 1e-6 * largest) & inside
    if not d.symmetric:
        negative = grid.split((factor < 0).double())
        some = grid.align(grid.amax((factor < 0).double()), factor.shape)
        is_other |= (negative != some) & inside
    return not bool(is_other.any())


@dataclass(frozen=True)
class GridComparison:
    """Two quantized weights, of which one should be the other with its channels scaled.

    It looks at nothing but the weights: codes should keep their magnitude and take the sign of the
    factor, and values should be those of before times the factor. A channel whose factor is too
    small for any scale should have values of 0.

    Attributes:
        other_codes: bool, the shape of the weights: codes that are not what they should be.
        error: float64, the same shape: how far values are from what they should be.
        rounding: the same: how far one rounding of the scale may move them.
        spacing: the same: the distance between two neighbours on the grid there.
    """

    other_codes: Tensor
    error: Tensor
    rounding: Tensor
    spacing: Tensor

    @classmethod
    def of(
        cls,
        before: TensorQuantizer,
        weight: Tensor,
        after: TensorQuantizer,
        scaled: Tensor,
        factor: Tensor,
    ) -> GridComparison:
        """Compare ``weight``, quantized by ``before``, with ``scaled``, quantized by ``after``.

        Args:
            before: the quantizer of ``weight``.
            weight: floating point.
            after: the quantizer of ``scaled``.
            scaled: the shape of ``weight``.
            factor: float64, the shape of ``weight``.
        """
        old_qparams = before.qparams(weight)
        new_qparams = after.qparams(scaled)
        old = old_qparams.centered(before.codes(weight)).double()
        new = new_qparams.centered(after.codes(scaled)).double()
        step = new_qparams.aligned(new_qparams.scale, new).double()
        products = old * old_qparams.aligned(old_qparams.scale, old).double() * factor
        # Below this there is no normal scale, so products are 0 on both sides.
        nothing = torch.finfo(torch.float32).tiny * after.descriptor.format.qmax
        spacing = step.expand_as(products)
        format = after.descriptor.format
        if isinstance(format, FloatFormat):
            spacing = torch.maximum(
                spacing, products.abs() * 2.0**-format.mantissa_bits
            )
        return cls(
            (new != old * factor.sign()) & (products.abs() > nothing),
            (new * step - products).abs(),
            scale_rounding(after) * products.abs() + nothing,
            spacing,
        )

    def unlike(self, changed: Tensor, inexact: Tensor) -> Tensor:
        """Return which codes are other ones, but for those that are known to be; bool.

        Args:
            changed: the codes that are known to be others.
            inexact: the codes whose values are known to be off, by the spacing of the grid at most.
        """
        allowed = torch.where(inexact, self.spacing * (1 + 2.0**-10), self.rounding)
        is_off = self.error > allowed
        return (self.other_codes & ~changed) | is_off


def scale_rounding(quantizer: TensorQuantizer) -> float:
    """Return by how much of itself one rounding moves a scale."""
    typed = quantizer.descriptor.block_scale_format
    if isinstance(typed, ScaleType):
        return 2.0 ** -(typed.mantissa_bits + 1) * (1 + 2.0**-10)
    return _FLOAT32_ROUNDING


def _mirrored(quantizer: TensorQuantizer, codes: Tensor, factor: Tensor) -> Tensor:
    """Return codes with the signs of the factors; those of two ends change places at the middle."""
    d = quantizer.descriptor
    other_side = (
        -codes if d.symmetric else d.format.quant_min + d.format.quant_max - codes
    )
    return torch.where(factor < 0, other_side, codes)


def _is_dead(old: QParams, factor: Tensor, codes: Tensor) -> Tensor:
    """Return where a scale times the factors is no normal number any more."""
    scale = old.aligned(old.scale, codes).double() * factor.abs()
    return scale < torch.finfo(torch.float32).tiny

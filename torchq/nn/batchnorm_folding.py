"""Folding a BatchNorm into a quantized layer: its codes stay, and the scales of its weight grow."""

import math
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from torchq.formats import PerAxis, PerBlock, PerTensor, ScaleType
from torchq.fusion.algebra import fold_affine_after
from torchq.fusion.fold import replace_parameter
from torchq.fusion.modules import OutputFold
from torchq.nn.integer_bias import bias_steps, raises_step
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.nn.weight_grid import (
    GridComparison,
    ScaledWeight,
    scale_range_,
    scale_rounding,
    scale_weight_,
    separate_channels_,
    shares_factors,
)

#: What float32 arithmetic may move the result of a layer by, relative to its largest terms.
_FLOAT32_ERROR = 1e-5


class OutputScaling(nn.Module):
    """Mixin that makes a quantized layer a :class:`torchq.fusion.RescalesOutput`.

    Every code keeps its magnitude and takes the sign of the factor; see
    :mod:`torchq.nn.weight_grid`. That needs a range per output channel; a weight with one range
    gets such ranges.
    """

    channel_axis: ClassVar[int]
    bias_format: str
    rounded_by: str
    after_fold: tuple[str, str]
    one_weight_scale: bool
    weight: Tensor
    input_quantizer: nn.Module
    weight_quantizer: nn.Module

    def output_scale_obstacle(self, scale: Tensor) -> str | None:
        """Return why output channels cannot be scaled on the weight's own grid, or None."""
        quantizer = self.weight_quantizer
        if any(
            getattr(q, "observing", False) for q in (self.input_quantizer, quantizer)
        ):
            return "is being calibrated; finish the calibration first, or fuse before quantizing"
        calibrator = getattr(quantizer, "calibrator", None)
        if calibrator is not None and calibrator.seen:
            return (
                "has a calibrator that has seen its weight and set no range of it; finish the "
                "calibration first, or fuse before quantizing"
            )
        if "output_quantizer" in self._modules:
            return (
                "quantizes its result in front of the BatchNorm, whose factors one range cannot "
                "take; fuse before quantizing"
            )
        if not isinstance(quantizer, TensorQuantizer) or not _has_range(quantizer):
            return None  # its range will be that of the folded weight
        factor = self.per_weight(scale)
        d = quantizer.descriptor
        if d.unsigned is True and d.symmetric and bool((scale < 0).any()):
            return (
                "has weight codes that begin at 0, which a negative factor of BatchNorm turns "
                "round; fuse before quantizing"
            )
        obstacle = self.weight_grid_obstacle()
        if obstacle is None or not (
            self._shares_ranges() and shares_factors(quantizer, factor)
        ):
            return obstacle
        return None

    def weight_grid_obstacle(self) -> str | None:
        """Return why the weight's quantizer cannot take a factor per output channel, or None.

        It depends on how the weight is quantized, not on its numbers.
        """
        quantizer = self.weight_quantizer
        if not isinstance(quantizer, TensorQuantizer):
            return None
        d = quantizer.descriptor
        obstacles = {
            "has a pre_quant_scale on its weight": quantizer.pre_quant_scale
            is not None,
            "has a delegate in its weight quantizer, which may compute anything": (
                quantizer.delegate is not None
            ),
            "returns the codes of its weight in place of values": not d.fake_quant,
            "has its weight's range on the meta device": quantizer.amax.is_meta,
            f"has weight scales of a fixed form ({d}), which BatchNorm's factors have not": (
                d.block_scale_format is not None
                and not isinstance(d.block_scale_format, ScaleType)
            ),
        }
        reason = next(
            (obstacle for obstacle, is_so in obstacles.items() if is_so), None
        )
        reason = reason or self._shared_ranges_obstacle()
        return None if reason is None else f"{reason}; fuse before quantizing"

    def _shared_ranges_obstacle(self) -> str | None:
        """Return why output channels cannot have ranges of their own, or None."""
        if not self._shares_ranges():
            return None
        quantizer: Any = self.weight_quantizer
        grid = quantizer.descriptor.granularity
        if self._range_axis() is None:
            return (
                "is a grouped transposed convolution, whose output channels lie along no one axis "
                "of the weight"
            )
        if self.one_weight_scale:
            return "has one range for the whole weight, as its target takes no more"
        if quantizer.descriptor.dynamic:
            return "takes one range of its whole weight at each call"
        if (
            isinstance(grid, PerTensor)
            or math.prod(grid.amax_shape(self.weight.shape)) == 1
        ):
            return None  # each channel gets this range
        return (
            f"has weight ranges that several output channels share ({quantizer.descriptor}); "
            f"expected a range along axis {self._range_axis()}"
        )

    def _range_axis(self) -> int | None:
        """Return the axis of the weight along which each index is of one output channel."""
        module: Any = self
        if self.channel_axis == 0 or module.groups == 1:
            return self.channel_axis
        return 0 if self.weight.shape[1] == 1 else None  # (in, out / groups, ...)

    def _shares_ranges(self) -> bool:
        """Return True if a range of the weight is that of several output channels."""
        quantizer: Any = self.weight_quantizer
        grid = quantizer.descriptor.granularity
        dims = self.weight.dim()
        if isinstance(grid, PerBlock):
            return self._range_axis() in (None, grid.axis % dims)
        axes = (
            {axis % dims for axis in grid.axes} if isinstance(grid, PerAxis) else set()
        )
        if self._range_axis() is None:
            return not {0, 1} <= axes
        return self._range_axis() not in axes

    def fold_output_(self, scale: Tensor, shift: Tensor) -> OutputFold:
        """Compute ``scale * result + shift`` from now on, per output channel, in place.

        The weight is written on its own new grid. Where its quantizer is off or has no range yet
        it is the product of floats, as nothing rounds it.

        Args:
            scale: float64 ``(out_channels,)``, of any sign.
            shift: the same.

        Returns:
            What became of the codes, and how exact the result is.
        """
        with torch.no_grad():
            factor = self.per_weight(scale)
            is_separated = self._separate_ranges_(factor)
            scaled = self.scale_weight_(factor)
            old: Any = self.bias
            bias = shift.cpu()
            if old is not None:
                bias = scale.cpu() * old.detach().double().cpu() + bias
            replace_parameter(self, "weight", scaled.values)
            replace_parameter(self, "bias", bias.to(self.weight))
            if any(self.after_fold):  # the bias is rounded from now on
                self.bias_format = self.after_fold[0]
            return self._outcome(scaled, is_separated)

    def folded_codes_obstacle(
        self, folded: nn.Module, scale: Tensor, outcome: OutputFold
    ) -> str | None:
        """Return what :meth:`fold_output_` did wrong to the codes of a copy, or None.

        Nothing that it says is believed but which codes it counts as changed: the codes and scales
        of both layers are compared.

        Args:
            folded: the copy of this layer.
            scale: as it was given.
            outcome: what it returned.
        """
        before = self.weight_quantizer
        after = getattr(folded, "weight_quantizer", None)
        if not (
            isinstance(before, TensorQuantizer) and isinstance(after, TensorQuantizer)
        ):
            return None
        if not (_has_range(before) and before.quantizing):
            return None
        with torch.no_grad():
            weight = self.weight.detach()
            new = folded.get_parameter("weight").detach()
            compared = GridComparison.of(
                before, weight, after, new, self.per_weight(scale)
            )
            unlike = int(compared.unlike(outcome.changed, outcome.inexact).sum())
        if not unlike:
            return None
        return (
            f"would change {unlike} of {weight.numel()} weight codes ({after.descriptor}, stored as"
            f" {str(weight.dtype).removeprefix('torch.')}); expected none. Fuse before quantizing"
        )

    def norm_is_folded_(
        self, path: str, norm: str, quantizer: nn.Module | None
    ) -> None:
        """Take over what the plan has for this layer once its BatchNorm is folded, in place.

        Args:
            path: of this layer in the model.
            norm: the path that the BatchNorm had.
            quantizer: that of the BatchNorm's result, which becomes this layer's own; or None.
        """
        if quantizer is not None:
            self.add_module("output_quantizer", quantizer)
        if isinstance(quantizer, TensorQuantizer):
            quantizer.name = f"{path}.output_quantizer"
        if any(self.after_fold):
            self.bias_format, self.rounded_by = self.after_fold
            self.after_fold = ("", "")
        moved = {f"{norm}.output_quantizer": f"{path}.output_quantizer"}
        # The activation of a BatchNorm that has one takes its place.
        start = f"{norm}.act."
        if self.rounded_by.startswith(start):
            moved[self.rounded_by] = f"{norm}.{self.rounded_by.removeprefix(start)}"
        self.rounded_by = moved.get(self.rounded_by, self.rounded_by)

    def _separate_ranges_(self, factor: Tensor) -> bool:
        """Give each output channel a range where one cannot take all factors; return if it did."""
        quantizer = self.weight_quantizer
        axis = self._range_axis()
        if not isinstance(quantizer, TensorQuantizer) or not _has_range(quantizer):
            return False
        if axis is None or shares_factors(quantizer, factor):
            return False
        separate_channels_(quantizer, self.weight, axis)
        return True

    def scale_weight_(self, factor: Tensor) -> ScaledWeight:
        """Multiply the weight's range by factors, in place; return what the weight is then.

        Args:
            factor: as :meth:`per_weight` lays it out.
        """
        quantizer = self.weight_quantizer
        weight = self.weight.detach()
        if isinstance(quantizer, TensorQuantizer) and _has_range(quantizer):
            if quantizer.quantizing:
                return scale_weight_(quantizer, weight, factor)
            scale_range_(quantizer, weight, factor)
        none = torch.zeros_like(factor, dtype=torch.bool)
        return ScaledWeight(
            (weight.double() * factor).to(weight.dtype), none, none, none, none
        )

    def _outcome(self, scaled: ScaledWeight, is_separated: bool) -> OutputFold:
        changed = scaled.saturated | scaled.rounded
        relative = max(_FLOAT32_ERROR, torch.finfo(self.weight.dtype).eps)
        quantizer = self.weight_quantizer
        codes = 0
        has_range = True
        if isinstance(quantizer, TensorQuantizer):
            relative += scale_rounding(quantizer)
            has_range = _has_range(quantizer)
            codes = changed.numel() if has_range and quantizer.quantizing else 0
        steps = bias_steps(self, self.get_parameter("bias"))
        exact = ~self._by_channel(scaled.inexact).cpu()
        absolute = torch.zeros(exact.shape, dtype=torch.float64)
        if steps is not None:  # half a step is rounded off, perhaps as much before
            absolute = steps.double().cpu().expand_as(absolute)
        remarks = tuple(self._remarks(scaled, is_separated))
        return OutputFold(
            codes=codes,
            changed=changed,
            inexact=scaled.inexact,
            exact=exact,
            relative=relative,
            absolute=absolute,
            remarks=remarks,
            has_range=has_range,
        )

    def _remarks(self, scaled: ScaledWeight, is_separated: bool) -> Iterator[str]:
        """Yield what a reader of the report should know."""
        quantizer: Any = self.weight_quantizer
        codes = scaled.values.numel()
        if count := int(scaled.saturated.sum()):
            form = quantizer.descriptor.format
            yield (
                f"{count} of {codes} weight codes {form.quant_min:g} became {form.quant_max:g}, as"
                " a negative factor turns their channels round"
            )
        if count := int(scaled.rounded.sum()):
            channels = int(self._by_channel(scaled.rounded).sum())
            yield (
                f"{count} of {codes} weight codes, in {channels} channels, rounded anew, as"
                f" {quantizer.descriptor.block_scale_format} holds no scale as small as theirs"
            )
        if count := int(self._by_channel(scaled.dead).sum()):
            yield f"{count} dead channels, whose factor is 0 or next to it"
        if is_separated:
            yield "a weight range per output channel in place of one"
        if count := int(raises_step(self, self.get_parameter("bias")).sum()):
            yield (
                f"{count} channels with a bias too large for their scale in int32: files round"
                " their weight codes to a coarser one"
            )
        if isinstance(quantizer, TensorQuantizer) and quantizer.descriptor.learn_amax:
            yield "its learned range was scaled, so an optimizer's state of it is out of date"

    def _by_channel(self, of_weight: Tensor) -> Tensor:
        """Return for each output channel whether anything in its part of the weight is true."""
        module: Any = self
        if self.channel_axis == 0:
            return of_weight.flatten(1).any(1)
        # (in, out / groups, ...) -> (groups, in / groups, out / groups, -1).
        groups = module.groups
        parts = of_weight.reshape(
            groups, -1, of_weight.shape[1], of_weight[0, 0].numel()
        )
        return parts.any(3).any(1).flatten()

    def per_weight(self, channelwise: Tensor) -> Tensor:
        """Return one value per output channel laid out over the weight, in float64."""
        module: Any = self
        ones = torch.ones(
            self.weight.shape, dtype=torch.float64, device=self.weight.device
        )
        channelwise = channelwise.to(ones.device)
        folded = fold_affine_after(
            ones,
            None,
            channelwise,
            torch.zeros_like(channelwise),
            groups=getattr(module, "groups", 1),
            transposed=self.channel_axis == 1,
        )
        return folded.kernel


def _has_range(quantizer: TensorQuantizer) -> bool:
    """Return True if what is quantized follows from numbers that stay, or from the weight."""
    return quantizer.calibrated or quantizer.descriptor.dynamic

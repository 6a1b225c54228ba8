"""The new weight, bias and ranges of one layer, from the statistics of its inputs and targets."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchq.errors import CalibrationError
from torchq.ptq.blockwise import (
    check_on_grid,
    grid_of,
    weight_quantizer,
)
from torchq.ptq.gptq.ranges import eliminations, round_groups, round_with_best_ranges
from torchq.ptq.gptq.solver import cholesky_with_damping, quadratic_error, ridge_regression
from torchq.ptq.gptq.statistics import Moments, MomentSums
from torchq.workflow.layer_matrices import weight_from_matrix, weight_matrix

__all__ = ["GPTQLayer", "Options", "round_layer_"]

# The pull of the regression towards the float weights, as a fraction of the mean diagonal.
_RIDGE = 0.1

Target = Literal["weight", "layer", "block"]


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`torchq.ptq.gptq_` that concern one layer."""

    target: Target
    group_size: int | None
    act_order: bool
    damping: float
    refine: bool


@dataclass(frozen=True)
class GPTQLayer:
    """What happened to one layer.

    Attributes:
        error_before: the power of the error of its output with weights rounded to nearest, over
            the variance of the output.
        error_after: the same with the new weights, bias and ranges.
        damping: the fraction of the mean diagonal that was added to the diagonal.
        repairs_shortcut: True if its target holds the error of a shortcut.
    """

    error_before: float
    error_after: float
    damping: float
    repairs_shortcut: bool


def round_layer_(
    name: str, layer: Any, sums: MomentSums, options: Options, repairs_shortcut: bool
) -> tuple[GPTQLayer, Tensor]:
    """Round the weight of ``layer`` in place; change its bias and ranges with it, or nothing.

    Args:
        name: its path, for error texts.
        layer: a quantized Linear or Conv layer.
        sums: the statistics of its quantized inputs and its targets.
        options: how to round.
        repairs_shortcut: for the report.

    Returns:
        What happened, and the weight matrix that was rounded.

    Raises:
        CalibrationError: the statistics hold NaN or infinity.
        QuantizationError: the grid does not fit the dtype of the weight.
    """
    fits_bias = layer.bias is not None and options.target != "weight"
    w0 = weight_matrix(layer, layer.weight.detach()).double()
    moments = sums.moments(centred=fits_bias)
    _check(name, moments, sums.count)
    quantizer = weight_quantizer(layer)
    before = _output_error(layer, grid_of(layer).nearest(w0), sums)
    damped = [cholesky_with_damping(xx, options.damping) for xx in moments.xx]
    h, used = torch.stack([matrix for matrix, _ in damped]), max(fraction for _, fraction in damped)
    wanted = w0
    if options.target != "weight":
        wanted = torch.stack(
            [
                ridge_regression(*parts, _RIDGE)
                for parts in zip(w0, moments.xx, moments.tx, strict=True)
            ]
        )
    old = quantizer.descriptor, quantizer.amax.detach().clone()
    try:
        rounded = _round_with_ranges(layer, wanted, h, options)
        weight = weight_from_matrix(layer, rounded).to(layer.weight.dtype)
        check_on_grid("gptq_", name, layer, weight)
    except BaseException:
        quantizer.descriptor = old[0]
        quantizer.amax.data = old[1]
        raise
    layer.weight.copy_(weight)
    if fits_bias:
        layer.bias.copy_(_best_bias(rounded, moments).to(layer.bias.dtype))
    after = _output_error(layer, weight_matrix(layer, weight).double(), sums)
    return GPTQLayer(before, after, used, repairs_shortcut), wanted


def _check(name: str, moments: Moments, count: int) -> None:
    """Raise an error for statistics of nothing, and of NaN or infinity."""
    if not count:
        raise CalibrationError(
            f"gptq_: {name}: got batches without rows; expected at least one row"
        )
    if not moments.finite:
        raise CalibrationError(
            f"gptq_: {name}: got NaN or infinite inputs or outputs; expected finite ones. Check "
            "the batches and the layers before"
        )


def _round_with_ranges(layer: Any, wanted: Tensor, h: Tensor, options: Options) -> Tensor:
    """Return the rounded weight matrix, after setting the ranges that go with it."""
    quantizer = weight_quantizer(layer)
    if options.group_size is not None:
        axis = -1 if layer.weight.dim() == 2 else 1
        quantizer.descriptor = quantizer.descriptor.replace(
            axis=None, block_size=options.group_size, block_axis=axis
        )
    if options.refine:
        rounded, amax = round_with_best_ranges(layer, wanted, h, act_order=options.act_order)
        quantizer.set_amax(amax)
        return rounded
    if options.group_size is not None or not quantizer.calibrated:
        quantizer.calibrate_on(weight_from_matrix(layer, wanted).to(layer.weight.dtype))
    return round_groups(wanted, eliminations(h, options.act_order), grid_of(layer))


def _best_bias(rounded: Tensor, moments: Moments) -> Tensor:
    """Return ``mean(t) - Q mean(x)``, which minimises the error for the weights Q."""
    return (moments.t - (rounded @ moments.x.unsqueeze(2)).squeeze(2)).flatten()


def _output_error(layer: Any, weight: Tensor, sums: MomentSums) -> float:
    """Return the power of the error of the output, over the variance of the target."""
    m = sums.moments(centred=True)
    bias = torch.zeros_like(m.t) if layer.bias is None else layer.bias.double().view_as(m.t)
    varying = m.tt - 2 * (weight * m.tx).sum(2) + quadratic_error(weight, m.xx)
    constant = m.t - (weight @ m.x.unsqueeze(2)).squeeze(2) - bias
    power = (varying.clamp(min=0) + constant.square()).sum()
    return (power / m.tt.sum().clamp(min=1e-30)).item()

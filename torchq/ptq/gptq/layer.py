"""The new weight, bias and ranges of one layer, from the statistics of its inputs and targets."""

from __future__ import annotations

import math
from collections.abc import Callable
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
from torchq.ptq.gptq.output_error import OutputError
from torchq.ptq.gptq.ranges import round_groups_, round_with_best_ranges_
from torchq.ptq.gptq.solver import Elimination, ridge_regression
from torchq.ptq.gptq.statistics import Moments, MomentSums
from torchq.workflow.layer_matrices import weight_from_matrix, weight_matrix

__all__ = ["GPTQLayer", "Options", "round_layer_"]

# The pull of the regression towards the float weights, as a fraction of the mean diagonal. With few
# samples for each input it is larger: what cancels their errors by chance does not on others.
_RIDGE, _RIDGE_OF_FEW = 0.1, 3.0
# The inputs for each sample that moments bear without more damping than asked for.
_FEW = 0.05

Target = Literal["weight", "layer", "block"]


@dataclass(frozen=True)
class Options:
    """The arguments of :func:`torchq.ptq.gptq_` that concern one layer."""

    target: Target
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
    name: str,
    layer: Any,
    sums: MomentSums,
    options: Options,
    *,
    repairs_shortcut: bool = False,
    keep: Callable[[Tensor], None] | None = None,
) -> GPTQLayer:
    """Round the weight of ``layer`` in place; change its bias and ranges with it, or nothing.

    Args:
        name: its path, for error texts.
        layer: a quantized Linear or Conv layer.
        sums: the statistics of its quantized inputs and, unless the target is ``"weight"``, of
            its targets; they are used up.
        options: how to round.
        repairs_shortcut: for the report.
        keep: called with a copy of the weight matrix that is rounded.

    Returns:
        What happened.

    Raises:
        CalibrationError: the statistics hold NaN or infinity.
        QuantizationError: the grid does not fit the dtype of the weight.
    """
    fits_bias = layer.bias is not None and options.target != "weight"
    moments = sums.take_moments(centred=fits_bias)
    error = OutputError(layer, moments)
    _check(name, moments, sums.count, error)
    scarcity = moments.xx.shape[2] / sums.count
    w0, grid = weight_matrix(layer, layer.weight.detach()), grid_of(layer)
    before = error.of(grid.nearest(w0.to(moments.xx.dtype)))
    rounded = _wanted(w0, moments, max(_RIDGE, _RIDGE_OF_FEW * scarcity))
    if keep is not None:
        keep(rounded.clone())
    quantizer, h, diagonals = weight_quantizer(layer), moments.xx, _diagonals(moments.xx).clone()
    published = options.target == "weight"
    least = options.damping if published else max(options.damping, scarcity - _FEW)
    old = quantizer.amax.detach().clone()
    try:
        used = _round_with_ranges_(layer, rounded, h, least, options)
        weight = weight_from_matrix(layer, rounded).to(layer.weight.dtype)
        check_on_grid("gptq_", name, layer, weight)
        _diagonals(h).copy_(diagonals)
        bias = _best_bias(rounded, moments).to(layer.bias.dtype) if fits_bias else None
        after = error.of(weight_matrix(layer, weight), bias)
    except BaseException:
        quantizer.amax.data = old
        raise
    layer.weight.copy_(weight)
    if bias is not None:
        layer.bias.copy_(bias)
    return GPTQLayer(before, after, used, repairs_shortcut)


def _diagonals(h: Tensor) -> Tensor:
    return h.diagonal(dim1=1, dim2=2)


def _wanted(weight: Tensor, moments: Moments, ridge: float) -> Tensor:
    """Return the weight matrix that is to be rounded, in the dtype of the moments."""
    if moments.tx is None:
        return weight.to(moments.xx.dtype, copy=True)
    wanted = torch.empty_like(moments.tx)
    for group in range(len(weight)):
        xx, tx = moments.xx[group], moments.tx[group]
        wanted[group] = ridge_regression(weight[group], xx, tx, ridge)
    return wanted


def _check(name: str, moments: Moments, count: int, error: OutputError) -> None:
    """Raise an error for statistics of nothing, and of NaN or infinity."""
    if not count:
        raise CalibrationError(
            f"gptq_: {name}: got batches without rows; expected at least one row"
        )
    if not (moments.finite and math.isfinite(error.variance)):
        raise CalibrationError(
            f"gptq_: {name}: got NaN or infinite inputs or outputs; expected finite ones. Check "
            "the batches and the layers before"
        )


def _round_with_ranges_(
    layer: Any, wanted: Tensor, h: Tensor, damping: float, options: Options
) -> float:
    """Round a weight matrix in place, and set the ranges that go with it.

    Returns the damping, which is added to ``h``.
    """
    found = [Elimination.damped_(matrix, damping, act_order=options.act_order) for matrix in h]
    solved, used = [one for one, _ in found], max(used for _, used in found)
    quantizer = weight_quantizer(layer)
    if options.refine:
        _, amax = round_with_best_ranges_(layer, wanted, h, solved)
        quantizer.set_amax(amax)
        return used
    if not quantizer.calibrated:
        quantizer.calibrate_on(weight_from_matrix(layer, wanted).to(layer.weight.dtype))
    round_groups_(wanted, solved, grid_of(layer))
    return used


def _best_bias(rounded: Tensor, moments: Moments) -> Tensor:
    """Return ``mean(t) - Q mean(x)``, which minimises the error for the weights Q."""
    assert moments.t is not None
    return (moments.t - (rounded @ moments.x.unsqueeze(2)).squeeze(2)).flatten()

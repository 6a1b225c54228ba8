"""The new weight, bias and ranges of one layer, from the statistics of its inputs and targets."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from torchq.errors import CalibrationError
from torchq.ptq.gptq.ranges import round_groups_, round_with_best_ranges
from torchq.ptq.gptq.solver import Elimination, damped_, quadratic_error, ridge_regression
from torchq.ptq.layers import (
    check_on_grid,
    grid_of,
    own_tensors,
    weight_quantizer,
)
from torchq.utils import undone_on_error
from torchq.workflow.layer_matrices import weight_from_matrix, weight_matrix

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


@dataclass(frozen=True)
class Moments:
    """Means over all samples in float64, those of products about the means if ``centred``.

    The first dimension counts groups; without targets t, tx and tt are None.
    """

    x: Tensor  # (groups, inputs)
    t: Tensor | None  # (groups, outputs)
    xx: Tensor  # x x^T, (groups, inputs, inputs)
    tx: Tensor | None  # t x^T, (groups, outputs, inputs)
    tt: Tensor | None  # t^2, (groups, outputs)
    centred: bool

    @property
    def finite(self) -> bool:
        """True if no NaN or infinity was seen."""
        return all(bool(m.isfinite().all()) for m in (self.xx, self.tx, self.tt) if m is not None)


class MomentSums:
    """Running sums of products.

    The products of one batch are in float32, their sums in float64.
    """

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.count = 0

    def add(self, x: Tensor, t: Tensor | None = None) -> None:
        """Add samples ``x``, (groups, inputs, samples), and their targets in every call or none."""
        x, t = x.float(), None if t is None else t.float()
        self._add(0, x.sum(2, dtype=torch.float64))
        self._add(1, x @ x.mT)
        if t is not None:
            self._add(2, t.sum(2, dtype=torch.float64))
            self._add(3, t.square().sum(2))
            self._add(4, t @ x.mT)
        self.count += x.shape[2]

    def _add(self, number: int, value: Tensor) -> None:
        """Add to one of the sums, or make it."""
        if number == len(self.sums):
            self.sums.append(value.double())
        else:
            self.sums[number] += value

    def take_moments(self, *, centred: bool) -> Moments:
        """Return the means, about the mean input and target if ``centred``; forget the sums."""
        x, xx, *of_targets = (total.div_(max(self.count, 1)) for total in self.sums)
        self.sums = []
        if centred:
            xx -= x.unsqueeze(2) * x.unsqueeze(1)
        if not of_targets:
            return Moments(x, None, xx, None, None, centred)
        t, tt, tx = of_targets
        if centred:
            tx -= t.unsqueeze(2) * x.unsqueeze(1)
            tt -= t.square()
        return Moments(x, t, xx, tx, tt, centred)


class OutputError:
    """The power of the error of the output, over the variance of the target.

    The target is that of the moments, which are taken before any damping. Where they have none, it
    is the output of the float weight of ``layer`` on the same inputs.
    """

    def __init__(self, layer: Any, moments: Moments) -> None:
        self._weight = weight_matrix(layer, layer.weight.detach())
        self._bias = None if layer.bias is None else layer.bias.detach().view(len(moments.x), -1)
        self._moments = moments
        self.variance = float(self._variance())

    def _variance(self) -> Tensor:
        """Return the sum of the variances of the outputs."""
        m = self._moments
        if m.tt is None or m.t is None:
            weight = self._weight.to(m.xx.dtype)
            mean = (weight @ m.x.unsqueeze(2)).squeeze(2)
            return (quadratic_error(weight, m.xx) - mean.square()).sum()
        return (m.tt if m.centred else m.tt - m.t.square()).sum()

    def of(self, weight: Tensor, bias: Tensor | None = None) -> float:
        """Return the relative error of another weight matrix, and of a bias in place of its own."""
        bias = self._bias if bias is None else bias.view(len(self._weight), -1)
        return float(self._power(weight, bias).sum()) / max(self.variance, 1e-30)

    def _power(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the mean squared error of the outputs."""
        m = self._moments
        weight = weight.to(m.xx.dtype)
        if m.tx is None or m.tt is None or m.t is None:
            return quadratic_error(weight - self._weight.to(weight.dtype), m.xx)
        shift = torch.zeros_like(m.t) if bias is None else bias.to(m.t.dtype)
        mean = (weight @ m.x.unsqueeze(2)).squeeze(2)
        power = m.tt - 2 * (weight * m.tx).sum(2) + quadratic_error(weight, m.xx)
        if m.centred:
            return power.clamp(min=0) + (m.t - mean - shift).square()
        return (power - 2 * shift * (m.t - mean) + shift.square()).clamp(min=0)


def round_layer_(
    name: str, layer: Any, sums: MomentSums, options: Options, repairs_shortcut: bool = False
) -> tuple[GPTQLayer, Tensor]:
    """Round the weight of ``layer`` in place; change its bias and ranges with it, or nothing.

    ``sums`` are of its quantized inputs and, unless the target is ``"weight"``, of its targets;
    they are used up. Returned is what happened, and the weight matrix that was rounded.
    """
    fits_bias = layer.bias is not None and options.target != "weight"
    moments = sums.take_moments(centred=fits_bias)
    error = OutputError(layer, moments)
    _check(name, moments, sums.count, error)
    scarcity = moments.xx.shape[2] / sums.count
    w0, grid = weight_matrix(layer, layer.weight.detach()), grid_of(layer)
    before = error.of(grid.nearest(w0.to(moments.xx.dtype)))
    rounded = _wanted(w0, moments, max(_RIDGE, _RIDGE_OF_FEW * scarcity))
    wanted = rounded.clone()
    h, diagonals = moments.xx, _diagonals(moments.xx).clone()
    published = options.target == "weight"
    least = options.damping if published else max(options.damping, scarcity - _FEW)
    quantizer = weight_quantizer(layer)
    with undone_on_error(quantizer, written=own_tensors([quantizer])):
        used = _round_with_ranges_(layer, rounded, h, least, options)
        weight = weight_from_matrix(layer, rounded).to(layer.weight.dtype)
        check_on_grid("gptq_", name, layer, weight)
        _diagonals(h).copy_(diagonals)
        bias = _best_bias(rounded, moments).to(layer.bias.dtype) if fits_bias else None
        after = error.of(weight_matrix(layer, weight), bias)
    layer.weight.copy_(weight)
    if bias is not None:
        layer.bias.copy_(bias)
    return GPTQLayer(before, after, used, repairs_shortcut), wanted


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
    found = [damped_(matrix, damping, Elimination.of) for matrix in h]
    solved, used = [one for one, _ in found], max(used for _, used in found)
    quantizer = weight_quantizer(layer)
    if options.refine:
        rounded, amax = round_with_best_ranges(layer, wanted, h, solved)
        wanted.copy_(rounded)
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

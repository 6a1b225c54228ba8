"""Rounding of a weight matrix so that its output changes least, and the ranges that suit it.

The error of rounded rows Q of a weight W is ``sum((Q - W) H (Q - W)^T)`` with a positive definite
matrix H of input moments. Rows are independent of each other.

Reference: Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers (ICLR 2023), section 3 and algorithm 1. Coordinate descent: Behdin et al., QuantEase
(2023), section 3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchq.calib.search import least_error
from torchq.formats import PerAxis
from torchq.ptq.layers import Grid, grid_of, weight_quantizer

T = TypeVar("T")

# Columns after which the rest of the matrix is brought up to date, in one product.
_LAZY = 128
# The search for a positive definite matrix ends here.
_MOST_DAMPING = 1e4
# Passes of coordinate descent over the columns, unless nothing changes before.
_SWEEPS = 4
# Ranges that are tried, as fractions of the largest magnitude, down to the smallest one.
_FRACTIONS = 24
_SMALLEST = 0.2
# Rounds of fitting ranges to codes and codes to ranges.
_REFITS = 2
# Bytes of the rows whose candidates are rounded at the same time.
_MEMORY = 1 << 21


def quadratic_error(difference: Tensor, h: Tensor) -> Tensor:
    """Return ``d H d^T`` of each row d of (..., rows, columns), with H (..., columns, columns)."""
    return (difference @ h).mul_(difference).sum(-1)


def damped_(h: Tensor, damping: float, solve: Callable[[Tensor], T]) -> tuple[T, float]:
    """Return ``solve(H)`` after damping H in place, and the fraction that it needed.

    This fraction of the mean of the diagonal is added to the diagonal; zeros become the fraction.
    It grows tenfold while ``solve`` finds a matrix that is not positive definite, because it is
    singular or because of rounding.
    """
    diagonal = h.diagonal().clone()
    mean = diagonal.mean()
    unit = torch.where(mean > 0, mean, 1.0)
    while True:
        h.diagonal().copy_(diagonal + damping * unit)
        try:
            return solve(h), damping
        except torch.linalg.LinAlgError:
            if damping > _MOST_DAMPING:
                raise
        damping *= 10


def ridge_regression(weight: Tensor, xx: Tensor, tx: Tensor, ridge: float) -> Tensor:
    """Return the weights that minimise ``mean((t - W x)^2) + r |W - weight|^2``, (rows, columns).

    ``xx`` are moments of the inputs, (columns, columns), whose diagonal is changed and restored,
    and ``tx`` those of targets and inputs. ``ridge`` is r as a fraction of the mean of the diagonal
    of ``xx``.
    """
    diagonal = xx.diagonal().clone()
    try:
        damped_(xx, ridge, torch.linalg.cholesky)
        r = xx.diagonal().mean() - diagonal.mean()
        factors, pivots = torch.linalg.lu_factor(xx)
    finally:
        xx.diagonal().copy_(diagonal)
    wanted = tx + r * weight.to(tx.dtype)
    return torch.linalg.lu_solve(factors, pivots, wanted.T).T.contiguous()


@dataclass(frozen=True)
class Elimination:
    """The order of columns, those with large diagonals of H first, and how the rest makes up.

    ``factor`` is the upper Cholesky factor of the inverse of H in this order.
    """

    order: Tensor
    factor: Tensor

    @classmethod
    def of(cls, h: Tensor) -> Elimination:
        """Return the elimination for a positive definite H; else raise LinAlgError."""
        order = h.diagonal().argsort(descending=True, stable=True)
        # LAPACK works in place where the entries of a column lie next to each other.
        matrix = h.mT[order.unsqueeze(1), order].mT
        torch.linalg.cholesky(matrix, out=matrix)
        torch.cholesky_inverse(matrix, out=matrix)
        torch.linalg.cholesky(matrix, upper=True, out=matrix)
        return cls(order, matrix)


def round_rows_(weight: Tensor, elimination: Elimination, grid: Grid) -> None:
    """Round ``weight`` by GPTQ, in place.

    One column is rounded after the other. Each error is made up for by the columns that are not
    rounded yet, as well as they can: by ``-error / U[i, i] * U[i, i + 1:]``, where U is the upper
    Cholesky factor of the inverse of H. ``weight`` is (rows, columns), in the dtype of H.
    """
    order, u = elimination.order, elimination.factor
    columns, w = order.tolist(), weight[:, order]
    for start in range(0, w.shape[1], _LAZY):
        end = min(start + _LAZY, w.shape[1])
        errors = torch.empty_like(w[:, start:end])
        for i in range(start, end):
            rounded = grid.nearest(w[:, i], columns[i])
            error = (w[:, i] - rounded) / u[i, i]
            w[:, i] = rounded
            w[:, i + 1 : end] -= error.unsqueeze(1) * u[i, i + 1 : end]
            errors[:, i - start] = error
        w[:, end:] -= errors @ u[start:end, end:]
    weight[:, order] = w


def round_groups_(weight: Tensor, eliminations: Iterable[Elimination], grid: Grid) -> None:
    """Round every group of ``weight`` by GPTQ, in place."""
    for part in zip(weight, eliminations, grid.groups(), strict=True):
        round_rows_(*part)


def descend(rounded: Tensor, weight: Tensor, h: Tensor, grid: Grid) -> Tensor:
    """Return ``rounded`` after coordinate descent, which never makes the error of a row larger.

    Each column in turn takes the grid value that is best for the values of all others. ``rounded``
    is on the grid, and ``weight`` is what was rounded, both (rows, columns).
    """
    q = rounded.clone()
    gradient = (q - weight) @ h
    diagonal = h.diagonal()
    for _ in range(_SWEEPS):
        changed = False
        for i in range(q.shape[1]):
            best = grid.nearest(q[:, i] - gradient[:, i] / diagonal[i], i)
            change = best - q[:, i]
            if bool(change.any()):
                gradient += change.unsqueeze(1) * h[i]
                q[:, i] = best
                changed = True
        if not changed:
            break
    return q


def _descend_groups(q: Tensor, weight: Tensor, h: Tensor, grid: Grid) -> Tensor:
    parts = zip(q, weight, h, grid.groups(), strict=True)
    return torch.stack([descend(*part) for part in parts])


def _better(one: Tensor, other: Tensor, weight: Tensor, h: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row whether ``one`` is better than ``other``, and the better of both."""
    is_better = quadratic_error(one - weight, h) < quadratic_error(other - weight, h)
    return is_better, torch.where(is_better.unsqueeze(2), one, other)


def round_with_best_ranges(
    layer: Any, weight: Tensor, h: Tensor, solved: list[Elimination]
) -> tuple[Tensor, Tensor]:
    """Return a rounded weight matrix, and the range of the weight that goes with it.

    Where each row has one range, every candidate is rounded by GPTQ, and each row takes the one
    with the least error. Then the ranges are fitted to the codes by least squares, and the codes to
    the ranges by coordinate descent, in turn. Other granularities take the candidate with the least
    error of nearest rounding, weighted by the diagonal of H.

    ``weight`` is (groups, rows, columns) and ``h`` (groups, columns, columns), positive definite.
    """
    granularity = weight_quantizer(layer).descriptor.granularity
    largest = granularity.amax(weight.reshape(layer.weight.shape)).float()
    fractions = torch.linspace(1, _SMALLEST, _FRACTIONS, dtype=torch.float32, device="cpu").tolist()
    one_each = isinstance(granularity, PerAxis) and granularity.axes == (0,)
    if one_each:
        q, amax = _best_of_candidates(layer, weight, h, solved, largest, fractions)
    else:
        amax, q = _weighted_search(layer, weight, h, largest, fractions), weight.clone()
        round_groups_(q, solved, grid_of(layer, amax))
    # No row shall be worse than rounded to nearest.
    grid = grid_of(layer, amax)
    ours, other = (_descend_groups(s, weight, h, grid) for s in (q, grid.nearest(weight)))
    q = _better(other, ours, weight, h)[1]
    for _ in range(_REFITS if one_each else 0):
        amax, q = _refit(layer, weight, h, amax, q)
    return q, amax


def _best_of_candidates(
    layer: Any,
    weight: Tensor,
    h: Tensor,
    solved: list[Elimination],
    largest: Tensor,
    fractions: list[float],
) -> tuple[Tensor, Tensor]:
    """Return the rounded rows with the best of some ranges, and these ranges.

    All candidates of some rows are rounded at the same time.
    """
    # The first column is like the others if a row has one range.
    grids = [grid_of(layer, largest * fraction) for fraction in fractions]
    scales = torch.stack([grid.scale[..., :1] for grid in grids], 1)
    divisors = torch.stack([grid.divisor[..., :1] for grid in grids], 1)
    columns, q, best = weight.shape[2], torch.empty_like(weight), []
    step = max(1, _MEMORY // (columns * 8))
    for start in range(0, weight.shape[1], step):
        rows = slice(start, start + step)
        part = weight[:, rows]
        tried = part.repeat(1, len(grids), 1)
        scale, divisor = (
            t[:, :, rows].flatten(1, 2).expand(-1, -1, columns) for t in (scales, divisors)
        )
        round_groups_(tried, solved, Grid(scale, divisor, grids[0].format))
        tried = tried.unflatten(1, (len(grids), -1))
        errors = [quadratic_error(one - part, h) for one in tried.unbind(1)]
        best.append(torch.stack(errors, 1).argmin(1))  # (groups, rows)
        index = best[-1].unsqueeze(1).unsqueeze(3).expand(-1, 1, -1, columns)
        q[:, rows] = tried.gather(1, index).squeeze(1)
    fraction = largest.new_tensor(fractions)[torch.cat(best, 1)]
    return q, largest * fraction.view(largest.shape)


def _refit(layer: Any, weight: Tensor, h: Tensor, amax: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return better ranges for the codes of ``q``, and better codes for these ranges."""
    grid = grid_of(layer, amax)
    codes = q / grid.scale
    along = codes @ h
    scale = (along * weight).sum(-1) / (along * codes).sum(-1).clamp(min=1e-300)
    fitted = (scale * grid.format.qmax).view(amax.shape).float()
    fitted = torch.where((fitted > 0) & fitted.isfinite(), fitted, amax)
    new = grid_of(layer, fitted)
    start = (codes.to(new.scale.dtype) * new.scale).to(q.dtype)
    is_better, found = _better(_descend_groups(start, weight, h, new), q, weight, h)
    return torch.where(is_better.view(amax.shape), fitted, amax), found


def _weighted_search(
    layer: Any, weight: Tensor, h: Tensor, largest: Tensor, fractions: list[float]
) -> Tensor:
    """Return the range with the least error of nearest rounding, weighted by the diagonal of H."""
    granularity = weight_quantizer(layer).descriptor.granularity
    importance = h.diagonal(dim1=1, dim2=2).unsqueeze(1)

    def error(amax: Tensor) -> Tensor:
        rounded = grid_of(layer, amax).nearest(weight)
        loss = ((rounded - weight).square() * importance).float()
        parts = granularity.split(loss.reshape(layer.weight.shape))
        dims = granularity.reduce_dims(parts.dim())
        return (parts.sum(dims) if dims else parts).view(largest.shape)

    return least_error([(largest * fraction,) for fraction in fractions], error)[0]

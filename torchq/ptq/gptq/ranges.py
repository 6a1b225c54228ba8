"""The search for the weight ranges that suit the inputs of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchq.calib.search import least_error
from torchq.formats import PerAxis
from torchq.ptq.gptq.solver import Elimination, descend, quadratic_error, round_rows_
from torchq.ptq.layers import Grid, grid_of, weight_quantizer

# Ranges that are tried, as fractions of the largest magnitude, down to the smallest one.
_FRACTIONS = 24
_SMALLEST = 0.2
# Rounds of fitting ranges to codes and codes to ranges.
_REFITS = 2
# Bytes of the rows whose candidates are rounded at the same time.
_MEMORY = 1 << 21


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
    if not (isinstance(granularity, PerAxis) and granularity.axes == (0,)):
        amax = _weighted_search(layer, weight, h, largest, fractions)
        grid, q = grid_of(layer, amax), weight.clone()
        round_groups_(q, solved, grid)
        return _improve(q, weight, h, grid), amax
    q, amax = _best_of_candidates(layer, weight, h, solved, largest, fractions)
    q = _improve(q, weight, h, grid_of(layer, amax))
    for _ in range(_REFITS):
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
    found = _descend_groups(start, weight, h, new)
    is_better = quadratic_error(found - weight, h) < quadratic_error(q - weight, h)
    return (
        torch.where(is_better.view(amax.shape), fitted, amax),
        torch.where(is_better.unsqueeze(2), found, q),
    )


def round_groups_(weight: Tensor, eliminations: Iterable[Elimination], grid: Grid) -> None:
    """Round every group of ``weight`` by GPTQ, in place."""
    for part in zip(weight, eliminations, grid.groups(), strict=True):
        round_rows_(*part)


def _improve(q: Tensor, weight: Tensor, h: Tensor, grid: Grid) -> Tensor:
    """Return the better of ``q`` and of nearest rounding for each row, after coordinate descent.

    So no row is worse than rounded to nearest.
    """
    ours, other = (_descend_groups(s, weight, h, grid) for s in (q, grid.nearest(weight)))
    is_better = quadratic_error(ours - weight, h) <= quadratic_error(other - weight, h)
    return torch.where(is_better.unsqueeze(2), ours, other)


def _descend_groups(q: Tensor, weight: Tensor, h: Tensor, grid: Grid) -> Tensor:
    parts = zip(q, weight, h, grid.groups(), strict=True)
    return torch.stack([descend(*part) for part in parts])


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

"""The search for the weight ranges that suit the inputs of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchq.formats import PerAxis, PerBlock
from torchq.functional import amax_from_scale
from torchq.ptq.blockwise.grid import Grid, grid_of
from torchq.ptq.blockwise.layers import weight_quantizer
from torchq.ptq.gptq.solver import Elimination, descend, quadratic_error, round_rows_

__all__ = ["round_groups_", "round_with_best_ranges_"]

# Ranges that are tried, as fractions of the largest magnitude, down to the smallest one.
_FRACTIONS = 24
_SMALLEST = 0.2
# Rounds of fitting ranges to codes and codes to ranges.
_REFITS = 2
# Bytes of the rows that are treated at the same time; all their candidates need as many times more.
_MEMORY = 1 << 21


def round_with_best_ranges_(
    layer: Any, weight: Tensor, h: Tensor, solved: list[Elimination]
) -> tuple[Tensor, Tensor]:
    """Round a weight matrix in place; return it, and the range of the weight that goes with it.

    Where each row has one range, every candidate is rounded by GPTQ, and each row takes the one
    with the least error. Then the ranges are fitted to the codes by least squares, and the codes to
    the ranges by coordinate descent, in turn. Other granularities take the candidate with the least
    error of nearest rounding, weighted by the diagonal of H.

    Rows that do not share a range are treated some at a time, which bounds the memory.

    Args:
        layer: a quantized Linear or Conv layer.
        weight: (groups, rows, columns), what is to be rounded.
        h: (groups, columns, columns), positive definite, of the same dtype.
        solved: the elimination of each group.
    """
    if not (len(weight) == 1 and _rows_share_nothing(layer)):
        rounded, amax = _rounded(layer, weight, h, solved, None)
        return weight.copy_(rounded), amax
    ranges = []
    count = max(1, _MEMORY // (weight.shape[2] * 8))
    for start in range(0, weight.shape[1], count):
        part = slice(start, start + count)
        weight[:, part], amax = _rounded(layer, weight[:, part], h, solved, part)
        ranges.append(amax)
    return weight, torch.cat(ranges)


def _rows_have_own_ranges(layer: Any) -> bool:
    """Return True if every row of the weight matrix of ``layer`` has one range of its own."""
    granularity = weight_quantizer(layer).descriptor.granularity
    return isinstance(granularity, PerAxis) and granularity.axes == (0,)


def _rows_share_nothing(layer: Any) -> bool:
    """Return True if every row of the weight of ``layer`` has one range or more of its own."""
    granularity = weight_quantizer(layer).descriptor.granularity
    in_row = isinstance(granularity, PerBlock) and granularity.axis % layer.weight.dim() > 0
    return in_row or _rows_have_own_ranges(layer)


def _rounded(
    layer: Any, weight: Tensor, h: Tensor, solved: list[Elimination], part: slice | None
) -> tuple[Tensor, Tensor]:
    """Return what :func:`round_with_best_ranges_` does, for the rows ``part``; None is all.

    ``weight`` holds these rows alone.
    """
    granularity = weight_quantizer(layer).descriptor.granularity
    largest = granularity.amax(_as_weight(layer, weight)).float()
    fractions = torch.linspace(1, _SMALLEST, _FRACTIONS, dtype=torch.float32, device="cpu").tolist()
    if not _rows_have_own_ranges(layer):
        amax = _weighted_search(layer, weight, h, part, largest, fractions)
        grid, q = grid_of(layer, amax, part), weight.clone()
        round_groups_(q, solved, grid)
        return _improve(q, weight, h, grid), amax
    q, amax = _best_of_candidates(layer, weight, h, solved, part, largest, fractions)
    q = _improve(q, weight, h, grid_of(layer, amax, part))
    for _ in range(_REFITS):
        amax, q = _refit(layer, weight, h, part, amax, q)
    return q, amax


def _as_weight(layer: Any, matrix: Tensor) -> Tensor:
    """Return some rows of the weight matrix of ``layer`` in the shape of its weight."""
    return matrix.reshape(-1, *layer.weight.shape[1:])


def _best_of_candidates(
    layer: Any,
    weight: Tensor,
    h: Tensor,
    solved: list[Elimination],
    part: slice | None,
    largest: Tensor,
    fractions: list[float],
) -> tuple[Tensor, Tensor]:
    """Return the rounded rows with the best of some ranges, and these ranges.

    All candidates are rounded at the same time.
    """
    grids = [_first_column(grid_of(layer, largest * f, part)) for f in fractions]
    count, rows = len(grids), weight.shape[1]
    stacked = Grid(
        torch.cat([grid.scale for grid in grids], 1).expand(-1, -1, weight.shape[2]),
        torch.cat([grid.divisor for grid in grids], 1).expand(-1, -1, weight.shape[2]),
        grids[0].format,
    )
    q = weight.repeat(1, count, 1)
    round_groups_(q, solved, stacked)
    q = q.unflatten(1, (count, rows))
    errors = [quadratic_error(one - weight, h) for one in q.unbind(1)]
    best = torch.stack(errors, 1).argmin(1)  # (groups, rows)
    fraction = largest.new_tensor(fractions)[best].view(largest.shape)
    index = best.unsqueeze(1).unsqueeze(3).expand(-1, 1, -1, weight.shape[2])
    return q.gather(1, index).squeeze(1), largest * fraction


def _first_column(grid: Grid) -> Grid:
    """Return a copy of the first column, which is like the others if a row has one range."""
    return Grid(grid.scale[..., :1].clone(), grid.divisor[..., :1].clone(), grid.format)


def _refit(
    layer: Any, weight: Tensor, h: Tensor, part: slice | None, amax: Tensor, q: Tensor
) -> tuple[Tensor, Tensor]:
    """Return better ranges for the codes of ``q``, and better codes for these ranges."""
    grid = grid_of(layer, amax, part)
    codes = q / grid.scale
    along = codes @ h
    scale = (along * weight).sum(-1) / (along * codes).sum(-1).clamp(min=1e-300)
    fitted = amax_from_scale(scale, grid.format).view(amax.shape).float()
    fitted = torch.where((fitted > 0) & fitted.isfinite(), fitted, amax)
    new = grid_of(layer, fitted, part)
    start = (codes.to(new.scale.dtype) * new.scale).to(q.dtype)
    found = _descend_groups(start, weight, h, new)
    is_better = quadratic_error(found - weight, h) < quadratic_error(q - weight, h)
    return (
        torch.where(is_better.view(amax.shape), fitted, amax),
        torch.where(is_better.unsqueeze(2), found, q),
    )


def round_groups_(weight: Tensor, eliminations: Iterable[Elimination], grid: Grid) -> None:
    """Round every group of ``weight`` by GPTQ, in place.

    The arguments are those of :func:`round_rows_`, with a first dimension of groups.
    """
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
    layer: Any,
    weight: Tensor,
    h: Tensor,
    part: slice | None,
    largest: Tensor,
    fractions: list[float],
) -> Tensor:
    """Return the range with the least error of nearest rounding, weighted by the diagonal of H."""
    granularity = weight_quantizer(layer).descriptor.granularity
    importance = h.diagonal(dim1=1, dim2=2).unsqueeze(1)
    best, least = largest, torch.full_like(largest, torch.inf)
    for fraction in fractions:
        rounded = grid_of(layer, largest * fraction, part).nearest(weight)
        loss = ((rounded - weight).square() * importance).float()
        parts = granularity.split(_as_weight(layer, loss))
        dims = granularity.reduce_dims(parts.dim())
        error = (parts.sum(dims) if dims else parts).view(largest.shape)
        best = torch.where(error < least, largest * fraction, best)
        least = torch.minimum(error, least)
    return best

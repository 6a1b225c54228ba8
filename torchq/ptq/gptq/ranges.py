"""The search for the weight ranges that suit the inputs of a layer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from torchq.formats import PerAxis
from torchq.functional import amax_from_scale
from torchq.ptq.blockwise.grid import Grid, grid_of
from torchq.ptq.blockwise.layers import weight_quantizer
from torchq.ptq.gptq.solver import Elimination, descend, quadratic_error, round_rows
from torchq.workflow.layer_matrices import weight_from_matrix

__all__ = ["eliminations", "round_groups", "round_with_best_ranges"]

# Ranges that are tried, as fractions of the largest magnitude, down to the smallest one.
_FRACTIONS = 24
_SMALLEST = 0.2
# Rounds of fitting ranges to codes and codes to ranges.
_REFITS = 2
# The least number of bytes of the rows that are rounded at the same time, in all ranges together.
_MEMORY = 1 << 23


def _rows_have_own_ranges(layer: Any) -> bool:
    """Return True if every row of the weight matrix of ``layer`` has one range of its own."""
    granularity = weight_quantizer(layer).descriptor.granularity
    return isinstance(granularity, PerAxis) and granularity.axes == (0,)


def round_with_best_ranges(
    layer: Any, weight: Tensor, h: Tensor, *, act_order: bool
) -> tuple[Tensor, Tensor]:
    """Return a rounded weight matrix, and the range of the weight that goes with it.

    Where each row has one range, every candidate is rounded by GPTQ, and each row takes the one
    with the least error. Then the ranges are fitted to the codes by least squares, and the codes to
    the ranges by coordinate descent, in turn. Other granularities take the candidate with the least
    error of nearest rounding, weighted by the diagonal of H.

    Args:
        layer: a quantized Linear or Conv layer.
        weight: (groups, rows, columns), float64, what is to be rounded.
        h: (groups, columns, columns), positive definite.
        act_order: see :class:`Elimination`.
    """
    granularity = weight_quantizer(layer).descriptor.granularity
    largest = granularity.amax(weight_from_matrix(layer, weight)).float()
    fractions = torch.linspace(1, _SMALLEST, _FRACTIONS).tolist()
    if not _rows_have_own_ranges(layer):
        amax = _weighted_search(layer, weight, h, largest, fractions)
        grid = grid_of(layer, amax)
        q = round_groups(weight, eliminations(h, act_order), grid)
        return _improve(q, weight, h, grid), amax
    q, amax = _best_of_candidates(layer, weight, h, eliminations(h, act_order), largest, fractions)
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

    All candidates of some rows are rounded at the same time. These rows are so few that they need
    no more memory than the weight itself.
    """
    if len(weight) > 1:
        return _best_rows(layer, weight, h, solved, largest, fractions, None)
    memory = max(_MEMORY, weight.nbytes)
    count = max(1, memory // (weight.shape[2] * weight.element_size() * len(fractions)))
    parts = [slice(start, start + count) for start in range(0, weight.shape[1], count)]
    found = [
        _best_rows(layer, weight[:, part], h, solved, largest[part], fractions, part)
        for part in parts
    ]
    return torch.cat([q for q, _ in found], 1), torch.cat([amax for _, amax in found])


def _best_rows(
    layer: Any,
    weight: Tensor,
    h: Tensor,
    solved: list[Elimination],
    largest: Tensor,
    fractions: list[float],
    part: slice | None,
) -> tuple[Tensor, Tensor]:
    """Return what :func:`_best_of_candidates` does, for the rows ``part`` of a layer.

    ``weight`` and ``largest`` hold these rows alone.
    """
    grids = [grid_of(layer, largest * fraction, part) for fraction in fractions]
    count, rows = len(grids), weight.shape[1]
    stacked = Grid(
        torch.cat([grid.scale for grid in grids], 1),
        torch.cat([grid.divisor for grid in grids], 1),
        grids[0].format,
    )
    repeated = weight.repeat(1, count, 1)
    q = round_groups(repeated, solved, stacked)
    errors = quadratic_error(q - repeated, h).unflatten(1, (count, rows))
    best = errors.argmin(1)  # (groups, rows)
    fraction = largest.new_tensor(fractions)[best].view(largest.shape)
    index = best.unsqueeze(1).unsqueeze(3).expand(-1, 1, -1, weight.shape[2])
    return q.unflatten(1, (count, rows)).gather(1, index).squeeze(1), largest * fraction


def _refit(layer: Any, weight: Tensor, h: Tensor, amax: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """Return better ranges for the codes of ``q``, and better codes for these ranges."""
    grid = grid_of(layer, amax)
    codes = q / grid.scale
    along = codes @ h
    scale = (along * weight).sum(-1) / (along * codes).sum(-1).clamp(min=1e-300)
    fitted = amax_from_scale(scale, grid.format).view(amax.shape).float()
    fitted = torch.where((fitted > 0) & fitted.isfinite(), fitted, amax)
    new = grid_of(layer, fitted)
    found = _descend_groups((codes.to(new.scale.dtype) * new.scale).double(), weight, h, new)
    is_better = quadratic_error(found - weight, h) < quadratic_error(q - weight, h)
    return (
        torch.where(is_better.view(amax.shape), fitted, amax),
        torch.where(is_better.unsqueeze(2), found, q),
    )


def eliminations(h: Tensor, act_order: bool) -> list[Elimination]:
    """Return the elimination of the matrix of each group."""
    return [Elimination.of(matrix, act_order=act_order) for matrix in h]


def round_groups(weight: Tensor, eliminations: Iterable[Elimination], grid: Grid) -> Tensor:
    """Return every group of ``weight`` rounded by GPTQ.

    The arguments are those of :func:`round_rows`, with a first dimension of groups.
    """
    parts = zip(weight, eliminations, grid.groups(), strict=True)
    return torch.stack([round_rows(*part) for part in parts])


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
    granularity = weight_quantizer(layer).descriptor.granularity
    importance = h.diagonal(dim1=1, dim2=2).unsqueeze(1)
    best, least = largest, torch.full_like(largest, torch.inf)
    for fraction in fractions:
        rounded = grid_of(layer, largest * fraction).nearest(weight)
        loss = ((rounded - weight).square() * importance).float()
        parts = granularity.split(weight_from_matrix(layer, loss))
        dims = granularity.reduce_dims(parts.dim())
        error = (parts.sum(dims) if dims else parts).view(largest.shape)
        best = torch.where(error < least, largest * fraction, best)
        least = torch.minimum(error, least)
    return best

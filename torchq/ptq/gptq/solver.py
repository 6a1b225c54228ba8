"""Rounding of a weight matrix so that its output changes least.

The error of rounded rows Q of a weight W is ``sum((Q - W) H (Q - W)^T)`` with a positive definite
matrix H of input moments. Rows are independent of each other.

Reference: Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers (ICLR 2023), section 3 and algorithm 1. Coordinate descent: Behdin et al., QuantEase
(2023), section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from torchq.ptq.layers import Grid

T = TypeVar("T")

# Columns after which the rest of the matrix is brought up to date, in one product.
_LAZY = 128
# The search for a positive definite matrix ends here.
_MOST_DAMPING = 1e4
# Passes of coordinate descent over the columns, unless nothing changes before.
_SWEEPS = 4


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

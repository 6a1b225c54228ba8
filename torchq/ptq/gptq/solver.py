"""Rounding of a weight matrix so that its output changes least.

The error of rounded rows Q of a weight W is ``sum((Q - W) H (Q - W)^T)`` with a positive definite
matrix H of input moments. Rows are independent of each other.

Reference: Frantar et al., GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers (ICLR 2023), section 3 and algorithm 1. Coordinate descent: Behdin et al., QuantEase
(2023), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.ptq.blockwise.grid import Grid

__all__ = [
    "Elimination",
    "damp_",
    "descend",
    "quadratic_error",
    "ridge_regression",
    "round_rows_",
]

# Columns after which the rest of the matrix is brought up to date, in one product.
_LAZY = 128
# The search for a positive definite matrix ends here.
_MOST_DAMPING = 1e4
# Passes of coordinate descent over the columns, unless nothing changes before.
_SWEEPS = 4


def quadratic_error(difference: Tensor, h: Tensor) -> Tensor:
    """Return ``d H d^T`` of each row d.

    Args:
        difference: (..., rows, columns).
        h: (..., columns, columns).

    Returns:
        (..., rows).
    """
    return (difference @ h).mul_(difference).sum(-1)


def damp_(h: Tensor, damping: float) -> float:
    """Make a matrix positive definite, in place; return the damping that did it.

    The damping is a fraction of the mean of the diagonal that is added to the diagonal. It grows
    tenfold until the Cholesky decomposition exists. A matrix of zeros becomes the identity.

    Args:
        h: (columns, columns), symmetric; its diagonal is changed.
        damping: the fraction to start from, > 0.
    """
    diagonal = h.diagonal().clone()
    mean = diagonal.mean()
    unit = torch.where(mean > 0, mean, 1.0)
    while True:
        h.diagonal().copy_(diagonal + damping * unit)
        _, info = torch.linalg.cholesky_ex(h)
        if not bool(info) or damping > _MOST_DAMPING:
            return damping
        damping *= 10


def ridge_regression(weight: Tensor, xx: Tensor, tx: Tensor, ridge: float) -> Tensor:
    """Return the weights that minimise ``mean((t - W x)^2) + r |W - weight|^2``.

    Args:
        weight: (rows, columns), where the solution is pulled to.
        xx: (columns, columns), moments of the inputs; its diagonal is changed and restored.
        tx: (rows, columns), moments of targets and inputs.
        ridge: r as a fraction of the mean of the diagonal of ``xx``.

    Returns:
        (rows, columns), in the dtype of ``xx``.
    """
    diagonal = xx.diagonal().clone()
    try:
        damp_(xx, ridge)
        r = xx.diagonal().mean() - diagonal.mean()
        factors, pivots = torch.linalg.lu_factor(xx)
    finally:
        xx.diagonal().copy_(diagonal)
    wanted = tx + r * weight.to(tx.dtype)
    return torch.linalg.lu_solve(factors, pivots, wanted.T).T.contiguous()


@dataclass(frozen=True)
class Elimination:
    """In which order columns are rounded, and how the rest makes up for their errors.

    Attributes:
        order: (columns,), the columns, those with large diagonals of H first.
        factor: the upper Cholesky factor of the inverse of H in this order.
    """

    order: Tensor
    factor: Tensor

    @classmethod
    def of(cls, h: Tensor, *, act_order: bool = True) -> Elimination:
        """Return the elimination for a positive definite matrix H.

        Args:
            h: (columns, columns).
            act_order: False takes the columns as they come.

        Raises:
            torch.linalg.LinAlgError: H is not positive definite, or too little so for its dtype.
        """
        if act_order:
            order = h.diagonal().argsort(descending=True, stable=True)
        else:
            order = torch.arange(len(h), device=h.device)
        # LAPACK works in place where the entries of a column lie next to each other.
        matrix = h.mT[order.unsqueeze(1), order].mT
        torch.linalg.cholesky(matrix, out=matrix)
        torch.cholesky_inverse(matrix, out=matrix)
        torch.linalg.cholesky(matrix, upper=True, out=matrix)
        return cls(order, matrix)

    @classmethod
    def damped_(
        cls, h: Tensor, damping: float, *, act_order: bool = True
    ) -> tuple[Elimination, float]:
        """Return the elimination of H after damping in place, and the fraction that it needed.

        A matrix may be positive definite while its inverse, with the errors of float32, is not.

        Args:
            h: (columns, columns), symmetric; its diagonal is changed.
            damping: the fraction to start from, see :func:`damp_`.
            act_order: False takes the columns as they come.
        """
        diagonal = h.diagonal().clone()
        while True:
            damping = damp_(h, damping)
            try:
                return cls.of(h, act_order=act_order), damping
            except torch.linalg.LinAlgError:
                if damping > _MOST_DAMPING:
                    raise
            h.diagonal().copy_(diagonal)
            damping *= 10


def round_rows_(weight: Tensor, elimination: Elimination, grid: Grid) -> None:
    """Round ``weight`` by GPTQ, in place.

    One column is rounded after the other. Each error is made up for by the columns that are not
    rounded yet, as well as they can: by ``-error / U[i, i] * U[i, i + 1:]``, where U is the upper
    Cholesky factor of the inverse of H.

    Args:
        weight: (rows, columns), in the dtype of H.
        elimination: of H.
        grid: of the rows.
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

    Each column in turn takes the grid value that is best for the values of all others.

    Args:
        rounded: (rows, columns) on the grid.
        weight: (rows, columns), what was rounded.
        h: (columns, columns), positive definite.
        grid: of the rows.
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

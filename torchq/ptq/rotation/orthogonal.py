"""Orthogonal matrices with entries of one magnitude, or random ones.

References: Paley, On orthogonal matrices (Journal of Mathematics and Physics, 1933); random signs:
Ashkboos et al., QuaRot (NeurIPS 2024), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["hadamard_matrix", "random_rotation"]


def hadamard_matrix(size: int) -> Tensor | None:
    """Return a matrix H of +1 and -1 with ``H H^T = size I``, or None if none is known here.

    Known are powers of two times 1 or a size of Paley's: q + 1 for a prime q = 3 mod 4, and
    2 (q + 1) for a prime q = 1 mod 4. That includes 12, 20, 24, 28, 36, 44, 48 and 60.

    Args:
        size: rows and columns.

    Returns:
        (size, size) float64.

    Example:
        >>> hadamard_matrix(4)[1]
        tensor([ 1., -1.,  1., -1.], dtype=torch.float64)
    """
    if size < 1:
        return None
    core = size
    while core % 2 == 0:
        core //= 2
    while core <= size:
        found = _paley(core)
        if found is not None:
            two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
            while len(found) < size:
                found = torch.kron(two, found)
            return found
        core *= 2
    return None


def random_rotation(size: int, seed: int) -> tuple[Tensor, bool]:
    """Return an orthogonal matrix, and True if it is a Hadamard matrix with random signs.

    Where no Hadamard matrix is known, the matrix is random.

    Args:
        size: rows and columns.
        seed: of the signs, or of the matrix.

    Returns:
        (size, size) float64.
    """
    generator = torch.Generator().manual_seed(seed)
    matrix = hadamard_matrix(size)
    if matrix is not None:
        signs = torch.randint(0, 2, (size, 1), generator=generator, device="cpu") * 2 - 1
        return signs * matrix / size**0.5, True
    normal = torch.randn(size, size, dtype=torch.float64, generator=generator, device="cpu")
    q, r = torch.linalg.qr(normal)
    return q * r.diagonal().sign(), False


def _paley(size: int) -> Tensor | None:
    """Return Paley's matrix of a size, the matrix of size 1, or None."""
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64, device="cpu")
    q = size - 1
    if q % 4 == 3 and _is_prime(q):
        return torch.eye(size, dtype=torch.float64, device="cpu") + _bordered(q, corner=-1.0)
    q = size // 2 - 1
    if size % 2 == 0 and q % 4 == 1 and _is_prime(q):
        conference = _bordered(q, corner=1.0)
        identity = torch.eye(q + 1, dtype=torch.float64, device="cpu")
        two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64, device="cpu")
        other = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64, device="cpu")
        return torch.kron(conference, two) + torch.kron(identity, other)
    return None


def _bordered(q: int, corner: float) -> Tensor:
    """Return the matrix of Legendre symbols of differences, with a border of ones."""
    squares = torch.zeros(q, dtype=torch.bool, device="cpu")
    squares[torch.arange(1, q, device="cpu").square() % q] = True
    symbol = torch.where(squares, 1.0, -1.0).double()
    symbol[0] = 0.0
    index = torch.arange(q, device="cpu")
    matrix = torch.zeros(q + 1, q + 1, dtype=torch.float64, device="cpu")
    matrix[1:, 1:] = symbol[(index.unsqueeze(1) - index) % q]
    matrix[0, 1:] = 1.0
    matrix[1:, 0] = corner
    return matrix


def _is_prime(q: int) -> bool:
    return q > 1 and all(q % d for d in range(2, int(q**0.5) + 1))

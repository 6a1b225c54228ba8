"""Comparing tensors number by number, whatever their type and layout."""

import torch
from torch import Tensor


def same_numbers(one: Tensor, other: Tensor) -> bool:
    """Return True for tensors of one shape and type with equal numbers.

    NaN is equal to NaN, and 0 to -0. Tensors on the meta device have no numbers to differ in.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if one.is_meta or other.is_meta:
        return True
    if one.layout in _SPARSE and other.layout in _SPARSE:
        parts = zip(_sparse_parts(one), _sparse_parts(other), strict=True)
        return all(same_numbers(*pair) for pair in parts)
    one = dense_numbers(one)
    other = dense_numbers(other)
    # One kernel in place of six, and most tensors are equal.
    if torch.equal(one, other):
        return True
    return bool(((one == other) | ((one != one) & (other != other))).all())


_SPARSE = frozenset(
    [
        torch.sparse_coo,
        torch.sparse_csr,
        torch.sparse_csc,
        torch.sparse_bsr,
        torch.sparse_bsc,
    ]
)


def _sparse_parts(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Return the places and the numbers of a sparse tensor, which may be too large to be dense."""
    coordinates = tensor.detach().to_sparse().coalesce()
    return coordinates.indices(), coordinates.values()


def dense_numbers(tensor: Tensor) -> Tensor:
    """Return the numbers of a tensor as real ones, in a type and layout that torch compares."""
    tensor = tensor.dequantize() if tensor.is_quantized else tensor
    tensor = tensor if tensor.layout is torch.strided else tensor.to_dense()
    if tensor.is_complex():
        return torch.view_as_real(tensor.resolve_conj())
    is_float8 = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.float() if is_float8 else tensor

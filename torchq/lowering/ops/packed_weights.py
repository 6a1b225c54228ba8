"""Weights in the memory layouts of oneDNN's kernels, and back.

A packed weight is an opaque tensor, whose layout the kernel chooses for the shape of its input.
Kernels that choose the same layout for the same weight share one packed copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torchq.lowering.ops.kernel_cache import KERNELS
from torchq.lowering.ops.params import ConvParams, Int8Weights

__all__ = [
    "PackedLayer",
    "as_lists",
    "packed_conv",
    "packed_linear",
    "packed_weight",
    "unpack_weight",
]

#: What the cache calls packed weights of convolutions and of linear layers.
_PACKED_KINDS = ("packed conv", "packed linear")
#: The key of the list of the packed copies of a weight. The list has weak references: a copy lives
#: as long as a kernel or a layer holds it.
_COPIES = ("packed copies", None)
_Copies = list[weakref.ref[Tensor]]


class PackedLayer(NamedTuple):
    """The arguments of an operator between the codes and its post-ops."""

    x_scale: float
    x_zero_point: int
    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None


def _pack(weights: Int8Weights, packed: Tensor) -> PackedLayer:
    """Return the arguments for a packed weight, with the zero point of the input in the bias.

    ``sum (x - z) w = sum x w - z sum w``. Kernels without a zero point are much faster.
    """
    codes, scale, bias, x_scale, x_zero_point = weights
    scale = scale.expand(codes.shape[0]).contiguous()
    if x_zero_point:
        sums = codes.flatten(1).sum(1, dtype=torch.int64).double()
        shift = sums * scale.double() * (x_scale * x_zero_point)
        bias = (-shift if bias is None else bias.double() - shift).float()
    bias = None if bias is None else bias.float()
    return PackedLayer(x_scale, 0, packed, scale, _zeros(codes.shape[0]), bias)


@lru_cache
def _zeros(count: int) -> Tensor:
    """Return the zero points of as many channels, one tensor for all layers, which only read it."""
    return torch.zeros(count, dtype=torch.int64, device="cpu")


def packed_conv(shape: Sequence[int], weights: Int8Weights, params: ConvParams) -> PackedLayer:
    """Return the packed weights for images of ``shape``.

    Their layout depends on the size of the image, not on the batch. A weight in the layout of
    another size is converted at every call, which takes a hundred times longer than convolving.
    """
    codes, scale, bias, x_scale, x_zero_point = weights

    def build() -> PackedLayer:
        plain = codes if codes.dim() == len(shape) else codes.unsqueeze(2)
        # The packed weight does not depend on the scales, and reading each of them takes time.
        packed = torch.ops.onednn.qconv_prepack(
            plain, scale.flatten()[:1], x_scale, 0, *as_lists(params), list(shape)
        )
        return _pack(weights, _shared_copy(codes, packed))

    key = (_PACKED_KINDS[0], (x_scale, x_zero_point, params, *shape[2:]))
    found: PackedLayer = KERNELS.get(codes, key, (scale, bias), build)
    return found


def packed_linear(weights: Int8Weights) -> PackedLayer:
    """Return the packed weights of a product of matrices; all kernel sizes are 1."""
    codes, scale, bias, *input_qparams = weights

    def build() -> PackedLayer:
        packed = torch.ops.onednn.qlinear_prepack(codes.flatten(1), None)
        return _pack(weights, _shared_copy(codes, packed))

    key = (_PACKED_KINDS[1], tuple(input_qparams))
    found: PackedLayer = KERNELS.get(codes, key, (scale, bias), build)
    return found


def _shared_copy(codes: Tensor, packed: Tensor) -> Tensor:
    """Return the copy of ``codes`` in the layout of ``packed`` that its kernels share.

    Images of most sizes ask for the same layout.
    """
    layout = _layout(packed)
    if layout is None:
        return packed
    copies: _Copies = KERNELS.get(codes, _COPIES, (), list)
    kept = [copy for reference in copies if (copy := reference()) is not None]
    for copy in kept:
        # The values are compared as well, since a plain weight may have been changed in place.
        if _layout(copy) == layout and torch.equal(_plain_weight(copy, codes.shape), codes):
            return copy
    copies[:] = map(weakref.ref, [*kept, packed])
    _share(packed, copies)
    return packed


def _share(weight: Tensor, copies: _Copies) -> None:
    """Let kernels that are made from ``weight``, plain or packed, share ``copies``."""
    KERNELS.get(weight, _COPIES, (), lambda: copies)


def _layout(packed: Tensor) -> bytes | None:
    """Return the memory layout of a packed weight, or None if torch does not tell it."""
    # Opaque tensors tell it by this operator alone.
    tell = getattr(torch.ops.mkldnn, "_get_mkldnn_serialized_md", None)
    return None if tell is None else bytes(tell(packed).tolist())


def as_lists(params: ConvParams) -> tuple[Any, ...]:
    """Return stride, padding, dilation and groups as the operators take them fastest."""
    return (*map(list, params[:3]), params.groups)


def packed_weight(weight: Tensor) -> Tensor | None:
    """Return a packed copy of ``weight`` (int8) that a kernel holds, or None."""
    kept = [packed for kind in _PACKED_KINDS for packed in KERNELS.kept(weight, kind)]
    return kept[0].weight if kept else None


def unpack_weight(packed: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the plain int8 weight of ``shape`` that was packed, as a new tensor.

    Kernels that are made from it share the packed copies of the weight.
    """
    plain = _plain_weight(packed, shape)
    for copies in KERNELS.kept(packed, _COPIES[0]):
        _share(plain, copies)
    return plain


def _plain_weight(packed: Tensor, shape: Sequence[int]) -> Tensor:
    dense = packed.to_dense()
    if packed.dim() == 2:  # of a linear layer: (in, out)
        dense = dense.t()
    return dense.reshape(list(shape)).contiguous()

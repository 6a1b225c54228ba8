"""Packed copies of weights and functions that hold one, under a weak reference to the plain weight.

Packed tensors can be neither copied nor saved. An entry holds as long as all that it was made from:
tensors are compared by identity, and who changes a weight in place calls ``KernelCache.forget``.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchq.lowering.definition import ConvParams, Int8Weights

#: How many input shapes kernels are kept for. oneDNN itself keeps a thousand compiled kernels: as
#: many as a network of 30 layers needs for this number of shapes.
MOST_SHAPES = 32

#: A kind of kernel, and the numbers that it was made from.
Key = tuple[str, Hashable]


class KernelCache:
    """Kernels by weight and key. Several threads may use it; only building takes the lock."""

    def __init__(self, most: int = MOST_SHAPES) -> None:
        self._most = most
        self._entries = WeakTensorKeyDictionary()
        self._lock = threading.RLock()  # building a bound kernel asks for a packed weight

    def get(
        self,
        weight: Tensor,
        key: Key,
        companions: Sequence[Tensor | None],
        build: Callable[[], Any],
    ) -> Any:
        """Return what ``build`` returned for this weight, key and companions."""
        found = self._entries.get(weight)
        entry = found.get(key) if found is not None else None
        if entry is not None and _same(entry[0], companions):
            return entry[1]
        with self._lock:
            entry = self._entries.get(weight, {}).get(key)
            if entry is None or not _same(entry[0], companions):
                entry = (companions, build())
                # A new dictionary: another thread may be reading the old one.
                kept = self._without_oldest(self._entries.get(weight, {}), key)
                self._entries[weight] = {**kept, key: entry}
            return entry[1]

    def _without_oldest(self, entries: dict[Key, Any], key: Key) -> dict[Key, Any]:
        alike = [other for other in entries if other[0] == key[0] and other != key]
        dropped = set(alike[: max(0, len(alike) + 1 - self._most)])
        return {other: entry for other, entry in entries.items() if other not in dropped}

    def kept(self, weight: Tensor, kind: str) -> list[Any]:
        """Return the kernels of one kind that are kept for ``weight``."""
        entries = self._entries.get(weight, {})
        return [kernel for key, (_, kernel) in entries.items() if key[0] == kind]

    def __len__(self) -> int:
        """Return the number of weights that have kernels."""
        return len(self._entries)

    def forget(self, weight: Tensor) -> None:
        """Drop the kernels of ``weight``, because its values have changed in place."""
        with self._lock:
            self._entries.pop(weight, None)


def drop_oldest(entries: dict[Any, Any], most: int) -> None:
    """Make room for one more entry in a dictionary, by dropping its oldest ones in place."""
    for key in list(entries)[: max(0, len(entries) + 1 - most)]:
        entries.pop(key, None)


def _same(before: Sequence[Tensor | None], now: Sequence[Tensor | None]) -> bool:
    return all(a is b for a, b in zip(before, now, strict=True))


#: The kernels of this process, of all operators.
KERNELS = KernelCache()


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

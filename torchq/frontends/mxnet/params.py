"""Reading ``.params`` files of MXNet: named arrays in NDArray format V0 to V3.

The layout is that of ``NDArray::Save`` in MXNet 1.9.1. Nothing in a file is trusted: a size is
compared with the bytes that are left before memory is taken.
"""

import math
import struct
from collections.abc import Mapping

import torch
from torch import Tensor

from torchq.errors import FrontendError
from torchq.frontends.building.importer import bytes_of

_LIST = 0x112
_V1, _V2, _V3 = 0xF993FAC8, 0xF993FAC9, 0xF993FACA
#: By the number that stands for them in a file.
_NAMES = "float32 float64 float16 uint8 int32 int8 int64 bool int16 uint16 uint32 uint64 bfloat16"
_DTYPES: dict[int, torch.dtype] = {
    n: getattr(torch, k) for n, k in enumerate(_NAMES.split())
}
_MAX_NDIM = 32
#: The most elements that a sparse array may have when its zeros are written out.
_MAX_DENSE = 2**28


def read_params(source: object, where: str) -> dict[str, Tensor]:
    """Return the arrays of a file by name, without the prefixes ``arg:`` and ``aux:``."""
    if isinstance(source, Mapping):
        named = {str(name): torch.as_tensor(array) for name, array in source.items()}
    else:
        named = _Reader(*bytes_of(source, where, "parameters")).arrays()
    result: dict[str, Tensor] = {}
    for name, tensor in named.items():
        key = name[4:] if name[:4] in ("arg:", "aux:") else name
        if key in result:
            raise FrontendError(f"{where}: got two arrays {key!r}; expected one")
        result[key] = tensor
    return result


class _Reader:
    """A position in the bytes of a file."""

    def __init__(self, data: bytes, where: str) -> None:
        self._data = memoryview(data)
        self._at = 0
        self._where = where

    def arrays(self) -> dict[str, Tensor]:
        """Return the arrays of the file by name."""
        if bytes(self._data[:4]) == b"PK\x03\x04":
            self._fail("is an .npz file; expected the .params that `net.export` writes")
        magic, _ = self._numbers("QQ")
        if magic != _LIST:
            self._fail(
                f"begins with {magic:#x}; expected {_LIST:#x}, a list of NDArrays"
            )
        tensors = [self._array() for _ in range(self._count(4))]
        names = [self._name() for _ in range(self._count(8))]
        if len({*names}) != len(names) or len(names) != len(tensors):
            self._fail(
                f"has the names {names} for {len(tensors)} arrays; expected one for each"
            )
        if self._at != len(self._data):
            self._fail(f"has {len(self._data) - self._at} bytes behind its last name")
        return dict(zip(names, tensors, strict=True))

    def _fail(self, text: str) -> None:
        raise FrontendError(f"{self._where} {text}")

    def _take(self, size: int) -> memoryview:
        bytes_left = len(self._data) - self._at
        if size > bytes_left:
            self._fail(
                f"is cut off: got {bytes_left} bytes at {self._at}; expected {size}"
            )
        self._at += size
        return self._data[self._at - size : self._at]

    def _numbers(self, layout: str) -> tuple[int, ...]:
        return struct.unpack(f"<{layout}", self._take(struct.calcsize(f"<{layout}")))

    def _count(self, least: int) -> int:
        """Return a count of things that take at least ``least`` bytes each."""
        (count,) = self._numbers("Q")
        if count * least > len(self._data) - self._at:
            self._fail(f"says that {count} items follow, more than the file can hold")
        return count

    def _name(self) -> str:
        (size,) = self._numbers("Q")
        return bytes(self._take(size)).decode("utf-8", "replace")

    def _shape(self, layout: str = "q") -> tuple[int, ...] | None:
        """Return a shape, None for one that is not known."""
        (ndim,) = self._numbers("i")
        return None if ndim == -1 else self._sizes(ndim, layout)

    def _sizes(self, ndim: int, layout: str) -> tuple[int, ...]:
        if not 0 <= ndim <= _MAX_NDIM:
            self._fail(f"has an array of {ndim} dimensions; expected 0 to {_MAX_NDIM}")
        return self._numbers(f"{ndim}{layout}")

    def _array(self) -> Tensor:
        (magic,) = self._numbers("I")
        if magic in (_V2, _V3):
            return self._array_with_storage(scalars=magic == _V3)
        shape = self._shape() if magic == _V1 else self._sizes(magic, "I")
        if not shape:
            return torch.empty(0)
        dtype = self._context_and_dtype()
        return self._elements(shape, dtype)

    def _array_with_storage(self, scalars: bool) -> Tensor:
        (storage,) = self._numbers("i")
        if storage not in (-1, 0, 1, 2):
            self._fail(
                f"has an array of storage type {storage}; expected dense, row-sparse or csr"
            )
        auxiliary = max(storage, 0)
        stored = self._shape() if auxiliary else None
        shape = self._shape()
        if shape is None or -1 in shape or (not shape and not scalars):
            return torch.empty(0)
        dtype = self._context_and_dtype()
        kinds = []
        for _ in range(auxiliary):
            (kind,) = self._numbers("i")
            kinds.append((self._dtype(kind), self._shape() or (0,)))
        if not auxiliary:
            return self._elements(shape, dtype)
        values = self._elements(stored or (0,), dtype)
        indices = [self._elements(sizes, kind).long() for kind, sizes in kinds]
        return self._dense(shape, values, indices)

    def _context_and_dtype(self) -> torch.dtype:
        _, _, flag = self._numbers("iii")
        return self._dtype(flag)

    def _dtype(self, flag: int) -> torch.dtype:
        if flag not in _DTYPES:
            self._fail(
                f"has an array of element type {flag}; expected one of {sorted(_DTYPES)}"
            )
        return _DTYPES[flag]

    def _elements(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        if any(size < 0 for size in shape):
            self._fail(f"has an array of shape {shape}")
        data = self._take(math.prod(shape) * dtype.itemsize)
        if not len(data):
            if math.prod(size for size in shape if size) > _MAX_DENSE:
                self._fail(f"has an empty array of shape {shape}")
            return torch.empty(shape, dtype=dtype)
        return (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            .view(dtype)
            .reshape(shape)
        )

    def _dense(
        self, shape: tuple[int, ...], values: Tensor, indices: list[Tensor]
    ) -> Tensor:
        """Return a sparse array with its zeros."""
        if math.prod(shape) > _MAX_DENSE or min(shape, default=0) < 0:
            self._fail(
                f"has a sparse array of shape {shape}; expected {_MAX_DENSE} elements"
            )
        result = torch.zeros(shape, dtype=values.dtype)
        try:
            if len(indices) == 1:
                result[indices[0]] = values
            else:
                rows = torch.repeat_interleave(
                    torch.arange(shape[0]), indices[0].diff()
                )
                result[rows, indices[1]] = values
        except (IndexError, RuntimeError, ValueError) as error:
            self._fail(f"has a sparse array whose parts do not fit together ({error})")
        return result

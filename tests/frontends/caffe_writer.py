"""Writing files of Caffe from the public schema: what tests need, and independent of torchq."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

__all__ = ["caffemodel", "delimited", "varint"]


def varint(value: int) -> bytes:
    """Return a number of variable length."""
    out = b""
    while value > 0x7F:
        out += bytes([value & 0x7F | 0x80])
        value >>= 7
    return out + bytes([value])


def delimited(number: int, data: bytes) -> bytes:
    """Return a field that holds bytes."""
    return varint(number << 3 | 2) + varint(len(data)) + data


#: The numbers of types in raw data of NVIDIA's Caffe.
RAW_TYPES = {"<f8": 0, "<f4": 1, "<f2": 2}


def raw_blob(array: Any, kind: str) -> bytes:
    """Return a BlobProto of NVIDIA's Caffe: ``raw_data_type`` = 10, ``raw_data`` = 12."""
    shape = delimited(7, delimited(1, b"".join(map(varint, array.shape))))
    data = delimited(12, np.asarray(array, kind).tobytes())
    return shape + varint(10 << 3) + varint(RAW_TYPES[kind]) + data


def blob(array: Any, old: bool) -> bytes:
    """Return a BlobProto: ``shape`` = 7 and ``data`` = 5, or the four sizes of old files."""
    data = delimited(5, np.asarray(array, "<f4").tobytes())
    if old:
        sizes = [1] * (4 - array.ndim) + list(array.shape)
        return (
            b"".join(varint(n << 3) + varint(size) for n, size in enumerate(sizes, 1))
            + data
        )
    return delimited(7, delimited(1, b"".join(map(varint, array.shape)))) + data


def caffemodel(weights: Mapping[str, Sequence[Any]], old: bool = False) -> bytes:
    """Return a NetParameter: ``layer`` = 100, or ``layers`` = 2 with old fields.

    Args:
        weights: the arrays of each layer.
        old: write layers of version 1.
    """
    layer, name, blobs = (2, 4, 6) if old else (100, 1, 7)
    # The name, and a field to skip.
    out = delimited(1, b"net") + struct.pack("<BB", 5 << 3, 1)
    for key, arrays in weights.items():
        parts = [delimited(name, key.encode())]
        parts += [delimited(blobs, blob(array, old)) for array in arrays]
        out += delimited(layer, b"".join(parts))
    return out

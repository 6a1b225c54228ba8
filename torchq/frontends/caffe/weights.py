"""Reading ``.caffemodel`` files: the blobs of each layer, by the name of the layer.

The field numbers are those of Caffe's public schema, caffe.proto.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchq.errors import FrontendError
from torchq.frontends.caffe.wire import fields, numbers, varints

# NetParameter: layers of the old form, and of the new one.
_LAYERS_V1, _LAYERS = 2, 100
# (name, blobs) of V1LayerParameter and LayerParameter.
_LAYER_FIELDS = {_LAYERS_V1: (4, 6), _LAYERS: (1, 7)}
# BlobProto: num, channels, height, width; data; shape; double_data. BlobShape: dim.
_LEGACY, _DATA, _SHAPE, _DOUBLE_DATA, _DIM = (1, 2, 3, 4), 5, 7, 8, 1


def read_weights(source: Any, where: str) -> dict[str, list[Tensor]]:
    """Return the blobs of each layer that has some.

    Args:
        source: a path, or the bytes of a file.
        where: how errors begin.

    Raises:
        FrontendError: the file cannot be read, or is no such message.
    """
    if not isinstance(source, bytes):
        path = Path(os.fspath(source))
        try:
            source = path.read_bytes()
        except OSError as error:
            raise FrontendError(f"{where}: cannot read the weights ({error})") from None
        where = f"{where}: {path.name}"
    result: dict[str, list[Tensor]] = {}
    for number, value in fields(memoryview(source), where):
        if number not in _LAYER_FIELDS or isinstance(value, int):
            continue
        name, blobs = _layer(value, *_LAYER_FIELDS[number], where)
        if blobs and name in result:
            raise FrontendError(f"{where}: got two layers {name!r} with weights; expected one")
        if blobs:
            result[name] = blobs
    return result


def _layer(
    data: memoryview, name_field: int, blob_field: int, where: str
) -> tuple[str, list[Tensor]]:
    name, blobs = "", []
    for number, value in fields(data, where):
        if isinstance(value, int):
            continue
        if number == name_field:
            name = bytes(value).decode("utf-8", "replace")
        elif number == blob_field:
            blobs.append(value)
    return name, [_blob(blob, f"{where}: layer {name!r}") for blob in blobs]


def _blob(data: memoryview, where: str) -> Tensor:
    legacy = dict.fromkeys(_LEGACY, 1)
    shape: list[int] | None = None
    parts: list[bytes] = []
    dtype = torch.float32
    for number, value in fields(data, where):
        if number in _LEGACY and isinstance(value, int):
            legacy[number] = value
        elif number == _SHAPE and not isinstance(value, int):
            shape = []
            for key, dims in fields(value, where):
                shape += varints(dims, where) if key == _DIM else []
        elif number in (_DATA, _DOUBLE_DATA):
            dtype = torch.float32 if number == _DATA else torch.float64
            parts.append(numbers(value, dtype.itemsize, where))
    sizes = list(legacy.values()) if shape is None else shape
    content = bytearray(b"".join(parts))
    if math.prod(sizes) * dtype.itemsize != len(content):
        raise FrontendError(
            f"{where}: got {len(content) // dtype.itemsize} numbers; "
            f"expected {math.prod(sizes)} for the shape {sizes}"
        )
    if not content:
        return torch.empty(sizes)
    return torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(sizes).float()

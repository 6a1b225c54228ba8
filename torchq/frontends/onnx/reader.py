"""Reading an ONNX file, its tensors, and files beside it. Nothing in a file is trusted."""

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torchq.errors import FrontendError
from torchq.utils import why_no_model
from torchq.utils.optional import import_optional

#: Types of four bits, two elements in a byte, and the torch types that their tensors get.
_FOUR_BITS = {21: torch.uint8, 22: torch.int8}

#: By the number that stands for them in a file; text and complex numbers have no type here.
_NAMES = (
    "float32 uint8 int8 uint16 int16 int32 int64 - bool float16 float64 uint32 uint64 - - bfloat16 "
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz"
)
_DTYPES = {
    n: getattr(torch, name) for n, name in enumerate(_NAMES.split(), 1) if name != "-"
}

#: How deeply sub-graphs and functions may be nested.
DEEPEST = 32


def dtype_of(data_type: int) -> torch.dtype | None:
    """Return torch's dtype for an ONNX element type, None where torch has no such dtype."""
    return _DTYPES.get(data_type)


def is_four_bits(proto: Any) -> bool:
    """Return True for a TensorProto of int4 or uint4, which torch holds in a byte each."""
    return proto.data_type in _FOUR_BITS


def read_model(source: Any) -> tuple[Any, Path | None]:
    """Read a file, checked, with functions of the model inlined."""
    onnx = import_optional("onnx", "from_onnx")
    folder, where = None, "from_onnx"
    try:
        if isinstance(source, (str, os.PathLike)):
            path = Path(source)
            where = f"from_onnx: {path}"
            folder = path.resolve().parent
            with path.open("rb") as file:
                reason = why_no_model(file.read(64))
            if reason:
                raise FrontendError(f"{where}: {reason}")
            model = onnx.load_model(str(path), load_external_data=False)
        elif isinstance(source, bytes):
            model = onnx.load_model_from_string(source)
        else:
            model = onnx.ModelProto.FromString(source.SerializeToString())
        if model.functions:
            model = import_optional("onnx.inliner", "from_onnx").inline_local_functions(
                model
            )
    except FileNotFoundError:
        raise FrontendError(f"{where}: there is no such file") from None
    except FrontendError:
        raise
    # Protobuf and onnx raise many kinds of errors for broken files.
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise FrontendError(f"{where}: cannot be read as ONNX ({reason})") from None
    if not model.graph.node and not model.graph.output:
        raise FrontendError(
            f"{where}: got a model without nodes and outputs; expected ONNX"
        )
    return model, folder


def graphs(graph: Any, where: str, depth: int = 0) -> Iterator[Any]:
    """Yield a graph and its sub-graphs; names must be text, which protobuf does not promise."""
    if depth > DEEPEST:
        raise FrontendError(f"{where}: sub-graphs are nested more than {DEEPEST} deep")
    names = [
        graph.name,
        *(v.name for v in (*graph.initializer, *graph.input, *graph.output)),
    ]
    for node in graph.node:
        names += [node.name, node.op_type, node.domain, *node.input, *node.output]
        names += [attribute.name for attribute in node.attribute]
    broken = next((name for name in names if not isinstance(name, str)), None)
    if broken is not None:
        raise FrontendError(
            f"{where}: got the name {broken!r}; expected names in UTF-8"
        )
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.type == attribute.GRAPH:
                yield from graphs(attribute.g, where, depth + 1)


def tensor_of(proto: Any, folder: Path | None, where: str) -> Tensor:
    """Return the tensor of a TensorProto; sizes are checked before memory is taken."""
    where = f"{where}: tensor {proto.name!r}"
    dtype = dtype_of(proto.data_type) or _FOUR_BITS.get(proto.data_type)
    if dtype is None:
        name = import_optional("onnx", "from_onnx").TensorProto.DataType.Name(
            proto.data_type
        )
        raise FrontendError(f"{where} holds {name}, which torch has no type for")
    shape = tuple(proto.dims)
    if any(size < 0 for size in shape):
        raise FrontendError(f"{where} has shape {shape}")
    count = math.prod(shape)
    data = proto.raw_data
    is_outside = proto.data_location == 1
    is_narrow = is_four_bits(proto)
    if is_outside:
        size = (count + 1) // 2 if is_narrow else count * dtype.itemsize
        data = _external(proto, size, folder, where)
    if is_narrow:
        data = data or bytes(number & 255 for number in proto.int32_data)
        return _four_bits(data, dtype, shape, where)
    raw = is_outside or proto.HasField("raw_data")
    odd_bytes = len(data) % dtype.itemsize
    fields = ("float_data", "int32_data", "int64_data", "double_data", "uint64_data")
    typed = max(len(getattr(proto, field)) for field in fields)
    stored = len(data) // dtype.itemsize if raw else typed
    if stored != count or odd_bytes:
        remainder = f" and a rest of {odd_bytes} bytes" if odd_bytes else ""
        raise FrontendError(
            f"{where} holds {stored} elements{remainder}; expected {count} for shape {shape}"
        )
    if raw:
        return _from_bytes(data, dtype, shape)
    array = import_optional("onnx.numpy_helper", "from_onnx").to_array(proto)
    if array.dtype.name.startswith(("bfloat16", "float8")):
        return _from_bytes(array.tobytes(), dtype, shape)
    return torch.from_numpy(np.array(array))


def _four_bits(
    data: bytes, dtype: torch.dtype, shape: tuple[int, ...], where: str
) -> Tensor:
    """Return codes of four bits, which lie two in a byte, the first one in the lower half."""
    count = math.prod(shape)
    if len(data) != (count + 1) // 2:
        expected = f"{(count + 1) // 2} for {count} numbers of 4 bits"
        raise FrontendError(f"{where} holds {len(data)} bytes; expected {expected}")
    both = _from_bytes(data, torch.uint8, (len(data),))
    codes = torch.stack([both & 15, both >> 4], 1).reshape(-1)[:count].reshape(shape)
    if dtype is torch.uint8:
        return codes
    return codes.to(torch.int8) - 16 * (codes > 7).to(torch.int8)


def _from_bytes(data: bytes, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not data:
        return torch.empty(shape, dtype=dtype)
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8).view(dtype).reshape(shape)
    )


def _external(proto: Any, size: int, folder: Path | None, where: str) -> bytes:
    """Return the bytes of a tensor that lies in a file beside the model."""
    entries = {entry.key: entry.value for entry in proto.external_data}
    if folder is None or "location" not in entries:
        raise FrontendError(f"{where} lies in another file; pass the path of the model")
    try:
        path = (folder / entries["location"]).resolve()
        if not path.is_relative_to(folder):
            raise FrontendError(
                f"{where} names the file {entries['location']!r}, "
                "which is outside the folder of the model"
            )
        if not path.is_file():
            raise FileNotFoundError(f"{entries['location']!r} is no file")
        offset = int(entries.get("offset", 0))
        length = int(entries.get("length", size))
        available = path.stat().st_size
        if offset < 0 or length != size or offset + length > available:
            expected = f"{size} bytes from {offset}; {path.name} has {available}"
            raise FrontendError(f"{where} needs {expected}")
        with path.open("rb") as file:
            file.seek(offset)
            return file.read(size)
    except FrontendError:
        raise
    # A damaged tensor may have any type and any number of bytes.
    except (
        OSError,
        ValueError,
        TypeError,
        RuntimeError,
    ) as error:
        raise FrontendError(f"{where}: its data cannot be read ({error})") from None


def attribute_values(node: Any, folder: Path | None, where: str) -> dict[str, Any]:
    """Return attributes: tensors as torch's, strings decoded, sub-graphs as they are."""
    get = import_optional("onnx.helper", "from_onnx").get_attribute_value
    result: dict[str, Any] = {}
    for attribute in node.attribute:
        value = get(attribute)
        if attribute.type == attribute.TENSOR:
            value = tensor_of(value, folder, where)
        elif attribute.type == attribute.STRING:
            value = value.decode("utf-8", "replace")
        elif attribute.type == attribute.STRINGS:
            value = [item.decode("utf-8", "replace") for item in value]
        elif attribute.type in (attribute.INTS, attribute.FLOATS):
            value = list(value)
        result[attribute.name] = value
    return result

"""Quantized models in checkpoints of Lightning and folders of Hugging Face.

These libraries save a state dict and build the model again by its own code. So the record of what
was quantized travels in the state dict, as a tensor of the bytes of its JSON text.
"""

import json
import math
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.nn.optional_buffers import RECORD, is_record
from torchq.swap import plan_of
from torchq.utils import network_of, short_repr, why_no_model

# Bytes of an archive that are checked at once.
_CHUNK = 1 << 20
_WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}


def embed_record_(model: nn.Module) -> None:
    """Let every state dict of ``model`` hold the record of what was quantized, in place.

    Then ``save_pretrained`` of Hugging Face and the checkpoints of Lightning hold it too, and
    :func:`torchq.load` makes a float model of the same architecture the quantized one. Loading such
    a state dict into ``model`` itself works as before; a model without this call reports the entry
    ``torchq_record`` as unexpected.

    Args:
        model: quantized, now or later; the record is made when the state dict is.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
        >>> report = torchq.quantize_(model)
        >>> torchq.workflow.embed_record_(model)
        >>> "torchq_record" in model.state_dict()
        True
    """
    model = network_of(model)
    model.register_state_dict_post_hook(_add_record)
    model.register_load_state_dict_pre_hook(_drop_record)


def _add_record(
    module: nn.Module, state: dict[str, object], prefix: str, metadata: object
) -> None:
    plan = plan_of(module)
    if not plan.replaced and not plan.fusions:
        return  # A model that was restored is a float one.
    encoded = json.dumps(plan.to_dict()).encode()
    state[prefix + RECORD] = torch.tensor(
        list(encoded), dtype=torch.uint8, device="cpu"
    )


def _drop_record(
    module: nn.Module, state: dict[str, object], prefix: str, *args: object
) -> None:
    state.pop(prefix + RECORD, None)


def record_in(state: dict[str, Any]) -> tuple[str, Any] | None:
    """Take the record out of a state dict."""
    keys = [key for key in state if is_record(key)]
    if not keys:
        return None
    value = state.pop(keys[0])
    try:
        decoded = bytes(value.to(torch.uint8).flatten().tolist()).decode()
        return keys[0][: -len(RECORD)].rstrip("."), json.loads(decoded)
    except (AttributeError, RuntimeError, ValueError, RecursionError):
        raise ConfigError(
            f"load: {keys[0]}: is no JSON text. The file is damaged"
        ) from None


def read_file(path: str | os.PathLike[str], map_location: Any) -> Any:
    """Return what a file or a folder of weights holds, without running code from it."""
    path = Path(path)
    if path.is_dir():
        return _read_folder(path, map_location)
    with path.open("rb") as file:
        reason = why_no_model(file.read(64))
        if reason:
            raise ConfigError(f"load: {path}: {reason}")
        file.seek(0)
        try:
            if path.suffix == ".safetensors":
                return _read_safetensors(file.read(), map_location)
            _check_archive(file)
            return torch.load(file, map_location=map_location, weights_only=True)
        except Exception as error:  # a damaged archive or pickle fails in many ways
            reason = next(iter(str(error).splitlines()), "")[:200]
            raise ConfigError(
                f"load: {path}: cannot be read ({type(error).__name__}: {reason}); "
                "expected a file that torchq.save wrote, or weights"
            ) from None


def _check_archive(file: BinaryIO) -> None:
    """Check a zip archive for damage and for parts larger than the file; torch.load does not."""
    is_archive = file.read(4) == b"PK\x03\x04"
    size = file.seek(0, os.SEEK_END)
    if is_archive:
        archive = zipfile.ZipFile(file)
        unpacked = sum(part.file_size for part in archive.infolist())
        if unpacked > size:
            raise ValueError(
                f"{size} bytes unpack to {unpacked}, but torch.save does not compress"
            )
        for part in archive.infolist():
            if part.CRC:  # 0 where torch was told not to compute it
                with archive.open(part) as content:
                    while content.read(_CHUNK):
                        pass
    file.seek(0)


def _read_folder(folder: Path, map_location: object) -> dict[str, object]:
    for name in _WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if index.is_file():
            return _read_parts(folder, index, map_location)
        if (folder / name).is_file():
            weights: dict[str, object] = read_file(folder / name, map_location)
            return weights
    raise ConfigError(
        f"load: {folder}: got no weights; expected {' or '.join(_WEIGHT_FILES)}"
    )


def _read_parts(folder: Path, index: Path, map_location: object) -> dict[str, object]:
    try:
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        paths = [folder / Path(name).name for name in names]
        missing = [
            name for name, path in zip(names, paths, strict=True) if not path.is_file()
        ]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise ConfigError(
            f"load: {index}: is no index of weights. The file is damaged"
        ) from None
    if missing:
        raise ConfigError(
            f"load: {index}: names {short_repr(missing[0])}; expected files in {folder}. Copy the "
            "whole folder, or the file is damaged"
        )
    weights: dict[str, object] = {}
    for path in paths:
        weights |= read_file(path, map_location)
    return weights


def _read_safetensors(data: bytes, map_location: Any) -> dict[str, Tensor]:
    """Return tensors of safetensors, version 0: github.com/huggingface/safetensors, "Format"."""
    size = int.from_bytes(data[:8], "little")
    header: Mapping[str, Any] = json.loads(data[8 : 8 + size])
    body = memoryview(data)[8 + size :]
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        dtype = _DTYPES[entry["dtype"]]
        shape = entry["shape"]
        start, end = entry["data_offsets"]
        size_in_bytes = math.prod(shape) * dtype.itemsize
        if not 0 <= start <= end <= len(body) or end - start != size_in_bytes:
            raise ValueError(f"{name}: its offsets do not fit its shape")
        tensor = torch.empty(shape, dtype=dtype, device="cpu")
        if end > start:
            content = torch.frombuffer(bytearray(body[start:end]), dtype=torch.uint8)
            tensor = content.view(dtype).reshape(shape)
        tensors[name] = tensor if map_location is None else tensor.to(map_location)
    return tensors

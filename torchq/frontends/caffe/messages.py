"""Messages of Caffe: the text of a network, and the bytes of a file of weights."""

from __future__ import annotations

import codecs
import math
import re
from collections.abc import Iterator
from typing import NoReturn

import torch
from torch import Tensor

from torchq.errors import FrontendError
from torchq.frontends.building.importer import bytes_of

#: A number, a flag, or text; names of enumerations are text too.
Scalar = float | bool | str
_DEEPEST = 32
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_TOKEN = re.compile(
    r"""(?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?f?(?![\w.]))
      | (?P<word>-?[A-Za-z_][\w.]*)
      | (?P<mark>[:{}<>\[\],;])
      | (?P<end>\Z)""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:[abfnrtv\\'\"]|[0-3]?[0-7]{1,2}|x[0-9a-fA-F]{2})")


class Message:
    """A message: the values of each field, in order."""

    def __init__(self) -> None:
        self.values: dict[str, list[Scalar | Message]] = {}

    def messages(self, name: str) -> list[Message]:
        """Return the messages of a field."""
        return [
            value for value in self.values.get(name, []) if isinstance(value, Message)
        ]

    def message(self, name: str) -> Message:
        """Return the last message of a field, an empty one where there is none."""
        return (self.messages(name) or [Message()])[-1]

    def scalars(self, name: str) -> list[Scalar]:
        """Return the scalars of a field."""
        return [
            value
            for value in self.values.get(name, [])
            if not isinstance(value, Message)
        ]

    def texts(self, name: str) -> list[str]:
        """Return the scalars of a field that are text."""
        return [value for value in self.scalars(name) if isinstance(value, str)]

    def text(self, name: str, default: str = "") -> str:
        """Return the last text of a field."""
        return (self.texts(name) or [default])[-1]


def parse_text(text: str, where: str) -> Message:
    """Return the message that a text describes."""
    return _Parser(text, where).message(end="", depth=0)


class _Parser:
    """A text, and the token of it that comes next."""

    def __init__(self, text: str, where: str) -> None:
        self._where = where
        self._text = text
        self._at = 0
        self._kind = self._token = ""
        self._next()

    def _fail(self, text: str) -> NoReturn:
        line = self._text.count("\n", 0, self._at) + 1
        raise FrontendError(
            f"{self._where}, line {line}: {text}; expected `name: value`"
        )

    def _next(self) -> str:
        """Return the token, and go on to the one behind it."""
        space = _SPACE.match(self._text, self._at)
        self._at = space.end() if space else self._at
        token = self._token
        found = _TOKEN.match(self._text, self._at)
        if found is None:
            self._fail(f"got {self._text[self._at : self._at + 20]!r}")
        self._kind = str(found.lastgroup)
        self._at = found.end()
        self._token = found[self._kind]
        return token

    def _accept(self, *marks: str) -> bool:
        """Go on if the token is one of some marks; return True if it was."""
        is_there = self._token in marks
        if is_there:
            self._next()
        return is_there

    def message(self, end: str, depth: int) -> Message:
        """Return the fields up to the token ``end``."""
        if depth > _DEEPEST:
            self._fail(f"got messages inside each other, more than {_DEEPEST}")
        result = Message()
        while self._token != end:
            if self._kind != "word":
                self._fail(f"got {self._token or 'the end'!r}")
            values = result.values.setdefault(self._next(), [])
            colon = self._accept(":")
            if colon and self._accept("["):
                while not self._accept("]"):
                    values.append(self._value(True, depth))
                    self._accept(",")
            else:
                values.append(self._value(colon, depth))
            self._accept(",", ";")
        self._next()
        return result

    def _value(self, colon: bool, depth: int) -> Scalar | Message:
        if self._token in ("{", "<"):
            return self.message({"{": "}", "<": ">"}[self._next()], depth + 1)
        if not colon or self._kind in ("mark", "end"):
            self._fail(f"got {self._token or 'the end'!r}")
        if self._kind == "number":
            return float(self._next().rstrip("f"))
        if self._kind == "word":
            word = self._next()
            return {"true": True, "false": False}.get(word, word)
        text = ""
        while self._kind == "string":
            text += self._next()[1:-1]
        return _ESCAPE.sub(
            lambda found: codecs.decode(found[0], "unicode_escape"), text
        )


_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields(data: memoryview, where: str) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of each field: whole numbers, or the bytes of anything else."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at, where)
        number, kind = key >> 3, key & 7
        if kind == _VARINT:
            value, at = _varint(data, at, where)
            yield number, value
            continue
        if kind == _BYTES:
            size, at = _varint(data, at, where)
        elif kind in (_FIXED64, _FIXED32):
            size = 8 if kind == _FIXED64 else 4
        else:
            raise FrontendError(
                f"{where}: got a field of wire type {kind}; expected a message"
            )
        if size > len(data) - at:
            raise FrontendError(
                f"{where}: is cut off: got {len(data) - at} bytes; expected {size} at {at}"
            )
        yield number, data[at : at + size]
        at += size


def _varint(data: memoryview, at: int, where: str) -> tuple[int, int]:
    """Return a number of variable length, and the place behind it."""
    result = 0
    for shift in range(0, 70, 7):
        if at >= len(data):
            raise FrontendError(f"{where}: is cut off in a number at {at}")
        byte = data[at]
        at += 1
        result |= (byte & 0x7F) << shift
        if byte < 0x80:
            return result & (2**64 - 1), at
    raise FrontendError(
        f"{where}: got a number of more than 10 bytes at {at}; expected a message"
    )


def varints(value: int | memoryview, where: str) -> list[int]:
    """Return the numbers of a repeated field: one, or many that are packed."""
    if isinstance(value, int):
        return [value]
    result = []
    at = 0
    while at < len(value):
        number, at = _varint(value, at, where)
        result.append(number)
    return result


def numbers(value: int | memoryview, size: int, where: str) -> bytes:
    """Return the bytes of the floats of a repeated field, each of ``size`` bytes."""
    if isinstance(value, int) or len(value) % size:
        raise FrontendError(f"{where}: got a field of other numbers; expected floats")
    return bytes(value)


# NetParameter: layers of the old form, and of the new one.
_LAYERS_V1, _LAYERS = 2, 100
# (name, blobs) of V1LayerParameter and LayerParameter.
_LAYER_FIELDS = {_LAYERS_V1: (4, 6), _LAYERS: (1, 7)}
# BlobProto: num, channels, height, width; data; shape; double_data. BlobShape: dim. Of NVIDIA's
# Caffe: raw_data, and its type, which is a number of the enumeration `Type` there. Field 10 of
# other forks is half_data.
_LEGACY = (1, 2, 3, 4)
_DATA = 5
_SHAPE = 7
_DOUBLE_DATA = 8
_RAW_TYPE, _RAW_DATA = 10, 12
_RAW_TYPES = {0: torch.float64, 1: torch.float32, 2: torch.float16}
_DIM = 1


def read_weights(source: object, where: str) -> dict[str, list[Tensor]]:
    """Return the blobs of each layer that has some."""
    data, where = bytes_of(source, where, "weights")
    result: dict[str, list[Tensor]] = {}
    for number, value in fields(memoryview(data), where):
        if number not in _LAYER_FIELDS or isinstance(value, int):
            continue
        name, blobs = _layer(value, *_LAYER_FIELDS[number], where)
        if blobs and name in result:
            raise FrontendError(
                f"{where}: got two layers {name!r} with weights; expected one"
            )
        if blobs:
            result[name] = blobs
    return result


def _layer(
    data: memoryview, name_field: int, blob_field: int, where: str
) -> tuple[str, list[Tensor]]:
    submessages = [
        (n, value) for n, value in fields(data, where) if not isinstance(value, int)
    ]
    names = [
        bytes(value).decode("utf-8", "replace")
        for n, value in submessages
        if n == name_field
    ]
    name = ["", *names][-1]
    blobs = [value for n, value in submessages if n == blob_field]
    return name, [_blob(blob, f"{where}: layer {name!r}") for blob in blobs]


def _raw_type(value: int | memoryview, where: str) -> torch.dtype:
    if isinstance(value, int) and value in _RAW_TYPES:
        return _RAW_TYPES[value]
    raise FrontendError(
        f"{where}: got raw data of type {value if isinstance(value, int) else 'unknown'}; expected "
        "doubles, floats or half floats. Save the weights in float32"
    )


def _blob(data: memoryview, where: str) -> Tensor:
    legacy = dict.fromkeys(_LEGACY, 1)
    shape: list[int] | None = None
    parts: list[bytes] = []
    dtype = torch.float32
    raw_type: int | memoryview = 1
    for number, value in fields(data, where):
        if number == _RAW_TYPE:
            raw_type = value
        elif number == _RAW_DATA and not isinstance(value, int):
            dtype = _raw_type(raw_type, where)
            parts.append(bytes(value))
        elif number in _LEGACY and isinstance(value, int):
            legacy[number] = value
        elif number == _SHAPE and not isinstance(value, int):
            shape = []
            for key, dims in fields(value, where):
                shape += varints(dims, where) if key == _DIM else []
        elif number in (_DATA, _DOUBLE_DATA):
            dtype = torch.float32 if number == _DATA else torch.float64
            parts.append(numbers(value, dtype.itemsize, where))
    if not parts and isinstance(raw_type, memoryview):
        raise FrontendError(
            f"{where}: got half_data, which a fork of Caffe writes; expected data. Save the "
            "weights in float32"
        )
    sizes = list(legacy.values()) if shape is None else shape
    content = bytearray(b"".join(parts))
    if math.prod(sizes) * dtype.itemsize != len(content):
        raise FrontendError(
            f"{where}: got {len(content) // dtype.itemsize} numbers; "
            f"expected {math.prod(sizes)} for the shape {sizes}"
        )
    if not content:
        return torch.empty(sizes)
    return (
        torch.frombuffer(content, dtype=torch.uint8).view(dtype).reshape(sizes).float()
    )

"""Messages of Caffe: the text of a network, and the bytes of a file of weights."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from torchq.errors import FrontendError
from torchq.frontends.building.importer import bytes_of

#: A number, a flag, or text; names of enumerations are text too.
Scalar = float | bool | str
_DEEPEST = 32
_TOKEN = re.compile(
    r"""(?P<skip>\s+|\#[^\n]*)
      | (?P<string>"(?:[^"\\\n]|\\.)*"|'(?:[^'\\\n]|\\.)*')
      | (?P<number>[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?f?(?![\w.]))
      | (?P<word>-?[A-Za-z_][\w.]*)
      | (?P<mark>[:{}<>\[\],;])""",
    re.VERBOSE,
)
_ESCAPE = re.compile(r"\\(?:([abfnrtv\\'\"])|([0-7]{1,3})|x([0-9a-fA-F]{1,2}))")
_ESCAPED = dict(zip("abfnrtv\\'\"", "\a\b\f\n\r\t\v\\'\"", strict=True))


class Message:
    """A message: the values of each field, in order."""

    def __init__(self) -> None:
        self.values: dict[str, list[Scalar | Message]] = {}

    def messages(self, name: str) -> list[Message]:
        """Return the messages of a field."""
        return [value for value in self.values.get(name, []) if isinstance(value, Message)]

    def message(self, name: str) -> Message:
        """Return the last message of a field, an empty one where there is none."""
        return (self.messages(name) or [Message()])[-1]

    def scalars(self, name: str) -> list[Scalar]:
        """Return the scalars of a field."""
        return [value for value in self.values.get(name, []) if not isinstance(value, Message)]

    def texts(self, name: str) -> list[str]:
        """Return the scalars of a field that are text."""
        return [value for value in self.scalars(name) if isinstance(value, str)]

    def text(self, name: str, default: str = "") -> str:
        """Return the last text of a field."""
        return (self.texts(name) or [default])[-1]


def parse_text(text: str, where: str) -> Message:
    """Return the message that a text describes."""
    parser = _Parser(text, where)
    return parser.message(end="", depth=0)


class _Parser:
    def __init__(self, text: str, where: str) -> None:
        self._where, self._text = where, text
        self._tokens = self._split()
        self._kind, self._token = next(self._tokens)

    def _split(self) -> Iterator[tuple[str, str]]:
        at = 0
        while at < len(self._text):
            found = _TOKEN.match(self._text, at)
            if found is None:
                self._at = at
                self._fail(f"got {self._text[at : at + 20]!r}")
            assert found is not None
            at = self._at = found.end()
            if found.lastgroup != "skip":
                yield str(found.lastgroup), found[0]
        yield "end", ""

    def _fail(self, text: str) -> None:
        line = self._text.count("\n", 0, self._at) + 1
        raise FrontendError(f"{self._where}, line {line}: {text}; expected `name: value`")

    def _next(self) -> str:
        token = self._token
        self._kind, self._token = next(self._tokens, ("end", ""))
        return token

    def message(self, end: str, depth: int) -> Message:
        """Return the fields up to the token ``end``."""
        if depth > _DEEPEST:
            self._fail(f"got messages inside each other, more than {_DEEPEST}")
        result = Message()
        while self._token != end or (self._kind == "end" and end):
            if self._kind != "word":
                self._fail(f"got {self._token or 'the end'!r}")
            values = result.values.setdefault(self._next(), [])
            colon = self._token == ":"
            if colon:
                self._next()
            if self._token == "[" and colon:
                self._list(values, depth)
            else:
                values.append(self._value(colon, depth))
            if self._token in (",", ";"):
                self._next()
        self._next()
        return result

    def _list(self, values: list[Scalar | Message], depth: int) -> None:
        self._next()
        while self._token != "]":
            values.append(self._value(True, depth))
            if self._token == ",":
                self._next()
        self._next()

    def _value(self, colon: bool, depth: int) -> Scalar | Message:
        if self._kind == "mark" and self._token in "{<":
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
            text += _unescaped(self._next()[1:-1])
        return text


def _unescaped(text: str) -> str:
    def plain(found: re.Match[str]) -> str:
        if found[1]:
            return _ESCAPED[found[1]]
        return chr(int(found[2], 8) if found[2] else int(found[3], 16))

    return _ESCAPE.sub(plain, text)


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
            raise FrontendError(f"{where}: got a field of wire type {kind}; expected a message")
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
    raise FrontendError(f"{where}: got a number of more than 10 bytes at {at}; expected a message")


def varints(value: int | memoryview, where: str) -> list[int]:
    """Return the numbers of a repeated field: one, or many that are packed."""
    if isinstance(value, int):
        return [value]
    result, at = [], 0
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
# BlobProto: num, channels, height, width; data; shape; double_data. BlobShape: dim.
_LEGACY, _DATA, _SHAPE, _DOUBLE_DATA, _DIM = (1, 2, 3, 4), 5, 7, 8, 1


def read_weights(source: Any, where: str) -> dict[str, list[Tensor]]:
    """Return the blobs of each layer that has some."""
    data, where = bytes_of(source, where, "weights")
    result: dict[str, list[Tensor]] = {}
    for number, value in fields(memoryview(data), where):
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
    found = [(n, value) for n, value in fields(data, where) if not isinstance(value, int)]
    names = [bytes(value).decode("utf-8", "replace") for n, value in found if n == name_field]
    name, blobs = ["", *names][-1], [value for n, value in found if n == blob_field]
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

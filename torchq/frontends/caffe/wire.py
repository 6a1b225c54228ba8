"""The wire format of protocol buffers: fields of a message, by number.

Caffe's weights are a protobuf message. Of its many fields few are needed, so messages are taken
apart one level at a time, and a nested message stays bytes until somebody asks for its fields.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchq.errors import FrontendError

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


def fields(data: memoryview, where: str) -> Iterator[tuple[int, int | memoryview]]:
    """Yield number and value of each field: whole numbers, or the bytes of anything else.

    Args:
        data: a message.
        where: how errors begin.

    Raises:
        FrontendError: the bytes are no message.
    """
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

"""One layer of a Caffe network as converters see it, and their registry."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NoReturn

from torch import Tensor

from torchq.frontends.building.graph import (
    Attributes,
    Constant,
    Converters,
    FileNode,
    GraphBuilder,
    Value,
)
from torchq.frontends.caffe.messages import Message
from torchq.frontends.caffe.network import Layer


class Settings(Attributes):
    """The fields of one message of a layer, with their types checked."""

    ignored = re.compile(
        r"\w*_filler|engine|force_nd_im2col|moving_average_fraction|label_map_file"
    )
    noun = "fields"

    def __init__(self, message: Message, refuse: Callable[[str], NoReturn]) -> None:
        super().__init__(message.values)
        self._message, self._refuse = message, refuse

    def refuse(self, reason: str) -> NoReturn:
        """Raise the error that the layer cannot be converted."""
        self._refuse(reason)

    def read(self, name: str, kind: type) -> Any:
        """Return a field: the last value of a number or flag, the whole numbers of a list."""
        if kind is bool:
            self.seen.add(name)
            found: list[Any] = self._message.scalars(name) or [None]
            value = found[-1]
            if value not in (True, False, None):
                self.refuse(f"{name} is {value!r}; expected true or false")
            return None if value is None else bool(value)
        found = self.numbers(name)
        if kind is not float:
            if any(value != value // 1 or abs(value) > 2**31 for value in found):
                self.refuse(f"{name} is {found}; expected whole numbers")
            found = [int(value) for value in found]
        return (found or None) if kind is list else (found or [None])[-1]

    def numbers(self, name: str) -> list[float]:
        """Return the numbers of a field that may be repeated."""
        self.seen.add(name)
        entries = self._message.values.get(name, [])
        if any(isinstance(value, (str, Message, bool)) for value in entries):
            self.refuse(f"{name} is {entries!r}; expected numbers")
        return [value for value in entries if isinstance(value, (int, float))]

    def choice(self, name: str, *names: str, first: int = 0) -> str:
        """Return one of the names of an enumeration."""
        self.seen.add(name)
        numbers = self._message.scalars(name)
        value = numbers[-1] if numbers else names[0]
        if isinstance(value, float) and value - first in range(len(names)):
            value = names[int(value) - first]
        if value not in names:
            self.refuse(f"{name} is {value!r}; expected one of {', '.join(names)}")
        return str(value)

    def settings(self, name: str) -> Settings:
        """Return the fields of a message inside this one."""
        self.seen.add(name)
        return Settings(self._message.message(name), self._refuse)

    def has(self, name: str) -> bool:
        """Return True if a field is given."""
        return name in self._message.values


class CaffeLayer(FileNode):
    """One layer: its inputs, its fields, and the calls that a converter writes in its place.

    ``inputs`` are the values of the bottoms and ``blobs`` the weights; ``ndims`` has None for an
    input whose number of dimensions is not known.
    """

    format = "caffe"

    def __init__(
        self,
        builder: GraphBuilder,
        layer: Layer,
        inputs: list[Value],
        blobs: list[Tensor],
        ndims: list[int | None],
    ) -> None:
        super().__init__(builder, layer.type, layer.name, {}, inputs)
        self.layer, self.blobs, self.ndims = layer, blobs, ndims
        # Of the first output; a converter that changes the number of dimensions says so.
        self.result_ndim: int | None = ndims[0] if ndims else None
        # The Scale layer that alone reads the result; a converter may take care of it.
        self.scale: CaffeLayer | None = None
        self.scale_done = False
        entry = CONVERTERS.get(layer.type)
        message = layer.message.message(entry.about or "" if entry else "")
        self.settings = Settings(message, self.refuse)

    def read(self, name: str, kind: type) -> Any:
        """Return a field of the message that belongs to the type of the layer."""
        return self.settings.read(name, kind)

    def check_all_read(self) -> None:
        """Refuse fields that the converter did not read, which may change the result."""
        self.settings.check_all_read()

    def blob(self, index: int, what: str, count: int | None = None) -> Constant:
        """Return a weight of the layer, which has ``count`` elements if that is given."""
        if index >= len(self.blobs):
            self.refuse(f"the file of weights lacks its {what}")
        tensor = self.blobs[index]
        if count is not None and tensor.numel() != count:
            self.refuse(f"its {what} has {tensor.numel()} elements; expected {count}")
        return Constant(tensor, f"{self.name}.{what}", trainable=True)

    def vector(self, index: int, what: str, count: int | None = None) -> Constant:
        """Return a weight of the layer without the leading dimensions that old files give it."""
        blob = self.blob(index, what, count)
        return Constant(blob.tensor.reshape(-1), blob.name, trainable=True)

    def axis(self) -> Any:
        """Return the axis, counted from the end where it is negative and the size is known."""
        axis = self.attr("axis", 1)
        ndim = self.ndims[0]
        return axis if axis >= 0 or ndim is None else axis + ndim


#: From the type of a layer to its converter; the name of its message stands beside.
CONVERTERS = Converters("Caffe layer")
converter, row = CONVERTERS.converter, CONVERTERS.row

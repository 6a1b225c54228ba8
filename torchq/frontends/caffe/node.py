"""One layer of a Caffe network as converters see it, and their registry."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from torch import Tensor

from torchq.frontends.building.graph import Constant, FileNode, GraphBuilder, Value, entering
from torchq.frontends.caffe.messages import Message
from torchq.frontends.caffe.network import Layer
from torchq.utils import Registry

#: Fields that say how Caffe computes or trains, not what a network computes.
_IGNORED = re.compile(r"\w*_filler|engine|force_nd_im2col|moving_average_fraction|label_map_file")


class Settings:
    """The fields of one message of a layer, with their types checked."""

    def __init__(self, message: Message, refuse: Callable[[str], NoReturn]) -> None:
        self._message, self._refuse = message, refuse
        self._read: set[str] = set()

    def numbers(self, name: str) -> list[float]:
        """Return the numbers of a field that may be repeated."""
        self._read.add(name)
        found = self._message.values.get(name, [])
        if any(isinstance(value, (str, Message, bool)) for value in found):
            self._refuse(f"{name} is {found!r}; expected numbers")
        return [value for value in found if isinstance(value, (int, float))]

    def number(self, name: str, default: float | None = None) -> float:
        """Return a number; without a default it is required."""
        return self._last(name, self.numbers(name), default)

    def _last(self, name: str, found: list[Any], default: Any) -> Any:
        if not found and default is None:
            self._refuse(f"the field {name!r} is missing")
        return found[-1] if found else default

    def integers(self, name: str) -> list[int]:
        """Return the whole numbers of a field that may be repeated."""
        found = self.numbers(name)
        if any(value != value // 1 or abs(value) > 2**31 for value in found):
            self._refuse(f"{name} is {found}; expected whole numbers")
        return [int(value) for value in found]

    def integer(self, name: str, default: int | None = None) -> int:
        """Return a whole number; without a default it is required."""
        return int(self._last(name, self.integers(name), default))

    def flag(self, name: str, default: bool) -> bool:
        """Return a field that is true or false."""
        self._read.add(name)
        found = self._message.scalars(name)
        value = found[-1] if found else default
        if value not in (True, False):
            self._refuse(f"{name} is {value!r}; expected true or false")
        return bool(value)

    def choice(self, name: str, *names: str, first: int = 0, default: str = "") -> str:
        """Return one of the names of an enumeration."""
        self._read.add(name)
        found = self._message.scalars(name)
        value = found[-1] if found else default or names[0]
        if isinstance(value, float) and value - first in range(len(names)):
            value = names[int(value) - first]
        if value not in names:
            self._refuse(f"{name} is {value!r}; expected one of {', '.join(names)}")
        return str(value)

    def settings(self, name: str) -> Settings:
        """Return the fields of a message inside this one."""
        self._read.add(name)
        return Settings(self._message.message(name), self._refuse)

    def has(self, name: str) -> bool:
        """Return True if a field is given."""
        return name in self._message.values

    def check_all_read(self) -> None:
        """Refuse fields that the converter did not read, which may change the result."""
        unread = [name for name in self._message.values if name not in self._read]
        unknown = sorted(name for name in unread if not _IGNORED.fullmatch(name))
        if unknown:
            self._refuse(f"got the fields {', '.join(unknown)}, which are not supported")


class CaffeLayer(FileNode):
    """One layer: its inputs, its fields, and the calls that a converter writes in its place.

    Args:
        builder: what collects the graph.
        layer: the description.
        inputs: the values of the bottoms.
        blobs: the weights of the layer.
        ndims: the number of dimensions of each input, None where it is not known.

    Attributes:
        result_ndim: of the first output; that of the first input unless a converter says otherwise.
        scale: the Scale layer that alone reads the result, and its blobs. A converter that takes
            care of it sets ``scale_done``.
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
        self.result_ndim: int | None = ndims[0] if ndims else None
        self.scale: CaffeLayer | None = None
        self.scale_done = False
        self._settings: list[Settings] = []

    def settings(self, name: str) -> Settings:
        """Return the fields of a message of the layer, such as ``"convolution_param"``."""
        found = Settings(self.layer.message.message(name), self.refuse)
        self._settings.append(found)
        return found

    def check_all_read(self) -> None:
        """Refuse fields that the converter did not read, which may change the result."""
        for settings in self._settings:
            settings.check_all_read()

    def blob(self, index: int, what: str, count: int | None = None) -> Constant:
        """Return a weight of the layer.

        Args:
            index: which one.
            what: its name, for errors and for the result.
            count: how many elements it must have.

        Raises:
            FrontendError: the file of weights does not hold it.
        """
        if index >= len(self.blobs):
            self.refuse(f"the file of weights lacks its {what}")
        tensor = self.blobs[index]
        if count is not None and tensor.numel() != count:
            self.refuse(f"its {what} has {tensor.numel()} elements; expected {count}")
        return Constant(tensor, f"{self.name}.{what}", trainable=True)

    def vector(self, index: int, what: str, count: int | None = None) -> Constant:
        """Return a weight of the layer without the leading dimensions that old files give it."""
        found = self.blob(index, what, count)
        return Constant(found.tensor.reshape(-1), found.name, trainable=True)

    def axis(self, settings: Settings, name: str = "axis", default: int = 1) -> Any:
        """Return an axis, counted from the end where it is negative and the size is known."""
        axis, ndim = settings.integer(name, default), self.ndims[0]
        return axis if axis >= 0 or ndim is None else axis + ndim


Converter = Callable[[CaffeLayer], "Value | Sequence[Value]"]

#: From the type of a layer to its converter.
CONVERTERS: Registry[str, Converter] = Registry("Caffe layer")


def converter(*types: str) -> Callable[[Converter], Converter]:
    """Enter the decorated function as the converter of types of layers.

    Args:
        types: names such as ``"Convolution"``.

    Raises:
        ConfigError: one of the types has a converter already.
    """
    return entering(CONVERTERS, types)


def operator(
    kind: str, function: Callable[..., object], message: str = "", *fields: tuple[Any, ...]
) -> None:
    """Enter a layer that one function computes, of all inputs and then of fields of a message.

    A field is the method of :class:`Settings` that reads it, and what the method takes.
    """

    def convert(layer: CaffeLayer) -> Value:
        settings = layer.settings(message)
        numbers = [getattr(settings, method)(*rest) for method, *rest in fields]
        return layer.call(function, *layer.inputs, *numbers)

    converter(kind)(convert)

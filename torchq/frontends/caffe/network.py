"""A network as Caffe describes it: layers in order, each with the values that it reads.

The differences between generations of the format end here: inputs of five kinds, layers of version
1 with types in capitals, layers for one phase, and layers that overwrite what they read.
"""

import itertools
from dataclasses import dataclass
from typing import Any

from torchq.errors import FrontendError
from torchq.frontends.building.importer import Output, text_of
from torchq.frontends.caffe.messages import Message, parse_text

#: Types of version 1 whose new name is not the old one in camel case.
_V1_TYPES = {
    name.upper(): name
    for name in ("AbsVal", "ArgMax", "BNLL", "LRN", "MVN", "PReLU", "ReLU")
}
_V1_TYPES |= {"HDF5_DATA": "HDF5Data", "HDF5_OUTPUT": "HDF5Output"}
_V1_TYPES |= {"IM2COL": "Im2col", "SOFTMAX_LOSS": "SoftmaxWithLoss", "TANH": "TanH"}
_KINDS = ("", "Annotated", "Dummy", "HDF5", "Image", "Memory", "Video", "Window")
_DATA = frozenset(f"{kind}Data" for kind in _KINDS) | {"Input"}


@dataclass(frozen=True)
class Layer:
    """One layer."""

    name: str
    type: str
    bottoms: tuple[Output, ...]
    tops: tuple[str, ...]
    message: Message


@dataclass(frozen=True)
class Network:
    """Layers, and inputs, which have negative numbers instead of a layer's."""

    name: str
    inputs: tuple[tuple[str, tuple[int, ...] | None], ...]
    layers: tuple[Layer, ...]
    names: dict[Output, str]


def read_network(source: object, where: str) -> Network:
    """Read the description of a network."""
    message = parse_text(text_of(source, where, "network"), where)
    old = message.messages("layers")
    layers = [*old, *message.messages("layer")]
    if any(layer.messages("layer") for layer in layers):
        raise FrontendError(
            f"{where}: got layers of version 0; expected version 1 or newer. Caffe's tool "
            "upgrade_net_proto_text rewrites such files"
        )
    if not layers:
        raise FrontendError(f"{where}: got no layers; expected a network")
    typed = [
        (_type_of(layer, layer in old), layer)
        for layer in layers
        if _runs_in_test(layer)
    ]
    return _Reader(message, typed, where).run()


def _runs_in_test(layer: Message) -> bool:
    """Return True if a layer belongs to the phase of testing."""
    included = layer.messages("include")
    excluded = layer.messages("exclude")
    if included:
        return any(rule.text("phase", "TEST") == "TEST" for rule in included)
    return not any(rule.text("phase", "TRAIN") == "TEST" for rule in excluded)


class _Reader:
    """Follows the names of values, which a layer may give to its output again."""

    def __init__(
        self, message: Message, layers: list[tuple[str, Message]], where: str
    ) -> None:
        self._message, self._layers, self._where = message, layers, where
        self._inputs: list[tuple[str, tuple[int, ...] | None]] = []
        self._current: dict[str, Output] = {}
        self._names: dict[Output, str] = {}

    def run(self) -> Network:
        self._declared_inputs()
        layers: list[Layer] = []
        for kind, message in self._layers:
            if kind in _DATA:
                self._input_layer(kind, message)
                continue
            bottoms = tuple(
                self._find(name, message) for name in message.texts("bottom")
            )
            tops = tuple(message.texts("top"))
            for place, top in enumerate(tops):
                self._enter(top, (len(layers), place))
            layers.append(Layer(message.text("name"), kind, bottoms, tops, message))
        name = self._message.text("name", "CaffeModel")
        return Network(name, tuple(self._inputs), tuple(layers), self._names)

    def _enter(self, name: str, output: Output) -> None:
        self._current[name] = output
        self._names[output] = name

    def _find(self, name: str, layer: Message) -> Output:
        if name not in self._current:
            raise FrontendError(
                f"{self._where}: layer {layer.text('name')!r} reads {name!r}, "
                "which no layer before it gives"
            )
        return self._current[name]

    def _add_inputs(self, names: list[str], shapes: list[list[Any]]) -> None:
        """Note inputs with their shapes; there may be fewer of these, or empty ones."""
        for name, shape in itertools.zip_longest(names, shapes[: len(names)]):
            self._inputs.append((name, tuple(map(int, shape)) if shape else None))
            self._enter(name, (-len(self._inputs), 0))

    def _declared_inputs(self) -> None:
        shapes = [
            shape.scalars("dim") for shape in self._message.messages("input_shape")
        ]
        sizes = self._message.scalars("input_dim")
        shapes += [sizes[i : i + 4] for i in range(0, len(sizes), 4)]
        self._add_inputs(self._message.texts("input"), shapes)

    def _input_layer(self, kind: str, message: Message) -> None:
        shapes = [
            s.scalars("dim") for s in message.message("input_param").messages("shape")
        ]
        tops = message.texts("top")
        self._add_inputs(
            tops, shapes * len(tops) if kind == "Input" and len(shapes) == 1 else shapes
        )


def _type_of(message: Message, old: bool) -> str:
    """Return the type of a layer; those of version 1 are written in capitals."""
    type_name = message.text("type")
    if not old:
        return type_name
    return _V1_TYPES.get(
        type_name, "".join(part.title() for part in type_name.split("_"))
    )

"""``from_caffe``: a network and its weights as a GraphModule of ordinary modules."""

import re

from torch import Tensor, fx

from torchq.errors import FrontendError
from torchq.frontends.building.graph import Value
from torchq.frontends.building.importer import NetworkImporter, Output, origin
from torchq.frontends.caffe.messages import read_weights
from torchq.frontends.caffe.network import Network, read_network
from torchq.frontends.caffe.node import CONVERTERS, CaffeLayer

#: Layers that measure or write, and give nothing that a network computes with.
_DROPPED = re.compile(r"\w*Loss|Accuracy|Silence|HDF5Output|DetectionEvaluate")


def from_caffe(prototxt: object, caffemodel: object) -> fx.GraphModule:
    """Read a network of Caffe as a model of ordinary torch modules. Caffe is not needed.

    Convolutions, inner products, norms, pooling and activations become modules of
    :mod:`torch.nn`, named after their layers; the rest becomes calls of functions. A BatchNorm
    layer and the Scale layer behind it become one BatchNorm. Layers of the training phase, losses
    and labels are dropped.

    Args:
        prototxt: the path of the network's description, or its text.
        caffemodel: the path of the file of weights, or its bytes.

    Returns:
        a module in eval mode whose ``forward`` takes the inputs of the network in order, or by
        name, and returns its output, or a tuple of its outputs. ``input_names`` and
        ``output_names`` are the names in the file; each graph node has the name and the type of
        its layer in ``meta["caffe_name"]`` and ``meta["caffe_op"]``.

    Raises:
        FrontendError: a file is broken, or layers cannot be converted: the text names all types at
            once, with counts.

    Example:
        >>> files = "deploy.prototxt", "net.caffemodel"
        >>> model = torchq.from_caffe(*files)  # doctest: +SKIP
        >>> report = torchq.quantize_(model)  # doctest: +SKIP
    """
    where = origin("from_caffe", prototxt)
    network = read_network(prototxt, where)
    return _Importer(network, read_weights(caffemodel, where), where).run()


class _Importer(NetworkImporter):
    """Converts one network."""

    format = "caffe"
    kinds = "layers"
    converters = CONVERTERS

    def __init__(
        self, network: Network, weights: dict[str, list[Tensor]], where: str
    ) -> None:
        super().__init__(where)
        self._network, self._weights = network, weights
        self._ndims: dict[Output, int | None] = {}
        layers = enumerate(network.layers)
        self._kept = {
            n: layer for n, layer in layers if not _DROPPED.fullmatch(layer.type)
        }
        self._read = {
            bottom for layer in self._kept.values() for bottom in layer.bottoms
        }

    def run(self) -> fx.GraphModule:
        """Convert the whole network."""
        self.refuse_unknown(layer.type for layer in self._kept.values())
        inputs = []
        for number, (name, shape) in enumerate(self._network.inputs, start=1):
            if (-number, 0) in self._read:
                self.input((-number, 0), name)
                # Layers that read images from files do not state their shape.
                self._ndims[-number, 0] = 4 if shape is None else len(shape)
                inputs.append((name, shape))
        for number, layer in self._kept.items():
            if (number, 0) not in self.values:
                self.convert(number, layer.type)
        return self.finish(self._network.name, inputs, self._outputs())

    def context(self, number: int) -> CaffeLayer:
        layer = self._network.layers[number]
        names = self._network.names
        missing = [
            names[bottom] for bottom in layer.bottoms if bottom not in self.values
        ]
        if missing:
            raise FrontendError(
                f"{self.where}: {layer.type} {layer.name!r} reads {missing[0]!r}, "
                "which exists in training only"
            )
        return CaffeLayer(
            self.builder,
            layer,
            [self.values[bottom] for bottom in layer.bottoms],
            self._weights.get(layer.name, []),
            [self._ndims.get(bottom) for bottom in layer.bottoms],
        )

    def convert(self, number: int, kind: str) -> None:
        """Write what a layer computes, together with the Scale layer that alone reads it."""
        context = self.context(number)
        after = self._sole_reader(number)
        if after is not None and self._network.layers[after].type == "Scale":
            scale = self._network.layers[after]
            blobs = self._weights.get(scale.name, [])
            context.scale = CaffeLayer(self.builder, scale, [], blobs, [None])
        for place, value in enumerate(context.converted(CONVERTERS[kind].convert)):
            self._note((number, place), value, context)
        if context.scale_done and after is not None:
            self._note((after, 0), self.values[number, 0], context)

    def _note(self, output: Output, value: Value, context: CaffeLayer) -> None:
        self.values[output] = value
        self._ndims[output] = context.result_ndim

    def _sole_reader(self, number: int) -> int | None:
        """Return the only layer that reads the first output of a layer, None if there are more."""
        layers = enumerate(self._network.layers)
        places = [
            n
            for n, layer in layers
            for bottom in layer.bottoms
            if bottom == (number, 0)
        ]
        return places[0] if len(places) == 1 else None

    def _outputs(self) -> list[tuple[Output, str]]:
        """Return the values that no layer reads but one that is dropped."""
        candidates = [
            ((number, place), name)
            for number, layer in self._kept.items()
            for place, name in enumerate(layer.tops)
            if (number, place) not in self._read
        ]
        if not candidates:
            raise FrontendError(
                f"{self.where}: got no output; expected a layer that gives one"
            )
        return candidates

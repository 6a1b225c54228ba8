"""``from_caffe``: a network and its weights as a GraphModule of ordinary modules."""

from __future__ import annotations

import collections
import os
import re
from typing import Any

from torch import Tensor, fx

from torchq.errors import FrontendError
from torchq.frontends.building import GraphBuilder, Value
from torchq.frontends.caffe.messages import read_weights
from torchq.frontends.caffe.network import Layer, Network, Output, read_network
from torchq.frontends.caffe.node import CONVERTERS, CaffeLayer

#: Layers that measure or write, and give nothing that a network computes with.
_DROPPED = re.compile(r"\w*Loss|Accuracy|Silence|HDF5Output|DetectionEvaluate")


def from_caffe(prototxt: Any, caffemodel: Any) -> fx.GraphModule:
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
        >>> model = torchq.frontends.from_caffe(*files)  # doctest: +SKIP
        >>> report = torchq.quantize_(model)  # doctest: +SKIP
    """
    where = "from_caffe"
    if isinstance(prototxt, os.PathLike) or "{" not in str(prototxt):
        where = f"from_caffe: {os.fspath(prototxt)}"
    network = read_network(prototxt, where)
    return _Importer(network, read_weights(caffemodel, where), where).run()


class _Importer:
    """Converts one network."""

    def __init__(self, network: Network, weights: dict[str, list[Tensor]], where: str) -> None:
        self._network, self._weights, self._where = network, weights, where
        self._builder = GraphBuilder(where)
        self._values: dict[Output, Value] = {}
        self._ndims: dict[Output, int | None] = {}
        self._dropped = [bool(_DROPPED.fullmatch(layer.type)) for layer in network.layers]

    def run(self) -> fx.GraphModule:
        """Convert the whole network."""
        self._refuse_unknown()
        inputs = self._begin()
        for number, layer in enumerate(self._network.layers):
            if not self._dropped[number] and (number, 0) not in self._values:
                self._convert(number, layer)
        found = self._outputs()
        end = CaffeLayer(self._builder, self._network.layers[-1], [], [], [])
        outputs = [end.tensor(self._values[output]) for output in found]
        names = [self._network.names[output] for output in found]
        stated = dict(self._network.inputs)
        shapes = [stated[name] for name in inputs]
        return self._builder.finish(outputs, self._network.name, inputs, names, shapes)

    def _refuse_unknown(self) -> None:
        kept = [
            n.type for n, out in zip(self._network.layers, self._dropped, strict=True) if not out
        ]
        unknown = collections.Counter(kind for kind in kept if kind not in CONVERTERS)
        if unknown:
            found = ", ".join(f"{kind} ({count})" for kind, count in sorted(unknown.items()))
            raise FrontendError(
                f"{self._where}: got layers that cannot be converted: {found}. "
                "Register a converter with torchq.frontends.caffe.converter, or cut the network"
            )

    def _begin(self) -> list[str]:
        """Make placeholders of the inputs that something other than a loss reads."""
        read = self._read()
        names = []
        for number, (name, shape) in enumerate(self._network.inputs, start=1):
            if (-number, 0) in read:
                node = self._builder.input(name)
                node.meta["caffe_name"] = name
                self._values[-number, 0] = node
                # Layers that read images from files do not state their shape.
                self._ndims[-number, 0] = 4 if shape is None else len(shape)
                names.append(name)
        return names

    def _context(self, layer: Layer) -> CaffeLayer:
        missing = [self._network.names[b] for b in layer.bottoms if b not in self._values]
        if missing:
            raise FrontendError(
                f"{self._where}: {layer.type} {layer.name!r} reads {missing[0]!r}, "
                "which exists in training only"
            )
        return CaffeLayer(
            self._builder,
            layer,
            [self._values[bottom] for bottom in layer.bottoms],
            self._weights.get(layer.name, []),
            [self._ndims.get(bottom) for bottom in layer.bottoms],
        )

    def _convert(self, number: int, layer: Layer) -> None:
        context = self._context(layer)
        after = self._sole_reader(number)
        if after is not None and self._network.layers[after].type == "Scale":
            scale = self._network.layers[after]
            blobs = self._weights.get(scale.name, [])
            context.scale = CaffeLayer(self._builder, scale, [], blobs, [None])
        try:
            result: Any = CONVERTERS[layer.type](context)
            context.check_all_read()
        except FrontendError:
            raise
        except Exception as error:  # a file may hold any field and any blob
            raise FrontendError(
                f"{self._where}: {layer.type} {layer.name!r} cannot be converted "
                f"({type(error).__name__}: {error})"
            ) from error
        results = result if isinstance(result, list) else [result]
        for place, value in enumerate(results):
            self._values[number, place] = value
            self._ndims[number, place] = context.result_ndim
        if context.scale_done and after is not None:
            self._values[after, 0] = results[0]
            self._ndims[after, 0] = context.result_ndim

    def _sole_reader(self, number: int) -> int | None:
        """Return the only layer that reads the first output of a layer, None if there are more."""
        if self._network.readers[number, 0] != 1:
            return None
        return next(
            place
            for place, layer in enumerate(self._network.layers)
            if (number, 0) in layer.bottoms
        )

    def _read(self) -> set[Output]:
        """Return the values that layers read which are not dropped."""
        layers = zip(self._network.layers, self._dropped, strict=True)
        return {bottom for layer, dropped in layers if not dropped for bottom in layer.bottoms}

    def _outputs(self) -> list[Output]:
        """Return the values that no layer reads but one that is dropped."""
        read = self._read()
        found = [
            (number, place)
            for number, layer in enumerate(self._network.layers)
            for place in range(len(layer.tops))
            if not self._dropped[number] and (number, place) not in read
        ]
        missing = [output for output in found if output not in self._values]
        if missing or not found:
            name = self._network.names[missing[0]] if missing else "any layer"
            raise FrontendError(f"{self._where}: the output of {name!r} is not supported")
        return found

"""``from_mxnet``: a symbol and its parameters as a GraphModule of ordinary modules."""

import collections
import re

from torch import Tensor, fx

from torchq.frontends.building.graph import Constant
from torchq.frontends.building.importer import NetworkImporter, Output, origin
from torchq.frontends.mxnet.converters.layers import LOSSES
from torchq.frontends.mxnet.node import CONVERTERS, SymbolContext
from torchq.frontends.mxnet.params import read_params
from torchq.frontends.mxnet.symbol import Symbol, SymbolNode, infer_ndims, read_symbol


def from_mxnet(symbol_json: object, params: object) -> fx.GraphModule:
    """Read a network of MXNet as a model of ordinary torch modules. MXNet is not needed.

    Convolutions, fully connected and recurrent layers, norms, pooling and activations become
    modules of :mod:`torch.nn`, named after their weights; the rest becomes calls of functions.
    Labels are no inputs, and operators that end a network for training give their prediction.

    Args:
        symbol_json: the path of ``NAME-symbol.json``, or its text. Files of all versions of MXNet
            up to 1.9 are read.
        params: the path of ``NAME-0000.params``, its bytes, or a mapping from names to arrays.

    Returns:
        a module in eval mode whose ``forward`` takes the inputs of the file in order, or by name,
        and returns its output, or a tuple of its outputs. ``input_names`` and ``output_names`` are
        the names in the file; each graph node has the name and the operator of the file's node in
        ``meta["mxnet_name"]`` and ``meta["mxnet_op"]``.

    Raises:
        FrontendError: a file is broken, or operators cannot be converted: the text names all of
            them at once, with counts.

    Example:
        >>> files = "resnet-symbol.json", "resnet-0000.params"
        >>> model = torchq.from_mxnet(*files)  # doctest: +SKIP
        >>> report = torchq.quantize_(model)  # doctest: +SKIP
    """
    where = origin("from_mxnet", symbol_json)
    symbol = read_symbol(symbol_json, where)
    return _Importer(symbol, read_params(params, where), where).run()


class _Importer(NetworkImporter):
    """Converts one symbol."""

    format = "mxnet"
    kinds = "operators"
    converters = CONVERTERS

    def __init__(self, symbol: Symbol, params: dict[str, Tensor], where: str) -> None:
        super().__init__(where)
        self._symbol, self._params = symbol, params
        self._ndims = infer_ndims(symbol, params)
        read = [entry for node in symbol.nodes for entry in node.inputs]
        # How many outputs of a node.
        self._read: collections.Counter[int] = collections.Counter()
        for number, output in (*read, *symbol.heads):
            self._read[number] = max(self._read[number], output + 1)

    def run(self) -> fx.GraphModule:
        """Convert the whole symbol."""
        operators = {
            n: node.op
            for n, node in enumerate(self._symbol.nodes)
            if not node.is_variable
        }
        self.refuse_unknown(operators.values())
        inputs = self._begin()
        for number, op in operators.items():
            if self._read[number]:
                self.convert(number, op)
        return self.finish("MxnetModel", inputs, self._heads())

    def _heads(self) -> list[tuple[Output, str]]:
        """Return the outputs with the names of their nodes, in MXNet's form where one has more."""
        names = [self._symbol.nodes[number].name for number, _ in self._symbol.heads]
        heads = zip(self._symbol.heads, names, strict=True)
        return [
            (o, n if names.count(n) == 1 else f"{n}_output{o[1]}") for o, n in heads
        ]

    def _begin(self) -> list[tuple[str, list[int] | None]]:
        """Make parameters of the variables that the file has; return inputs with their shapes."""
        outputs = []
        labels = self._labels()
        for number, node in enumerate(self._symbol.nodes):
            if not node.is_variable:
                continue
            tensor = self._params.get(node.name)
            if tensor is not None:
                self.values[number, 0] = Constant(tensor, node.name, trainable=True)
            elif number not in labels and self._read[number]:
                self.input((number, 0), node.name)
                outputs.append((node.name, _stated_shape(node)))
        return outputs

    def _labels(self) -> set[int]:
        """Return the variables that only training reads."""
        read: set[int] = {number for number, _ in self._symbol.heads}
        trained: set[int] = set()
        for node in self._symbol.nodes:
            for place, (number, _) in enumerate(node.inputs):
                (trained if place and node.op in LOSSES else read).add(number)
        return trained - read

    def context(self, number: int) -> SymbolContext:
        node = self._symbol.nodes[number]
        inputs = node.inputs[:1] if node.op in LOSSES else node.inputs
        return SymbolContext(
            self.builder,
            node.op,
            node.name,
            dict(node.attributes),
            [self.value(entry, self._symbol.nodes[entry[0]].name) for entry in inputs],
            [self._ndims.get(entry) for entry in inputs],
            self._read[number],
        )


def _stated_shape(node: SymbolNode) -> list[int] | None:
    """Return the shape that a variable states; 0 stands for a size that is not known."""
    shape_text = node.attributes.get("__shape__", "")
    if not re.fullmatch(r"[(\[][\d, L]+[)\]]", shape_text):
        return None
    return [int(size) for size in re.findall(r"\d+", shape_text)]

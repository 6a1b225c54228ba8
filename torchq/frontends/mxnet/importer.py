"""``from_mxnet``: a symbol and its parameters as a GraphModule of ordinary modules."""

from __future__ import annotations

import collections
import os
import re
from typing import Any

from torch import Tensor, fx

from torchq.errors import FrontendError
from torchq.frontends.building import Constant, GraphBuilder, Value
from torchq.frontends.mxnet.converters.layers import LOSSES
from torchq.frontends.mxnet.node import CONVERTERS, SymbolContext
from torchq.frontends.mxnet.params import read_params
from torchq.frontends.mxnet.symbol import Symbol, infer_ndims, read_symbol


def from_mxnet(symbol_json: Any, params: Any) -> fx.GraphModule:
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
        >>> model = torchq.frontends.from_mxnet(*files)  # doctest: +SKIP
        >>> report = torchq.quantize_(model)  # doctest: +SKIP
    """
    where = "from_mxnet"
    if isinstance(symbol_json, os.PathLike) or "{" not in str(symbol_json)[:64]:
        where = f"from_mxnet: {os.fspath(symbol_json)}"
    symbol = read_symbol(symbol_json, where)
    return _Importer(symbol, read_params(params, where), where).run()


class _Importer:
    """Converts one symbol."""

    def __init__(self, symbol: Symbol, params: dict[str, Tensor], where: str) -> None:
        self._symbol, self._params, self._where = symbol, params, where
        self._builder = GraphBuilder(where)
        self._ndims = infer_ndims(symbol, params)
        self._values: dict[tuple[int, int], Value] = {}
        read = [entry for node in symbol.nodes for entry in node.inputs]
        self._outputs: collections.Counter[int] = collections.Counter()
        for number, output in (*read, *symbol.heads):
            self._outputs[number] = max(self._outputs[number], output + 1)

    def run(self) -> fx.GraphModule:
        """Convert the whole symbol."""
        self._refuse_unknown()
        inputs = self._begin()
        for number, node in enumerate(self._symbol.nodes):
            if not node.is_variable and self._outputs[number]:
                self._convert(number)
        end = SymbolContext(self._builder, "output", "output", {}, [], [], 1)
        outputs = [end.tensor(self._value(entry)) for entry in self._symbol.heads]
        names = self._output_names()
        return self._builder.finish(outputs, "MxnetModel", inputs, names, self._shapes(inputs))

    def _output_names(self) -> list[str]:
        """Return the names of the nodes of the outputs, in MXNet's form where one gives several."""
        heads = [(self._symbol.nodes[number].name, place) for number, place in self._symbol.heads]
        counts = collections.Counter(name for name, _ in heads)
        return [name if counts[name] == 1 else f"{name}_output{place}" for name, place in heads]

    def _shapes(self, inputs: list[str]) -> list[list[int] | None]:
        """Return the shapes that variables state; 0 stands for a size that is not known."""
        stated = {}
        for node in self._symbol.nodes:
            text = node.attributes.get("__shape__", "")
            if node.is_variable and re.fullmatch(r"[(\[][\d, L]+[)\]]", text):
                stated[node.name] = [int(size) for size in re.findall(r"\d+", text)]
        return [stated.get(name) for name in inputs]

    def _refuse_unknown(self) -> None:
        operators = [node.op for node in self._symbol.nodes if not node.is_variable]
        unknown = collections.Counter(op for op in operators if op not in CONVERTERS)
        if unknown:
            found = ", ".join(f"{op} ({count})" for op, count in sorted(unknown.items()))
            raise FrontendError(
                f"{self._where}: got operators that cannot be converted: {found}. "
                "Register a converter with torchq.frontends.mxnet.converter, or cut the network"
            )

    def _begin(self) -> list[str]:
        """Make parameters of the variables that the file has, and inputs of the others."""
        names = []
        labels = self._labels()
        for number, node in enumerate(self._symbol.nodes):
            if not node.is_variable:
                continue
            tensor = self._params.get(node.name)
            if tensor is not None:
                self._values[number, 0] = Constant(tensor, node.name, trainable=True)
            elif number not in labels and self._outputs[number]:
                placeholder = self._builder.input(node.name)
                placeholder.meta["mxnet_name"] = node.name
                self._values[number, 0] = placeholder
                names.append(node.name)
        return names

    def _labels(self) -> set[int]:
        """Return the variables that only training reads."""
        read: set[int] = {number for number, _ in self._symbol.heads}
        trained: set[int] = set()
        for node in self._symbol.nodes:
            for place, (number, _) in enumerate(node.inputs):
                (trained if place and node.op in LOSSES else read).add(number)
        return trained - read

    def _convert(self, number: int) -> None:
        node = self._symbol.nodes[number]
        inputs = node.inputs[:1] if node.op in LOSSES else node.inputs
        context = SymbolContext(
            self._builder,
            node.op,
            node.name,
            dict(node.attributes),
            [self._value(entry) for entry in inputs],
            [self._ndims.get(entry) for entry in inputs],
            self._outputs[number],
        )
        try:
            result: Any = CONVERTERS[node.op](context)
            context.check_all_read()
        except FrontendError:
            raise
        except Exception as error:  # a file may hold any attribute and any constant
            raise FrontendError(
                f"{self._where}: {node.op} {node.name!r} cannot be converted "
                f"({type(error).__name__}: {error})"
            ) from error
        for output, value in enumerate(result if isinstance(result, list) else [result]):
            self._values[number, output] = value

    def _value(self, entry: tuple[int, int]) -> Value:
        if entry not in self._values:
            name = self._symbol.nodes[entry[0]].name
            raise FrontendError(f"{self._where}: output {entry[1]} of {name!r} is not supported")
        return self._values[entry]

"""The layers of a file, and which of them the nodes of its optimised graph belong to.

ONNX Runtime fuses nodes, changes layouts and names what it adds as it likes, and does so in another
way for a float file than for its quantized one. What both have are the layers: convolutions and
matrix products. Whatever is computed from the result of a layer, up to the next one, counts to it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from torchq.onnx.ir import Model, Node, is_constant, names
from torchq.onnx.targets.checks import layer_name

__all__ = ["FIRST", "LayerNames"]

#: The name of what comes before the first layer.
FIRST = "input"
_LAYERS = names("Conv ConvTranspose ConvInteger Gemm MatMul MatMulInteger LSTM GRU RNN")
#: What ONNX Runtime appends to the names of nodes that it fuses or moves to another layout.
_ADDED = re.compile(r"(_token_\d+|_nchwc|_quant)+$")
#: The modules that a node comes from, as torch's newer exporter notes them.
_SCOPES = "pkg.torch.onnx.name_scopes"


class LayerNames:
    """The layers of a file by the names of its nodes and values.

    Args:
        model: The file as it is written.

    Attributes:
        layers: Its layers in order, the first one of which is :data:`FIRST`.
    """

    def __init__(self, model: Model) -> None:
        self.layers = [FIRST]
        self._found: dict[str, int] = {}
        for node in model.graph:
            own = self._layer_of(node)
            for name in (node.name, *(value.name for value in node.outputs)):
                if name and own is not None:
                    self._found[name] = own

    def of(self, nodes: Iterable[str]) -> list[str]:
        """Return the layers of nodes of the optimised graph.

        Args:
            nodes: Their names, in the order in which they run.
        """
        last, found = FIRST, []
        for name in nodes:
            index = self._found.get(name)
            if index is None:
                index = self._found.get(_ADDED.sub("", name))
            last = last if index is None else self.layers[index]
            found.append(last)
        return found

    def _layer_of(self, node: Node) -> int | None:
        """Return the index of the layer of a node; None where it reads stored tensors alone."""
        before = [self._found.get(str(value.name)) for value in node.inputs if value is not None]
        known = [index for index in before if index is not None]
        fed = [
            v for v in node.inputs if v is not None and not is_constant(v) and v.producer() is None
        ]
        if not known and not fed:
            return None
        if node.op_type not in _LAYERS:
            return max(known, default=0)
        path = _path_of(node)
        if path not in self.layers:
            self.layers.append(path)
        return self.layers.index(path)


def _path_of(node: Node) -> str:
    """Return the dotted path of a layer, from the quantizer of its weight where it has one."""
    name = layer_name(node)
    return module_of(node) if name in (node.name, node.outputs[0].name) else name


def module_of(node: Node) -> str:
    """Return the dotted path of the module that a node comes from, or its name.

    Example:
        >>> class Node:
        ...     name, metadata_props = "/features/features.0/features.0.1/Conv", {}
        >>> module_of(Node)
        'features.0.1'
    """
    scopes = node.metadata_props.get(_SCOPES)
    if scopes:
        return str(ast.literal_eval(scopes)[-2])
    parts: list[str] = []
    for part in str(node.name).strip("/").split("/")[:-1]:
        # Children of containers repeat the name of their container.
        inner = parts and part.startswith(f"{parts[-1]}.")
        parts[-1:] = [part] if inner else [*parts[-1:], part]
    return ".".join(parts) or str(node.name)

"""Channels of depthwise convolutions in multiples of what the kernels of a runtime read at once."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    attribute,
    data_type,
    is_constant,
    is_output,
    names,
    nodes_of,
    onnx_ir,
    readers,
    value_of,
)
from torchq.onnx.qdq import pair_name, read_record, stored_weight, write_record

__all__ = ["pad_depthwise", "remove_padding"]

#: ONNX Runtime's depthwise kernel on codes takes two to five times as long for other numbers.
_MULTIPLE = 16
_PADDED = "padded"
#: Operators that compute each channel by itself.
_BY_CHANNEL = names(
    "QuantizeLinear DequantizeLinear Relu Clip LeakyRelu HardSigmoid HardSwish Sigmoid Mul Add "
    "MaxPool AveragePool GlobalAveragePool"
)
_OPERANDS = names("Mul Add")


def pad_depthwise(model: Model) -> None:
    """Pad the channels of integer depthwise convolutions with zeros, up to a multiple of 16.

    Before::

        Conv -> depthwise Conv of 40 channels -> Conv, with operators by channel between them.

    After::

        The three convolutions have 48 channels between them. The weights of the additional ones
        are 0 on both sides, so no code of another channel changes. The record has under
        ``padded`` the shape of each weight before.
    """
    padded: dict[str, list[int]] = {}
    for node in nodes_of(model, "Conv"):
        channels = _depth(node)
        if not channels or channels % _MULTIPLE == 0 or not node.inputs[0].producer():
            continue
        region = _Region.around(node, channels)
        if region is not None:
            region.pad(-(-channels // _MULTIPLE) * _MULTIPLE, padded)
    if padded:
        write_record(model, padded={**padded, **read_record(model).get(_PADDED, {})})


def remove_padding(model: Model) -> list[str]:
    """Undo :func:`pad_depthwise` with the help of the record.

    Before::

        A file with padded channels.

    After::

        The channels of the layers that were exported.

    Returns:
        The quantizers of weights whose padding is not zero.
    """
    record, wrong = read_record(model).get(_PADDED, {}), []
    for node in nodes_of(model, "Conv"):
        weight = stored_weight(node.inputs[1])
        shape = None if weight is None else record.get(pair_name(weight))
        if weight is None or shape is None:
            continue
        codes = value_of(weight.inputs[0])
        kept = codes[tuple(slice(length) for length in shape)]
        if int((codes != 0).sum()) != int((kept != 0).sum()):
            wrong.append(pair_name(weight))
        if _depth(node):
            node.attributes["group"] = onnx_ir.AttrInt64("group", shape[0])
        _resize(node, weight, shape[0], shape[1])
    return wrong


def _depth(node: Node) -> int:
    """Return the channels of a depthwise convolution with a stored quantized weight, or 0."""
    weight = stored_weight(node.inputs[1])
    group = int(attribute(node, "group", 1))
    if node.op_type != "Conv" or weight is None or group == 1:
        return 0
    out, depth = weight.inputs[0].const_value.shape.numpy()[:2]
    return group if out == group and depth == 1 else 0


class _Region:
    """Values with the same channels, and the convolutions where they begin and end.

    Attributes:
        values: All of them.
        sources: The convolutions that compute some of them.
        depthwise: Those that read and compute some of them.
        sinks: Those that read some of them.
    """

    def __init__(self) -> None:
        self.values: dict[Value, None] = {}
        self.sources: dict[Node, None] = {}
        self.depthwise: dict[Node, None] = {}
        self.sinks: dict[Node, None] = {}

    @classmethod
    def around(cls, node: Node, channels: int) -> _Region | None:
        """Return the region of a depthwise convolution; None where it has another kind of end."""
        region = cls()
        pending = [node.inputs[0], node.outputs[0]]
        while pending:
            value = pending.pop()
            if value in region.values:
                continue
            producer = value.producer()
            if producer is None or is_output(value):
                return None
            region.values[value] = None
            for user in (producer, *readers(value)):
                found = region._joined(user, user is not producer, value, channels)
                if found is None:
                    return None
                pending += found
        return region

    def _joined(self, node: Node, reads: bool, value: Value, channels: int) -> list[Value] | None:
        """Enter a node that reads or computes ``value``; return what joins, None if it cannot."""
        if node.op_type == "Conv":
            own = stored_weight(node.inputs[1])
            if own is None or len(readers(own.outputs[0])) != 1 or not _can_resize(node):
                return None
            if _depth(node) == channels:
                self.depthwise[node] = None
                return [node.inputs[0], node.outputs[0]]
            if attribute(node, "group", 1) != 1 or (reads and node.inputs[0] is not value):
                return None
            (self.sinks if reads else self.sources)[node] = None
            return []
        if node.op_type not in _BY_CHANNEL or len(node.outputs) != 1:
            return None
        operands = node.inputs if node.op_type in _OPERANDS else node.inputs[:1]
        values = [v for v in operands if not (is_constant(v) and v.const_value.size == 1)]
        return None if any(is_constant(v) for v in values) else [*values, node.outputs[0]]

    def pad(self, channels: int, record: dict[str, list[int]]) -> None:
        """Give all convolutions ``channels`` channels; note the shapes of their weights."""
        for node in (*self.sources, *self.depthwise, *self.sinks):
            weight = stored_weight(node.inputs[1])
            assert weight is not None
            out, depth = weight.inputs[0].const_value.shape.numpy()[:2]
            record.setdefault(pair_name(weight), list(weight.inputs[0].const_value.shape.numpy()))
            out = channels if node in self.sources or node in self.depthwise else out
            depth = channels if node in self.sinks else depth
            if node in self.depthwise:
                node.attributes["group"] = onnx_ir.AttrInt64("group", channels)
            _resize(node, weight, out, depth)
        for value in self.values:
            value.shape = None


def _can_resize(node: Node) -> bool:
    return all(value is None or is_constant(value) for value in node.inputs[2:])


def _resize(node: Node, weight: Node, out: int, depth: int) -> None:
    """Cut or pad the stored weight, scales and bias of a convolution."""
    codes = value_of(weight.inputs[0])
    grow = (depth - codes.shape[1], out - codes.shape[0])
    kernel = [0] * (2 * (codes.dim() - 2))
    resized = F.pad(codes, [*kernel, 0, grow[0], 0, grow[1]])
    _store(weight, 0, resized)
    for index in (1, 2):
        if len(weight.inputs) > index and weight.inputs[index] is not None:
            old = value_of(weight.inputs[index])
            if old.dim():
                _store(weight, index, F.pad(old, [0, grow[1]], value=1 if index == 1 else 0))
    if len(node.inputs) > 2 and node.inputs[2] is not None:
        _store(node, 2, F.pad(value_of(node.inputs[2]), [0, grow[1]]))
    weight.outputs[0].shape = None


def _store(node: Node, index: int, tensor: torch.Tensor) -> None:
    """Let an input of a node be a new stored tensor; the old one stays for its other readers."""
    old = node.inputs[index]
    name = str(old.name)
    new = add_initializer(node.graph, name, tensor, data_type(old))
    node.replace_input_with(index, new)
    if not old.uses():
        del node.graph.initializers[name]
        new.name = name

"""The fused operator RNN: several recurrent layers whose weights lie in one vector."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx, nn

from torchq.frontends.building import Value
from torchq.frontends.mxnet.node import SymbolContext
from torchq.frontends.mxnet.registry import converter

_CLASSES: dict[str, tuple[type[Any], dict[str, str]]] = {
    "lstm": (nn.LSTM, {}),
    "gru": (nn.GRU, {}),
    "rnn_tanh": (nn.RNN, {"nonlinearity": "tanh"}),
    "rnn_relu": (nn.RNN, {"nonlinearity": "relu"}),
}


@converter("RNN")
def _rnn(node: SymbolContext) -> list[Value]:
    mode = node.text("mode")
    if mode not in _CLASSES:
        node.refuse(f"mode is {mode!r}; expected one of {', '.join(_CLASSES)}")
    for name in ("projection_size", "lstm_state_clip_min", "lstm_state_clip_max"):
        node.expect(name)
    node.expect("use_sequence_length", "False", "0")
    node.expect("lstm_state_clip_nan", "False", "0")
    node.flag("state_outputs", False)
    x, states = node.inputs[0], [node.tensor(value) for value in node.inputs[2:]]
    module = _layers(node, mode)
    path = node.builder.add_module(node.name, module.eval(), node.op_type)
    initial = (states[0], states[1]) if mode == "lstm" else states[0]
    result = node.builder.graph.call_module(path, (node.tensor(x), initial))
    y, last = (node.call(operator.getitem, result, index) for index in (0, 1))
    if mode != "lstm":
        return [y, last]
    assert isinstance(last, fx.Node)
    return [y, *(node.call(operator.getitem, last, index) for index in (0, 1))]


def _layers(node: SymbolContext, mode: str) -> nn.Module:
    """Return torch's layers with the weights of the vector.

    It holds all matrices, of the input and of the state for each direction of each layer, and then
    all biases in this order. The gates have the order of torch.
    """
    packed, size = node.parameter(1, "weight").tensor.reshape(-1), node.integer("state_size")
    layers, both = node.integer("num_layers"), node.flag("bidirectional", False)
    directions = 2 if both else 1
    cls, options = _CLASSES[mode]
    gates = {"lstm": 4, "gru": 3}.get(mode, 1) * size
    later = (layers - 1) * directions * gates * (size * directions + size + 2)
    first = packed.numel() - later
    inputs, rest = divmod(first, directions * gates)
    inputs -= size + 2
    if rest or inputs < 1:
        node.refuse(f"its weight has {packed.numel()} numbers, which fit no size of the input")
    p = node.number("p", 0.0)
    module = cls(inputs, size, layers, dropout=p if layers > 1 else 0.0, bidirectional=both,
                 **options)  # fmt: skip
    ends = [f"l{i}{end}" for i in range(layers) for end in ("", "_reverse")[:directions]]
    names = [f"weight_{kind}_{end}" for end in ends for kind in ("ih", "hh")]
    names += [f"bias_{kind}_{end}" for end in ends for kind in ("ih", "hh")]
    with torch.no_grad():
        for name in names:
            parameter = getattr(module, name)
            parameter.copy_(packed[: parameter.numel()].view(parameter.shape))
            packed = packed[parameter.numel() :]
    return module

"""LSTM, GRU and plain recurrent layers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.onnx.context import NodeContext, converter

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
#: For each gate in torch's order its place in ONNX's order.
_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_DEFAULTS = {"LSTM": ["Sigmoid", "Tanh", "Tanh"], "GRU": ["Sigmoid", "Tanh"], "RNN": ["Tanh"]}
_KNOWN = ("tanh", "relu", "sigmoid", "softsign", "softplus")


@converter("LSTM", "GRU", "RNN")
def _recurrent(node: NodeContext) -> list[Value]:
    directions = 2 if node.attr("direction", "forward") == "bidirectional" else 1
    activations = _activations(node, directions)
    if not set(activations) <= set(_KNOWN) or node.attr("clip") or node.attr("input_forget"):
        node.refuse("its activations, its clipping or its coupled gates are not supported")
    x, batch_first = node.inputs[0], bool(node.attr("layout", 0))
    if batch_first:
        x = node.call(torch.transpose, x, 0, 1)
    module = _as_module(node, directions, activations)
    if module is None:
        results = _as_loop(node, x, directions, activations, batch_first)
    else:
        results = _call_module(node, module, x, directions, batch_first)
    if not batch_first:
        return results
    order = [(2, 0, 1, 3), (1, 0, 2), (1, 0, 2)]
    return [
        node.call(torch.permute, value, perm) for value, perm in zip(results, order, strict=False)
    ]


def _activations(node: NodeContext, directions: int) -> list[str]:
    default = _DEFAULTS[node.op_type] * directions
    return [name.lower() for name in node.attr("activations", default)]


def _as_module(node: NodeContext, directions: int, activations: list[str]) -> nn.Module | None:
    """Return torch's layer with the weights of the node, None where torch has no such layer."""
    kind, weights = node.op_type, [node.input(index) for index in (1, 2, 3)]
    if (
        not all(isinstance(part, Constant) or part is None for part in weights)
        or weights[0] is None
    ):
        return None
    plain = [name.lower() for name in _DEFAULTS[kind]] * directions
    is_relu = kind == "RNN" and set(activations) == {"relu"}
    if (
        (activations != plain and not is_relu)
        or node.input(4) is not None
        or node.input(7) is not None
    ):
        return None
    if node.attr("direction", "forward") == "reverse" or (
        kind == "GRU" and not node.attr("linear_before_reset", 0)
    ):
        return None
    w, r, b = ((part.tensor if isinstance(part, Constant) else None) for part in weights)
    assert w is not None and r is not None
    options: dict[str, Any] = {"nonlinearity": "relu"} if is_relu else {}
    cls: Any = {"LSTM": nn.LSTM, "GRU": nn.GRU, "RNN": nn.RNN}[kind]
    module = cls(
        w.shape[2], r.shape[2], bias=b is not None, bidirectional=directions == 2, **options
    )
    with torch.no_grad():
        for direction in range(directions):
            suffix = "l0_reverse" if direction else "l0"
            getattr(module, f"weight_ih_{suffix}").copy_(_reordered(w[direction], kind))
            getattr(module, f"weight_hh_{suffix}").copy_(_reordered(r[direction], kind))
            if b is not None:
                of_input, of_state = b[direction].chunk(2)
                getattr(module, f"bias_ih_{suffix}").copy_(_reordered(of_input, kind))
                getattr(module, f"bias_hh_{suffix}").copy_(_reordered(of_state, kind))
    return module.to(w.dtype)


def _reordered(weight: Tensor, kind: str) -> Tensor:
    """Return the rows of all gates in torch's order."""
    gates = weight.chunk(_GATES[kind])
    return torch.cat([gates[place] for place in _ORDER[kind]])


def _states(node: NodeContext, batch_first: bool) -> list[Value]:
    """Return the initial states that the node has as (directions, batch, hidden)."""
    places = (5, 6) if node.op_type == "LSTM" else (5,)
    found = [node.input(place) for place in places]
    if batch_first:
        found = [None if s is None else node.call(torch.transpose, s, 0, 1) for s in found]
    return found


def _call_module(
    node: NodeContext, module: nn.Module, x: Value, directions: int, batch_first: bool
) -> list[Value]:
    states = _states(node, batch_first)
    if any(state is not None for state in states):
        if None in states:
            states = [
                node.call(torch.zeros_like, states[1 - i]) if s is None else s
                for i, s in enumerate(states)
            ]
        initial: Any = tuple(states) if node.op_type == "LSTM" else states[0]
        result = _module_with_state(node, module, x, initial)
    else:
        result = node.module(module, x)
    y = node.call(_item, result, 0)
    last = node.call(_item, result, 1)
    ends = (
        [node.call(_item, last, 0), node.call(_item, last, 1)] if node.op_type == "LSTM" else [last]
    )
    return [node.call(split_directions, y, directions), *ends]


def _module_with_state(node: NodeContext, module: nn.Module, x: Value, state: Any) -> Value:
    parts = state if isinstance(state, tuple) else (state,)
    path = node.builder.add_module(node.name, module.eval(), node.op_type)
    nodes = tuple(node.tensor(part) for part in parts)
    argument = nodes if isinstance(state, tuple) else nodes[0]
    return node.builder.graph.call_module(path, (node.tensor(x), argument))


def _item(value: Any, index: int) -> Any:
    return value[index]


def _as_loop(
    node: NodeContext, x: Value, directions: int, activations: list[str], batch_first: bool
) -> list[Value]:
    """Write a call of the function that computes the layer step by step."""
    states = _states(node, batch_first)
    reverse = node.attr("direction", "forward") == "reverse"
    weights = [node.input(index) for index in (1, 2, 3)]
    options = (activations, directions, reverse, bool(node.attr("linear_before_reset", 0)))
    peephole = node.input(7) if node.op_type == "LSTM" else None
    count = 3 if node.op_type == "LSTM" else 2
    return node.call_parts(
        count, run_layer, node.op_type, x, weights, peephole, node.input(4), states, *options
    )


def run_layer(
    kind: str,
    x: Tensor,
    weights: list[Tensor | None],
    peephole: Tensor | None,
    lengths: Tensor | None,
    states: list[Tensor | None],
    activations: list[str],
    directions: int,
    reverse: bool,
    linear_before_reset: bool,
) -> tuple[Tensor, ...]:
    """Run a recurrent layer of ONNX in all its directions."""
    w, r, b = weights
    assert w is not None and r is not None
    zeros = x.new_zeros(directions, x.shape[1], r.shape[-1])
    starts = [zeros if state is None else state for state in states]
    each = len(activations) // directions
    outputs: list[tuple[Tensor, ...]] = []
    for d in range(directions):
        own: Any = (w[d], r[d], None if b is None else b[d])
        names: Any = tuple(activations[d * each : (d + 1) * each])
        back = reverse or d == 1
        if kind == "LSTM":
            own = (*own, None if peephole is None else peephole[d])
            outputs.append(
                lstm_sequence(x, own, (starts[0][d], starts[1][d]), lengths, names, back)
            )
        elif kind == "GRU":
            outputs.append(
                gru_sequence(x, own, starts[0][d], lengths, names, back, linear_before_reset)
            )
        else:
            outputs.append(rnn_sequence(x, own, starts[0][d], lengths, names[0], back))
    y = torch.stack([parts[0] for parts in outputs], 1)
    return (y, *(torch.stack([parts[i] for parts in outputs]) for i in range(1, len(outputs[0]))))


_ACTIVATIONS = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "softplus": F.softplus,
}


def split_directions(y: Tensor, directions: int) -> Tensor:
    """Return outputs (time, batch, directions * hidden) as (time, directions, batch, hidden)."""
    return y.unflatten(2, (directions, -1)).transpose(1, 2)


def _times(length: int, reverse: bool) -> range:
    return range(length - 1, -1, -1) if reverse else range(length)


def _frozen(new: Tensor, old: Tensor, alive: Tensor | None) -> Tensor:
    """Return the new state where a sequence still lasts, else the old one."""
    return new if alive is None else torch.where(alive, new, old)


def _alive(lengths: Tensor | None, time: int) -> Tensor | None:
    return None if lengths is None else (time < lengths).unsqueeze(1)


def lstm_sequence(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None, Tensor | None],
    state: tuple[Tensor, Tensor],
    lengths: Tensor | None,
    activations: tuple[str, str, str],
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return all hidden states, the last one and the last cell state of an LSTM in one direction.

    Biases are (8 * hidden,) and peepholes (3 * hidden,); the gates come in ONNX's order input,
    output, forget, cell. Activations are those of gates, of the cell input and of the output.
    """
    w, r, b, p = weights
    h, c = state
    gate, cell, out = (_ACTIVATIONS[name] for name in activations)
    bias = None if b is None else b.chunk(2)[0] + b.chunk(2)[1]
    pi, po, pf = (0.0, 0.0, 0.0) if p is None else p.chunk(3)
    results = [torch.zeros_like(h)] * x.shape[0]
    for time in _times(x.shape[0], reverse):
        i, o, f, g = F.linear(torch.cat([x[time], h], 1), torch.cat([w, r], 1), bias).chunk(4, 1)
        i, f = gate(i + pi * c), gate(f + pf * c)
        new_c = f * c + i * cell(g)
        new_h = gate(o + po * new_c) * out(new_c)
        alive = _alive(lengths, time)
        h, c = _frozen(new_h, h, alive), _frozen(new_c, c, alive)
        results[time] = new_h if alive is None else torch.where(alive, new_h, 0.0)
    return torch.stack(results), h, c


def gru_sequence(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None],
    h: Tensor,
    lengths: Tensor | None,
    activations: tuple[str, str],
    reverse: bool,
    linear_before_reset: bool,
) -> tuple[Tensor, Tensor]:
    """Return all hidden states and the last one of one direction of a GRU.

    The arguments are those of :func:`lstm_sequence`.

    The gates come in ONNX's order update, reset, hidden.
    """
    w, r, b = weights
    size = r.shape[1]
    gate, new = (_ACTIVATIONS[name] for name in activations)
    wb, rb = (x.new_zeros(3 * size),) * 2 if b is None else b.chunk(2)
    results = [torch.zeros_like(h)] * x.shape[0]
    for time in _times(x.shape[0], reverse):
        inputs = F.linear(x[time], w, wb)
        zr = gate(inputs[:, : 2 * size] + F.linear(h, r[: 2 * size], rb[: 2 * size]))
        z, reset = zr.chunk(2, 1)
        if linear_before_reset:
            hidden = reset * F.linear(h, r[2 * size :], rb[2 * size :])
        else:
            hidden = F.linear(reset * h, r[2 * size :], rb[2 * size :])
        new_h = (1 - z) * new(inputs[:, 2 * size :] + hidden) + z * h
        alive = _alive(lengths, time)
        h = _frozen(new_h, h, alive)
        results[time] = new_h if alive is None else torch.where(alive, new_h, 0.0)
    return torch.stack(results), h


def rnn_sequence(
    x: Tensor,
    weights: tuple[Tensor, Tensor, Tensor | None],
    h: Tensor,
    lengths: Tensor | None,
    activation: str,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Return all hidden states and the last one of one direction of a plain recurrent layer."""
    w, r, b = weights
    function = _ACTIVATIONS[activation]
    bias = None if b is None else b.chunk(2)[0] + b.chunk(2)[1]
    results = [torch.zeros_like(h)] * x.shape[0]
    for time in _times(x.shape[0], reverse):
        new_h = function(F.linear(torch.cat([x[time], h], 1), torch.cat([w, r], 1), bias))
        alive = _alive(lengths, time)
        h = _frozen(new_h, h, alive)
        results[time] = new_h if alive is None else torch.where(alive, new_h, 0.0)
    return torch.stack(results), h

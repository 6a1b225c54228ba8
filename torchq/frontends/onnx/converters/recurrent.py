"""LSTM, GRU and plain recurrent layers."""

from collections.abc import Callable
from operator import getitem
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.frontends.building.graph import Constant, Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.onnx.context import NodeContext, converter

_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
#: For each gate in torch's order its place in ONNX's order.
_ORDER = {"LSTM": (0, 2, 3, 1), "GRU": (1, 0, 2), "RNN": (0,)}
_DEFAULTS = {
    "LSTM": ["Sigmoid", "Tanh", "Tanh"],
    "GRU": ["Sigmoid", "Tanh"],
    "RNN": ["Tanh"],
}


@converter("LSTM", "GRU", "RNN")
def _recurrent(node: NodeContext) -> list[Value]:
    kind = node.op_type
    direction = node.attr("direction", "forward")
    directions = 2 if direction == "bidirectional" else 1
    default = _DEFAULTS[kind] * directions
    activations = [name.lower() for name in node.attr("activations", default)]
    if (
        not set(activations) <= set(_ACTIVATIONS)
        or node.attr("clip")
        or node.attr("input_forget")
    ):
        node.refuse(
            "its activations, its clipping or its coupled gates are not supported"
        )
    batch_first = node.attr("layout", False)
    given = [node.input(place) for place in ((0, 5, 6) if kind == "LSTM" else (0, 5))]
    if batch_first:
        given = [
            None if v is None else node.call(torch.transpose, v, 0, 1) for v in given
        ]
    x, *states = (
        given  # (time, batch, size), and initial states (directions, batch, hidden)
    )
    module = _as_module(node, directions, activations)
    if module is not None:
        backwards = direction == "reverse"
        x = node.call(torch.flip, x, [0]) if backwards else x
        results = _call_module(node, module, x, states, directions)
        if backwards:
            results[0] = node.call(torch.flip, results[0], [0])
    else:
        weights = [node.input(index) for index in (1, 2, 3)]
        weights.append(node.input(7) if kind == "LSTM" else None)
        options = (
            directions,
            direction == "reverse",
            node.attr("linear_before_reset", False),
        )
        arguments = (kind, x, weights, node.input(4), states, activations, *options)
        results = node.call_parts(1 + len(states), run_layer, *arguments)
    if not batch_first:
        return results
    orders = zip(results, [(2, 0, 1, 3), (1, 0, 2), (1, 0, 2)], strict=False)
    return [node.call(torch.permute, value, order) for value, order in orders]


def _as_module(
    node: NodeContext, directions: int, activations: list[str]
) -> nn.Module | None:
    """Return torch's layer with the weights of the node, None where torch has no such layer."""
    kind = node.op_type
    weights = [node.input(index) for index in (1, 2, 3)]
    plain = [name.lower() for name in _DEFAULTS[kind]] * directions
    is_relu = kind == "RNN" and set(activations) == {"relu"}
    w, r, b = (
        (part.tensor if isinstance(part, Constant) else None) for part in weights
    )
    if (
        (w is None or r is None or (b is None and weights[2] is not None))
        or (activations != plain and not is_relu)
        or _has_lengths(node)
        or node.input(7) is not None
        or (kind == "GRU" and not node.attr("linear_before_reset", 0))
    ):
        return None
    options: dict[str, Any] = {"bias": b is not None, "bidirectional": directions == 2}
    if is_relu:
        options["nonlinearity"] = "relu"
    module: nn.Module = getattr(nn, kind)(w.shape[2], r.shape[2], **options)
    parts = {"weight_ih": w, "weight_hh": r}
    if b is not None:
        parts["bias_ih"], parts["bias_hh"] = b.chunk(2, 1)
    with torch.no_grad():
        for name, part in parts.items():
            for weight, suffix in zip(part, ("l0", "l0_reverse"), strict=False):
                getattr(module, f"{name}_{suffix}").copy_(_reordered(weight, kind))
    return module.to(w.dtype)


def _has_lengths(node: NodeContext) -> bool:
    """Return True if sequences may be shorter than the input is long."""
    lengths = node.constant(4)
    shape = node.shape(0)
    if lengths is None or shape is None:
        return node.input(4) is not None
    time = shape[1 if node.attr("layout", False) else 0]
    return time is None or bool((lengths != time).any())


def _reordered(weight: Tensor, kind: str) -> Tensor:
    """Return the rows of all gates in torch's order."""
    gates = weight.chunk(_GATES[kind])
    return torch.cat([gates[place] for place in _ORDER[kind]])


def _call_module(
    node: NodeContext, module: nn.Module, x: Value, states: list[Value], directions: int
) -> list[Value]:
    first_state = next((state for state in states if state is not None), None)
    arguments: list[Any] = [x]
    if first_state is not None:
        filled = [
            node.call(torch.zeros_like, first_state) if s is None else s for s in states
        ]
        arguments.append(tuple(filled) if len(states) > 1 else filled[0])
    result = node.module(module, *arguments)
    y = node.call(getitem, result, 0)
    last = node.call(getitem, result, 1)
    ends = (
        [node.call(getitem, last, index) for index in (0, 1)]
        if len(states) > 1
        else [last]
    )
    return [node.call(split_directions, y, directions), *ends]


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "tanh": torch.tanh,
    "relu": torch.relu,
    "sigmoid": torch.sigmoid,
    "softsign": F.softsign,
    "softplus": F.softplus,
}


@one_call
def split_directions(y: Tensor, directions: int) -> Tensor:
    """Return outputs (time, batch, directions * hidden) as (time, directions, batch, hidden)."""
    return y.unflatten(2, (directions, -1)).transpose(1, 2)


@one_call
def run_layer(
    kind: str,
    x: Tensor,
    weights: list[Tensor | None],
    lengths: Tensor | None,
    states: list[Tensor | None],
    activations: list[str],
    directions: int,
    reverse: bool,
    linear_before_reset: bool,
) -> tuple[Tensor, ...]:
    """Run a recurrent layer of ONNX in all its directions, the second one backwards.

    The results are all outputs (time, directions, batch, hidden), and the last states (directions,
    batch, hidden).
    """
    assert weights[1] is not None
    zeros = x.new_zeros(directions, x.shape[1], weights[1].shape[-1])
    starts = [zeros if state is None else state for state in states]
    each = len(activations) // directions
    found = []
    for d in range(directions):
        direction_weights = [None if part is None else part[d] for part in weights]
        functions = [
            _ACTIVATIONS[name] for name in activations[d * each : (d + 1) * each]
        ]
        step = _STEPS[kind](direction_weights, functions, linear_before_reset)
        state = tuple(start[d] for start in starts)
        found.append(_run(step, x, state, lengths, reverse or d == 1))
    y = torch.stack([parts[0] for parts in found], 1)
    return (
        y,
        *(torch.stack([parts[i] for parts in found]) for i in range(1, len(found[0]))),
    )


_Step = Callable[..., tuple[Tensor, ...]]


def _run(
    step: _Step,
    x: Tensor,
    state: tuple[Tensor, ...],
    lengths: Tensor | None,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """Return all hidden states and the last states; a sequence that ended keeps its states."""
    results = [torch.zeros_like(state[0])] * x.shape[0]
    for time in reversed(range(x.shape[0])) if reverse else range(x.shape[0]):
        new = step(x[time], *state)
        results[time] = new[0]
        if lengths is not None:
            alive = (time < lengths).unsqueeze(1)
            results[time] = torch.where(alive, new[0], 0.0)
            new = tuple(
                torch.where(alive, a, b) for a, b in zip(new, state, strict=True)
            )
        state = new
    return (torch.stack(results), *state)


def _lstm(weights: list[Any], functions: list[Any], _: bool) -> _Step:
    """Return a step of an LSTM, whose gates come in the order input, output, forget, cell."""
    w, r, b, p = weights
    gate, cell, out = functions
    pi, po, pf = (0.0, 0.0, 0.0) if p is None else p.chunk(3)
    both = torch.cat([w, r], 1)
    bias = None if b is None else b.chunk(2)[0] + b.chunk(2)[1]

    def step(x: Tensor, h: Tensor, c: Tensor) -> tuple[Tensor, ...]:
        i, o, f, g = F.linear(torch.cat([x, h], 1), both, bias).chunk(4, 1)
        i, f = gate(i + pi * c), gate(f + pf * c)
        new = f * c + i * cell(g)
        return gate(o + po * new) * out(new), new

    return step


def _gru(weights: list[Any], functions: list[Any], linear_before_reset: bool) -> _Step:
    """Return a step of a GRU, whose gates come in the order update, reset, hidden."""
    w, r, b, _ = weights
    gate, new = functions
    size = r.shape[1]
    wb, rb = (r.new_zeros(3 * size),) * 2 if b is None else b.chunk(2)

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        inputs = F.linear(x, w, wb)
        zr = gate(inputs[:, : 2 * size] + F.linear(h, r[: 2 * size], rb[: 2 * size]))
        z, reset = zr.chunk(2, 1)
        if linear_before_reset:
            hidden = reset * F.linear(h, r[2 * size :], rb[2 * size :])
        else:
            hidden = F.linear(reset * h, r[2 * size :], rb[2 * size :])
        return ((1 - z) * new(inputs[:, 2 * size :] + hidden) + z * h,)

    return step


def _plain(weights: list[Any], functions: list[Any], _: bool) -> _Step:
    """Return a step of a plain recurrent layer."""
    w, r, b, _peepholes = weights
    both = torch.cat([w, r], 1)
    bias = None if b is None else b.chunk(2)[0] + b.chunk(2)[1]

    def step(x: Tensor, h: Tensor) -> tuple[Tensor, ...]:
        return (functions[0](F.linear(torch.cat([x, h], 1), both, bias)),)

    return step


_STEPS: dict[str, Callable[..., _Step]] = {"LSTM": _lstm, "GRU": _gru, "RNN": _plain}

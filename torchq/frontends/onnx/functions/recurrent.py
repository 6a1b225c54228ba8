"""Recurrent layers with options that torch's modules do not have, one time step after another."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

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
    """Return all hidden states, the last one and the last cell state of one direction of an LSTM.

    Args:
        x: (time, batch, input).
        weights: of the input, of the state, biases (8 * hidden,) and peepholes (3 * hidden,); the
            gates in ONNX's order input, output, forget, cell.
        state: hidden and cell state, (batch, hidden).
        lengths: of each sequence, or None.
        activations: of gates, of the cell input and of the output.
        reverse: from the last time to the first.
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

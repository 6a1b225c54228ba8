"""Recurrent layers computed step by step, on tensors quantized with the range of a call.

This is the reference of the rows of recurrent modules in the module contract. It is written from
torch's formulas alone: INT8, a range for each row of a weight, and one for each input and for the
hidden state of each step.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq import QuantDescriptor
from torchq.functional import fake_quantize, reduce_amax

__all__ = ["after_products", "recurrent_by_hand"]

State = tuple[Tensor, ...]


def recurrent_by_hand(plain: nn.RNNBase, x: Tensor) -> Any:
    """Return what a quantized copy of the layer ``plain`` must give for ``x``."""
    y, last = (x.transpose(0, 1) if plain.batch_first else x), list[State]()
    ends = ("", "_reverse") if plain.bidirectional else ("",)
    for level in range(plain.num_layers):
        y = _quantized(y)
        parts = [_direction(plain, y, f"_l{level}{end}", last) for end in ends]
        y = torch.cat(parts, -1)
    states = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    y = y.transpose(0, 1) if plain.batch_first else y
    return y, states if len(states) > 1 else states[0]


def _direction(plain: nn.RNNBase, x: Tensor, end: str, last: list[State]) -> Tensor:
    """Return the outputs of one direction of a level, and append its last state to ``last``."""
    state = _zeros(plain, x[0], plain.proj_size or plain.hidden_size)
    outputs = dict[int, Tensor]()
    steps = range(len(x))
    for step in reversed(steps) if end.endswith("reverse") else steps:
        state = _step(plain, x[step], state, end)
        outputs[step] = state[0]
    last.append(state)
    return torch.stack([outputs[step] for step in steps])


def _step(plain: nn.Module, x: Tensor, state: State, end: str) -> State:
    """Return the state after one step on a quantized input."""
    weights = [_quantized_rows(getattr(plain, f"weight_{kind}{end}")) for kind in ("ih", "hh")]
    biases = [getattr(plain, f"bias_{kind}{end}") if plain.bias else None for kind in ("ih", "hh")]
    i = F.linear(x, weights[0], biases[0])
    h = F.linear(_quantized(state[0]), weights[1], biases[1])
    y, *memory = after_products(plain, i, h, state)
    if getattr(plain, "proj_size", 0):
        y = F.linear(_quantized(y), _quantized_rows(getattr(plain, f"weight_hr{end}")))
    return y, *memory


def after_products(plain: nn.Module, i: Tensor, h: Tensor, state: State) -> State:
    """Return the state after the products of the input and of the hidden state, by kind of layer.

    It is that before a projection; a plain recurrent layer has tanh.
    """
    if isinstance(plain, nn.LSTM | nn.LSTMCell):
        first, forget, value, out = (i + h).chunk(4, 1)
        cell = forget.sigmoid() * state[1] + first.sigmoid() * value.tanh()
        return out.sigmoid() * cell.tanh(), cell
    if isinstance(plain, nn.GRU | nn.GRUCell):
        (ir, iz, iv), (hr, hz, hv) = i.chunk(3, 1), h.chunk(3, 1)
        update = (iz + hz).sigmoid()
        return ((1 - update) * (iv + (ir + hr).sigmoid() * hv).tanh() + update * state[0],)
    return ((i + h).tanh(),)


def _zeros(plain: nn.RNNBase, x: Tensor, width: int) -> State:
    """Return the state before the first step of rows ``x``."""
    hidden = x.new_zeros(len(x), width)
    if not isinstance(plain, nn.LSTM):
        return (hidden,)
    return hidden, x.new_zeros(len(x), plain.hidden_size)


def _quantized(x: Tensor) -> Tensor:
    return fake_quantize(x, reduce_amax(x))


def _quantized_rows(weight: Tensor) -> Tensor:
    granularity = QuantDescriptor(axis=0).granularity
    return fake_quantize(weight, reduce_amax(weight, granularity), granularity=granularity)

"""Recurrent layers computed step by step from torch's formulas, on quantized operands.

This is the reference of the recurrent layers in the module contract and in
tests/nn/test_recurrent.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq import QuantDescriptor
from torchq.functional import fake_quantize, reduce_amax

__all__ = ["recurrent_by_hand"]

State = tuple[Tensor, ...]
#: The name of a quantizer, such as ``"weight_hh_l0"``, and a tensor, to the quantized tensor.
Quantize = Callable[[str, Tensor], Tensor]


def by_the_range_of_the_call(slot: str, x: Tensor) -> Tensor:
    """Return INT8: a range for each row of a weight, and one for any other tensor."""
    granularity = QuantDescriptor(
        axis=0 if slot.startswith("weight") else None
    ).granularity
    return fake_quantize(x, reduce_amax(x, granularity), granularity=granularity)


def recurrent_by_hand(
    plain: nn.RNNBase,
    x: Tensor,
    quantize: Quantize = by_the_range_of_the_call,
    state: State | None = None,
    keep: Tensor | None = None,
) -> Any:
    """Return what a quantized copy of the layer ``plain`` must give for a padded batch ``x``.

    ``keep`` (T, N) tells which elements are no padding; a row's state stays where it is padding.
    """
    y = x.transpose(0, 1) if plain.batch_first else x
    last = list[State]()
    ends = ("", "_reverse") if plain.bidirectional else ("",)
    if state is None:
        widths = [plain.proj_size or plain.hidden_size]
        widths += [plain.hidden_size] if isinstance(plain, nn.LSTM) else []
        state = tuple(
            y.new_zeros(plain.num_layers * len(ends), y.shape[1], w) for w in widths
        )
    keep = torch.ones(y.shape[:2], dtype=torch.bool) if keep is None else keep
    for level in range(plain.num_layers):
        y, outputs = quantize(f"input_l{level}", y), []
        for end in ends:
            own = tuple(part[len(last)] for part in state)
            outputs.append(
                _direction(plain, y, f"_l{level}{end}", own, quantize, keep, last)
            )
        y = torch.cat(outputs, -1)
    states = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    y = y.transpose(0, 1) if plain.batch_first else y
    return y, states if len(states) > 1 else states[0]


def _direction(
    plain: nn.RNNBase,
    x: Tensor,
    end: str,
    state: State,
    quantize: Quantize,
    keep: Tensor,
    last: list[State],
) -> Tensor:
    """Return the outputs of one direction of a level, and append its last state to ``last``."""
    outputs = dict[int, Tensor]()
    steps = range(len(x))
    for step in reversed(steps) if end.endswith("reverse") else steps:
        new = _step(plain, x[step], state, end, quantize)
        rows = keep[step].unsqueeze(1)
        state = tuple(torch.where(rows, n, o) for n, o in zip(new, state, strict=True))
        outputs[step] = torch.where(rows, new[0], 0.0)
    last.append(state)
    return torch.stack([outputs[step] for step in steps])


def _step(
    plain: nn.RNNBase, x: Tensor, state: State, end: str, quantize: Quantize
) -> State:
    """Return the state after one step on a quantized input."""

    def weight(kind: str) -> Tensor:
        return quantize(f"{kind}{end}", getattr(plain, f"{kind}{end}"))

    biases = [
        getattr(plain, f"bias_{kind}{end}") if plain.bias else None
        for kind in ("ih", "hh")
    ]
    i = F.linear(x, weight("weight_ih"), biases[0])
    h = F.linear(
        quantize(f"hidden{end}", state[0]),
        weight("weight_hh"),
        biases[1],
    )
    y, *memory = _after_products(plain, i, h, state)
    if plain.proj_size:
        y = F.linear(
            quantize(f"projected{end}", y),
            weight("weight_hr"),
        )
    return y, *memory


def _after_products(plain: nn.RNNBase, i: Tensor, h: Tensor, state: State) -> State:
    """Return the state after the products of the input and of the hidden state."""
    if isinstance(plain, nn.LSTM):
        first, forget, value, out = (i + h).chunk(4, 1)
        cell = forget.sigmoid() * state[1] + first.sigmoid() * value.tanh()
        return out.sigmoid() * cell.tanh(), cell
    if isinstance(plain, nn.GRU):
        ir, iz, iv = i.chunk(3, 1)
        hr, hz, hv = h.chunk(3, 1)
        update = (iz + hz).sigmoid()
        return (
            (1 - update) * (iv + (ir + hr).sigmoid() * hv).tanh() + update * state[0],
        )
    return (
        (i + h).relu()
        if getattr(plain, "nonlinearity", "") == "relu"
        else (i + h).tanh(),
    )

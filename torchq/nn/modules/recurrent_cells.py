"""Quantized LSTM, GRU and RNN cells: one step, which the caller repeats."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.functional import gru_cell, lstm_cell, rnn_cell
from torchq.nn.convert import QuantModule, register
from torchq.nn.modules.attention import is_passive
from torchq.nn.modules.recurrent_steps import hidden_descriptor


class _QuantCell(QuantModule, nn.RNNCellBase):
    """Base of the cells; with every quantizer off it is torch's own forward, bit for bit."""

    input_slots = ("input", "hidden")
    weight_slots = ("weight_ih", "weight_hh")

    hidden_quantizer: nn.Module
    weight_ih_quantizer: nn.Module
    weight_hh_quantizer: nn.Module

    @classmethod
    def slot_descriptors(
        cls, input: QuantDescriptor | None, weight: QuantDescriptor | None
    ) -> dict[str, QuantDescriptor | None]:
        """Return the rule's descriptors; the hidden state is signed."""
        inputs = {"input": input, "hidden": hidden_descriptor(input)}
        return inputs | dict.fromkeys(cls.weight_slots, weight)

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Return the next state; the arguments are those of torch's cell."""
        if all(is_passive(getattr(self, f"{slot}_quantizer")) for slot in self.slots()):
            return super().forward(input, hx)
        if hx is None:
            # One sum of sizes, which torch.fx can trace.
            zeros = input.new_zeros(input.shape[:-1] + (self.hidden_size,))
            hx = (zeros, zeros) if isinstance(self, nn.LSTMCell) else zeros
        hidden = hx[0] if isinstance(hx, tuple) else hx
        weights = (
            self.weight_ih_quantizer(self.weight_ih),
            self.weight_hh_quantizer(self.weight_hh),
        )
        from_input = F.linear(self.input_quantizer(input), weights[0], self.bias_ih)
        from_hidden = F.linear(self.hidden_quantizer(hidden), weights[1], self.bias_hh)
        return self._combine(from_input, from_hidden, hx)

    def _combine(self, from_input: Tensor, from_hidden: Tensor, hx: Any) -> Any:
        """Return the next state from both products."""
        raise NotImplementedError


@register(nn.LSTMCell)
class QuantLSTMCell(_QuantCell, nn.LSTMCell):
    """Quantized :class:`torch.nn.LSTMCell`; the cell state stays float."""

    def _combine(self, from_input: Tensor, from_hidden: Tensor, hx: Any) -> Any:
        return lstm_cell(from_input + from_hidden, hx[1])


@register(nn.GRUCell)
class QuantGRUCell(_QuantCell, nn.GRUCell):
    """Quantized :class:`torch.nn.GRUCell`."""

    def _combine(self, from_input: Tensor, from_hidden: Tensor, hx: Any) -> Any:
        return gru_cell(from_input, from_hidden, hx)


@register(nn.RNNCell)
class QuantRNNCell(_QuantCell, nn.RNNCell):
    """Quantized :class:`torch.nn.RNNCell`."""

    def _combine(self, from_input: Tensor, from_hidden: Tensor, hx: Any) -> Any:
        return rnn_cell(from_input + from_hidden, self.nonlinearity)

"""Quantized LSTM with the parameters, names and arguments of torch's, and a loop of its own."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq.compat.pytorch_quantization import tensor_quant
from torchq.compat.pytorch_quantization.mixins import (
    QuantMixin,
    constructor,
    pop_quant_desc_in_kwargs,
)
from torchq.compat.pytorch_quantization.recurrent_step import LSTMCell as lstm_cell
from torchq.compat.pytorch_quantization.recurrent_step import quantize_together
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor
from torchq.errors import ConfigError
from torchq.functional.recurrent import run_over_steps

_OWN = {"input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout"}
_OWN |= {"bidirectional", "proj_size", "device", "dtype"}


class _Recurrent(QuantMixin):
    """The constructor of both: torch's arguments, and the descriptors of input and weight."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW

    def __init__(self, *args: object, **kwargs: Any) -> None:
        others = {key: kwargs.pop(key) for key in set(kwargs) - _OWN}
        descriptors = pop_quant_desc_in_kwargs(type(self), **others)
        if kwargs.get("proj_size"):
            raise ConfigError(
                f"QuantLSTM: got proj_size={kwargs['proj_size']}; "
                "expected 0, projections are not supported"
            )
        super().__init__(*args, **kwargs)
        self.init_quantizer(*descriptors)


class QuantLSTM(_Recurrent, nn.LSTM):
    """Quantized :class:`torch.nn.LSTM`, without ``proj_size``.

    ``_input_quantizers`` and ``_weight_quantizers`` hold one quantizer for each layer and
    direction, in torch's order, of what the step quantizes together.
    """

    __init__ = constructor(inspect.signature(nn.RNNBase.__init__), _Recurrent.__init__)

    def init_quantizer(
        self,
        quant_desc_input: QuantDescriptor,
        quant_desc_weight: QuantDescriptor,
        num_layers: int | None = None,
    ) -> None:
        """Create a pair of quantizers for each layer and direction."""
        count = num_layers or self.num_layers * (1 + self.bidirectional)
        super().init_quantizer(quant_desc_input, quant_desc_weight, count)

    def forward(self, input: Any, hx: tuple[Tensor, Tensor] | None = None) -> Any:
        """Return what :class:`torch.nn.LSTM` returns."""
        if isinstance(input, PackedSequence):
            data, counts, order, back = input
            hx = None if hx is None else self.permute_hidden(hx, order)
            flat, state = self._layers(data, counts.tolist(), hx)
            return PackedSequence(flat, counts, order, back), self.permute_hidden(
                state, back
            )
        time = 1 if self.batch_first else 0
        batched = input.dim() == 3
        if not batched:
            input = input.unsqueeze(1 - time)
            hx = None if hx is None else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        steps = input.shape[time]
        rows = input.shape[1 - time]
        flat, state = self._layers(torch.cat(input.unbind(time)), [rows] * steps, hx)
        output = torch.stack(flat.split(rows), time)
        if batched:
            return output, state
        return output.squeeze(1 - time), tuple(part.squeeze(1) for part in state)

    def _layers(
        self, flat: Tensor, sizes: list[int], hx: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run all layers over a flat sequence, see :mod:`torchq.functional.recurrent`."""
        directions = 1 + self.bidirectional
        shape = (self.num_layers * directions, sizes[0], self.hidden_size)
        if hx is None:
            hx = (flat.new_zeros(shape), flat.new_zeros(shape))
        if flat.shape[1] != self.input_size or any(
            tuple(part.shape) != shape for part in hx
        ):
            got = (flat.shape[1], tuple(hx[0].shape), tuple(hx[1].shape))
            raise ConfigError(
                f"QuantLSTM: got input size and states {got}; "
                f"expected {(self.input_size, shape, shape)}"
            )
        ends = []
        for layer in range(self.num_layers):
            if layer:
                flat = F.dropout(flat, self.dropout, self.training)
            outputs = []
            for i in range(layer * directions, (layer + 1) * directions):
                cell = self._cell(flat.split(sizes), i)
                state = hx[0][i], hx[1][i]
                output, end = run_over_steps(
                    cell, state, sizes, reverse=bool(i % directions)
                )
                outputs.append(output)
                ends.append(end)
            flat = torch.cat(outputs, 1)
        return flat, (
            torch.stack([h for h, _ in ends]),
            torch.stack([c for _, c in ends]),
        )

    def _cell(
        self, steps: Sequence[Tensor], i: int
    ) -> Callable[[int, Any], tuple[Tensor, Tensor]]:
        """Return the function of one step in a direction, with weights that are quantized once."""
        first, second, *biases = self.all_weights[i]
        w_ih, w_hh = quantize_together(self._weight_quantizers[i], first, second)
        quantizer = self._input_quantizers[i]
        b_ih, b_hh = biases or (None, None)
        return lambda step, state: lstm_cell(
            steps[step], state, w_ih, w_hh, b_ih, b_hh, input_quantizer=quantizer
        )


class QuantLSTMCell(_Recurrent, nn.LSTMCell):
    """Quantized :class:`torch.nn.LSTMCell`."""

    __init__ = constructor(inspect.signature(nn.LSTMCell.__init__), _Recurrent.__init__)

    def forward(
        self, input: Tensor, hx: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the next hidden and cell state."""
        batched = input.dim() == 2
        if not batched:
            input = input.unsqueeze(0)
            hx = None if hx is None else (hx[0].unsqueeze(0), hx[1].unsqueeze(0))
        if hx is None:
            zeros = input.new_zeros(input.shape[0], self.hidden_size)
            hx = (zeros, zeros)
        weights = (self.weight_ih, self.weight_hh, self.bias_ih, self.bias_hh)
        h, c = lstm_cell(
            input, hx, *weights, self._input_quantizer, self._weight_quantizer
        )
        return (h, c) if batched else (h.squeeze(0), c.squeeze(0))


LSTM = QuantLSTM
LSTMCell = QuantLSTMCell

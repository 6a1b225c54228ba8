"""Quantized LSTM with the parameters, names and arguments of torch's, and a loop of its own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq.compat.pytorch_quantization import tensor_quant
from torchq.compat.pytorch_quantization.mixins import (
    QuantMixin,
    pop_quant_desc_in_kwargs,
)
from torchq.compat.pytorch_quantization.recurrent_step import LSTMCell as lstm_cell
from torchq.compat.pytorch_quantization.recurrent_step import direction
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor
from torchq.errors import ConfigError

_OWN = {"input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout"}
_OWN |= {"bidirectional", "proj_size", "device", "dtype"}


class _Recurrent(QuantMixin):
    """The constructor of both: torch's arguments, and the descriptors of input and weight."""

    default_quant_desc_weight = tensor_quant.QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW

    def __init__(self, *args: Any, **kwargs: Any) -> None:
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
            data, sizes, sorted_indices, unsorted_indices = input
            hx = None if hx is None else self.permute_hidden(hx, sorted_indices)
            outputs, state = self._layers(list(data.split(sizes.tolist())), hx)
            packed = PackedSequence(torch.cat(outputs), sizes, sorted_indices, unsorted_indices)
            return packed, self.permute_hidden(state, unsorted_indices)
        batched = input.dim() == 3
        if not batched:
            input = input.unsqueeze(0 if self.batch_first else 1)
            hx = None if hx is None else (hx[0].unsqueeze(1), hx[1].unsqueeze(1))
        steps = input.unbind(1 if self.batch_first else 0)
        outputs, state = self._layers(list(steps), hx)
        output = torch.stack(outputs, 1 if self.batch_first else 0)
        if batched:
            return output, state
        return output.squeeze(0 if self.batch_first else 1), tuple(s.squeeze(1) for s in state)

    def _layers(
        self, steps: list[Tensor], hx: tuple[Tensor, Tensor] | None
    ) -> tuple[list[Tensor], tuple[Tensor, Tensor]]:
        """Run all layers over ``steps`` (see :func:`direction`); stack the hidden states."""
        directions = 1 + self.bidirectional
        shape = (self.num_layers * directions, steps[0].shape[0], self.hidden_size)
        if hx is None:
            hx = (steps[0].new_zeros(shape), steps[0].new_zeros(shape))
        if steps[0].shape[1] != self.input_size or any(tuple(part.shape) != shape for part in hx):
            got = (steps[0].shape[1], tuple(hx[0].shape), tuple(hx[1].shape))
            raise ConfigError(
                f"QuantLSTM: got input size and states {got}; "
                f"expected {(self.input_size, shape, shape)}"
            )
        states = []
        for layer in range(self.num_layers):
            found = []
            for i in range(layer * directions, (layer + 1) * directions):
                quantizers = self._input_quantizers[i], self._weight_quantizers[i]
                parts = steps, (hx[0][i], hx[1][i]), self.all_weights[i]
                outputs, state = direction(*parts, *quantizers, reverse=bool(i % directions))
                found.append(outputs)
                states.append(state)
            steps = [torch.cat(parts, 1) for parts in zip(*found, strict=True)]
            if self.dropout and layer < self.num_layers - 1:
                steps = [F.dropout(step, self.dropout, self.training) for step in steps]
        return steps, (torch.stack([h for h, _ in states]), torch.stack([c for _, c in states]))


class QuantLSTMCell(_Recurrent, nn.LSTMCell):
    """Quantized :class:`torch.nn.LSTMCell`."""

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
        h, c = lstm_cell(input, hx, *weights, self._input_quantizer, self._weight_quantizer)
        return (h, c) if batched else (h.squeeze(0), c.squeeze(0))


LSTM = QuantLSTM
LSTMCell = QuantLSTMCell

"""One step of an LSTM."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.functional.recurrent import lstm_cell

Quantizer = Callable[[Tensor], Tensor]
State = tuple[Tensor, Tensor]


def LSTMCell(
    input: Tensor,
    hidden: State,
    w_ih: Tensor,
    w_hh: Tensor,
    b_ih: Tensor | None = None,
    b_hh: Tensor | None = None,
    input_quantizer: Quantizer | None = None,
    weight_quantizer: Quantizer | None = None,
) -> State:
    """Return the next hidden and cell state ``(h, c)``.

    Input and hidden state are quantized together, with one range. So are the two weights, because
    at inference both products are one matrix multiplication. The cell state and the biases stay
    float.

    The input is (batch, input size), the states are (batch, hidden size), and weights and biases
    have 4 * hidden size rows. The quantizers take the concatenations.
    """
    h, c = hidden
    input, h = quantize_together(input_quantizer, input, h)
    w_ih, w_hh = quantize_together(weight_quantizer, w_ih, w_hh)
    return lstm_cell(F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh), c)


def quantize_together(
    quantizer: Quantizer | None, a: Tensor, b: Tensor
) -> Sequence[Tensor]:
    """Quantize the concatenation of two tensors, and split it again."""
    if quantizer is None:
        return a, b
    return quantizer(torch.cat([a, b], 1)).split([a.shape[1], b.shape[1]], 1)

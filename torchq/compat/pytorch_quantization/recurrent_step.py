"""One step of an LSTM, and one direction of a layer."""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

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
    input, h = _quantize_together(input_quantizer, input, h)
    w_ih, w_hh = _quantize_together(weight_quantizer, w_ih, w_hh)
    gates = F.linear(input, w_ih, b_ih) + F.linear(h, w_hh, b_hh)
    i, f, g, o = gates.chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _quantize_together(quantizer: Quantizer | None, a: Tensor, b: Tensor) -> Sequence[Tensor]:
    """Quantize the concatenation of two tensors, and split it again."""
    if quantizer is None:
        return a, b
    return quantizer(torch.cat([a, b], 1)).split([a.shape[1], b.shape[1]], 1)


def direction(
    steps: Sequence[Tensor],
    hidden: State,
    weights: Sequence[Tensor],
    input_quantizer: Quantizer,
    weight_quantizer: Quantizer,
    reverse: bool = False,
) -> tuple[list[Tensor], State]:
    """Run one layer in one direction over ``steps`` (batch, size), whose batch may shrink."""
    w_ih, w_hh = _quantize_together(weight_quantizer, weights[0], weights[1])
    b_ih, b_hh = weights[2:] if len(weights) > 2 else (None, None)
    h, c = hidden
    outputs = []
    for x in reversed(steps) if reverse else steps:
        n = x.shape[0]
        new_h, new_c = LSTMCell(x, (h[:n], c[:n]), w_ih, w_hh, b_ih, b_hh, input_quantizer)
        h, c = torch.cat([new_h, h[n:]]), torch.cat([new_c, c[n:]])
        outputs.append(new_h)
    return outputs[::-1] if reverse else outputs, (h, c)

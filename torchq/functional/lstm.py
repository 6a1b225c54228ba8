"""A whole LSTM sequence with a quantized hidden state, with a backward of its own.

A step is so small that, under autograd, most of its time goes into calls. Here a step is a handful
of operations that write into tensors for the whole sequence, and the gradient of the weight is one
product at the end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.formats import Format
from torchq.functional.recurrent import running_order
from torchq.functional.scale import divisor, scale_from_amax

__all__ = ["lstm_over_steps"]


def lstm_over_steps(
    start: Tensor,
    weight: Tensor,
    hidden: Tensor,
    cell: Tensor,
    amax: Tensor,
    format: Format,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Run an LSTM over sequences of equal length, with the hidden state quantized at each step.

    It equals :func:`torchq.functional.run_over_steps` with :func:`torchq.functional.lstm_cell` and
    :func:`torchq.functional.fake_quantize`. There is no gradient to ``amax``.

    Args:
        start: the products of the input, with all biases, flat: (steps * N, 4 * width).
        weight: of the hidden state, (4 * width, width).
        hidden: before the first step, (N, width).
        cell: before the first step, (N, width).
        amax: the range of the hidden state, 0-d, in the compute dtype.
        format: of the hidden state.
        reverse: run from the last step to the first.

    Returns:
        The outputs (steps * N, width), and hidden state and cell behind the last step.
    """
    outputs, cells = _LstmOverSteps.apply(start, weight, hidden, cell, amax, format, reverse)
    rows, last = hidden.shape[0], 0 if reverse else -1
    return outputs, outputs.view(-1, rows, outputs.shape[1])[last], cells[last]


class _LstmOverSteps(torch.autograd.Function):
    """Outputs, flat, and cells (steps, N, width)."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        weight: Tensor,
        hidden: Tensor,
        cell: Tensor,
        amax: Tensor,
        format: Format,
        reverse: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return outputs and cells."""
        rows, width = hidden.shape
        gates = start.view(-1, rows, 4 * width)
        active, per_step = torch.empty_like(gates), (gates.shape[0], rows, width)
        outputs, cells, squashed, operands = (start.new_empty(per_step) for _ in range(4))
        inside = start.new_empty(per_step, dtype=torch.bool)
        scale = scale_from_amax(amax, format)
        by, transposed = divisor(amax, scale), weight.t()
        h, c = hidden, cell
        for step in running_order(len(gates), reverse):
            operand, gate = operands[step], active[step]
            format.snap_(torch.div(h, by, out=operand)).mul_(scale)
            torch.le(h.abs(), amax, out=inside[step])
            torch.addmm(gates[step], operand, transposed, out=gate)
            first, forget, value, last = gate.chunk(4, 1)
            squeezed = value.tanh()
            gate.sigmoid_()
            value.copy_(squeezed)
            c = torch.mul(forget, c, out=cells[step]).addcmul_(first, value)
            h = torch.mul(last, torch.tanh(c, out=squashed[step]), out=outputs[step])
        ctx.save_for_backward(weight, cell, active, cells, squashed, operands, inside)
        ctx.reverse = reverse
        return outputs.view(-1, width), cells

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients to start, weight, hidden state and cell."""
        weight, cell, active, cells, squashed, operands, inside = ctx.saved_tensors
        of_outputs, of_cells = grads[0].view_as(cells), grads[1]
        of_gates = torch.empty_like(active)
        of_h, of_c = torch.zeros_like(cell), torch.zeros_like(cell)
        order = list(running_order(len(cells), ctx.reverse))
        before = [None, *order]
        for step, previous in zip(reversed(order), reversed(before[:-1]), strict=True):
            first, forget, value, last = active[step].chunk(4, 1)
            earlier = cell if previous is None else cells[previous]
            of_h = of_h.add_(of_outputs[step])
            of_c = of_c.add_(of_cells[step])
            of_c.add_(torch.ops.aten.tanh_backward(of_h * last, squashed[step]))
            upstream = torch.cat((of_c * value, of_c * earlier, of_c, of_h * squashed[step]), 1)
            torch.ops.aten.sigmoid_backward.grad_input(
                upstream, active[step], grad_input=of_gates[step]
            )
            of_gates[step].chunk(4, 1)[2].copy_(torch.ops.aten.tanh_backward(of_c * first, value))
            of_h = (of_gates[step] @ weight).mul_(inside[step])
            of_c = of_c.mul_(forget)
        flat = of_gates.flatten(0, 1)
        of_weight = flat.t() @ operands.flatten(0, 1) if ctx.needs_input_grad[1] else None
        return flat, of_weight, of_h, of_c, None, None, None

"""A whole sequence of an Elman network with a quantized hidden state, with its own backward.

See :mod:`torchq.functional.lstm`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.formats import Format
from torchq.functional.recurrent import running_order
from torchq.functional.scale import divisor, scale_from_amax

__all__ = ["rnn_over_steps"]


def rnn_over_steps(
    start: Tensor,
    weight: Tensor,
    hidden: Tensor,
    amax: Tensor,
    format: Format,
    nonlinearity: str,
    reverse: bool,
) -> tuple[Tensor, Tensor]:
    """Run an RNN over sequences of equal length, with the hidden state quantized at each step.

    It equals :func:`torchq.functional.run_over_steps` with :func:`torchq.functional.rnn_cell` and
    :func:`torchq.functional.fake_quantize`. There is no gradient to ``amax``.

    Args:
        start: the products of the input, with all biases, flat: (steps * N, width).
        weight: of the hidden state, (width, width).
        hidden: before the first step, (N, width).
        amax: the range of the hidden state, 0-d, in the compute dtype.
        format: of the hidden state.
        nonlinearity: "tanh" or "relu".
        reverse: run from the last step to the first.

    Returns:
        The outputs (steps * N, width), and the hidden state behind the last step.
    """
    outputs: Tensor = _RnnOverSteps.apply(
        start, weight, hidden, amax, format, nonlinearity == "tanh", reverse
    )
    return outputs, outputs.view(-1, *hidden.shape)[0 if reverse else -1]


class _RnnOverSteps(torch.autograd.Function):
    """Outputs, flat."""

    @staticmethod
    def forward(
        ctx: Any,
        start: Tensor,
        weight: Tensor,
        hidden: Tensor,
        amax: Tensor,
        format: Format,
        is_tanh: bool,
        reverse: bool,
    ) -> Tensor:
        """Return the outputs."""
        gates = start.view(-1, *hidden.shape)
        outputs, operands = torch.empty_like(gates), torch.empty_like(gates)
        inside = torch.empty_like(gates, dtype=torch.bool)
        scale = scale_from_amax(amax, format)
        by, transposed, h = divisor(amax, scale), weight.t(), hidden
        for step in running_order(len(gates), reverse):
            operand = operands[step]
            format.snap_(torch.div(h, by, out=operand)).mul_(scale)
            torch.le(h.abs(), amax, out=inside[step])
            h = torch.addmm(gates[step], operand, transposed, out=outputs[step])
            h = h.tanh_() if is_tanh else h.relu_()
        ctx.save_for_backward(weight, outputs, operands, inside)
        ctx.is_tanh, ctx.reverse = is_tanh, reverse
        return outputs.view(start.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients to start, weight and hidden state."""
        weight, outputs, operands, inside = ctx.saved_tensors
        of_outputs, of_gates = grads[0].view_as(outputs), torch.empty_like(outputs)
        # The slope of the nonlinearity follows from its result, for all steps at once.
        slopes = 1 - outputs.square() if ctx.is_tanh else (outputs > 0).to(outputs.dtype)
        of_h = torch.zeros_like(outputs[0])
        for step in reversed(running_order(len(outputs), ctx.reverse)):
            torch.mul(of_h.add_(of_outputs[step]), slopes[step], out=of_gates[step])
            of_h = (of_gates[step] @ weight).mul_(inside[step])
        flat = of_gates.flatten(0, 1)
        of_weight = flat.t() @ operands.flatten(0, 1) if ctx.needs_input_grad[1] else None
        return flat, of_weight, of_h, None, None, None, None

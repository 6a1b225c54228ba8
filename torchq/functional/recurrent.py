"""Recurrent cells, and the loop that runs one over a sequence.

A sequence is *flat*: all rows of step 0, then all rows of step 1, and so on. ``sizes`` says how
many rows each step has, which never grows from step to step, as in
:class:`torch.nn.utils.rnn.PackedSequence`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.functional.kernels import is_plain

__all__ = [
    "Product",
    "gru_cell",
    "lstm_cell",
    "rnn_cell",
    "run_over_steps",
    "running_order",
    "step_product",
    "supports_whole_sequences",
]

#: A product of each step: ``(index of the step, its operand)`` to the result.
Product = Callable[[int, Tensor], Tensor]


def lstm_cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and cell of an LSTM step.

    Args:
        gates: the sum of both products and both biases, (N, 4 * width): input, forget, cell and
            output gate, as in :class:`torch.nn.LSTM`.
        cell: the cell of the step before, (N, width).
    """
    first, forget, value, last = gates.chunk(4, -1)
    new = forget.sigmoid() * cell + first.sigmoid() * value.tanh()
    return last.sigmoid() * new.tanh(), new


def gru_cell(from_input: Tensor, from_hidden: Tensor, hidden: Tensor) -> Tensor:
    """Return the output of a GRU step.

    Args:
        from_input: the product of the input with its bias, (N, 3 * width): reset, update and new
            gate, as in :class:`torch.nn.GRU`.
        from_hidden: the product of the hidden state with its bias, of the same shape.
        hidden: the hidden state of the step before, (N, width).
    """
    sizes = [2 * hidden.shape[-1], hidden.shape[-1]]
    (gates, value), (more_gates, more_value) = (
        x.split(sizes, -1) for x in (from_input, from_hidden)
    )
    reset, update = (gates + more_gates).sigmoid().chunk(2, -1)
    new = (value + reset * more_value).tanh()
    return new + update * (hidden - new)


def rnn_cell(gates: Tensor, nonlinearity: str) -> Tensor:
    """Return the output of a step of an Elman network.

    Args:
        gates: the sum of both products and both biases, (N, width).
        nonlinearity: "tanh" or "relu".
    """
    return gates.tanh() if nonlinearity == "tanh" else gates.relu()


class _GradientOfAllSteps(torch.autograd.Function):
    """Identity of a flat sequence; its gradient also gives the weight's, in one product.

    Autograd alone would compute a product of the weight's size for each step, and add them up.
    The operands are noted while the steps run, between this forward and its backward.
    """

    @staticmethod
    def forward(ctx: Any, start: Tensor, weight: Tensor, operands: list[Tensor | None]) -> Tensor:
        """Return a view of ``start``."""
        ctx.operands, ctx.dtype = operands, weight.dtype
        return start.view_as(start)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the start, and ``grad.T @ operands`` for the weight."""
        (grad,) = grads
        steps = torch.cat([step for step in ctx.operands if step is not None])
        return grad, (grad.t() @ steps.to(grad.dtype)).to(ctx.dtype), None


def step_product(start: Tensor, weight: Tensor, sizes: Sequence[int]) -> Product:
    """Return a function that computes ``start[step] + operand @ weight.T`` for each step.

    Each step is computed once, in any order.

    Args:
        start: what is added to the products, flat, (sum of sizes, outputs).
        weight: (outputs, width).
        sizes: the rows of each step.
    """
    together = torch.is_grad_enabled() and weight.requires_grad and is_plain(weight)
    if not together or not is_plain(start):
        parts = start.split(list(sizes))
        return lambda step, operand: parts[step] + F.linear(operand, weight)
    operands: list[Tensor | None] = [None] * len(sizes)
    parts = _GradientOfAllSteps.apply(start, weight, operands).split(list(sizes))
    fixed = weight.detach()

    def product(step: int, operand: Tensor) -> Tensor:
        operands[step] = operand.detach()
        return parts[step] + F.linear(operand, fixed)

    return product


def run_over_steps(
    cell: Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...]],
    state: tuple[Tensor, ...],
    sizes: Sequence[int],
    reverse: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run ``cell`` over the steps of a flat sequence.

    Args:
        cell: maps the index of a step and the state of its rows to the new state, of which the
            first tensor is the output.
        state: the state before the first step, each (sizes[0], width).
        sizes: the rows of each step, from many to few.
        reverse: run from the last step to the first.

    Returns:
        The outputs, flat, and the state behind the last step of each row.
    """
    outputs: list[Tensor] = [state[0]] * len(sizes)
    if reverse:
        last = tuple(part[: sizes[-1]] for part in state)
        for step in reversed(range(len(sizes))):
            joining = [part[last[0].shape[0] : sizes[step]] for part in state]
            if joining[0].shape[0]:
                last = tuple(map(torch.cat, zip(last, joining, strict=True)))
            last = cell(step, last)
            outputs[step] = last[0]
        return torch.cat(outputs), last
    ended: list[tuple[Tensor, ...]] = []
    for step, size in enumerate(sizes):
        if size < state[0].shape[0]:
            ended.append(tuple(part[size:] for part in state))
            state = tuple(part[:size] for part in state)
        state = cell(step, state)
        outputs[step] = state[0]
    if ended:
        state = tuple(map(torch.cat, zip(state, *reversed(ended), strict=True)))
    return torch.cat(outputs), state


def running_order(steps: int, reverse: bool) -> range:
    """Return the indices of the steps in the order in which a direction runs them."""
    return range(steps - 1, -1, -1) if reverse else range(steps)


def supports_whole_sequences(*tensors: Tensor) -> bool:
    """Return True if functions with a backward of their own may run on these tensors now.

    They are ordinary tensors of one dtype, float32 or float64, with elements, and no autocast is
    on.
    """
    same = {tensor.dtype for tensor in tensors}
    return (
        all(map(is_plain, tensors))
        and tensors[0].numel() > 0
        and len(same) == 1
        and same <= {torch.float32, torch.float64}
        and not torch.is_autocast_enabled(tensors[0].device.type)
    )

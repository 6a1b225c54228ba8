"""Recurrent cells, and the loop that runs one over a sequence.

A sequence is *flat*: all rows of step 0, then all rows of step 1, and so on. ``sizes`` says how
many rows each step has, which never grows from step to step, as in
:class:`torch.nn.utils.rnn.PackedSequence`.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

#: A product of each step: ``(index of the step, its operand)`` to the result.
Product = Callable[[int, Tensor], Tensor]


def lstm_cell(gates: Tensor, cell: Tensor) -> tuple[Tensor, Tensor]:
    """Return output and cell (N, width) of an LSTM step from its gates (N, 4 * width) of torch."""
    input_gate, forget_gate, candidate, output_gate = gates.chunk(4, -1)
    new_cell = forget_gate.sigmoid() * cell + input_gate.sigmoid() * candidate.tanh()
    return output_gate.sigmoid() * new_cell.tanh(), new_cell


def gru_cell(from_input: Tensor, from_hidden: Tensor, hidden: Tensor) -> Tensor:
    """Return the output (N, width) of a GRU step from both products with biases (N, 3 * width)."""
    width = hidden.shape[-1]
    # torch stores reset and update gate, then the candidate of the new state.
    input_gates, input_candidate = from_input.split([2 * width, width], -1)
    hidden_gates, hidden_candidate = from_hidden.split([2 * width, width], -1)
    reset, update = (input_gates + hidden_gates).sigmoid().chunk(2, -1)
    candidate = (input_candidate + reset * hidden_candidate).tanh()
    result: Tensor = candidate + update * (hidden - candidate)
    return result


def step_product(start: Tensor, weight: Tensor, sizes: Sequence[int]) -> Product:
    """Return a function that computes ``start[step] + operand @ weight.T`` for each step.

    ``start`` is flat, (sum of sizes, outputs), and ``weight`` is (outputs, width).
    """
    parts = start.split(list(sizes))
    return lambda step, operand: parts[step] + F.linear(operand, weight)


def run_over_steps(
    cell: Callable[[int, tuple[Tensor, ...]], tuple[Tensor, ...]],
    state: tuple[Tensor, ...],
    sizes: Sequence[int],
    reverse: bool,
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Run ``cell`` over the steps of a flat sequence.

    ``cell`` maps the index of a step and the state of its rows to the new state, of which the first
    tensor is the output. ``state`` stands before the first step, each part (sizes[0], width). The
    result is the outputs, flat, and the state behind the last step of each row.
    """
    outputs: list[Tensor] = [state[0]] * len(sizes)
    if reverse:
        current = tuple(part[: sizes[-1]] for part in state)
        for step in reversed(range(len(sizes))):
            # Shorter sequences begin at an earlier step: their rows join with their first state.
            running = current[0].shape[0]
            joining = [part[running : sizes[step]] for part in state]
            if joining[0].shape[0]:
                current = tuple(map(torch.cat, zip(current, joining, strict=True)))
            current = cell(step, current)
            outputs[step] = current[0]
        return torch.cat(outputs), current
    ended: list[tuple[Tensor, ...]] = []
    for step, size in enumerate(sizes):
        running = state[0].shape[0]
        if size < running:
            # The shortest sequences stand last; their rows end here.
            ended.append(tuple(part[size:] for part in state))
            state = tuple(part[:size] for part in state)
        state = cell(step, state)
        outputs[step] = state[0]
    if ended:
        state = tuple(map(torch.cat, zip(state, *reversed(ended), strict=True)))
    return torch.cat(outputs), state

"""Recurrent layers without their products: what comes in and out, levels and directions."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq.errors import QuantizationError

State = tuple[Tensor, ...]


class RecurrentFlow(nn.Module):
    """Base of recurrent layers with the arguments and results of torch's; subclasses compute steps.

    The attributes are those of torch's layers. Inside, a sequence is *flat*, see
    :mod:`torchq.functional.recurrent`, and a state has one part, or two for an LSTM.
    """

    hidden_size: int
    num_layers: int
    batch_first: bool
    bidirectional: bool
    proj_size: int
    #: The number of tensors of a state.
    state_parts = 1

    def suffixes(self, level: int) -> tuple[str, ...]:
        """Return the ends of the parameter names of a level: one for each direction."""
        both = (f"_l{level}", f"_l{level}_reverse")
        return both if self.bidirectional else both[:1]

    def run_sequences(self, input: Any, hx: Any) -> Any:
        """Return the outputs and the last state; the arguments are those of torch's layer.

        Raises:
            QuantizationError: the sequence has no steps; torch's layers raise a RuntimeError too.
        """
        if isinstance(input, PackedSequence):
            data, batch_sizes, order, back = input
            sizes = [int(size) for size in batch_sizes]
            state = self._given_state(data, hx, sizes[0], True, batch_sizes)
            flat, last = self._run_levels(self._enter(data), sizes, _permuted(state, order))
            packed = PackedSequence(flat, batch_sizes, order, back)
            return packed, self._as_torch(_permuted(last, back))
        is_batched = input.dim() != 2
        batched = input if is_batched else input.unsqueeze(0 if self.batch_first else 1)
        rows = batched.shape[0 if self.batch_first else 1]
        state = self._given_state(batched, hx, rows, is_batched, None)
        x = self._enter(batched)
        x = x.transpose(0, 1) if self.batch_first else x
        steps = x.shape[0]
        if not torch.jit.is_tracing() and steps == 0:
            raise QuantizationError("input: got a sequence of 0 steps; expected at least one")
        flat, last = self._run_levels(x.flatten(0, 1), [rows] * steps, state)
        y = flat.view(steps, rows, flat.shape[-1])
        y = y.transpose(0, 1) if self.batch_first else y
        if not is_batched:
            y, last = y.squeeze(0 if self.batch_first else 1), tuple(p.squeeze(1) for p in last)
        return y, self._as_torch(last)

    def _given_state(
        self, input: Tensor, hx: Any, rows: int, is_batched: bool, batch_sizes: Tensor | None
    ) -> State:
        """Return the state to start from, each part (levels * directions, rows, width)."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        if hx is None:
            widths = (self.proj_size or self.hidden_size, self.hidden_size)[: self.state_parts]
            given: State = tuple(input.new_zeros(count, rows, width) for width in widths)
        else:
            given = hx if isinstance(hx, tuple) else (hx,)
            given = given if is_batched else tuple(part.unsqueeze(1) for part in given)
        if not torch.jit.is_tracing():  # There the check would compare sizes that are tensors.
            self._check(input, given, batch_sizes)
        return given

    def _check(self, input: Tensor, state: State, batch_sizes: Tensor | None) -> None:
        """Raise an error where torch's layer would: for other shapes."""
        raise NotImplementedError

    def _enter(self, x: Tensor) -> Tensor:
        """Return the input of the first level as the products read it."""
        return x

    def _between(self, x: Tensor, level: int) -> Tensor:
        """Return the output of a level as the products of the next, ``level``, read it."""
        return x

    def _as_torch(self, state: State) -> Any:
        """Return a state as torch's layer takes and returns it."""
        return state if self.state_parts > 1 else state[0]

    def _run_levels(self, x: Tensor, sizes: list[int], state: State) -> tuple[Tensor, State]:
        """Run all levels on a flat input that :meth:`_enter` returned."""
        ends: list[State] = []
        for level in range(self.num_layers):
            x = self._between(x, level) if level else x
            x, last = self._run_level(x, sizes, state, level)
            ends += last
        return x, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))

    def _run_level(
        self, x: Tensor, sizes: list[int], state: State, level: int
    ) -> tuple[Tensor, list[State]]:
        """Run one level on its flat input; return the last state of each direction."""
        found = []
        directions = self.suffixes(level)
        for number, end in enumerate(directions, level * len(directions)):
            own = tuple(part[number] for part in state)
            reverse = end.endswith("_reverse")
            found.append(self._run_direction(x, sizes, own, end, reverse))
        outputs = [y for y, _ in found]
        y = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        return y, [last for _, last in found]

    def _run_direction(
        self, x: Tensor, sizes: list[int], state: State, end: str, reverse: bool
    ) -> tuple[Tensor, State]:
        """Run one direction of a level; return its outputs, flat, and its last state.

        Args:
            x: the flat input.
            sizes: the rows of each step.
            state: before the first step.
            end: of the parameter names.
            reverse: run from the last step to the first.
        """
        raise NotImplementedError


def _permuted(state: State, order: Tensor | None) -> State:
    """Return the rows of a state in another order."""
    return state if order is None else tuple(part.index_select(1, order) for part in state)

"""Quantized LSTM, GRU and RNN layers: input, hidden state and weights of every product.

A layer with several levels, directions or projections has a quantizer for each of its weights, for
the input of each level, and for each hidden state; their names end as those of torch's parameters
do (``weight_hh_l1_reverse_quantizer``).
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from torchq.descriptor import QuantDescriptor
from torchq.errors import QuantizationError
from torchq.functional.recurrent import (
    gru_cell,
    lstm_cell,
    run_over_steps,
    step_product,
)
from torchq.nn.convert import QuantModule, register
from torchq.nn.modules.attention import is_passive
from torchq.nn.tensor_quantizer import TensorQuantizer

State = tuple[Tensor, ...]


def _permuted(state: State, order: Tensor | None) -> State:
    """Return the rows of a state in another order."""
    return (
        state if order is None else tuple(part.index_select(1, order) for part in state)
    )


class StepQuantizer:
    """A quantizer that is called at each step; what it only observes, it sees at once."""

    def __init__(self, quantizer: nn.Module) -> None:
        self._quantizer = quantizer
        self._notes = (
            isinstance(quantizer, TensorQuantizer) and not quantizer.quantizing
        )
        self._noted: list[Tensor] = []

    def __call__(self, x: Tensor) -> Tensor:
        """Return ``x`` quantized, or note it for :meth:`finish`."""
        if self._notes:
            self._noted.append(x)
            return x
        return cast(Tensor, self._quantizer(x))

    def finish(self) -> None:
        """Show the quantizer what was noted."""
        if self._noted and not is_passive(self._quantizer):
            self._quantizer(torch.cat(self._noted))


class QuantRecurrent(QuantModule, nn.RNNBase):
    """Base of the quantized recurrent layers; state dicts have the keys of torch's layer.

    With every quantizer off this is torch's own forward, bit for bit. If the hidden states stay
    float, torch's fused kernel runs on quantized inputs and weights. Else the steps are run one by
    one, since each quantizes the hidden state of the step before. Biases and the cell of an LSTM
    stay float. Inside, a sequence is *flat*, see :mod:`torchq.functional.recurrent`.
    """

    #: The number of tensors of a state.
    state_parts = 1
    input_slots = ("input_l0", "hidden_l0")
    weight_slots = ("weight_ih_l0", "weight_hh_l0")

    @classmethod
    def slot_descriptors(
        cls, input: QuantDescriptor | None, weight: QuantDescriptor | None
    ) -> dict[str, QuantDescriptor | None]:
        """Return the rule's descriptors; the hidden state is signed."""
        is_unsigned = input is not None and input.unsigned is True
        hidden = (
            input.replace(unsigned=False)
            if input is not None and is_unsigned
            else input
        )
        inputs = {"input_l0": input, "hidden_l0": hidden}
        return inputs | dict.fromkeys(cls.weight_slots, weight)

    def suffixes(self, level: int) -> tuple[str, ...]:
        """Return the ends of the parameter names of a level: one for each direction."""
        both = (f"_l{level}", f"_l{level}_reverse")
        return both if self.bidirectional else both[:1]

    def all_slots(self) -> dict[str, str]:
        """Return every slot of this layer with the slot of level 0 whose descriptor it has."""
        like_by_slot = {}
        for level in range(self.num_layers):
            like_by_slot[f"input_l{level}"] = "input_l0"
            for end in self.suffixes(level):
                of_end = {"hidden": "hidden_l0", "weight_ih": "weight_ih_l0"}
                of_end["weight_hh"] = "weight_hh_l0"
                if self.proj_size:
                    of_end |= {"projected": "hidden_l0", "weight_hr": "weight_hh_l0"}
                like_by_slot.update(
                    {f"{kind}{end}": like for kind, like in of_end.items()}
                )
        return like_by_slot

    def attach_quantizers(self, **descriptors: QuantDescriptor | None) -> None:
        """Add the quantizers of all levels and directions, like those of level 0."""
        expanded = {slot: descriptors[like] for slot, like in self.all_slots().items()}
        super().attach_quantizers(**expanded)

    def detach_quantizers(self) -> None:
        """Remove the quantizers of all levels and directions."""
        self.on_revert()
        for slot in self.all_slots():
            delattr(self, f"{slot}_quantizer")

    def quantized_weights(self) -> Iterator[tuple[TensorQuantizer, Tensor]]:
        """Yield each weight quantizer with its weight."""
        for slot in self.all_slots():
            quantizer = self.quantizer(slot)
            if slot.startswith("weight") and isinstance(quantizer, TensorQuantizer):
                yield quantizer, cast(Tensor, getattr(self, slot))

    def quantizer(self, slot: str) -> nn.Module:
        """Return the quantizer of a slot."""
        return cast(nn.Module, getattr(self, f"{slot}_quantizer"))

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Return the outputs and the last state; the arguments are those of torch's layer."""
        if all(is_passive(self.quantizer(slot)) for slot in self.all_slots()):
            return super().forward(input, hx)
        enter = self.quantizer("input_l0")
        if isinstance(input, PackedSequence):
            data, batch_sizes, order, back = input
            sizes = [int(size) for size in batch_sizes]
            state = self._given_state(data, hx, sizes[0], True, batch_sizes)
            flat, last = self._run_levels(enter(data), sizes, _permuted(state, order))
            packed = PackedSequence(flat, batch_sizes, order, back)
            return packed, self._as_torch(_permuted(last, back))
        is_batched = input.dim() != 2
        batched = input if is_batched else input.unsqueeze(0 if self.batch_first else 1)
        rows = batched.shape[0 if self.batch_first else 1]
        state = self._given_state(batched, hx, rows, is_batched, None)
        x = enter(batched)
        x = x.transpose(0, 1) if self.batch_first else x
        steps = x.shape[0]
        if not torch.jit.is_tracing() and steps == 0:
            raise QuantizationError(
                "input: got a sequence of 0 steps; expected at least one"
            )
        flat, last = self._run_levels(x.flatten(0, 1), [rows] * steps, state)
        y = flat.view(steps, rows, flat.shape[-1])
        y = y.transpose(0, 1) if self.batch_first else y
        if not is_batched:
            y, last = (
                y.squeeze(0 if self.batch_first else 1),
                tuple(p.squeeze(1) for p in last),
            )
        return y, self._as_torch(last)

    def _given_state(
        self,
        input: Tensor,
        hx: object,
        rows: int,
        is_batched: bool,
        batch_sizes: Tensor | None,
    ) -> State:
        """Return the state to start from, each part (levels * directions, rows, width)."""
        count = self.num_layers * (2 if self.bidirectional else 1)
        if hx is None:
            widths = (self.proj_size or self.hidden_size, self.hidden_size)[
                : self.state_parts
            ]
            initial: State = tuple(
                input.new_zeros(count, rows, width) for width in widths
            )
        else:
            initial = hx if isinstance(hx, tuple) else (hx,)
            initial = (
                initial if is_batched else tuple(part.unsqueeze(1) for part in initial)
            )
        # There the check would compare sizes that are tensors.
        if not torch.jit.is_tracing():
            self.check_forward_args(input, self._as_torch(initial), batch_sizes)
        return initial

    def _as_torch(self, state: State) -> Any:
        """Return a state as torch's layer takes and returns it."""
        return state if self.state_parts > 1 else state[0]

    def _run_levels(
        self, x: Tensor, sizes: list[int], state: State
    ) -> tuple[Tensor, State]:
        """Run all levels on a flat, quantized input."""
        ends: list[State] = []
        for level in range(self.num_layers):
            if level:
                dropped = F.dropout(x, self.dropout, self.training)
                x = self.quantizer(f"input_l{level}")(dropped)
            x, last = self._run_level(x, sizes, state, level)
            ends += last
        return x, tuple(torch.stack(parts) for parts in zip(*ends, strict=True))

    def _run_level(
        self, x: Tensor, sizes: list[int], state: State, level: int
    ) -> tuple[Tensor, list[State]]:
        """Run one level, by torch's own kernel where its hidden states stay float."""
        directions = self.suffixes(level)
        first = level * len(directions)
        level_state = tuple(part[first : first + len(directions)] for part in state)
        if all(is_passive(q) for end in directions for q in self._step_quantizers(end)):
            return self._run_fused(x, sizes, level_state, directions)
        runs = [
            self._run_direction(
                x, sizes, tuple(part[number] for part in level_state), end
            )
            for number, end in enumerate(directions)
        ]
        outputs = [y for y, _ in runs]
        y = torch.cat(outputs, -1) if len(outputs) > 1 else outputs[0]
        return y, [last for _, last in runs]

    @property
    def has_quantized_state(self) -> bool:
        """True if a hidden state is quantized, so that the steps run one by one."""
        ends = [end for level in range(self.num_layers) for end in self.suffixes(level)]
        quantizers = [q for end in ends for q in self._step_quantizers(end)]
        return not all(map(is_passive, quantizers))

    def _step_quantizers(self, end: str) -> list[nn.Module]:
        """Return the quantizers that run at each step of a direction."""
        kinds = ("hidden", "projected") if self.proj_size else ("hidden",)
        return [self.quantizer(f"{kind}{end}") for kind in kinds]

    def _weights(self, end: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return the quantized weights and the biases of a direction."""
        kinds = ("weight_ih", "weight_hh", *(("weight_hr",) if self.proj_size else ()))
        weights = [
            self.quantizer(f"{k}{end}")(getattr(self, f"{k}{end}")) for k in kinds
        ]
        return weights, [
            getattr(self, f"{k}{end}") for k in ("bias_ih", "bias_hh") if self.bias
        ]

    def _run_direction(
        self, x: Tensor, sizes: list[int], state: State, end: str
    ) -> tuple[Tensor, State]:
        """Run one direction of a level; return its outputs, flat, and its last state."""
        weights, biases = self._weights(end)
        quantizers = self._step_quantizers(end)
        steps = [StepQuantizer(quantizer) for quantizer in quantizers]
        cell = self._make_cell(x, sizes, weights, biases, steps)
        result = run_over_steps(cell, state, sizes, end.endswith("_reverse"))
        for quantizer in steps:
            quantizer.finish()
        return result

    def _run_fused(
        self, x: Tensor, sizes: list[int], state: State, directions: tuple[str, ...]
    ) -> tuple[Tensor, list[State]]:
        """Run one level by torch's own kernel."""
        kernel_weights: list[Tensor] = []
        for weights, biases in map(self._weights, directions):
            kernel_weights += [*weights[:2], *biases, *weights[2:]]
        options = (self.bias, 1, 0.0, self.training, len(directions) > 1)
        hx: object = self._as_torch(state)
        # In a padded sequence all sizes are one object, which may stand for an open dimension.
        if all(size is sizes[0] for size in sizes):
            steps = x.view(len(sizes), sizes[0], x.shape[-1])
            y, *last = self._call_kernel(steps, hx, kernel_weights, *options, False)
            y = y.flatten(0, 1)
        else:
            y, *last = self._call_kernel(
                x, torch.tensor(sizes, device="cpu"), hx, kernel_weights, *options
            )
        ends = [
            tuple(part[number] for part in last) for number in range(len(directions))
        ]
        return y, ends

    def _call_kernel(self, *args: object) -> Any:
        """Call torch's function; its arguments are those of padded or of packed sequences."""
        raise NotImplementedError

    def _make_cell(
        self,
        x: Tensor,
        sizes: Sequence[int],
        weights: list[Tensor],
        biases: list[Tensor],
        quantizers: list[StepQuantizer],
    ) -> Callable[[int, State], State]:
        """Return the function of one step for :func:`run_over_steps`."""
        gates = F.linear(x, weights[0], biases[0] + biases[1] if biases else None)
        product = step_product(gates, weights[1], sizes)

        def cell(step: int, state: State) -> State:
            output, *memory = self._after_gates(
                product(step, quantizers[0](state[0])), state
            )
            if self.proj_size:
                output = F.linear(quantizers[1](output), weights[2])
            return output, *memory

        return cell

    def _after_gates(self, gates: Tensor, state: State) -> State:
        """Return the new state of a step from the sum of both products and the state before."""
        raise NotImplementedError


@register(nn.LSTM)
class QuantLSTM(QuantRecurrent, nn.LSTM):
    """Quantized :class:`torch.nn.LSTM`: the same arguments, results and parameters."""

    state_parts = 2

    def _call_kernel(self, *args: Any) -> Any:
        """Call torch's LSTM."""
        return torch.lstm(*args)

    def _after_gates(self, gates: Tensor, state: State) -> State:
        return lstm_cell(gates, state[1])


@register(nn.GRU)
class QuantGRU(QuantRecurrent, nn.GRU):
    """Quantized :class:`torch.nn.GRU`: the same arguments, results and parameters."""

    def _call_kernel(self, *args: Any) -> Any:
        """Call torch's GRU."""
        return torch.gru(*args)

    def _make_cell(
        self,
        x: Tensor,
        sizes: Sequence[int],
        weights: list[Tensor],
        biases: list[Tensor],
        quantizers: list[StepQuantizer],
    ) -> Callable[[int, State], State]:
        inputs = F.linear(x, weights[0], biases[0] if biases else None)
        # The reset gate multiplies this bias, so it belongs to the product of the hidden state.
        bias = biases[1] if biases else inputs.new_zeros(inputs.shape[1])
        product = step_product(
            bias.to(inputs.dtype).expand_as(inputs), weights[1], sizes
        )
        parts = inputs.split(list(sizes))

        def cell(step: int, state: State) -> State:
            (hidden,) = state
            return (
                gru_cell(parts[step], product(step, quantizers[0](hidden)), hidden),
            )

        return cell


@register(nn.RNN)
class QuantRNN(QuantRecurrent, nn.RNN):
    """Quantized :class:`torch.nn.RNN`: the same arguments, results and parameters."""

    def _call_kernel(self, *args: Any) -> Any:
        """Call torch's RNN with the layer's nonlinearity."""
        return (torch.rnn_tanh if self.nonlinearity == "tanh" else torch.rnn_relu)(
            *args
        )

    def _after_gates(self, gates: Tensor, state: State) -> State:
        return (gates.tanh() if self.nonlinearity == "tanh" else gates.relu(),)

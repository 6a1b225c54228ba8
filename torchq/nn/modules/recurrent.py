"""Quantized LSTM, GRU and RNN layers: input, hidden state and weights of every gate product.

A layer with several levels, directions or projections has a quantizer for each of its weights, for
the input of each level, and for each hidden state; their names end as those of torch's parameters
do (``weight_hh_l1_reverse_quantizer``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.functional import (
    gru_cell,
    lstm_cell,
    rnn_cell,
    run_over_steps,
    step_product,
)
from torchq.nn.convert import QuantModule, register
from torchq.nn.modules.attention import is_passive
from torchq.nn.modules.recurrent_flow import RecurrentFlow, State
from torchq.nn.modules.recurrent_steps import StepQuantizer, hidden_descriptor
from torchq.nn.tensor_quantizer import TensorQuantizer


class QuantRecurrent(RecurrentFlow, QuantModule, nn.RNNBase):
    """Base of the quantized recurrent layers; state dicts have the keys of torch's layer.

    With every quantizer off this is torch's own forward, bit for bit. If the hidden states stay
    float, torch's fused kernel runs on quantized inputs and weights. Else the steps are run one by
    one, since each quantizes the hidden state of the step before. Biases and the cell of an LSTM
    stay float.
    """

    input_slots = ("input_l0", "hidden_l0")
    weight_slots = ("weight_ih_l0", "weight_hh_l0")

    @classmethod
    def slot_descriptors(
        cls, input: QuantDescriptor | None, weight: QuantDescriptor | None
    ) -> dict[str, QuantDescriptor | None]:
        """Return the rule's descriptors; the hidden state is signed."""
        inputs = {"input_l0": input, "hidden_l0": hidden_descriptor(input)}
        return inputs | dict.fromkeys(cls.weight_slots, weight)

    def all_slots(self) -> dict[str, str]:
        """Return every slot of this layer with the slot of level 0 whose descriptor it has."""
        found = {}
        for level in range(self.num_layers):
            found[f"input_l{level}"] = "input_l0"
            for end in self.suffixes(level):
                own = {"hidden": "hidden_l0", "weight_ih": "weight_ih_l0"}
                own["weight_hh"] = "weight_hh_l0"
                if self.proj_size:
                    own |= {"projected": "hidden_l0", "weight_hr": "weight_hh_l0"}
                found.update({f"{kind}{end}": like for kind, like in own.items()})
        return found

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
        return self.run_sequences(input, hx)

    def _check(self, input: Tensor, state: State, batch_sizes: Tensor | None) -> None:
        self.check_forward_args(input, self._as_torch(state), batch_sizes)

    def _enter(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.quantizer("input_l0")(x))

    def _between(self, x: Tensor, level: int) -> Tensor:
        dropped = F.dropout(x, self.dropout, self.training)
        return cast(Tensor, self.quantizer(f"input_l{level}")(dropped))

    def _run_level(
        self, x: Tensor, sizes: list[int], state: State, level: int
    ) -> tuple[Tensor, list[State]]:
        """Run one level, by torch's own kernel where its hidden states stay float."""
        directions = self.suffixes(level)
        if not all(is_passive(q) for end in directions for q in self._step_quantizers(end)):
            return super()._run_level(x, sizes, state, level)
        first = level * len(directions)
        own = tuple(part[first : first + len(directions)] for part in state)
        return self._run_fused(x, sizes, own, directions)

    def _step_quantizers(self, end: str) -> list[nn.Module]:
        """Return the quantizers that run at each step of a direction."""
        kinds = ("hidden", "projected") if self.proj_size else ("hidden",)
        return [self.quantizer(f"{kind}{end}") for kind in kinds]

    def _weights(self, end: str) -> tuple[list[Tensor], list[Tensor]]:
        """Return the quantized weights and the biases of a direction."""
        kinds = ("weight_ih", "weight_hh", *(("weight_hr",) if self.proj_size else ()))
        weights = [self.quantizer(f"{k}{end}")(getattr(self, f"{k}{end}")) for k in kinds]
        return weights, [getattr(self, f"{k}{end}") for k in ("bias_ih", "bias_hh") if self.bias]

    def _run_direction(
        self, x: Tensor, sizes: list[int], state: State, end: str, reverse: bool
    ) -> tuple[Tensor, State]:
        weights, biases = self._weights(end)
        quantizers = self._step_quantizers(end)
        steps = [StepQuantizer(quantizer) for quantizer in quantizers]
        cell = self._make_cell(x, sizes, weights, biases, steps)
        result = run_over_steps(cell, state, sizes, reverse)
        for quantizer in steps:
            quantizer.finish()
        return result

    def _run_fused(
        self, x: Tensor, sizes: list[int], state: State, directions: tuple[str, ...]
    ) -> tuple[Tensor, list[State]]:
        """Run one level by torch's own kernel."""
        given: list[Tensor] = []
        for weights, biases in map(self._weights, directions):
            given += [*weights[:2], *biases, *weights[2:]]
        options = (self.bias, 1, 0.0, self.training, len(directions) > 1)
        hx: Any = self._as_torch(state)
        # In a padded sequence all sizes are one object, which may stand for an open dimension.
        if all(size is sizes[0] for size in sizes):
            steps = x.view(len(sizes), sizes[0], x.shape[-1])
            y, *last = self._call_kernel(steps, hx, given, *options, False)
            y = y.flatten(0, 1)
        else:
            y, *last = self._call_kernel(x, torch.tensor(sizes, device="cpu"), hx, given, *options)
        ends = [tuple(part[number] for part in last) for number in range(len(directions))]
        return y, ends

    def _call_kernel(self, *args: Any) -> Any:
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
        """Return the function of one step for :func:`torchq.functional.run_over_steps`.

        Args:
            x: the flat input, quantized.
            sizes: the rows of each step.
            weights: of the input, of the hidden state, and of the projection if there is one.
            biases: of the input and of the hidden state, or none.
            quantizers: of the hidden state, and of what is projected.
        """
        product = step_product(_all_gates(x, weights[0], biases), weights[1], sizes)

        def cell(step: int, state: State) -> State:
            output, *rest = self._after_gates(product(step, quantizers[0](state[0])), state)
            if self.proj_size:
                output = F.linear(quantizers[1](output), weights[2])
            return output, *rest

        return cell

    def _after_gates(self, gates: Tensor, state: State) -> State:
        """Return the new state of a step from the sum of both products and the state before."""
        raise NotImplementedError


def _all_gates(x: Tensor, weight: Tensor, biases: list[Tensor]) -> Tensor:
    """Return the product of the input with both biases, for all steps at once."""
    return F.linear(x, weight, biases[0] + biases[1] if biases else None)


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
        product = step_product(bias.to(inputs.dtype).expand_as(inputs), weights[1], sizes)
        parts = inputs.split(list(sizes))

        def cell(step: int, state: State) -> State:
            (hidden,) = state
            return (gru_cell(parts[step], product(step, quantizers[0](hidden)), hidden),)

        return cell


@register(nn.RNN)
class QuantRNN(QuantRecurrent, nn.RNN):
    """Quantized :class:`torch.nn.RNN`: the same arguments, results and parameters."""

    def _call_kernel(self, *args: Any) -> Any:
        """Call torch's RNN with the layer's nonlinearity."""
        return (torch.rnn_tanh if self.nonlinearity == "tanh" else torch.rnn_relu)(*args)

    def _after_gates(self, gates: Tensor, state: State) -> State:
        return (rnn_cell(gates, self.nonlinearity),)

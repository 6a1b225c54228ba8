"""Recurrent layers and cells whose products run on integer kernels; the gates stay float."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from torchq.errors import InputError
from torchq.formats import PerTensor
from torchq.functional import gru_cell, lstm_cell, rnn_cell, run_over_steps
from torchq.lowering.modules.dynamic_linear import DynamicInt8Linear
from torchq.lowering.modules.input_checks import smallest_value
from torchq.lowering.modules.linear import Int8Linear
from torchq.lowering.registry import LOWERINGS, active, as_linear, lower
from torchq.nn import (
    QuantGRU,
    QuantGRUCell,
    QuantLSTM,
    QuantLSTMCell,
    QuantModule,
    QuantRNN,
    QuantRNNCell,
)
from torchq.nn.modules.recurrent import QuantRecurrent, RecurrentFlow, State

__all__ = ["DeployedRecurrent", "DeployedRecurrentCell"]

Product = Int8Linear | DynamicInt8Linear
#: ``(product of the input, product of the hidden state, state)`` to the new state.
Cell = Callable[[Tensor, Tensor, State], State]

#: The plain attributes that are those of the float layer.
_SETTINGS = ("input_size", "hidden_size", "num_layers", "batch_first", "bidirectional", "proj_size")

#: Kind of layer -> what follows its two products.
_CELLS: dict[str, Cell] = {
    "LSTM": lambda x, h, state: lstm_cell(x.add_(h), state[1]),
    "GRU": lambda x, h, state: (gru_cell(x, h, state[0]),),
    "RNN tanh": lambda x, h, state: (rnn_cell(x.add_(h), "tanh"),),
    "RNN relu": lambda x, h, state: (rnn_cell(x.add_(h), "relu"),),
}


class DeployedRecurrent(RecurrentFlow):
    """A recurrent layer for inference with its products on integer kernels.

    Arguments and results of :meth:`forward` are those of torch's layer. The product of the input is
    computed for all steps at once, that of the hidden state at each step. Gates and the cell of an
    LSTM are computed in floating point, as in the simulation.

    Args:
        module: the layer that this one replaces; it gives everything but the products.
        products: by the name of the weight, such as ``weight_hh_l0``.
    """

    def __init__(self, module: QuantRecurrent, products: dict[str, Product]) -> None:
        super().__init__()
        for name in _SETTINGS:
            setattr(self, name, getattr(module, name))
        self.kind = _kind(module)
        self.state_parts = module.state_parts
        self.products = nn.ModuleDict({name: _reading_codes(p) for name, p in products.items()})

    def forward(self, input: Any, hx: Any = None) -> Any:
        """Return the outputs and the last state.

        Raises:
            InputError: a shape does not fit the layer.
            TypeError: the input has another dtype than the layer.
            QuantizationError: the input or the given state holds NaN, and its range is fixed.
        """
        return self.run_sequences(input, hx)

    def _check(self, input: Tensor, state: State, batch_sizes: Tensor | None) -> None:
        """Raise an error for shapes that torch's layer refuses."""
        ndim = 3 if batch_sizes is None else 2
        if input.dim() != ndim or input.shape[-1] != self.input_size:
            raise InputError(
                f"{self.kind}: got an input of shape {tuple(input.shape)}; expected {ndim} "
                f"dimensions, the last of {self.input_size}"
            )
        rows = input.shape[0 if self.batch_first else 1]
        rows = rows if batch_sizes is None else int(batch_sizes[0])
        count = self.num_layers * (2 if self.bidirectional else 1)
        widths = (self.proj_size or self.hidden_size, self.hidden_size)[: self.state_parts]
        shapes = [tuple(part.shape) for part in state]
        expected = [(count, rows, width) for width in widths]
        if shapes != expected:
            raise InputError(f"{self.kind}: got a state of shapes {shapes}; expected {expected}")

    def _run_direction(
        self, x: Tensor, sizes: list[int], state: State, end: str, reverse: bool
    ) -> tuple[Tensor, State]:
        of_input, hidden = (self.products[f"{kind}{end}"] for kind in ("weight_ih", "weight_hh"))
        parts = of_input(_codes(of_input, x)).split(sizes)
        projected: Any = self.products[f"weight_hr{end}"] if self.proj_size else None
        follow = _CELLS[self.kind]
        smallest_value(state[0], None, self.kind)  # NaN; the states that follow are finite.

        def cell(step: int, state: State) -> State:
            output, *rest = follow(parts[step], hidden(_quantized(hidden, state[0])), state)
            if projected is not None:
                output = projected(_quantized(projected, output))
            return output, *rest

        return run_over_steps(cell, state, sizes, reverse)

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`.

        The products have rows of their own.
        """
        return "float", 0, "gates, step by step"

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        return f"{self.kind}, {self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"


class DeployedRecurrentCell(nn.Module):
    """A recurrent cell for inference with both products on integer kernels.

    Args:
        module: the cell that this one replaces.
        from_input: the product of the input.
        from_hidden: the product of the hidden state.
    """

    def __init__(self, module: nn.RNNCellBase, from_input: Product, from_hidden: Product) -> None:
        super().__init__()
        self.kind, self.hidden_size = _kind(module), module.hidden_size
        self.from_input, self.from_hidden = map(_reading_codes, (from_input, from_hidden))

    def forward(self, input: Tensor, hx: Any = None) -> Any:
        """Return the next state; the arguments are those of torch's cell.

        Raises:
            TypeError: the input has another dtype than the layer.
            QuantizationError: the input or the given state holds NaN, and its range is fixed.
        """
        if hx is None:
            zeros = input.new_zeros(*input.shape[:-1], self.hidden_size)
            hx = (zeros, zeros) if self.kind == "LSTM" else zeros
        state: State = hx if isinstance(hx, tuple) else (hx,)
        from_input = self.from_input(_codes(self.from_input, input))
        from_hidden = self.from_hidden(_codes(self.from_hidden, state[0]))
        new = _CELLS[self.kind](from_input, from_hidden, state)
        return new if self.kind == "LSTM" else new[0]

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`."""
        return "float", 0, "gates"


def _kind(module: nn.Module) -> str:
    """Return the key of :data:`_CELLS` for a layer or cell."""
    if isinstance(module, nn.LSTM | nn.LSTMCell):
        return "LSTM"
    if isinstance(module, nn.GRU | nn.GRUCell):
        return "GRU"
    return f"RNN {module.nonlinearity}"


def _reading_codes(product: Product) -> Product:
    """Return a product that reads codes if it can: given numbers, it would look at each."""
    if isinstance(product, Int8Linear):
        product.reads_codes = True
    return product


def _codes(product: nn.Module, x: Tensor) -> Tensor:
    """Return what a product reads for ``x``, which is looked at."""
    return product.codes(x) if isinstance(product, Int8Linear) else x


def _quantized(product: nn.Module, x: Tensor) -> Tensor:
    """Return what a product reads for ``x``, which holds no NaN."""
    return product.input_qparams.quantize(x) if isinstance(product, Int8Linear) else x


@LOWERINGS.register(QuantLSTM)
@LOWERINGS.register(QuantGRU)
@LOWERINGS.register(QuantRNN)
def _recurrent(module: QuantModule, reduce_range: bool) -> nn.Module | str:
    assert isinstance(module, QuantRecurrent)
    products: dict[str, Product] = {}
    for level in range(module.num_layers):
        for end in module.suffixes(level):
            sources = {"weight_ih": f"input_l{level}", "weight_hh": f"hidden{end}"}
            if module.proj_size:
                sources["weight_hr"] = f"projected{end}"
            biases = _biases(module, end)
            for kind, source in sources.items():
                slot = f"{kind}{end}"
                product = _product(module, source, slot, biases.get(kind), reduce_range)
                if isinstance(product, str):
                    return product
                products[slot] = product
    return DeployedRecurrent(module, products)


@LOWERINGS.register(QuantLSTMCell)
@LOWERINGS.register(QuantGRUCell)
@LOWERINGS.register(QuantRNNCell)
def _cell(module: QuantModule, reduce_range: bool) -> nn.Module | str:
    assert isinstance(module, nn.RNNCellBase)
    biases, found = _biases(module, ""), []
    for kind, source in (("weight_ih", "input"), ("weight_hh", "hidden")):
        product = _product(module, source, kind, biases.get(kind), reduce_range)
        if isinstance(product, str):
            return product
        found.append(product)
    return DeployedRecurrentCell(module, *found)


def _biases(module: Any, end: str) -> dict[str, Tensor]:
    """Return the bias of each product; only the reset gate of a GRU keeps the two apart."""
    if not module.bias:
        return {}
    of_input, of_hidden = getattr(module, f"bias_ih{end}"), getattr(module, f"bias_hh{end}")
    if _kind(module) == "GRU":
        return {"weight_ih": of_input, "weight_hh": of_hidden}
    return {"weight_ih": of_input + of_hidden}


def _product(
    module: nn.Module, source: str, slot: str, bias: Tensor | None, reduce_range: bool
) -> Product | str:
    """Return one product of a recurrent layer, or why it has no integer kernel."""
    of_input, of_weight = (getattr(module, f"{name}_quantizer") for name in (source, slot))
    if active(of_input) is None:
        return f"{source} stays float"
    if not isinstance(of_input.descriptor.granularity, PerTensor):
        return f"{source} has more than one range"
    weight = getattr(module, slot)
    product = lower(as_linear(weight, bias, of_input, of_weight), reduce_range)
    if isinstance(product, str):
        return f"{slot}: {product}"
    return product if isinstance(product, Product) else f"{slot} has no integer product"

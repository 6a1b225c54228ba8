"""A second length for each open dimension of a file, where the float model accepts one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import TorchqError
from torchq.graph import call_arguments, call_model, map_tensors
from torchq.nn import switched_off
from torchq.onnx.interface import input_names_of, nested_tensors
from torchq.onnx.ir import Model, first_line
from torchq.onnx.verify.report import Verdict
from torchq.workflow import quantizers

#: The length that an open batch gets, and another one where it has that.
_ROWS = (3, 2)


def open_dimensions(graph: Model) -> dict[str, list[tuple[str, int]]]:
    """Return the inputs and their dimensions that have each open length of a file, by its name."""
    dims_by_length: dict[str, list[tuple[str, int]]] = {}
    for value in graph.graph.inputs:
        for dim, length in enumerate(() if value.shape is None else value.shape):
            if not isinstance(length, int):
                name = str(getattr(length, "value", None) or f"{value.name}_{dim}")
                dims_by_length.setdefault(name, []).append((str(value.name), dim))
    return dims_by_length


def resized(
    model: nn.Module, batch: object, inputs: list[str], places: list[tuple[str, int]]
) -> Any:
    """Return a batch with another length in some dimensions, by repeating what is there.

    Args:
        model: takes the batch.
        batch: arguments of one call.
        inputs: the inputs of the file, in order.
        places: names of inputs, and dimensions that have one length.
    """
    args, kwargs = call_arguments(model, batch)
    tensors = nested_tensors(model, args, kwargs)
    names = dict(zip(input_names_of(model, tensors), tensors.values(), strict=True))
    if not all(name in names for name in inputs):
        names = dict(zip(inputs, tensors.values(), strict=False))
    new: dict[int, Tensor] = {}
    for name, dim in places:
        original = names[name]
        tensor = new.get(id(original), original)
        new[id(original)] = tensor.index_select(dim, _places(tensor, dim))
    changed_args, changed_kwargs = (
        map_tensors(part, lambda tensor: new.get(id(tensor), tensor))
        for part in (args, kwargs)
    )
    return changed_kwargs or changed_args


def _places(tensor: Tensor, dim: int) -> Tensor:
    """Return which elements of a dimension the new one holds."""
    old = tensor.shape[dim]
    # Some models need lengths that 32 divides; rows of a batch are few.
    count = 2 * old if dim else next(rows for rows in _ROWS if rows != old)
    return torch.arange(count, device=tensor.device) % old


class Sizes:
    """The verdicts on the open dimensions of a file.

    Args:
        graph: the file.
        model: the quantized model.
    """

    def __init__(self, graph: Model, model: nn.Module) -> None:
        self._model = model
        self._inputs = [str(value.name) for value in graph.graph.inputs]
        self._open = open_dimensions(graph)
        self.verdicts: list[Verdict] = []

    def run(self, batch: object, compare: Callable[[Any], str]) -> None:
        """Add a verdict for each open length; ``compare`` says what is wrong with a batch."""
        for name, places in self._open.items():
            lengths = ", ".join(
                f"dimension {dim} of {input_name}" for input_name, dim in places
            )
            what = f"another length of {name} ({lengths})"
            self.verdicts.append(self._verdict(what, batch, places, compare))

    def _verdict(
        self,
        what: str,
        batch: object,
        places: list[tuple[str, int]],
        compare: Callable[[Any], str],
    ) -> Verdict:
        try:
            other = resized(self._model, batch, self._inputs, places)
            with switched_off(quantizers(self._model).values()):
                call_model(self._model, other)
        except Exception as error:  # A model may refuse a length in any way it likes.
            return Verdict(what, None, f"the model refuses it ({first_line(error)})")
        try:
            problem = compare(other)
        except TorchqError as error:
            problem = first_line(error)
        return Verdict(what, not problem, problem)

"""The example call that torch's exporters trace, and which of its dimensions stay open."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.graph import call_arguments, tensors_in
from torchq.onnx.interface_names import (
    argument_names,
    checked_names,
    checked_shapes,
    input_names_of,
    output_names_of,
)

__all__ = ["ExampleCall", "named_tensors", "nested_tensors"]

_BATCH = "batch"


class ExampleCall:
    """An example call of a model, and which dimensions of its tensors stay open.

    Args:
        model: A model in eval mode.
        example: A tensor, positional arguments or keyword arguments.
        dynamic_batch: Open the first dimension of the first tensor, and of all others of the same
            length.
        dynamic_shapes: More open dimensions by the name of the argument, or by that in the file.
        input_names: Names for the file; default those of the file that the model was read from,
            or of the arguments.
        output_names: Names for the file; default those of the file that the model was read from.

    Attributes:
        args: Positional arguments.
        kwargs: Keyword arguments.
        open: Open dimensions and their names, by the name of the argument.
        contained: The names of tensors inside containers.

    Raises:
        ExportError: ``dynamic_shapes`` names an argument that is no tensor of the example, or a
            dimension that it does not have; or names are no sequence of different strings.
    """

    def __init__(
        self,
        model: nn.Module,
        example: Any,
        dynamic_batch: bool,
        dynamic_shapes: Mapping[str, Mapping[int, str]] | None,
        input_names: Sequence[str] | None,
        output_names: Sequence[str] | None,
    ) -> None:
        self.model = model
        args, kwargs = call_arguments(model, example)
        # Copies, because torch.export notes open dimensions on the tensors that it is given.
        self.args = tuple(_copied(value) for value in args)
        self.kwargs = {name: _copied(value) for name, value in kwargs.items()}
        tensors = named_tensors(model, self.args, self.kwargs)
        nested = nested_tensors(model, self.args, self.kwargs)
        self.contained = [name for name in nested if name not in tensors]
        own = input_names_of(model, nested)
        given = checked_names("input_names", () if input_names is None else input_names, len(own))
        self.input_names = checked_names("input_names", [*given, *own[len(given) :]])
        found = output_names_of(model) if output_names is None else output_names
        self.output_names = None if found is None else checked_names("output_names", found)
        if not {*self.input_names}.isdisjoint(self.output_names or ()):
            both = sorted({*self.input_names} & {*(self.output_names or ())})
            raise ExportError(
                f"export_onnx: got {', '.join(both)} as the name of an input and of an output; "
                "expected different names. Pass input_names=[...] and output_names=[...]"
            )
        self._in_file = dict(zip(nested, self.input_names, strict=True))
        arguments = {self._in_file[name]: name for name in tensors}
        self.open = checked_shapes(dynamic_shapes, tensors, arguments)
        if dynamic_batch:
            self._open_batch(tensors)

    def _open_batch(self, tensors: Mapping[str, Tensor]) -> None:
        length = next((t.shape[0] for t in tensors.values() if t.dim()), None)
        batched = {name: t for name, t in tensors.items() if t.dim() and t.shape[0] == length}
        for name in batched:
            self.open[name].setdefault(0, _BATCH)
        if length == 1:  # torch.export takes a length of 1 for a constant.
            doubled = {id(t): torch.cat([t, t]) for t in batched.values()}
            self.args = tuple(doubled.get(id(value), value) for value in self.args)
            self.kwargs = {k: doubled.get(id(value), value) for k, value in self.kwargs.items()}

    @property
    def shapes(self) -> dict[str, dict[int, str]]:
        """Open dimensions by name in the file, of the tensors that have any."""
        return {self._in_file[name]: dims for name, dims in self.open.items() if dims}


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value


def named_tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the tensors among the arguments of a call, by the names that they have in a file."""
    named = {**dict(zip(argument_names(model, len(args)), args, strict=True)), **kwargs}
    return {name: value for name, value in named.items() if isinstance(value, Tensor)}


def nested_tensors(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Tensor]:
    """Return the tensors of a call with those inside its containers, in the order of a file.

    Names are those of :func:`named_tensors`, with a number inside a container.
    """
    named = {**dict(zip(argument_names(model, len(args)), args, strict=True)), **kwargs}
    found: dict[str, Tensor] = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            found[name] = value
        else:
            found |= {f"{name}_{i}": tensor for i, tensor in enumerate(tensors_in(value))}
    return found

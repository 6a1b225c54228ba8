"""The arguments that a deployed graph takes: bound as Python binds them, and checked by name."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ExportError, InputError
from torchq.graph import call_arguments

__all__ = ["CallSignature", "GraphInput", "argument_values", "example_arguments"]

_EMPTY = inspect.Parameter.empty
_STAR, _STARS = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD


@dataclass(frozen=True)
class GraphInput:
    """A tensor that a graph reads.

    Attributes:
        name: of the argument, and of the input in the file.
        dtype: of the tensor.
        shape: its length in each dimension; None where any length is accepted.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int | None, ...]

    def problem(self, value: Any, device: torch.device) -> str:
        """Return what is wrong with an argument; an empty string if it fits."""
        if not isinstance(value, Tensor):
            return f"got a {type(value).__name__}; expected a tensor"
        if value.dtype is not self.dtype:
            return f"got {value.dtype}; expected {self.dtype}"
        if value.device.type != device.type:
            return f"got a tensor on {value.device}; expected one on {device}"
        pairs = zip(value.shape, self.shape, strict=False)
        fits = all(want is None or got == want for got, want in pairs)
        if fits and value.dim() == len(self.shape):
            return ""
        shown = ", ".join("any" if length is None else str(length) for length in self.shape)
        return (
            f"got shape {tuple(value.shape)}; expected ({shown}). The graph was made for these "
            "lengths: deploy with an example of the wanted shape"
        )


@dataclass(frozen=True)
class CallSignature:
    """The signature of a model, and which of its arguments a graph reads.

    Attributes:
        model: the class of the model, for error texts.
        parameters: those of ``forward``, without annotations.
        inputs: the tensors that the graph reads.
        constants: the arguments of the example that are no tensors, by name: the graph has them
            built in.
        unread: tensors of the example that have no influence on the results.
    """

    model: str
    parameters: inspect.Signature
    inputs: tuple[GraphInput, ...]
    constants: dict[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
    ) -> dict[str, Tensor]:
        """Return the tensors of a call by name.

        Args:
            args: positional arguments.
            kwargs: keyword arguments.
            device: where the tensors have to be.

        Raises:
            InputError: the text names the argument.
        """
        try:
            bound = self.parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(
                f"{self.model}: {error}; expected {self.model}{self.parameters}"
            ) from None
        values = argument_values(bound)
        feeds = {}
        for graph_input in self.inputs:
            value = values.pop(graph_input.name, None)
            if problem := graph_input.problem(value, device):
                raise InputError(f"{self.model}: argument {graph_input.name!r}: {problem}")
            feeds[graph_input.name] = value
        for name, value in values.items():
            if name not in self.unread:
                self._require_constant(name, value)
        return feeds

    def _require_constant(self, name: str, value: Any) -> None:
        """Raise an error unless an argument has the value that is built into the graph."""
        parameter = self.parameters.parameters.get(name)
        default = None if parameter is None or parameter.default is _EMPTY else parameter.default
        built_in = self.constants.get(name, default)
        if value is built_in or (type(value) is type(built_in) and bool(value == built_in)):
            return
        shown = f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
        raise InputError(
            f"{self.model}: argument {name!r}: got {shown}; expected {built_in!r}, which is built "
            "into the graph. Deploy with an example that has the other value"
        )


def argument_values(bound: inspect.BoundArguments) -> dict[str, Any]:
    """Return every argument of a call by its name; those of ``*args`` are ``input_0``, ..."""
    values: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = bound.signature.parameters[name].kind
        if kind is _STAR:
            values |= {f"input_{i}": v for i, v in enumerate(value, len(values))}
        elif kind is _STARS:
            values |= value
        else:
            values[name] = value
    return values


def example_arguments(model: nn.Module, example: Any) -> tuple[inspect.Signature, dict[str, Any]]:
    """Return the signature of a model without annotations, and the arguments of an example.

    Raises:
        ExportError: an argument of the example holds tensors in a tuple, list or mapping.
    """
    args, kwargs = call_arguments(model, example)
    signature = inspect.signature(model.forward)
    parameters = [p.replace(annotation=_EMPTY) for p in signature.parameters.values()]
    plain = signature.replace(parameters=parameters, return_annotation=_EMPTY)
    values = argument_values(plain.bind(*args, **kwargs))
    for name, value in values.items():
        if isinstance(value, (tuple, list, Mapping)) and any(
            isinstance(part, Tensor)
            for part in (value.values() if isinstance(value, Mapping) else value)
        ):
            raise ExportError(
                f"deploy: argument {name!r} is a {type(value).__name__} of tensors; expected a "
                "tensor, as graphs take tensors by name. Use engine='torch'"
            )
    return plain, values

"""What a deployed graph takes and returns, seen from Python: arguments by name, nested results."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # torch has no public name for it

from torchq.errors import ExportError, InputError
from torchq.graph import call_arguments, tensors_in
from torchq.utils import qualified_name

_EMPTY = inspect.Parameter.empty
_BY_PLACE = (
    inspect.Parameter.POSITIONAL_ONLY,
    inspect.Parameter.POSITIONAL_OR_KEYWORD,
)
_STAR = inspect.Parameter.VAR_POSITIONAL
_STARS = inspect.Parameter.VAR_KEYWORD


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

    def problem(self, value: object, device: torch.device) -> str:
        """Return what is wrong with an argument; an empty string if it fits."""
        if not isinstance(value, Tensor):
            return f"got a {type(value).__name__}; expected a tensor"
        if value.dtype is not self.dtype:
            return f"got {value.dtype}; expected {self.dtype}"
        # Devices compare without the names of their types, which torch makes anew each time.
        if value.device != device and value.device.type != device.type:
            return f"got a tensor on {value.device}; expected one on {device}"
        if value.shape == self.shape or self._fits(value.shape):
            return ""
        shown = ", ".join(
            "any" if length is None else str(length) for length in self.shape
        )
        return (
            f"got shape {tuple(value.shape)}; expected ({shown}). The graph was made for these "
            "lengths: deploy with an example of the wanted shape"
        )

    def _fits(self, shape: torch.Size) -> bool:
        if len(shape) != len(self.shape):
            return False
        for length, wanted in zip(shape, self.shape, strict=True):
            if wanted is not None and length != wanted:
                return False
        return True


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
    constants: dict[str, object] = field(default_factory=dict)
    unread: tuple[str, ...] = ()

    def bind(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], device: torch.device
    ) -> dict[str, Tensor]:
        """Return the tensors of a call by name."""
        if self._names_by_place and not kwargs and len(args) == len(self.inputs):
            values = dict(zip(self._names_by_place, args, strict=True))
        else:
            values = self._arguments(args, kwargs)
        feeds = {}
        for graph_input in self.inputs:
            value = values.pop(graph_input.name, None)
            if problem := graph_input.problem(value, device):
                raise InputError(
                    f"{self.model}: argument {graph_input.name!r}: {problem}"
                )
            feeds[graph_input.name] = value
        for name, value in values.items():
            if name not in self.unread:
                self._require_constant(name, value)
        return feeds

    @cached_property
    def _names_by_place(self) -> tuple[str, ...]:
        """The names of the inputs, where a call by place may hold them and nothing else.

        Such calls are bound without :mod:`inspect`, which takes as long as a small network.
        """
        parameters = list(self.parameters.parameters.values())
        names = tuple(graph_input.name for graph_input in self.inputs)
        first = parameters[: len(names)]
        others = parameters[len(names) :]
        by_place = all(parameter.kind in _BY_PLACE for parameter in first)
        needs_others = any(parameter.default is _EMPTY for parameter in others)
        is_plain = names == tuple(parameter.name for parameter in first) and by_place
        return names if is_plain and not needs_others and not self.constants else ()

    def _arguments(
        self, args: tuple[object, ...], kwargs: Mapping[str, object]
    ) -> dict[str, Any]:
        """Return every argument of a call by its name."""
        try:
            bound = self.parameters.bind(*args, **kwargs)
        except TypeError as error:
            raise InputError(
                f"{self.model}: {error}; expected {self.model}{self.parameters}"
            ) from None
        values = argument_values(bound)
        # An argument that is left out has its default, as in the original's forward.
        for name in self.constants.keys() - values.keys():
            values[name] = self._default(name)
        return values

    def _default(self, name: str) -> object:
        """Return the default of a parameter; None where it has none."""
        parameter = self.parameters.parameters.get(name)
        if parameter is None or parameter.default is _EMPTY:
            return None
        return parameter.default

    def _require_constant(self, name: str, value: object) -> None:
        """Raise an error unless an argument has the value that is built into the graph."""
        built_in = self.constants.get(name, self._default(name))
        if value is built_in or (
            type(value) is type(built_in) and bool(value == built_in)
        ):
            return
        shown = (
            f"a {type(value).__name__}" if isinstance(value, Tensor) else repr(value)
        )
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


def example_arguments(
    model: nn.Module, example: object
) -> tuple[inspect.Signature, dict[str, Any]]:
    """Return the signature of a model without annotations, and the arguments of an example."""
    args, kwargs = call_arguments(model, example)
    signature = inspect.signature(model.forward)
    parameters = [p.replace(annotation=_EMPTY) for p in signature.parameters.values()]
    plain = signature.replace(parameters=parameters, return_annotation=_EMPTY)
    values = argument_values(plain.bind(*args, **kwargs))
    for name, value in values.items():
        parts = pytree.tree_leaves(value)
        if not isinstance(value, Tensor) and any(
            isinstance(part, Tensor) for part in parts
        ):
            raise ExportError(
                f"deploy: argument {name!r} is a {type(value).__name__} of tensors; expected a "
                "tensor, as graphs take tensors by name. Use target='torch'"
            )
    return plain, values


#: Values without tensors, which a graph cannot return: they are what they were for the example.
_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
)


@dataclass(frozen=True)
class Structure:
    """Results of a model without their tensors.

    Attributes:
        spec: the containers, as torch's pytree describes them.
        leaves: what is in them: ``_Place`` for a tensor, of which one may have several places, or
            the constant itself; None for what is left out.
        left_out: the classes of what no graph returns, such as the cache of a language model.
    """

    spec: pytree.TreeSpec
    leaves: tuple[object, ...]
    left_out: tuple[str, ...] = ()

    def rebuild(self, tensors: Sequence[Tensor]) -> Any:
        """Return the results with these tensors in the places."""
        leaves = [tensors[x.index] if isinstance(x, _Place) else x for x in self.leaves]
        return pytree.tree_unflatten(leaves, self.spec)

    def tensors_of(self, value: object) -> list[Tensor]:
        """Return the tensors of other results of this structure, each once.

        What was a constant is left out: tracing makes tensors of sizes.
        """
        pairs = zip(self.leaves, pytree.tree_leaves(value), strict=True)
        tensor_by_place = {
            place.index: tensor for place, tensor in pairs if isinstance(place, _Place)
        }
        return [tensor_by_place[index] for index in sorted(tensor_by_place)]


@dataclass(frozen=True)
class _Place:
    """The place of a tensor, with its number in the flat list."""

    index: int


def flatten(value: object) -> tuple[list[Tensor], Structure]:
    """Return the tensors in the results of a model, each once, and their structure.

    Objects beside the tensors are left out, as :func:`torchq.export_onnx` does, unless they hold
    tensors that a result is known to consist of.
    """
    tensors: dict[int, Tensor] = {}
    places: dict[int, _Place] = {}
    leaves, spec = pytree.tree_flatten(value)
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            tensors[id(leaf)] = leaf
            places.setdefault(id(leaf), _Place(len(places)))
    others = [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *_CONSTANTS))]
    refused = [x for x in others if not tensors or any(True for _ in tensors_in(x))]
    if refused:
        raise ExportError(
            f"deploy: the model returns a {type(refused[0]).__name__}; expected tensors in tuples, "
            "lists, dictionaries and classes of torch.export.register_dataclass, which a graph "
            "can return. Use target='torch'"
        )
    left_out = {id(leaf) for leaf in others}
    leaves_or_places = tuple(
        None if id(leaf) in left_out else places.get(id(leaf), leaf) for leaf in leaves
    )
    names = tuple(dict.fromkeys(qualified_name(type(leaf)) for leaf in others))
    return list(tensors.values()), Structure(spec, leaves_or_places, names)


#: The shape of each input of a call, by name.
Shapes = tuple[tuple[str, tuple[int, ...]], ...]
#: Computes the outputs of a graph, in order, from its inputs by name. Several threads may call it.
Run = Callable[[Mapping[str, Tensor]], list[Tensor]]
#: Returns the bytes of an ONNX file, a new copy for each call.
ReadGraph = Callable[[], bytes]


@dataclass(frozen=True)
class GraphInterface:
    """What a graph takes and returns, seen from Python.

    Attributes:
        signature: of the call.
        structure: of the results.
        open_results: for each output of the graph, True if its length in dimension 0 depends on
            the inputs.
        usual: the shapes of the example.
    """

    signature: CallSignature
    structure: Structure
    open_results: tuple[bool, ...]
    usual: Shapes = ()

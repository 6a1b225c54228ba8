"""From a calibrated model to a graph: the export, and which lengths of its inputs stay open."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.graph import call_arguments, call_model
from torchq.nn.convert import float_class_of
from torchq.onnx import export_onnx
from torchq.onnx.interface import argument_names, named_tensors
from torchq.onnx.ir import load_model
from torchq.runtime import Runtime
from torchq.runtimes.interface import (
    CallSignature,
    GraphInput,
    GraphInterface,
    Shapes,
    Structure,
    example_arguments,
    flatten,
)

log = logging.getLogger(__name__)

#: What an error says where a trace holds one of several ways.
WARNS = "the exporter based on TorchScript warns"


@dataclass(frozen=True)
class OpenLengths:
    """Which lengths of its inputs a graph leaves open.

    Attributes:
        batch: True for the first one of the first tensor, and of all others that have the same.
        others: name of an argument -> its other open dimensions.
    """

    batch: bool = True
    others: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def lengths_to_try(model: nn.Module, example: object) -> tuple[OpenLengths, ...]:
    """Return sets of lengths that could stay open, the largest first.

    A length may be open if the model itself runs where it is doubled: in all dimensions of the
    example that have this length, as those of a sequence and of its mask have to agree. An example
    with one image suffices for all of this.
    """
    tensors = _tensors(model, example)
    places: dict[int, dict[str, tuple[int, ...]]] = {}
    for name, tensor in tensors.items():
        for dim, length in enumerate(tensor.shape[1:], 1):
            if length > 1:
                group = places.setdefault(length, {})
                group[name] = (*group.get(name, ()), dim)
    open_dims: dict[str, tuple[int, ...]] = {}
    for group in places.values():
        if _runs(model, _resized(model, example, 1, group)):
            for name, dims in group.items():
                open_dims[name] = (*open_dims.get(name, ()), *dims)
    smaller = (OpenLengths(), OpenLengths(batch=False))
    return (OpenLengths(others=open_dims), *smaller) if open_dims else smaller


def probes(model: nn.Module, example: object, lengths: OpenLengths) -> Iterator[Any]:
    """Yield examples with other lengths where ``lengths`` says open; the model may refuse them."""
    if lengths.others:
        yield _resized(model, example, 1, lengths.others)
    rows = _rows(_tensors(model, example))
    if lengths.batch and rows:
        # Not one, which exporters take for a constant, and not the length that was traced.
        yield _resized(model, example, 2 if rows == 3 else 3)


def tensor_shapes(model: nn.Module, example: object) -> Shapes:
    """Return the shape of each tensor of an example, by the name of its argument."""
    return tuple((name, tuple(t.shape)) for name, t in _tensors(model, example).items())


def _tensors(model: nn.Module, example: object) -> dict[str, Tensor]:
    _, values = example_arguments(model, example)
    return {name: value for name, value in values.items() if isinstance(value, Tensor)}


def _rows(tensors: Mapping[str, Tensor]) -> int:
    """Return the length of the first tensor in dimension 0: what has as many rows is batched."""
    return next((t.shape[0] for t in tensors.values() if t.dim()), 0)


def _resized(
    model: nn.Module,
    example: object,
    count: int,
    places: Mapping[str, tuple[int, ...]] | None = None,
) -> object:
    """Return an example with so many rows, repeated or cut, and twice as long in some places."""
    new = _tensors(model, example)
    rows = _rows(new)
    for name, tensor in new.items():
        if rows and tensor.dim() and tensor.shape[0] == rows:
            new[name] = tensor[torch.arange(count, device=tensor.device) % rows]
        for dim in (places or {}).get(name, ()):
            new[name] = torch.cat([new[name]] * 2, dim)
    args, kwargs = call_arguments(model, example)
    if kwargs:
        return {**kwargs, **new}
    names = argument_names(model, len(args))
    return tuple(new.get(name, arg) for name, arg in zip(names, args, strict=True))


def _runs(model: nn.Module, example: object) -> bool:
    try:
        with torch.no_grad():
            call_model(model, example)
    except Exception as error:  # a model may refuse a shape in any way it likes
        log.debug("the model does not run on other lengths: %s", error)
        return False
    return True


def export_graph(
    model: nn.Module,
    example: object,
    outcome: object,
    *,
    target: Runtime | None,
    dynamo: bool,
    lengths: OpenLengths,
    for_all_inputs: bool = True,
) -> tuple[Tensor, GraphInterface]:
    """Return the bytes of an ONNX file of the model, and what the graph takes and returns.

    ``outcome`` is what the model returns for the example. Without ``for_all_inputs`` the graph may
    hold the way of this example alone, as it does where a forward asks for values or lengths.
    """
    results, structure = flatten(outcome)
    opened = {
        name: {dim: f"{name}_{dim}" for dim in dims}
        for name, dims in lengths.others.items()
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        _flat_results(model, structure),
        _without_warnings_of_tracing() if for_all_inputs and not dynamo else _quiet(),
    ):
        path = Path(folder, "model.onnx")
        export_onnx(
            model,
            example,
            path,
            target=target,
            dynamo=dynamo,
            dynamic_batch=lengths.batch,
            dynamic_shapes=opened,
            input_names=list(named_tensors(model, *call_arguments(model, example))),
        )
        if len(list(Path(folder).iterdir())) > 1:
            raise ExportError(
                "deploy: the weights exceed what one ONNX file can hold (1.8 GB); expected a "
                "smaller model. Use target='torch', or export_onnx and the runtime's own module"
            )
        graph = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
        interface = _interface(model, example, path, structure)
    if len(interface.open_results) != len(results):
        raise ExportError(
            f"deploy: the graph returns {len(interface.open_results)} tensors; expected "
            f"{len(results)}, as the model does. Use target='torch'"
        )
    return graph, interface


@contextmanager
def _flat_results(model: nn.Module, structure: Structure) -> Iterator[None]:
    """Let a model return a tuple of tensors, which every exporter can write."""
    handle = model.register_forward_hook(
        lambda module, args, out: tuple(structure.tensors_of(out))
    )
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep warnings and the printed graphs of torch's exporters from the user.

    What they say is checked afterwards: the results, and lengths that were taken for constants. Or
    it is of no account, as the graph is for one example.
    """
    with warnings.catch_warnings(), _quiet_output():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _without_warnings_of_tracing() -> Iterator[None]:
    """Keep the printed graphs from the user, and make an error of what tracing warns of.

    A trace holds one way through a forward, the values that Python read, and the order in which
    elements with equal indices were added; it says so in warnings.
    """
    with warnings.catch_warnings(record=True) as caught, _quiet_output():
        warnings.simplefilter("always")
        yield
    for warning in caught:
        if _is_of_tracing(warning):
            first = next(iter(str(warning.message).splitlines()), "")
            raise ExportError(
                f"deploy: {WARNS}: {first}; expected a graph that "
                "holds for all inputs. Use target='torch'"
            )


def _is_of_tracing(warning: warnings.WarningMessage) -> bool:
    if issubclass(warning.category, torch.jit.TracerWarning):
        return True
    is_users = issubclass(warning.category, UserWarning)
    return is_users and "/torch/onnx/" in warning.filename.replace(os.sep, "/")


@contextmanager
def _quiet_output() -> Iterator[None]:
    with contextlib.redirect_stdout(io.StringIO()), _no_output():
        yield


@contextmanager
def _no_output() -> Iterator[None]:
    """Send what C++ code prints nowhere: a failed export prints its graph, thousands of lines."""
    standard_output = 1
    try:
        before = os.dup(standard_output)
    except OSError:  # the process has none
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), standard_output)
        yield
    finally:
        os.dup2(before, standard_output)
        os.close(before)


def _interface(
    model: nn.Module, example: object, path: Path, structure: Any
) -> GraphInterface:
    parameters, values = example_arguments(model, example)
    graph = load_model(path, check=False).graph
    inputs = tuple(
        GraphInput(str(value.name), values[value.name].dtype, _lengths(value))
        for value in graph.inputs
    )
    read = {graph_input.name for graph_input in inputs}
    tensors = {name for name, value in values.items() if isinstance(value, Tensor)}
    constants = {name: value for name, value in values.items() if name not in tensors}
    signature = CallSignature(
        class_name(model), parameters, inputs, constants, tuple(sorted(tensors - read))
    )
    opened = tuple(_lengths(value)[:1] == (None,) for value in graph.outputs)
    return GraphInterface(signature, structure, opened)


def _lengths(value: Any) -> tuple[int | None, ...]:
    """Return the lengths of an input or output in a file; None where they are open."""
    if value.shape is None:
        return (None,)
    return tuple(length if isinstance(length, int) else None for length in value.shape)


def class_name(model: nn.Module) -> str:
    """Return the name of the class that a model had before it was quantized."""
    return float_class_of(model).__name__

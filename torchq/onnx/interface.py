"""The example call that torch's exporters trace: its names, and its open dimensions."""

from __future__ import annotations

import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn

from torchq.errors import ExportError
from torchq.graph import call_arguments, tensors_in
from torchq.nn import TensorQuantizer


def argument_names(model: nn.Module, count: int) -> list[str]:
    """Return the names of the first ``count`` positional arguments, ``input_0`` for ``*args``."""
    names = [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind
        in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return [*names, *(f"input_{i}" for i in range(len(names), count))][:count]


def input_names_of(model: nn.Module, arguments: Iterable[str]) -> list[str]:
    """Return the names that arguments have in the file that a model was read from.

    An argument of any other model keeps its name.
    """
    stored = _stored_names(model, "input_names")
    name_in_file = dict(zip(argument_names(model, len(stored)), stored, strict=True))
    return [name_in_file.get(name, name) for name in arguments]


def output_names_of(model: nn.Module) -> list[str] | None:
    """Return the names of the outputs in the file that a model was read from.

    They are None for any other model, and where the outputs are not those of the file any more.
    """
    names = _stored_names(model, "output_names")
    all_names = [*names, *_stored_names(model, "input_names")]
    if (
        not names
        or not isinstance(model, fx.GraphModule)
        or len(set(all_names)) < len(all_names)
    ):
        return None
    (results,) = model.graph.output_node().args
    count = len(results) if isinstance(results, (tuple, list)) else 1
    return names if len(names) == count else None


def output_names_in(result: object) -> list[str]:
    """Return a name for each tensor that a model returns; none where it names none of them.

    Keys of mappings and fields of dataclasses are names, with a number behind them inside lists.
    """
    names = [*_names_in(result, "")]
    return names if any(not name.startswith("output") for name in names) else []


def _names_in(result: object, name: str) -> Iterator[str]:
    if isinstance(result, Tensor):
        yield name or "output"
    elif isinstance(result, Mapping):
        for key, member in result.items():
            yield from _names_in(member, str(key))
    elif isinstance(result, (tuple, list)):
        for number, member in enumerate(result):
            yield from _names_in(member, f"{name or 'output'}_{number}")
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        for field in dataclasses.fields(result):
            yield from _names_in(getattr(result, field.name), field.name)


def fixes_batch(model: nn.Module) -> bool:
    """Return True if the file that a model was read from fixes the first size of an input."""
    if not isinstance(model, fx.GraphModule) or not getattr(
        model, "checks_sizes", False
    ):
        return False  # Caffe and MXNet take any batch, whatever the file states
    shapes = getattr(model, "input_shapes", None)
    return any(shape and shape[0] is not None for shape in shapes or ())


def _stored_names(model: nn.Module, attribute: str) -> list[str]:
    """Return the names that a reader of files left in an attribute; none for other models."""
    stored = (
        getattr(model, attribute, None) if isinstance(model, fx.GraphModule) else None
    )
    return list(stored) if isinstance(stored, list) else []


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def checked_names(option: str, names: Any, most: int | None = None) -> list[str]:
    """Return the names for inputs or outputs."""
    is_list = isinstance(names, Sequence) and not isinstance(names, (str, bytes))
    if not is_list or not all(map(_is_name, names)):
        raise ExportError(
            f"export_onnx: got {option}={names!r}; expected a list of names such as ['image']"
        )
    if len(set(names)) < len(names):
        raise ExportError(
            f"export_onnx: got {option}={list(names)}; expected different names"
        )
    if most is not None and len(names) > most:
        raise ExportError(
            f"export_onnx: got {option}={list(names)}; expected at most {most}"
        )
    return list(names)


def checked_shapes(
    asked: object, tensors: Mapping[str, Tensor], arguments: Mapping[str, str]
) -> dict[str, dict[int, str]]:
    """Return the open dimensions of each tensor argument."""
    open_dims: dict[str, dict[int, str]] = {name: {} for name in tensors}
    if asked is None:
        return open_dims
    if not isinstance(asked, Mapping):
        raise ExportError(_shapes_text(asked))
    unknown = [key for key in asked if key not in tensors and key not in arguments]
    if unknown:
        raise ExportError(
            f"export_onnx: dynamic_shapes names {sorted(map(str, unknown))}; "
            f"expected some of the tensor arguments {sorted(tensors)}"
        )
    for key, dims in asked.items():
        name = key if key in tensors else arguments[key]
        dimensions = range(tensors[name].dim())
        if not isinstance(dims, Mapping) or not all(map(_is_name, dims.values())):
            raise ExportError(_shapes_text(asked))
        beyond = [dim for dim in dims if dim not in dimensions]
        if beyond:
            raise ExportError(
                f"export_onnx: dynamic_shapes opens dimension {beyond[0]!r} of {key!r}; expected "
                f"0 to {dimensions.stop - 1}, as its example has {dimensions.stop} dimensions"
            )
        open_dims[name] |= dims
    return open_dims


def _shapes_text(asked: object) -> str:
    return (
        f"export_onnx: got dynamic_shapes={asked!r}; expected a mapping from the name of an input "
        "to {dimension: name}, such as {'x': {2: 'height'}}"
    )


_BATCH = "batch"


class ExampleCall:
    """An example call of a model, and which dimensions of its tensors stay open."""

    def __init__(
        self,
        model: nn.Module,
        example: object,
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
        names_in_file = input_names_of(model, nested)
        chosen_names = checked_names(
            "input_names",
            () if input_names is None else input_names,
            len(names_in_file),
        )
        self.input_names = checked_names(
            "input_names", [*chosen_names, *names_in_file[len(chosen_names) :]]
        )
        names_of_outputs = (
            output_names_of(model) if output_names is None else output_names
        )
        self.output_names = (
            None
            if names_of_outputs is None
            else checked_names("output_names", names_of_outputs)
        )
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
        """Open the first dimension of each tensor that is as long as the first tensor's."""
        length = next((t.shape[0] for t in tensors.values() if t.dim()), None)
        batched = []
        for name, tensor in tensors.items():
            if tensor.dim() and tensor.shape[0] == length:
                batched.append(tensor)
                self.open[name].setdefault(0, _BATCH)
        if length == 1:  # torch.export takes a length of 1 for a constant.
            doubled = {id(tensor): torch.cat([tensor, tensor]) for tensor in batched}
            self.args = tuple(doubled.get(id(value), value) for value in self.args)
            self.kwargs = {
                k: doubled.get(id(value), value) for k, value in self.kwargs.items()
            }

    def feeds(self) -> dict[str, Tensor]:
        """Return the tensors of the call by their names in the file."""
        tensors = nested_tensors(self.model, self.args, self.kwargs)
        return {self._in_file[name]: tensor for name, tensor in tensors.items()}

    @property
    def shapes(self) -> dict[str, dict[int, str]]:
        """Open dimensions by name in the file, of the tensors that have any."""
        return {self._in_file[name]: dims for name, dims in self.open.items() if dims}


def _copied(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else value


def named_tensors(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, Tensor]:
    """Return the tensors among the arguments of a call, by the names that they have in a file."""
    named = zip(argument_names(model, len(args)), args, strict=True)
    return {
        n: value for n, value in (*named, *kwargs.items()) if isinstance(value, Tensor)
    }


def nested_tensors(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> dict[str, Tensor]:
    """Return the tensors of a call with those inside its containers, in the order of a file.

    Names are those of :func:`named_tensors`, with a number inside a container.
    """
    named = {**dict(zip(argument_names(model, len(args)), args, strict=True)), **kwargs}
    tensors: dict[str, Tensor] = {}
    for name, value in named.items():
        if isinstance(value, Tensor):
            tensors[name] = value
        else:
            tensors |= {
                f"{name}_{i}": tensor for i, tensor in enumerate(tensors_in(value))
            }
    return tensors


@contextmanager
def named_calls(
    model: nn.Module,
    quantizers: Mapping[str, TensorQuantizer],
    note: Callable[[str, TensorQuantizer, Tensor, Tensor], Tensor],
) -> Iterator[None]:
    """Let ``note(name, quantizer, input, result)`` change what quantizers return; none observes.

    Names are those of a file: the second call of a quantizer in one run of ``model`` is ``path#2``.
    """
    observing = [(quantizer, quantizer.observing) for quantizer in quantizers.values()]
    calls: Counter[str] = Counter()
    # An exporter may run the model more than once.
    handles = [model.register_forward_pre_hook(lambda *_: calls.clear())]

    def hook(path: str, quantizer: TensorQuantizer, x: Tensor, out: Tensor) -> Tensor:
        calls[path] += 1
        name = path if calls[path] == 1 else f"{path}#{calls[path]}"
        return note(name, quantizer, x, out)

    try:
        for path, quantizer in quantizers.items():
            quantizer.observing = False
            handles.append(
                quantizer.register_forward_hook(
                    lambda module, args, out, path=path: hook(
                        path, module, args[0], out
                    )
                )
            )
        yield
    finally:
        for handle in handles:
            handle.remove()
        for quantizer, before in observing:
            quantizer.observing = before

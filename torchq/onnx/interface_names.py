"""The names of inputs, outputs and open dimensions of a file, and what callers say of them."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, fx, nn

from torchq.errors import ExportError

__all__ = [
    "argument_names",
    "checked_names",
    "checked_shapes",
    "fixes_batch",
    "input_names_of",
    "output_names_of",
]


def argument_names(model: nn.Module, count: int) -> list[str]:
    """Return the names of the first ``count`` positional arguments, ``input_0`` for ``*args``."""
    names = [
        parameter.name
        for parameter in inspect.signature(model.forward).parameters.values()
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD)
    ]
    return [*names, *(f"input_{i}" for i in range(len(names), count))][:count]


def input_names_of(model: nn.Module, arguments: Iterable[str]) -> list[str]:
    """Return the names that arguments have in the file that a model was read from.

    An argument of any other model keeps its name.
    """
    stored = _stored_names(model, "input_names")
    known = dict(zip(argument_names(model, len(stored)), stored, strict=True))
    return [known.get(name, name) for name in arguments]


def output_names_of(model: nn.Module) -> list[str] | None:
    """Return the names of the outputs in the file that a model was read from.

    They are None for any other model, and where the outputs are not those of the file any more.
    """
    names = _stored_names(model, "output_names")
    taken = [*names, *_stored_names(model, "input_names")]
    if not names or not isinstance(model, fx.GraphModule) or len(set(taken)) < len(taken):
        return None
    (results,) = model.graph.output_node().args
    count = len(results) if isinstance(results, (tuple, list)) else 1
    return names if len(names) == count else None


def fixes_batch(model: nn.Module) -> bool:
    """Return True if the file that a model was read from fixes the first size of an input."""
    if not isinstance(model, fx.GraphModule) or not getattr(model, "checks_sizes", False):
        return False  # Caffe and MXNet take any batch, whatever the file states
    shapes = getattr(model, "input_shapes", None)
    return any(shape and shape[0] is not None for shape in shapes or ())


def _stored_names(model: nn.Module, attribute: str) -> list[str]:
    """Return the names that a reader of files left in an attribute; none for other models."""
    found = getattr(model, attribute, None) if isinstance(model, fx.GraphModule) else None
    return list(found) if isinstance(found, list) else []


def _is_name(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def checked_names(option: str, names: Any, most: int | None = None) -> list[str]:
    """Return the names for inputs or outputs.

    Raises:
        ExportError: They are one text, or not texts, or two are equal, or more than ``most``.
    """
    is_list = isinstance(names, Sequence) and not isinstance(names, (str, bytes))
    if not is_list or not all(map(_is_name, names)):
        raise ExportError(
            f"export_onnx: got {option}={names!r}; expected a list of names such as ['image']"
        )
    if len(set(names)) < len(names):
        raise ExportError(f"export_onnx: got {option}={list(names)}; expected different names")
    if most is not None and len(names) > most:
        raise ExportError(f"export_onnx: got {option}={list(names)}; expected at most {most}")
    return list(names)


def checked_shapes(
    asked: Any, tensors: Mapping[str, Tensor], arguments: Mapping[str, str]
) -> dict[str, dict[int, str]]:
    """Return the open dimensions of each tensor argument.

    Args:
        asked: What the caller gave, by the name of the argument or by that in the file.
        tensors: The tensor arguments.
        arguments: The argument of each name in the file.

    Raises:
        ExportError: This is no such mapping, or it names what the call does not have.
    """
    found: dict[str, dict[int, str]] = {name: {} for name in tensors}
    if asked is None:
        return found
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
        known = range(tensors[name].dim())
        if not isinstance(dims, Mapping) or not all(map(_is_name, dims.values())):
            raise ExportError(_shapes_text(asked))
        beyond = [dim for dim in dims if dim not in known]
        if beyond:
            raise ExportError(
                f"export_onnx: dynamic_shapes opens dimension {beyond[0]!r} of {key!r}; expected "
                f"0 to {known.stop - 1}, as its example has {known.stop} dimensions"
            )
        found[name] |= dims
    return found


def _shapes_text(asked: Any) -> str:
    return (
        f"export_onnx: got dynamic_shapes={asked!r}; expected a mapping from the name of an input "
        "to {dimension: name}, such as {'x': {2: 'height'}}"
    )

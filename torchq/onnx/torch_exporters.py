"""The two exporters of torch behind one call."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.functional.onnx_ops import MARK
from torchq.utils.optional import need

__all__ = ["TORCHSCRIPT_MAX", "Call", "plain_attention", "run_dynamo", "run_torchscript"]

#: The last opset that the TorchScript exporter knows. What changed up to opset 23 only adds types, but for GroupNormalization, which
#: that exporter never writes; so its graphs are valid there as they are.
TORCHSCRIPT_MAX = 20
_IR_VERSIONS = {21: 10, 22: 10, 23: 11}
BATCH = "batch"


class Call:
    """An example call of a model, and which dimensions of its tensors stay open.

    Args:
        model: in eval mode.
        args: a tensor, positional arguments or keyword arguments.
        dynamic_batch: open the first dimension of the first tensor, and of all others of the same length.
        dynamic_shapes: more open dimensions by argument name.
        input_names, output_names: for the file.

    Raises:
        ExportError: ``dynamic_shapes`` names no tensor argument, or there is no tensor.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        dynamic_batch: bool,
        dynamic_shapes: Mapping[str, Mapping[int, str]] | None,
        input_names: Sequence[str] | None,
        output_names: Sequence[str] | None,
    ) -> None:
        self.model = model
        self.args: tuple[Any, ...] = (
            (args,)
            if isinstance(args, Tensor)
            else ()
            if isinstance(args, Mapping)
            else tuple(args)
        )
        self.kwargs: dict[str, Any] = dict(args) if isinstance(args, Mapping) else {}
        named = {
            **dict(zip(_parameters(model, len(self.args)), self.args, strict=True)),
            **self.kwargs,
        }
        self.tensors = {name: value for name, value in named.items() if isinstance(value, Tensor)}
        self.input_names = list(input_names) if input_names is not None else list(self.tensors)
        self.output_names = None if output_names is None else list(output_names)
        if unknown := sorted(set(dynamic_shapes or ()) - set(self.tensors)):
            raise ExportError(
                f"export_onnx: dynamic_shapes names {unknown}; expected some of the tensor arguments {sorted(self.tensors)}"
            )
        self.open: dict[str, dict[int, str]] = {
            name: dict((dynamic_shapes or {}).get(name, {})) for name in self.tensors
        }
        if dynamic_batch:
            self._open_batch()

    def _open_batch(self) -> None:
        length = next((t.shape[0] for t in self.tensors.values() if t.dim()), None)
        batched = {name for name, t in self.tensors.items() if t.dim() and t.shape[0] == length}
        for name in batched:
            self.open[name].setdefault(0, BATCH)
        if length == 1:  # torch.export takes a length of 1 for a constant
            double = {name: torch.cat([self.tensors[name]] * 2) for name in batched}
            originals = {id(self.tensors[name]): value for name, value in double.items()}
            self.args = tuple(originals.get(id(value), value) for value in self.args)
            self.kwargs = {
                name: originals.get(id(value), value) for name, value in self.kwargs.items()
            }

    @property
    def positional(self) -> tuple[Any, ...]:
        """All arguments in the order of ``forward``: the TorchScript exporter makes tensors of defaults that it fills in itself."""
        if not self.kwargs:
            return self.args
        parameters = list(inspect.signature(self.model.forward).parameters.values())[
            len(self.args) :
        ]
        last = max(i for i, p in enumerate(parameters) if p.name in self.kwargs)
        return (*self.args, *(self.kwargs.get(p.name, p.default) for p in parameters[: last + 1]))

    @property
    def shapes(self) -> dict[str, dict[int, str]]:
        """Open dimensions by name in the file, where there are any."""
        return {
            name: dims
            for name, dims in zip(self.input_names, self.open.values(), strict=False)
            if dims
        }


def _parameters(model: nn.Module, count: int) -> list[str]:
    """Names of the first ``count`` positional parameters of ``forward``; those of ``*args`` are numbered."""
    names = []
    for parameter in inspect.signature(model.forward).parameters.values():
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            names.append(parameter.name)
    return [*names, *(f"input_{i}" for i in range(len(names), count))][:count]


@contextmanager
def plain_attention() -> Iterator[None]:
    """Inside, attention runs operator by operator: its fused kernel has no ONNX form, and reads weights past their quantizers."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def run_dynamo(call: Call, opset: int) -> Any:
    """The ModelProto of the exporter on top of ``torch.export``."""
    names = _parameters(call.model, len(call.args))
    shapes: dict[str, Any] = {name: call.open.get(name) or None for name in (*names, *call.kwargs)}
    is_open = any(shapes.values())
    parameters = inspect.signature(call.model.forward).parameters
    if unnamed := [
        name for name in names if name not in parameters
    ]:  # torch.export knows *args as one tuple
        rest = next(p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL)
        shapes[rest] = tuple(shapes.pop(name) for name in unnamed)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the exporter warns about itself
            program = torch.onnx.export(
                call.model,
                call.args,
                kwargs=call.kwargs,
                input_names=call.input_names,
                output_names=call.output_names,
                opset_version=opset,
                dynamic_shapes=shapes if is_open else None,
                dynamo=True,
                verbose=False,
            )
    except Exception as error:
        raise _explained(
            error, "dynamo=False takes the other exporter, dynamic_batch=False fixes the batch size"
        ) from error
    if program is None:
        raise ExportError(
            "export_onnx: torch.onnx.export returned nothing; expected a program. Pass dynamo=False"
        )
    return program.model_proto


class _Positional(nn.Module):
    """Calls ``wrapped`` with positional arguments: the TorchScript exporter makes tensors of the defaults that it finds in a signature."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped
        self.training = wrapped.training

    def forward(self, *args: Any) -> Any:
        return self.wrapped(*args)


def _unprefix(model: Any) -> None:
    """Initializers under the names that they have in the model."""
    prefix = "wrapped."
    for tensor in model.graph.initializer:
        tensor.name = tensor.name.removeprefix(prefix)
    for node in model.graph.node:
        for names in (node.input, node.output):
            for index, name in enumerate(names):
                names[index] = name.removeprefix(prefix)


def run_torchscript(call: Call, opset: int) -> Any:
    """The ModelProto of the TorchScript exporter."""
    axes = {name: dict(dims) for name, dims in call.shapes.items()}
    try:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.filterwarnings(
                "ignore", message="Constant folding"
            )  # it would not shorten the graph there
            file = Path(folder, "model.onnx")
            torch.onnx.export(
                _Positional(call.model),
                call.positional,
                str(file),
                input_names=call.input_names,
                output_names=call.output_names,
                opset_version=min(opset, TORCHSCRIPT_MAX),
                dynamic_axes=axes or None,
                dynamo=False,
                custom_opsets={MARK[0]: 1},
            )
            model = need("onnx", "export_onnx").load_model(str(file))
    except Exception as error:
        raise _explained(error, "dynamo=True (torch >= 2.8) takes the other exporter") from error
    _unprefix(model)
    for entry in model.opset_import:
        if entry.domain == "":
            entry.version = opset
    model.ir_version = max(model.ir_version, _IR_VERSIONS.get(opset, 0))
    return model


def _explained(error: Exception, fix: str) -> Exception:
    """An error of ours as it is; torch's, which can be pages long, by its first line and cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ExportError):
            return cause
        cause = cause.__cause__ or cause.__context__
    deepest = error
    while isinstance(deepest.__cause__, Exception):
        deepest = deepest.__cause__
    first = next(
        (line for line in str(deepest).splitlines() if line.strip()), type(deepest).__name__
    )
    return ExportError(
        f"export_onnx: torch could not export the model ({type(deepest).__name__}: {first}); expected it to. {fix}"
    )

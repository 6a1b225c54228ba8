"""The two ONNX exporters of torch, as functions that return ``onnx_ir`` models."""

from __future__ import annotations

import inspect
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.functional.onnx_ops import MARK
from torchq.nn import TensorQuantizer
from torchq.onnx.example_call import ExampleCall
from torchq.onnx.interface_names import argument_names
from torchq.onnx.ir import Model, onnx_ir, set_opset
from torchq.onnx.torch_optimizer import optimize_

__all__ = [
    "TORCHSCRIPT_MAX",
    "TorchExportError",
    "run_dynamo",
    "run_torchscript",
]

#: The last opset that the TorchScript exporter knows. Up to opset 23 only types were added, and
#: GroupNormalization changed, which that exporter never writes; so its graphs are valid there.
TORCHSCRIPT_MAX = 20
_WRAPPED = "torchq_wrapped_model"


class TorchExportError(ExportError):
    """torch's exporter failed; torchq's own errors about the model are plain ExportErrors."""


def run_dynamo(call: ExampleCall, opset: int) -> Model:
    """Return the graph of the exporter that is based on ``torch.export``."""
    args, kwargs = call.args, call.kwargs
    if args and not kwargs and isinstance(args[-1], dict):  # torch would take it for kwargs.
        args, kwargs = args[:-1], {argument_names(call.model, len(args))[-1]: args[-1]}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The exporter warns about itself.
            program = torch.onnx.export(
                call.model,
                args,
                kwargs=kwargs,
                input_names=call.input_names,
                output_names=call.output_names,
                opset_version=opset,
                dynamic_shapes=_dynamic_shapes(call),
                dynamo=True,
                verbose=False,
                optimize=False,
            )
            if program is not None:
                _check_lengths(program.exported_program)
                optimize_(program)
    except Exception as error:
        fix = "dynamo=False takes the other exporter, dynamic_batch=False fixes the batch size"
        raise _explained(error, fix) from error
    if program is None:
        raise ExportError("export_onnx: torch.onnx.export returned nothing. Pass dynamo=False")
    _keep_input_names(program.model, call.input_names)
    return program.model


def _keep_input_names(model: Model, names: list[str]) -> None:
    """Give inputs their names back, which torch gives to outputs that are inputs as they are."""
    inputs, outputs = list(model.graph.inputs), list(model.graph.outputs)
    if len(inputs) != len(names):
        return
    for value in outputs:
        if value.name in names and value not in inputs:
            value.name = f"{value.name}_output"
    for value, name in zip(inputs, names, strict=True):
        value.name = name


def _check_lengths(program: torch.export.ExportedProgram | None) -> None:
    """Raise an error where a recurrent layer has the length of the example for an open one.

    Some versions of torch write such files without a word.
    """
    for node in () if program is None else program.graph.nodes:
        if not str(node.target).startswith(("aten.lstm.", "aten.gru.", "aten.rnn_")):
            continue
        given = node.args[0].meta["val"].shape
        results = [user.meta["val"].shape for user in node.users if user.args[1:] == (0,)]
        for shape in results:
            for length, frozen in zip(given[:2], shape[:2], strict=True):
                if isinstance(length, torch.SymInt) and isinstance(frozen, int):
                    raise TorchExportError(
                        "export_onnx: torch could not export the model (a recurrent layer takes "
                        f"the length {frozen} of the example for a constant). dynamo=False takes "
                        "the other exporter"
                    )


def _dynamic_shapes(call: ExampleCall) -> dict[str, Any] | None:
    """Return the open dimensions in the form of ``torch.export``; None where all are fixed."""
    names = argument_names(call.model, len(call.args))
    shapes: dict[str, Any] = {name: call.open.get(name) or None for name in (*names, *call.kwargs)}
    if not any(shapes.values()):
        return None
    parameters = inspect.signature(call.model.forward).parameters
    unnamed = [name for name in names if name not in parameters]
    if unnamed:  # torch.export knows *args as one tuple.
        rest = next(p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL)
        shapes[rest] = tuple(shapes.pop(name) for name in unnamed)
    return shapes


class _TensorsOnly(nn.Module):
    """A module that calls another one, and whose arguments are tensors alone.

    The TorchScript exporter makes inputs of numbers too, and of defaults that it finds in a
    signature. Here they are part of the module.
    """

    def __init__(self, call: ExampleCall) -> None:
        super().__init__()
        self.add_module(_WRAPPED, call.model)
        self._call = call
        self.training = call.model.training

    def forward(self, *tensors: Tensor) -> Any:
        left = list(tensors)
        args = [left.pop(0) if isinstance(v, Tensor) else v for v in self._call.args]
        kwargs = {
            name: left.pop(0) if isinstance(v, Tensor) else v
            for name, v in self._call.kwargs.items()
        }
        return self.get_submodule(_WRAPPED)(*args, **kwargs)


def run_torchscript(call: ExampleCall, opset: int) -> Model:
    """Return the graph of the TorchScript exporter."""
    if call.contained:
        raise ExportError(
            f"export_onnx: got the tensors {', '.join(call.contained)} inside a container, which "
            "the TorchScript exporter would store as constants; expected tensors. Pass "
            "dynamo=True, with opset 18 or later"
        )
    axes = {name: dict(dims) for name, dims in call.shapes.items()}
    try:
        with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("ignore", DeprecationWarning)
            # Folding would not shorten the graph where the exporter warns about it.
            warnings.filterwarnings("ignore", message="Constant folding")
            file = Path(folder, "model.onnx")
            torch.onnx.export(
                _TensorsOnly(call),
                tuple(v for v in (*call.args, *call.kwargs.values()) if isinstance(v, Tensor)),
                str(file),
                input_names=call.input_names,
                output_names=call.output_names,
                opset_version=min(opset, TORCHSCRIPT_MAX),
                dynamic_axes=axes or None,
                dynamo=False,
                custom_opsets={MARK[0]: 1} if _has_marks(call.model) else {},
            )
            model = onnx_ir.external_data.load_to_model(onnx_ir.load(file))
    except Exception as error:
        raise _explained(error, "dynamo=True takes the other exporter") from error
    _remove_prefix(model)
    set_opset(model, opset)
    return model


def _has_marks(model: nn.Module) -> bool:
    """Return True if quantizers mark their nodes; torch prints about a domain without nodes."""
    quantizers = (m for m in model.modules() if isinstance(m, TensorQuantizer))
    return any(quantizer.quantizing for quantizer in quantizers)


def _remove_prefix(model: Model) -> None:
    """Give nodes and values the names that they have without the wrapper of the model."""
    stored = list(model.graph.initializers.values())
    nodes = list(onnx_ir.traversal.RecursiveGraphIterator(model.graph))
    values = [value for node in nodes for value in node.outputs]
    for named in (*stored, *nodes, *values):
        if named.name and _WRAPPED in named.name:
            name = named.name.replace(f"/{_WRAPPED}/", "/", 1).replace(f"{_WRAPPED}.", "")
            named.name = name


def _explained(error: Exception, fix: str) -> Exception:
    """Return an error of torchq as it is, and torch's, which can be pages long, by its cause."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, ExportError):
            return cause
        cause = cause.__cause__ or cause.__context__
    deepest = error
    while isinstance(deepest.__cause__, Exception):
        deepest = deepest.__cause__
    lines = [line for line in str(deepest).splitlines() if line.strip()]
    first = lines[0] if lines else type(deepest).__name__
    return TorchExportError(
        f"export_onnx: torch could not export the model ({type(deepest).__name__}: {first}). {fix}"
    )

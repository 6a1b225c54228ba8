"""The two ONNX exporters of torch, as functions that return ``onnx_ir`` models."""

from __future__ import annotations

import inspect
import logging
import math
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr
from io import StringIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchq.errors import ExportError
from torchq.functional.onnx_ops import MARK, legacy_marks, mark
from torchq.graph import map_tensors
from torchq.nn import TensorQuantizer
from torchq.onnx.interface import ExampleCall, argument_names
from torchq.onnx.ir import Graph, Model, Node, Value, onnx_ir, set_opset
from torchq.onnx.marks import Marks
from torchq.onnx.plain_recurrent import translations
from torchq.utils.optional import import_optional

_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
#: Wider than the 1e-5 and 1e-8 of onnxscript's matcher, so that later releases may move a little.
_RELATIVE, _ABSOLUTE = 1e-4, 1e-6


def optimize_(program: Any) -> None:
    """Optimize what torch's exporter gave, in place.

    onnxscript takes a number near 0 or 1 for 0 or 1 itself (``math.isclose`` in its
    ``rewriter/_matcher.py``) and drops what is added or multiplied: ``log(x + 1e-10)`` would be
    infinite where x is 0. So such numbers are inputs of the graph while the optimizer runs.
    """
    optimizer = import_optional("onnxscript.optimizer", "export_onnx(dynamo=True)")
    # What onnxscript could not compute beforehand it leaves as nodes.
    with _without_log_of("onnxscript"):
        optimizer.inline(program.model)
        optimizer.fold_constants(program.model)
        with _small_numbers_as_inputs(program.model):
            program.optimize()


@contextmanager
def _without_log_of(name: str) -> Iterator[None]:
    """Keep warnings of a package out of the log, unless somebody asked for more than warnings."""
    logger = logging.getLogger(name)
    level = logger.level
    if level in (logging.NOTSET, logging.WARNING):
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _small_numbers_as_inputs(model: Model) -> Iterator[None]:
    graph = model.graph
    hidden = [
        _hide(graph, node, place, number)
        for node, place, number in _small_numbers(graph)
    ]
    try:
        yield
    finally:
        for value, tensor in hidden:
            graph.inputs.remove(value)
            value.const_value = tensor
            if value.uses():
                graph.register_initializer(value)


def _small_numbers(graph: Graph) -> list[tuple[Node, int, object]]:
    """Return the stored numbers that are nearly what changes nothing, with node and place."""
    numbers = []
    for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
        if node.domain or node.op_type not in _NEUTRAL:
            continue
        neutral = _NEUTRAL[node.op_type]
        for place, value in enumerate(node.inputs):
            number = onnx_ir.convenience.get_const_tensor(value)
            if number is not None and number.size == 1 and _nearly(number, neutral):
                numbers.append((node, place, number))
    return numbers


def _nearly(number: Any, neutral: float) -> bool:
    value = float(number.numpy().reshape(()))
    close = math.isclose(value, neutral, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    return close and value != neutral


def _hide(graph: Graph, node: Node, place: int, number: Any) -> tuple[Value, object]:
    """Let a node read a new input of the graph in the place of a stored number."""
    value = onnx_ir.Value(
        name=f"small_number_of_{node.outputs[0].name}_{place}",
        type=onnx_ir.TensorType(number.dtype),
        shape=onnx_ir.Shape(number.shape),
    )
    node.replace_input_with(place, value)
    graph.inputs.append(value)
    return value, number


#: The last opset that the TorchScript exporter knows. Up to opset 23 only types were added, and
#: GroupNormalization changed, which that exporter never writes; so its graphs are valid there.
_TORCHSCRIPT_MAX = 20
_WRAPPED = "torchq_wrapped_model"
_NUMBERED = "torchq_number_"
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]


#: What is left where neither exporter can trace a model, as one that chooses boxes.
_WRAPPER = (
    "Where both refuse a model, export a torch.nn.Module around its layers, such as backbone and "
    "head, whose forward takes one tensor and returns a tuple of tensors, and leave the rest, such "
    "as the choice of boxes, in Python"
)
#: Letters of a reason of torch that a message shows.
_LONGEST_REASON = 300


class TorchExportError(ExportError):
    """torch's exporter failed; torchq's own errors about the model are plain ExportErrors."""


def run_dynamo(call: ExampleCall, opset: int, marks: Marks) -> Model:
    """Return the graph of the exporter that is based on ``torch.export``."""
    args, kwargs = call.args, call.kwargs
    # Torch would take it for kwargs.
    if args and not kwargs and isinstance(args[-1], dict):
        name = argument_names(call.model, len(args))[-1]
        kwargs = {name: args[-1]}
        args = args[:-1]
    # Where a forward asks for the length of its batch, torch traces bytecode, which would not
    # enter the functions of torch.onnx that a mark calls.
    torch.compiler.allow_in_graph(mark)
    try:
        # The exporter warns about itself.
        with (
            warnings.catch_warnings(),
            _without_log_of("torch.onnx"),
            redirect_stderr(StringIO()),  # torch prints graphs that it could not finish
            _dense_states(call.model),
        ):
            warnings.simplefilter("ignore")
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
                custom_translation_table=translations(),
            )
            assert program is not None  # None comes back from dynamo=False alone.
            _check_lengths(program.exported_program)
            marks.place(program.model)
            optimize_(program)
    except Exception as error:
        raise _explained(error, _advice_on_dynamo(call)) from error
    _keep_input_names(program.model, call.input_names)
    return program.model


def _advice_on_dynamo(call: ExampleCall) -> str:
    """Return what to do where the exporter that is based on ``torch.export`` fails."""
    fixes = ["dynamo=False takes the other exporter"]
    if any(0 in dims for dims in call.shapes.values()):
        fixes.append("dynamic_batch=False fixes the batch size")
    return f"{', '.join(fixes)}. {_WRAPPER}"


@contextmanager
def _dense_states(model: nn.Module) -> Iterator[None]:
    """Give recurrent layers their first states without gaps between the numbers, for a while.

    torch.export makes a loop over the steps, and refuses one whose states come in with other
    strides than they go out.
    """
    layers = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(
                layer.register_forward_pre_hook(_with_dense_states, with_kwargs=True)
            )
        yield


def _with_dense_states(
    layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if "hx" in kwargs:
        return args, {**kwargs, "hx": _dense(kwargs["hx"])}
    return (*args[:1], *map(_dense, args[1:])), kwargs


def _dense(states: Any) -> Any:
    """Return the hidden states of a layer, one tensor or a pair, without gaps; None as it is."""
    if isinstance(states, tuple):
        return tuple(map(_dense, states))
    return states.contiguous() if isinstance(states, Tensor) else states


def _keep_input_names(model: Model, names: list[str]) -> None:
    """Give inputs their names back, which torch gives to outputs that are inputs as they are."""
    inputs = list(model.graph.inputs)
    outputs = list(model.graph.outputs)
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
        input_shape = node.args[0].meta["val"].shape
        results = [
            user.meta["val"].shape for user in node.users if user.args[1:] == (0,)
        ]
        for shape in results:
            for length, frozen in zip(input_shape[:2], shape[:2], strict=True):
                if isinstance(length, torch.SymInt) and isinstance(frozen, int):
                    raise TorchExportError(
                        "export_onnx: torch could not export the model (a recurrent layer takes "
                        f"the length {frozen} of the example for a constant). dynamo=False takes "
                        "the other exporter"
                    )


def _dynamic_shapes(call: ExampleCall) -> dict[str, object] | None:
    """Return the open dimensions in the form of ``torch.export``; None where all are fixed."""
    names = argument_names(call.model, len(call.args))
    shapes: dict[str, Any] = {
        name: call.open.get(name) or None for name in (*names, *call.kwargs)
    }
    if not any(shapes.values()):
        return None
    parameters = inspect.signature(call.model.forward).parameters
    unnamed = [name for name in names if name not in parameters]
    if unnamed:  # torch.export knows *args as one tuple.
        variadic = next(
            p.name for p in parameters.values() if p.kind is p.VAR_POSITIONAL
        )
        shapes[variadic] = tuple(shapes.pop(name) for name in unnamed)
    return shapes


class _TensorsOnly(nn.Module):
    """A module that calls another one, and whose arguments are tensors alone.

    The TorchScript exporter makes inputs of numbers too, and of defaults that it finds in a
    signature; and constants of tensors inside lists and mappings. Here all that are no tensors are
    part of the module, and all tensors are arguments.
    """

    def __init__(self, call: ExampleCall) -> None:
        super().__init__()
        self.add_module(_WRAPPED, call.model)
        self._call = call
        self.training = call.model.training

    def forward(self, *tensors: Tensor) -> Any:
        remaining = iter(tensors)
        args, kwargs = map_tensors(
            (self._call.args, self._call.kwargs), lambda _: next(remaining)
        )
        with _DataIsDetached():
            return self.get_submodule(_WRAPPED)(*args, **kwargs)


class _DataIsDetached(TorchFunctionMode):
    """Lets ``x.data`` be ``x.detach()``: a trace takes the former for a constant of the example."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func == _GET_DATA:
            return args[0].detach()
        return func(*args, **(kwargs or {}))


@contextmanager
def _each_warning_once() -> Iterator[None]:
    """Let what is warned of in the block be said once behind it, with filters of the block's own.

    The exporter changes filters while it runs, so that Python forgets what it has shown: a
    transformer of twelve layers repeats one sentence twelve times. Warnings that are errors are
    raised at once.
    """
    with warnings.catch_warnings(record=True) as caught:
        yield
    texts = {(warning.category, str(warning.message)): None for warning in caught}
    for category, text in texts:
        warnings.warn(text, category, stacklevel=3)


def run_torchscript(call: ExampleCall, opset: int) -> Model:
    """Return the graph of the TorchScript exporter."""
    tensors = tuple(call.feeds().values())
    replaced: list[Tensor] = []
    map_tensors((call.args, call.kwargs), replaced.append)
    if [*map(id, replaced)] != [*map(id, tensors)]:
        raise ExportError(
            f"export_onnx: got the tensors {', '.join(call.contained)} inside a container that is "
            "no tuple, list or mapping, which the TorchScript exporter would store as constants; "
            "expected tensors. Pass dynamo=True, with opset 18 or later"
        )
    axes = {_spelled(name): dict(dims) for name, dims in call.shapes.items()}
    try:
        with (
            _each_warning_once(),
            legacy_marks(),
            tempfile.TemporaryDirectory() as folder,
        ):
            warnings.simplefilter("ignore", DeprecationWarning)
            # Folding would not shorten the graph where the exporter warns about it.
            warnings.filterwarnings("ignore", message="Constant folding")
            file = Path(folder, "model.onnx")
            torch.onnx.export(
                _TensorsOnly(call),
                tensors,
                str(file),
                input_names=[_spelled(name) for name in call.input_names],
                output_names=call.output_names
                and [_spelled(name) for name in call.output_names],
                opset_version=min(opset, _TORCHSCRIPT_MAX),
                dynamic_axes=axes or None,
                dynamo=False,
                custom_opsets={MARK[0]: 1} if _has_marks(call.model) else {},
            )
            model = onnx_ir.external_data.load_to_model(onnx_ir.load(file))
    except Exception as error:
        raise _explained(
            error, f"dynamo=True takes the other exporter. {_WRAPPER}"
        ) from error
    _remove_prefix(model)
    _restore_numbers(model)
    set_opset(model, opset)
    return model


def _spelled(name: str) -> str:
    """Return a name that torch's older exporter takes, which wants no numbers for names."""
    return f"{_NUMBERED}{name}" if name.isdigit() else name


def _restore_numbers(model: Model) -> None:
    """Give inputs and outputs the numbers back that are their names; others give way."""
    nodes = list(onnx_ir.traversal.RecursiveGraphIterator(model.graph))
    results = [value for node in nodes for value in node.outputs]
    for value in (*model.graph.inputs, *model.graph.outputs):
        name = str(value.name)
        if name.startswith(_NUMBERED):
            number = name.removeprefix(_NUMBERED)
            for other in results:
                if other.name == number:
                    other.name = f"{number}/inner"
            value.name = number


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
            name = named.name.replace(f"/{_WRAPPED}/", "/", 1).replace(
                f"{_WRAPPED}.", ""
            )
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
    reason = lines[0] if lines else type(deepest).__name__
    if reason.endswith(":"):
        reason = " ".join([reason, *(line.lstrip("- ") for line in lines[1:2])])
    reason = reason.rstrip(".")
    if len(reason) > _LONGEST_REASON:
        reason = f"{reason[:_LONGEST_REASON]} ..."
    return TorchExportError(
        f"export_onnx: torch could not export the model ({type(deepest).__name__}: {reason}). {fix}"
    )

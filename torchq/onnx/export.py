"""``export_onnx``: checks, one of torch's exporters, the passes, and the file."""

from __future__ import annotations

import copy
import dataclasses
import os
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError, ExportError
from torchq.fusion.record import fusion_record
from torchq.fusion.unfolded import keeps_norm
from torchq.graph import tensors_in
from torchq.nn import QuantModule, TensorQuantizer
from torchq.nn.integer_bias import rounded_biases
from torchq.onnx.coverage import EXAMPLE_LENGTHS, Coverage, example_lengths
from torchq.onnx.interface import ExampleCall, fixes_batch, output_names_in
from torchq.onnx.ir import (
    Model,
    Rewrite,
    float_size,
    is_constant,
    nodes_of,
    opset_of,
    run_passes,
    save_model,
    set_opset,
)
from torchq.onnx.lengths import problem_with_half, token_lengths
from torchq.onnx.lost_arguments import check_arguments
from torchq.onnx.marks import MarksLost, marking, write_pairs
from torchq.onnx.passes import EXPORT_PASSES
from torchq.onnx.passes.pairs import merge_duplicates
from torchq.onnx.preflight import (
    check_dtypes,
    check_quantizers,
    choose_exporter,
    default_opset,
    warn_of_own_grid,
)
from torchq.onnx.qdq import (
    qparams_of,
    quantizer_nodes,
    read_record,
    store_codes,
    weight_nodes,
    write_record,
)
from torchq.onnx.steps import warn_of_steps
from torchq.onnx.torch_exporters import (
    TorchExportError,
    run_dynamo,
    run_torchscript,
)
from torchq.onnx.traced_calls import check_calls, noted_holders
from torchq.runtime import RUNTIMES, Runtime, check_planned, planned_runtime, runtime_of
from torchq.swap import plan_of
from torchq.swap.even_channels import as_in_files
from torchq.utils import (
    bullets,
    deployed_part,
    evaluating,
    network_of,
    plain_attention,
    progress_stages,
    qualified_name,
    state_kept,
)
from torchq.utils.optional import import_optional
from torchq.workflow.changed_weights import warn_of_changed_weights
from torchq.workflow.lost_norms import check_norms

#: What the progress bar shows.
_STAGES = ("trace", "rewrite", "write")
#: Below this share of its multiply-adds on integers, a file of a quantized model is worth a word.
_FEW = 1 / 3


@dataclass(frozen=True)
class ExportReport:
    """The file that :func:`torchq.export_onnx` wrote.

    Attributes:
        path: The file.
        target: The runtime that it was shaped for, or None for plain Q/DQ.
        opset: Version of the default ONNX domain.
        exporter: ``"dynamo"`` or ``"torchscript"``.
        size: Bytes on disk, with external data.
        float_size: Bytes that the same stored tensors occupy in float32.
        activations: Names of the quantizers of activations in the file.
        weights: Names of the quantizers whose weights are stored as integers or FP8.
        merged: Quantizers whose Q/DQ nodes another quantizer provides, because both had the same
            input and range: name -> name of the provider.
        warnings: Rules of the target that the model does not follow; each names a layer and a fix.
        notes: What the target has to say of the file, such as how to run it.
        coverage: How much of the file reads integers.
    """

    path: Path
    target: str | None
    opset: int
    exporter: str
    size: int
    float_size: int
    activations: tuple[str, ...]
    weights: tuple[str, ...]
    merged: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    coverage: Coverage | None = None

    def __str__(self) -> str:
        share = ""
        if self.float_size:
            percent = f"{self.size / self.float_size:.0%}"
            share = f" ({percent} of {_megabytes(self.float_size)} in float32)"
        coverage = "" if self.coverage is None else f", {self.coverage}"
        lines = [
            f"{self.path}: {_megabytes(self.size)}{share}{coverage}",
            f"opset {self.opset}, {self.exporter} exporter, target {self.target or 'any'}",
            f"{len(self.weights)} weights stored quantized, "
            f"{len(self.activations)} activations quantized, {len(self.merged)} merged",
            *self.notes,
        ]
        if self.warnings:
            # The warning itself has said them.
            count = f"{len(self.warnings)} warning{'s' * (len(self.warnings) > 1)}"
            lines.append(f"with {count}: print(*report.warnings)")
        return "\n".join(lines)


def _megabytes(size: int) -> str:
    return f"{size / 1e6:.2f} MB"


def export_onnx(
    model: nn.Module,
    example: object,
    path: str | os.PathLike[str],
    *,
    target: str | Runtime | None = None,
    opset: int | None = None,
    dynamo: bool | None = None,
    dynamic_batch: bool = True,
    dynamic_shapes: Mapping[str, Mapping[int, str]] | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    progress: bool = True,
) -> ExportReport:
    """Write a quantized model as ONNX with QuantizeLinear, DequantizeLinear and integer weights.

    The model is exported in eval mode and left as it was. Every Q and DQ node is named after its
    quantizer, so that :func:`torchq.verify_onnx` can compare layer by layer. The file is replaced
    whole or not at all.

    Args:
        model: A calibrated model; DataParallel and DistributedDataParallel are unwrapped.
        example: A tensor, a tuple or list of positional arguments (labels at its end are dropped),
            or a mapping of keyword arguments; see :func:`torchq.graph.call_model`.
        path: The ``.onnx`` file. Tensors go to ``path + ".data"`` where they exceed what one file
            can hold.
        target: The runtime to shape the graph for, one of :func:`torchq.targets` or a
            :class:`torchq.runtimes.Runtime`. None takes the one that the model was quantized for.
            A model that was quantized for none can go to any, on its own grid; where that is
            another one than the runtime has, there is a warning.
        opset: 10 to 23; None takes 20, or 21 for what needs it. Per-channel ranges need 13, FP8
            needs 19; int16 and blocks need 21, and so does int4, which older ones hold as int8.
        dynamo: The exporter of torch: True for the one based on ``torch.export`` (opset >=
            18), False for TorchScript. None takes the first where the opset allows it.
        dynamic_batch: Leave the first dimension of every tensor argument open. Where torch cannot
            trace that, the file has the batch size of the example, and a warning says so. A model
            that was read from a file with a fixed batch size keeps that.
        dynamic_shapes: More open dimensions: input name -> {dimension: name}. None opens the number
            of tokens, the second dimension of arguments named ``..._ids`` and ``..._mask``, where
            the model runs with half as many; ``{}`` leaves all of them fixed.
        input_names: Names in the file; default those of the file that the model was read from
            (:func:`torchq.from_onnx` and its like), or the arguments of ``forward``.
        output_names: Names in the file; default those of the file that the model was read from, or
            of the exporter.
        progress: Show a bar where it takes longer than a second.

    Returns:
        What was written; ``print`` it.

    Raises:
        ConfigError: There is no such target, it reads no ONNX file, the model was quantized for
            another one, or the path has an ending of files that the target has beside ONNX.
        ExportError: A quantizer has no usable range, the opset or the target lacks something, or
            torch cannot export the model.
        MissingExtraError: A package of the extra "export" is not installed.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> report = torchq.quantize_(model)
        >>> x = torch.randn(4, 3, 8, 8)
        >>> _ = torchq.calibrate(model, [x], progress=False)
        >>> print(torchq.export_onnx(model, x, "model.onnx"))  # doctest: +SKIP
    """
    import_optional("onnx", "export_onnx")
    model, path = unwrap(model), Path(path)
    runtime = _runtime_for(model, target)
    _check_reads_onnx(runtime)
    _check_ending(path, runtime)
    version = default_opset(model) if opset is None else opset
    modern = choose_exporter(dynamo, version)
    active = check_quantizers(model, version, runtime)
    warn_of_own_grid(model, active, runtime)
    check_norms("export_onnx", model)
    check_arguments(model, example, dynamo=modern)
    has_steps_first = warn_of_steps(model, example, dynamic_shapes)
    warn_of_changed_weights("export_onnx", model)
    names = (input_names, output_names)
    has_fixed_rows = fixes_batch(model) or has_steps_first
    batches = (True, False) if dynamic_batch and not has_fixed_rows else (False,)
    calls = [
        ExampleCall(model, example, is_open, dynamic_shapes, *names)
        for is_open in batches
    ]
    if len(calls) > 1 and calls[0].shapes == calls[1].shapes:
        del calls[1:]  # Tensors inside containers have no open batch.
    lengths = _open_lengths(model, example) if dynamic_shapes is None else {}
    if lengths:
        calls.insert(0, ExampleCall(model, example, batches[0], lengths, *names))
    stages = progress_stages("export", _STAGES, enabled=progress)
    with as_in_files(model), stages as next_stage:
        graph = _first_that_traces(calls, version, modern, active)
        next_stage()
        set_opset(graph, version)
        graph.meta.update(
            runtime=runtime, feeds=calls[-1].feeds, fused=_was_fused(model)
        )
        broken_rules = _shape_for(runtime, graph)
        next_stage()
        write_record(graph, target=None if runtime is None else runtime.name)
        work = plan_of(model).work
        rows = 1 if work is None else work.rows
        if recorded := example_lengths(graph, graph.meta["feeds"](), rows):
            write_record(graph, **{EXAMPLE_LENGTHS: recorded})
        size = save_model(graph, path)
    exporter = "dynamo" if modern else "torchscript"
    coverage = Coverage.of(graph, runtime)
    has_weights_alone = bool(weight_nodes(graph)) and not quantizer_nodes(graph)
    # A float model in which its author has placed quantizers may be float around them.
    has_layers = any(isinstance(module, QuantModule) for module in model.modules())
    # Where BatchNorms alone are the reason, a check of the runtime has warned and says what helps.
    is_known = bool(broken_rules) and not (
        coverage.float_weights or coverage.float_inputs
    )
    if active and has_layers and not has_weights_alone and not is_known:
        _warn_of_float(coverage, path, was_fused=_was_fused(model))
    return _report_on(
        graph,
        path,
        runtime,
        exporter=exporter,
        size=size,
        warnings=broken_rules,
        coverage=coverage,
    )


def _was_fused(model: nn.Module) -> bool:
    """Return True if ``fuse_`` has seen a model: it refused the BatchNorms that are left."""
    return bool(fusion_record(model)) or any(map(keeps_norm, model.modules()))


def _warn_of_float(coverage: Coverage, path: Path, *, was_fused: bool) -> None:
    """Warn that a file of a quantized model computes in float for the most part, and why."""
    if coverage.share is not None and coverage.share < _FEW:
        advice = "print(torchq.swap.plan_of(model)) says what is quantized"
        if coverage.before_norms:
            advice = (
                "torchq.fuse_ refused it, and print(torchq.fuse_(model.eval(), example)) says why"
                if was_fused
                else "torchq.fuse_(model.eval(), example) folds it and keeps the codes"
            )
        warnings.warn(
            f"export_onnx: {coverage.reason}, so {path.name} computes in float: {coverage}. "
            f"{advice}",
            stacklevel=3,
        )


def _report_on(
    graph: Model, path: Path, runtime: Runtime | None, **fields: Any
) -> ExportReport:
    """Return the report on a file, with names from its graph and its record."""
    notes = None if runtime is None or runtime.file is None else runtime.file.notes
    merged = dict(read_record(graph).get("merged", {}))
    weights = [*weight_nodes(graph)]
    return ExportReport(
        path=path,
        target=None if runtime is None else runtime.name,
        opset=opset_of(graph),
        float_size=float_size(graph),
        activations=tuple(quantizer_nodes(graph)),
        weights=(
            *weights,
            *(name for name, other in merged.items() if other in weights),
        ),
        merged=merged,
        notes=() if notes is None else tuple(notes(graph, path)),
        **fields,
    )


def _runtime_for(model: nn.Module, target: str | Runtime | None) -> Runtime | None:
    """Return the runtime of a file: the given one, or that of the plan; ConfigError for others."""
    runtime = planned_runtime(model) if target is None else runtime_of(target)
    check_planned("export_onnx", model, runtime)
    check_dtypes(model, runtime)
    return runtime


def _shape_for(runtime: Runtime | None, graph: Model) -> tuple[str, ...]:
    """Rewrite a graph for a runtime; warn of its rules that the graph breaks, and return them."""
    run_passes(graph, EXPORT_PASSES)
    if runtime is None or runtime.file is None:
        return ()
    rules, codes = runtime.file, runtime.codes
    if codes is not None and codes.stored:
        for node in nodes_of(graph, "QuantizeLinear"):
            if (
                is_constant(node.inputs[1])
                and qparams_of(node).format.bits in codes.widths
            ):
                store_codes(node, signed=False)
    run_passes(graph, (merge_duplicates, *rules.passes))
    broken_rules = tuple(
        broken_rule for check in rules.checks for broken_rule in check(graph)
    )
    if broken_rules:
        warnings.warn(
            f"export_onnx(target={runtime.name!r}):\n{bullets(broken_rules)}",
            stacklevel=3,
        )
    return broken_rules


def _check_reads_onnx(runtime: Runtime | None) -> None:
    """Raise an error for a runtime that reads no ONNX file."""
    if runtime is None or runtime.file is not None:
        return
    lines = [runtime.writing_line(ending) for ending in runtime.writers()]
    if lines:
        advice = f"Write a file of its own with {lines[0]}"
    elif runtime.here:
        advice = "torchq.deploy(model, example) runs it here"
    else:
        advice = "torchq.save keeps the model with the numbers that it would compute"
    raise ConfigError(
        f"export_onnx: there are no ONNX files for {runtime.name}; expected a target that reads "
        f"ONNX. {advice}; for another target, restore_ the model and quantize it for that one"
    )


def _check_ending(path: Path, runtime: Runtime | None) -> None:
    """Raise an error for an ending of files that a runtime has beside ONNX."""
    if runtime is not None and path.suffix in runtime.writers():
        raise ConfigError(
            f"export_onnx: got {path}, the name of a file that {runtime.name} has beside ONNX; "
            "expected one that ends in .onnx. Write the other one with "
            f"{runtime.writing_line(path.suffix)}, or with torchq quantize --export"
        )


def undo_export(graph: Model) -> dict[str, str]:
    """Undo what the passes of a file changed in layers; return what is wrong, by quantizer."""
    runtime = RUNTIMES.get(str(read_record(graph).get("target")))
    runtime_passes = (
        () if runtime is None or runtime.file is None else runtime.file.passes
    )
    wrong: dict[str, str] = {}
    for rewrite in reversed((*EXPORT_PASSES, *runtime_passes)):
        if isinstance(rewrite, Rewrite):
            wrong |= rewrite.undo(graph)
    return wrong


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model inside DataParallel or DistributedDataParallel.

    Raises:
        ExportError: ``model`` was returned by torch.compile, torch.jit or torch.export; these
            modules cannot be exported again. Or by :func:`torchq.deploy`. Or accelerate has wrapped
            its forward in autocast; the file would compute in bfloat16, for which ONNX Runtime has
            few kernels.
    """
    model = network_of(model)
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrap(model.module)
    if (
        isinstance(model, torch.jit.ScriptModule)
        or type(model).__name__ == "OptimizedModule"
    ):
        raise ExportError(
            f"export_onnx: got a {type(model).__name__}; expected the model itself. "
            "Pass the module that torch.compile or jit was given"
        )
    if "_original_forward" in vars(model):
        raise ExportError(
            f"export_onnx: the forward of this {type(model).__name__} is wrapped for mixed "
            "precision by accelerate; expected the class's own. Pass "
            "accelerator.unwrap_model(model, keep_fp32_wrapper=False)"
        )
    deployed = deployed_part(model)
    if deployed is not None:
        name, module = deployed
        raise ExportError(
            f"export_onnx: {name}: got a {type(module).__name__} of a deployed model; expected the "
            "simulation, from which files are made. Pass the calibrated model that deploy was given"
        )
    return model


def _traced(
    call: ExampleCall, opset: int, modern: bool, active: Mapping[str, TensorQuantizer]
) -> Model:
    """Return the graph that torch's exporter makes of the model, with the pairs of quantizers."""
    holders: set[str] = set()
    marked: tuple[Model, list[str]] | None = None
    # A version of torch may note no modules; or nothing reads what a quantizer returned.
    with suppress(MarksLost):
        marked = _marked(call, opset, modern, active, holders, by_scope=modern)
    if marked is None:
        marked = _marked(call, opset, modern, active, holders, by_scope=False)
    graph, names = marked
    if not graph.graph.outputs:
        raise ExportError(
            f"export_onnx: {type(call.model).__name__} returns no tensor; expected one at least"
        )
    check_calls(graph, call, active, holders)
    write_pairs(graph, active, opset)
    if call.output_names is None:
        _name_outputs(graph, names)
    return graph


def _marked(
    call: ExampleCall,
    opset: int,
    modern: bool,
    active: Mapping[str, TensorQuantizer],
    holders: set[str],
    *,
    by_scope: bool,
) -> tuple[Model, list[str]]:
    """Return the graph with a mark where each quantizer is called, and the names of its outputs.

    The paths of the modules with quantizers that are called are added to ``holders``.
    """
    with ExitStack() as stack:
        # A forward may store results in its module; what it stores while it is traced is no tensor.
        stack.enter_context(state_kept(call.model))
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(call.model))
        stack.enter_context(rounded_biases(call.model))
        stack.enter_context(noted_holders(call.model, holders))
        marks = stack.enter_context(marking(call.model, active, opset, by_scope))
        names = stack.enter_context(_known_outputs(call.model))
        stack.enter_context(plain_attention())
        if modern:
            graph = run_dynamo(call, opset, marks)
        else:
            graph = run_torchscript(call, opset)
    return graph, names


def _name_outputs(graph: Model, names: Sequence[str]) -> None:
    """Give the outputs of a graph the names that the model has for them, if it has any."""
    outputs = graph.graph.outputs
    values = [value for node in graph.graph for value in node.outputs]
    values += [*graph.graph.inputs, *graph.graph.initializers.values()]
    taken = {str(value.name) for value in values if value not in outputs}
    if len(names) == len(outputs) == len({*names} - taken):
        for value, name in zip(outputs, names, strict=True):
            value.name = name


def _first_that_traces(
    calls: Sequence[ExampleCall],
    opset: int,
    modern: bool,
    active: Mapping[str, TensorQuantizer],
) -> Model:
    """Trace the first call; if torch cannot, the next one, with fewer open dimensions, and warn.

    A model that has stored the batch size of an earlier call cannot be traced for any other.
    """
    first: TorchExportError | None = None
    for call in calls:
        try:
            graph = _traced(call, opset, modern, active)
        except TorchExportError as error:
            first = first or error
            continue
        if first is not None:
            _warn_of_fixed(calls[0], call, first)
        return graph
    assert first is not None
    raise first


def _warn_of_fixed(
    asked: ExampleCall, traced: ExampleCall, error: TorchExportError
) -> None:
    """Warn that dimensions have the size of the example, as torch cannot trace them open."""
    reason = str(error).partition(". dynamo=")[0].removeprefix("export_onnx: ")
    batch = "an open batch size, so the file has the fixed batch size of the example"
    lengths = "open numbers of tokens, so the file takes as many as the example has"
    is_batch_fixed = _opens(asked, 0) and not _opens(traced, 0)
    what = batch if is_batch_fixed else lengths
    option = "dynamic_batch=False" if is_batch_fixed else "dynamic_shapes={}"
    warnings.warn(
        f"export_onnx: {reason} with {what}. Pass {option} to say so", stacklevel=4
    )


def _opens(call: ExampleCall, dimension: int) -> bool:
    return any(dimension in dims for dims in call.shapes.values())


def _open_lengths(model: nn.Module, example: object) -> dict[str, dict[int, str]]:
    """Return the dimensions that count tokens; none, with a warning, where the model fixes them."""
    lengths = token_lengths(model, example)
    problem = problem_with_half(model, example, lengths) if lengths else ""
    if problem:
        warnings.warn(
            f"export_onnx: {', '.join(lengths)}: the model takes no other number of tokens than "
            f"the example has ({problem}), and so does the file. Pass dynamic_shapes={{}} to say "
            "so",
            stacklevel=3,
        )
    return {} if problem else lengths


@contextmanager
def _known_outputs(model: nn.Module) -> Iterator[list[str]]:
    """Leave out of the outputs what is no tensor, number or text, warn of it, and note their names.

    The exporters refuse objects of unknown classes, such as the cache of keys and values that
    language models of Hugging Face return beside their logits. Dataclasses become dictionaries.
    """
    dropped: set[str] = set()
    names: list[str] = []

    def known(value: object) -> Any:
        if value is None or isinstance(value, (Tensor, bool, int, float, str)):
            return value
        if isinstance(value, MutableMapping):
            value = copy.copy(value)
            for key in list(value):
                value[key] = known(value[key])
            return value
        if isinstance(value, (tuple, list)):
            elements = [known(element) for element in value]
            return (
                type(value)(elements)
                if type(value) in (tuple, list)
                else type(value)(*elements)
            )
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            # The exporters know those alone that are registered.
            return {
                field.name: known(getattr(value, field.name))
                for field in dataclasses.fields(value)
            }
        dropped.add(qualified_name(type(value)))
        return None

    def noted(module: nn.Module, args: object, out: object) -> Any:
        result = known(out)
        if not any(True for _ in tensors_in(result)):
            raise ExportError(
                f"export_onnx: {type(module).__name__} returns no tensor; expected one at least, "
                f"also in tuples, lists, mappings and dataclasses, and got a {type(out).__name__}. "
                "Export a module whose forward returns its tensors"
            )
        names[:] = output_names_in(result)
        return result

    handle = model.register_forward_hook(noted)
    try:
        yield names
    finally:
        handle.remove()
    if dropped:
        warnings.warn(
            f"export_onnx: the model returns {', '.join(sorted(dropped))}, which ONNX has no type "
            "for; the file leaves it out",
            stacklevel=6,
        )

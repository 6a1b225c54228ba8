"""``export_onnx``: checks, one of torch's two exporters, and the passes that make its graph fit for deployment."""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ExportError
from torchq.formats import Format
from torchq.functional.onnx_ops import mark
from torchq.nn import TensorQuantizer
from torchq.onnx.ir import Graph
from torchq.onnx.passes.cleanup import (
    constants_to_initializers,
    fold_scales,
    fold_slices,
    fold_weights,
    merge_duplicates,
    name_quantizers,
    strip_metadata,
)
from torchq.onnx.passes.fold_shapes import fold_shapes
from torchq.onnx.passes.matmul_layout import keep_products, store_transposed
from torchq.onnx.preflight import check_quantizers, default_opset
from torchq.onnx.report import ExportReport
from torchq.onnx.targets.checks import findings
from torchq.onnx.targets.retarget import retarget
from torchq.onnx.torch_exporters import Call, plain_attention, run_dynamo, run_torchscript
from torchq.onnx.verify.qdq import write_record
from torchq.swap import TARGETS
from torchq.utils import evaluating
from torchq.utils.optional import need

__all__ = ["export_onnx", "unwrap"]

_OPSETS = range(10, 24)
_DYNAMO_MIN = 18
Shapes = Mapping[str, Mapping[int, str]]


def export_onnx(
    model: nn.Module,
    args: Tensor | Sequence[Any] | Mapping[str, Any],
    path: str | os.PathLike[str],
    *,
    target: str | None = None,
    opset: int | None = None,
    dynamo: bool | None = None,
    dynamic_batch: bool = True,
    dynamic_shapes: Shapes | None = None,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
) -> ExportReport:
    """Write a quantized model as ONNX with standard QuantizeLinear / DequantizeLinear and integer weights.

    The model is exported in eval mode and left as it was. Every Q and DQ node is named after its quantizer, so that
    :func:`torchq.verify_onnx` can compare layer by layer.

    Args:
        model: calibrated; DataParallel and DistributedDataParallel are unwrapped.
        args: an example: a tensor, a tuple or list of positional arguments, or a mapping of keyword arguments.
        path: the ``.onnx`` file. Tensors go to ``path + ".data"`` where they exceed what one file can hold.
        target: shape the graph for ``"tensorrt"``, ``"onnxruntime"`` or ``"openvino"``; None writes what the simulation does.
        opset: 10 to 23; None takes 20, or 21 for what needs it. Per-channel ranges need 13, FP8 19, int4, int16 and blocks 21.
        dynamo: which exporter of torch to use: True the ``torch.export`` based one (torch >= 2.8, opset >= 18), False TorchScript.
            None takes the first where it can.
        dynamic_batch: leave the first dimension of every tensor argument open.
        dynamic_shapes: more open dimensions: input name -> {dimension: name}.
        input_names, output_names: names in the file; default those of the arguments of ``forward``, and the exporter's.

    Returns:
        what was written; ``print`` it.

    Raises:
        ExportError: a quantizer without a usable range, an opset that lacks something, or a model that torch cannot export.
        MissingExtraError: onnx, or onnxscript for ``dynamo=True``, is not installed.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3))
        >>> report = torchq.quantize_(model)
        >>> report = torchq.calibrate(model, [torch.randn(4, 3, 8, 8)], progress=False)
        >>> print(torchq.export_onnx(model, torch.randn(1, 3, 8, 8), "model.onnx"))  # doctest: +SKIP
    """
    need("onnx", "export_onnx")
    model, path = unwrap(model), Path(path)
    opset = default_opset(model) if opset is None else opset
    modern = _choose(dynamo, opset)
    if target is not None:
        TARGETS[target]  # an unknown one is an error that lists the known
    active = check_quantizers(model, opset, modern)
    if not active:
        warnings.warn(
            f"export_onnx: {type(model).__name__} has no active quantizer; the file will hold a float model",
            stacklevel=2,
        )
    call = Call(model, args, dynamic_batch, dynamic_shapes, input_names, output_names)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(evaluating(model))
        stack.enter_context(_marked(model, active))
        stack.enter_context(plain_attention())
        graph = Graph(run_dynamo(call, opset) if modern else run_torchscript(call, opset))
    formats = {name: q.descriptor.format for name, q in active.items()}
    names, weights, merged = _clean(graph, formats)
    retarget(graph, target)
    if found := findings(graph, target):
        warnings.warn(f"export_onnx(target={target!r}): " + "; ".join(found), stacklevel=2)
    write_record(graph, target=target, merged=merged)
    activations = tuple(n for n in names if n not in weights and n not in merged)
    exporter, size = "dynamo" if modern else "torchscript", graph.save(path)
    return ExportReport(
        path,
        target,
        graph.opset,
        exporter,
        size,
        graph.float_size,
        activations,
        tuple(weights),
        merged,
        tuple(found),
    )


def _clean(
    graph: Graph, formats: Mapping[str, Format]
) -> tuple[list[str], list[str], dict[str, str]]:
    """Names, integer weights, no duplicates; the quantizers in the graph, those of weights, and those that others stand for."""
    constants_to_initializers(graph)
    fold_slices(graph)
    fold_scales(graph)
    names, merged = name_quantizers(graph)
    weights = fold_weights(graph, formats)
    merged |= merge_duplicates(graph)
    fold_shapes(graph)
    store_transposed(graph)
    keep_products(graph)
    strip_metadata(graph)
    return names, weights, merged


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DataParallel or DistributedDataParallel.

    Raises:
        ExportError: what torch.compile, torch.jit or torch.export returned: their modules cannot be exported again.
    """
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return unwrap(model.module)
    if isinstance(model, torch.jit.ScriptModule) or type(model).__name__ == "OptimizedModule":
        raise ExportError(
            f"export_onnx: got a {type(model).__name__}; expected the model itself. Pass the module that torch.compile or jit was given"
        )
    return model


def _choose(dynamo: bool | None, opset: int) -> bool:
    """Whether the ``torch.export`` based exporter does it."""
    if opset not in _OPSETS:
        raise ExportError(
            f"export_onnx: got opset {opset}; expected {_OPSETS.start} to {_OPSETS.stop - 1}"
        )
    able = hasattr(torch.onnx, "ops")
    if dynamo and not able:
        raise ExportError(
            f"export_onnx: dynamo=True with torch {torch.__version__}; expected torch >= 2.8. Leave dynamo out, or pass False"
        )
    if dynamo and opset < _DYNAMO_MIN:
        raise ExportError(
            f"export_onnx: dynamo=True with opset {opset}; expected opset >= {_DYNAMO_MIN}. Pass dynamo=False"
        )
    if dynamo is None:
        dynamo = able and opset >= _DYNAMO_MIN
    if dynamo:
        need("onnxscript", "export_onnx(dynamo=True)")
    return dynamo


@contextmanager
def _marked(model: nn.Module, active: Mapping[str, TensorQuantizer]) -> Iterator[None]:
    """Inside, every quantizer writes its path beside its Q/DQ nodes, ``path#2`` on its second call and so on, and none observes."""
    before = [(q, q.observing) for q in active.values()]
    calls: Counter[str] = Counter()
    handles = [
        model.register_forward_pre_hook(lambda *_: calls.clear())
    ]  # an exporter may run the model more than once

    def hook(name: str, out: Tensor) -> Tensor:
        calls[name] += 1
        return mark(out, name if calls[name] == 1 else f"{name}#{calls[name]}")

    try:
        for name, quantizer in active.items():
            quantizer.observing = False
            handles.append(
                quantizer.register_forward_hook(lambda _, __, out, name=name: hook(name, out))
            )
        yield
    finally:
        for handle in handles:
            handle.remove()
        for quantizer, observing in before:
            quantizer.observing = observing

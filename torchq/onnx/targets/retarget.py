"""Rewriting the activations of a file for a runtime: which integer type, which zero point. Weights stay as they are."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch

from torchq.onnx.ir import Graph, load_graph
from torchq.onnx.passes.cleanup import (
    attribute,
    constants_to_initializers,
    element_type,
    merge_duplicates,
)
from torchq.onnx.passes.fold_shapes import known_shapes
from torchq.onnx.passes.matmul_layout import keep_products, split_gemms
from torchq.onnx.report import ExportReport
from torchq.onnx.targets.checks import findings
from torchq.onnx.verify.qdq import read_record, write_record
from torchq.swap import TARGETS

__all__ = ["nonnegative", "retarget", "retarget_onnx"]

_UINT8, _INT8 = 2, 3
#: Operators whose result is never negative, whatever they read.
_POSITIVE = frozenset(
    [
        "Relu",
        "Sigmoid",
        "Softmax",
        "HardSigmoid",
        "Abs",
        "Exp",
        "Softplus",
        "ReduceL2",
        "ReduceSumSquare",
    ]
)
#: Operators whose result is not negative where all that they read is not. The number of operands that count, or None for all.
_KEEPING: dict[str, int | None] = {
    **dict.fromkeys(
        [
            "MaxPool",
            "AveragePool",
            "GlobalAveragePool",
            "GlobalMaxPool",
            "ReduceMean",
            "ReduceMax",
            "ReduceSum",
        ],
        1,
    ),
    **dict.fromkeys(
        [
            "Reshape",
            "Flatten",
            "Transpose",
            "Squeeze",
            "Unsqueeze",
            "Slice",
            "Gather",
            "Split",
            "Expand",
            "Tile",
        ],
        1,
    ),
    **dict.fromkeys(
        [
            "Identity",
            "Dropout",
            "Cast",
            "DepthToSpace",
            "SpaceToDepth",
            "DequantizeLinear",
            "QuantizeLinear",
            "Sqrt",
        ],
        1,
    ),
    "Resize": 1,
    **dict.fromkeys(["Concat", "Add", "Mul", "Max"], None),
}


def nonnegative(graph: Graph, value: str) -> bool:
    """Whether the operators alone say that ``value`` has no negative element."""
    pending, seen = [value], {value}
    while pending:
        node = graph.producer(pending.pop())
        if node is None:
            return False
        if node.op_type in _POSITIVE or (node.op_type == "Clip" and _clips_at_zero(graph, node)):
            continue
        if node.op_type not in _KEEPING or (
            node.op_type == "Resize" and attribute(node, "mode", b"nearest") == b"cubic"
        ):
            return False
        operands = [name for name in node.input if name][: _KEEPING[node.op_type]]
        pending += [name for name in operands if name not in seen]
        seen.update(operands)
    return True


def _clips_at_zero(graph: Graph, node: Any) -> bool:
    low = node.input[1] if len(node.input) > 1 else ""
    if low:
        return low in graph.initializers and bool((graph.value(low) >= 0).all())
    return bool(attribute(node, "min", -1.0) >= 0)


def retarget(graph: Graph, target: str | None) -> None:
    """Rewrite every int8 or uint8 activation, in place.

    "onnxruntime": uint8 everywhere. A tensor that cannot be negative gets zero point 0 and the scale times 127/255: the same range on a
    finer grid; any other gets zero point 128: the same grid. Kernels for uint8 take ReLU in, and are never refused.
    "openvino": the same for tensors that cannot be negative, as the kernels of CPUs without AMX multiply uint8 by int8; int8 for others.
    "tensorrt": int8 with zero point 0; the inverse of both. None: as they are.
    """
    if target is None:
        return
    signed = {
        _shared_name(node)
        for node in graph.of("QuantizeLinear")
        if not nonnegative(graph, node.input[0])
    }
    for quantize in graph.of("QuantizeLinear"):
        dequantize = [
            node for node in graph.readers(quantize.output[0]) if node.op_type == "DequantizeLinear"
        ]
        if any(name not in graph.initializers for name in quantize.input[1:]) or element_type(
            graph, quantize
        ) not in (_UINT8, _INT8):
            continue
        scale, kind = graph.value(quantize.input[1]), element_type(graph, quantize)
        zero = (
            graph.value(quantize.input[2])
            if len(quantize.input) > 2
            else torch.zeros(scale.shape, dtype=torch.uint8)
        )
        if scale.numel() > 1:
            continue
        positive = _shared_name(quantize) not in signed
        if (
            (target == "onnxruntime" or (target == "openvino" and positive))
            and kind == _INT8
            and int(zero) == 0
        ):
            _set(
                graph,
                [quantize, *dequantize],
                scale * (127 / 255) if positive else scale,
                _number(0 if positive else 128),
            )
        elif target == "tensorrt" and kind == _UINT8 and int(zero) in (0, 128):
            _set(
                graph,
                [quantize, *dequantize],
                scale if int(zero) else scale * (255 / 127),
                torch.tensor(0, dtype=torch.int8),
            )
    merge_duplicates(graph)
    if target == "onnxruntime":
        _pool_means(graph)
        _close_pooling(graph)
        _close_concatenations(graph)
        split_gemms(graph)


def _shared_name(node: Any) -> str:
    """The quantizer that a node belongs to, whichever of its calls it is: all of them keep one grid."""
    return str(node.name).rpartition("/")[0].partition("#")[0] or str(node.output[0])


def _close_concatenations(graph: Graph) -> None:
    """Quantize the result of each Concat of equally quantized tensors once more: it changes nothing, and makes an integer kernel fit."""
    for node in graph.of("Concat", "MaxPool"):
        pairs = [graph.producer(value) for value in node.input]
        if any(pair is None or pair.op_type != "DequantizeLinear" for pair in pairs):
            continue
        settings = {tuple(pair.input[1:]) for pair in pairs if pair is not None}
        readers = graph.readers(node.output[0])
        if (
            len(settings) != 1
            or graph.is_output(node.output[0])
            or all(reader.op_type == "QuantizeLinear" for reader in readers)
        ):
            continue
        _insert_pair(graph, node, settings.pop())
    graph.sort()


def _pool_means(graph: Graph) -> None:
    """GlobalAveragePool instead of a mean of codes over both dimensions of images: ONNX Runtime has an integer kernel for that alone."""
    shapes, gone = known_shapes(graph), []
    for node in graph.of("ReduceMean"):
        source, axes = graph.producer(node.input[0]), attribute(node, "axes")
        if axes is None and len(node.input) > 1 and node.input[1] in graph.initializers:
            axes = graph.value(node.input[1]).tolist()
        quantized = source is not None and source.op_type == "DequantizeLinear"
        if (
            not quantized
            or axes is None
            or len(shapes.get(node.input[0], ())) != 4
            or sorted(axis % 4 for axis in axes) != [2, 3]
        ):
            continue
        result = str(node.output[0])
        pooled = result if attribute(node, "keepdims", 1) else graph.fresh(f"{result}/pooled")
        node.output[0] = ""
        graph.add("GlobalAveragePool", [node.input[0]], pooled)
        if pooled != result:
            graph.add(
                "Squeeze",
                [pooled, graph.add_initializer(f"{result}/axes", torch.tensor([2, 3]))],
                result,
            )
        gone.append(node)
    graph.remove(gone)
    graph.sort()


def _close_pooling(graph: Graph) -> None:
    """Quantize what pooling of codes returns right away, as a quantizer behind a reshape will do, so that the kernel returns codes."""
    for node in graph.of("GlobalAveragePool", "AveragePool"):
        reader, source = _only_reader(graph, node), graph.producer(node.input[0])
        if (
            source is None
            or source.op_type != "DequantizeLinear"
            or reader is None
            or reader.op_type not in ("Flatten", "Reshape", "Squeeze")
        ):
            continue
        while reader is not None and reader.op_type in ("Flatten", "Reshape", "Squeeze"):
            reader = _only_reader(graph, reader)
        if (
            reader is not None
            and reader.op_type == "QuantizeLinear"
            and not attribute(reader, "axis")
        ):
            _insert_pair(graph, node, tuple(reader.input[1:]))
    graph.sort()


def _only_reader(graph: Graph, node: Any) -> Any | None:
    readers = graph.readers(node.output[0])
    return readers[0] if len(readers) == 1 and not graph.is_output(node.output[0]) else None


def _insert_pair(graph: Graph, node: Any, settings: tuple[str, ...]) -> None:
    """A QuantizeLinear and a DequantizeLinear behind a node, with this scale and zero point."""
    name = graph.fresh(f"{node.name}/same")
    graph.replace_uses(node.output[0], f"{name}/value")
    graph.add("QuantizeLinear", [node.output[0], *settings], f"{name}/codes")
    graph.add("DequantizeLinear", [f"{name}/codes", *settings], f"{name}/value")


def retarget_onnx(
    source: str | os.PathLike[str], path: str | os.PathLike[str], target: str
) -> ExportReport:
    """Write a file for another runtime: :func:`torchq.export_onnx` with ``target=`` from a file instead of a model.

    Args:
        source: a Q/DQ file; of any exporter, as long as scales are constants.
        path: where to write.
        target: "onnxruntime", "tensorrt" or "openvino".

    Raises:
        ConfigError: an unknown target.
        MissingExtraError: onnx is not installed.
    """
    TARGETS[target]
    graph = load_graph(source)
    constants_to_initializers(graph)
    retarget(graph, target)
    keep_products(graph)
    if found := findings(graph, target):
        warnings.warn(f"retarget_onnx(target={target!r}): " + "; ".join(found), stacklevel=2)
    write_record(graph, target=target)
    activations = tuple(str(node.name).rpartition("/")[0] for node in graph.of("QuantizeLinear"))
    weights = tuple(
        str(n.name).rpartition("/")[0]
        for n in graph.of("DequantizeLinear")
        if n.input[0] in graph.initializers
    )
    merged = read_record(graph).get("merged", {})
    return ExportReport(
        Path(path),
        target,
        graph.opset,
        "file",
        graph.save(Path(path)),
        graph.float_size,
        activations,
        weights,
        merged,
        tuple(found),
    )


def _number(value: int) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.uint8)


def _set(graph: Graph, nodes: list[Any], scale: torch.Tensor, zero: torch.Tensor) -> None:
    """Give a Q and its DQs another scale and zero point."""
    name = nodes[0].name.rpartition("/")[0]
    scale_name = graph.add_initializer(f"{name}/scale", scale)
    zero_name = graph.add_initializer(f"{name}/zero_point", zero.reshape(scale.shape))
    for node in nodes:
        rest = list(node.attribute)
        del node.input[1:]
        node.input.extend([scale_name, zero_name])
        for index in reversed(range(len(rest))):
            if rest[index].name == "output_dtype":
                del node.attribute[index]
    graph.reindex()

"""What runtimes ask of a Q/DQ graph, as checks: each finding names a layer and says what to do.

Sources for TensorRT: the onnx-tensorrt importer (10.1), issues of NVIDIA/TensorRT (1694, 2380, 3412, 3987, 4560) and the source of NVIDIA
ModelOpt. For ONNX Runtime: what version 1.31 was seen to fuse.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torchq.onnx.ir import Graph
from torchq.onnx.passes.cleanup import attribute, axis_of

__all__ = ["findings"]

_INT8, _FP8, _FOUR_BITS = 3, (17, 19), (21, 22)
_CONVS = ("Conv", "ConvTranspose")
_LAYERS = (*_CONVS, "Gemm", "MatMul")
Rule = Callable[[Graph], Iterator[str]]


def findings(graph: Graph, target: str | None) -> list[str]:
    """What the graph does that the target does not run well, or at all."""
    return [text for rule in _RULES.get(target or "", ()) for text in rule(graph)]


def layer_name(graph: Graph, node: Any) -> str:
    """The module of a layer, from its weight's quantizer; else the node's name."""
    for value in node.input[1:2]:
        producer = graph.producer(value)
        while producer is not None and producer.op_type in ("Cast", "Transpose"):
            producer = graph.producer(producer.input[0])
        if (
            producer is not None
            and producer.op_type == "DequantizeLinear"
            and ".weight_quantizer" in producer.name
        ):
            return str(producer.name).partition(".weight_quantizer")[0]
    return str(node.name or node.output[0])


def _weight(graph: Graph, node: Any) -> Any | None:
    """The DequantizeLinear of a layer's stored weight."""
    found = graph.producer(node.input[1]) if len(node.input) > 1 else None
    return (
        found
        if found is not None
        and found.op_type == "DequantizeLinear"
        and found.input[0] in graph.initializers
        else None
    )


def _quantized(graph: Graph, value: str) -> Any | None:
    """The DequantizeLinear that ``value`` comes from."""
    found = graph.producer(value)
    return found if found is not None and found.op_type == "DequantizeLinear" else None


def _quantizer(node: Any) -> str:
    return str(node.name).rpartition("/")[0]


def _scale(graph: Graph, node: Any) -> tuple[float, ...]:
    return tuple(graph.value(node.input[1]).float().reshape(-1).tolist())


def _integer_types(graph: Graph) -> Iterator[str]:
    for node in graph.of("QuantizeLinear"):
        zero = graph.initializers.get(node.input[2]) if len(node.input) > 2 else None
        if zero is not None and zero.data_type not in (_INT8, *_FP8):
            yield f"{_quantizer(node)}: TensorRT takes int8 or FP8 activations; quantize it with 8 signed bits"
        elif zero is not None and bool((graph.value(node.input[2]).float() != 0).any()):
            yield f"{_quantizer(node)}: TensorRT takes no zero point but 0; quantize it symmetrically"
        if len(_scale(graph, node)) > 1:
            yield f"{_quantizer(node)}: TensorRT takes one scale for an activation; use a descriptor without axis"


def _transposed_axis(graph: Graph) -> Iterator[str]:
    for node in graph.of("ConvTranspose"):
        weight = _weight(graph, node)
        if weight is not None and len(_scale(graph, weight)) > 1 and axis_of(weight) != 0:
            yield (
                f"{layer_name(graph, node)}: TensorRT scales ConvTranspose weights on axis 0 alone, axis {axis_of(weight)} gave wrong "
                "results; use Rule('type:ConvTranspose*', weight=QuantDescriptor(axis=0), input=...) or a scale per tensor"
            )


def _channels(graph: Graph) -> Iterator[str]:
    for node in graph.of(*_CONVS):
        weight = _weight(graph, node)
        if weight is None or _quantized(graph, node.input[0]) is None:
            continue
        stored = graph.initializers[weight.input[0]]
        groups = int(attribute(node, "group", 1))
        first, second = stored.dims[0], stored.dims[1]
        channels = {first, second * groups}
        if any(count < 16 and count % 8 for count in channels) and groups == 1:
            yield (
                f"{layer_name(graph, node)}: has {min(channels)} channels; TensorRT's 8-bit convolutions want >= 16 or multiples of 8. "
                "Leave it in float with exclude="
            )
        size = 1
        for length in stored.dims[2:]:
            size *= length
        if stored.data_type in _FP8 and size >= 32:
            yield f"{layer_name(graph, node)}: TensorRT's FP8 filters have at most 31 elements, this one {size}; exclude it, or use INT8"


def _four_bits(graph: Graph) -> Iterator[str]:
    for node in graph.of("DequantizeLinear"):
        stored = graph.initializers.get(node.input[0])
        if stored is None or stored.data_type not in _FOUR_BITS:
            continue
        if stored.data_type == 21:
            yield f"{_quantizer(node)}: TensorRT has no UINT4; use signed 4 bits"
        if stored.dims and stored.dims[-1] % 2:
            yield f"{_quantizer(node)}: TensorRT wants an even last dimension for INT4, this has {stored.dims[-1]}. Exclude it, or use INT8"
        for reader in graph.readers(node.output[0]):
            if reader.op_type in _LAYERS and _quantized(graph, reader.input[0]) is not None:
                yield f"{layer_name(graph, reader)}: TensorRT takes INT4 weights with float inputs alone; leave the input unquantized"


def _residuals(graph: Graph) -> Iterator[str]:
    for node in graph.of("Add"):
        sources = [_quantized(graph, value) for value in node.input]
        plain = [_behind(graph, value) for value in node.input]
        from_layer = [kind in _LAYERS and weight for kind, weight in plain]
        if not any(from_layer) or any(value in graph.initializers for value in node.input):
            continue
        if all(sources):
            names = [_quantizer(s) for s, layer in zip(sources, from_layer, strict=True) if layer]
            yield f"{names[-1]}: TensorRT adds before it rounds; switch this quantizer off (quantize_ with target='tensorrt' does)"
        elif not any(sources):
            yield f"{node.name}: TensorRT fuses a sum whose identity branch is quantized; use quantize_ with target='tensorrt', or QuantAdd"


def _behind(graph: Graph, value: str) -> tuple[str, bool]:
    """What computes ``value``, behind a Q/DQ pair, and whether its weight is quantized."""
    node = graph.producer(value)
    while node is not None and node.op_type in ("DequantizeLinear", "QuantizeLinear"):
        node = graph.producer(node.input[0])
    return ("", False) if node is None else (str(node.op_type), _weight(graph, node) is not None)


def _concatenations(graph: Graph) -> Iterator[str]:
    for node in graph.of("Concat"):
        pairs = [pair for value in node.input if (pair := _quantized(graph, value)) is not None]
        if len({_scale(graph, pair) for pair in pairs}) > 1:
            yield f"{_quantizer(pairs[0])}: the inputs of {node.name} have different scales; use QuantCat, or torchq.qat.share_range_"


def _one_range_per_tensor(graph: Graph) -> Iterator[str]:
    values = {node.input[0] for node in graph.of("QuantizeLinear")}
    for value in sorted(values):
        pairs = [node for node in graph.readers(value) if node.op_type == "QuantizeLinear"]
        if len({_scale(graph, node) for node in pairs}) > 1:
            names = ", ".join(sorted(_quantizer(node) for node in pairs))
            yield f"{names}: quantize one tensor with different scales; use torchq.qat.share_range_, or quantize_(..., example=...)"


def _norms(graph: Graph) -> Iterator[str]:
    for node in graph.of("BatchNormalization"):
        before = graph.producer(node.input[0])
        if before is not None and before.op_type in _CONVS and _weight(graph, before) is not None:
            yield f"{layer_name(graph, before)}: a BatchNorm follows it as a layer of its own; run torchq.fuse_(model) before quantize_"


def _outputs(graph: Graph) -> Iterator[str]:
    for node in graph.of("Conv"):
        if _weight(graph, node) is None or _quantized(graph, node.input[0]) is None:
            continue
        value, readers = node.output[0], graph.readers(node.output[0])
        while len(readers) == 1 and readers[0].op_type in ("Relu", "Clip"):
            value, readers = readers[0].output[0], graph.readers(readers[0].output[0])
        if graph.is_output(value) or not all(
            reader.op_type == "QuantizeLinear" for reader in readers
        ):
            yield (
                f"{layer_name(graph, node)}: its output is not quantized, so it runs in float; use quantize_ with target='onnxruntime', or "
                "put torchq.nn.QuantIdentity() behind it, or exclude it"
            )


def _useless(graph: Graph) -> Iterator[str]:
    for node in graph.of("ConvTranspose"):
        if _quantized(graph, node.input[0]) is not None:
            yield f"{layer_name(graph, node)}: ONNX Runtime has no integer ConvTranspose; switch its input quantizer off"


_RULES: dict[str, tuple[Rule, ...]] = {
    "tensorrt": (
        _integer_types,
        _transposed_axis,
        _channels,
        _four_bits,
        _residuals,
        _concatenations,
        _one_range_per_tensor,
        _norms,
    ),
    "onnxruntime": (_outputs, _useless, _one_range_per_tensor, _norms),
    "openvino": (_one_range_per_tensor, _norms),
}

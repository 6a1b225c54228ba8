"""The codes that OpenVINO reads right where it moves quantizers across operators."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    attribute,
    computed_by,
    names,
    nodes_of,
    onnx_ir,
    readers,
)
from torchq.onnx.passes.fold_shapes import Shape, known_shapes
from torchq.onnx.qdq import shared_name
from torchq.onnx.targets.activations import ActivationTypes, retype_activations
from torchq.onnx.targets.checks import LAYERS
from torchq.utils.optional import import_optional

__all__ = ["unsigned_codes", "with_signed_codes"]

#: What OpenVINO moves quantization across.
_TRANSPARENT = names(
    "QuantizeLinear DequantizeLinear Relu Clip MaxPool AveragePool Reshape Transpose Slice Split "
    "Squeeze Unsqueeze Flatten Pad Resize Identity Concat"
)
#: What OpenVINO may make a part of the layer behind it.
_AFFINE = names("Add Sub Mul Div BatchNormalization QuantizeLinear DequantizeLinear")
_PRODUCTS = names("MatMul Gemm")


def unsigned_codes(model: Model) -> None:
    """Write unsigned codes where OpenVINO computes wrong numbers with signed ones.

    The kernels of OpenVINO 2026.4 read unsigned codes, so it adds an offset to signed ones. It does
    not subtract the offset again where a convolution or linear layer reads a concatenation or,
    beside a concatenation, the result of max pooling. Files with unsigned codes and a zero point
    are computed right there, and as fast. Signed codes stay where no layer reads a concatenation,
    as in front of the BatchNorm and ReLU of DenseNet: they are right there, and faster. They stay
    too where a product reads tensors that are joined along another dimension than that of their
    features, which is right, and which OpenVINO cannot compile with a zero point.

    Before::

        A Concat or MaxPool between Q/DQ pairs with signed codes, whatever moves elements beside
        it, and a layer that reads these codes, or reads them behind a norm.

    After::

        These pairs have unsigned codes, with the zero point 128 or, behind a ReLU, 0.
    """
    values: set[Value] = set()
    shapes = known_shapes(model)
    for node in nodes_of(model, "Concat", "MaxPool"):
        if node.outputs[0] not in values:
            moved = _moved_together(node)
            joins = (computed_by(value, "Concat") for value in moved)
            features = all(_joins_features(one, shapes) for one in joins if one is not None)
            values |= _until_layers(moved, features)
    shared = {shared_name(n) for n in nodes_of(model, "QuantizeLinear") if n.inputs[0] in values}
    retype_activations(model, ActivationTypes("unsigned", "unsigned"), shared)


def _joins_features(node: Node, shapes: Mapping[str, Shape]) -> bool:
    """Return True if a Concat joins the last dimensions of its operands, as far as is known."""
    axis, shape = int(attribute(node, "axis")), shapes.get(str(node.outputs[0].name))
    return axis == -1 or shape is None or axis == len(shape) - 1


def _until_layers(values: set[Value], features: bool) -> set[Value]:
    """Return values with what norms compute from them; nothing if no layer reads any of these.

    Args:
        values: with the same codes.
        features: products count as layers, besides convolutions.
    """
    pending, found, is_read = list(values), set(values), False
    while pending:
        for user in readers(pending.pop()):
            result = user.outputs[0]
            is_read |= user.op_type in LAYERS and (features or user.op_type not in _PRODUCTS)
            if user.op_type in _AFFINE and result not in found:
                found.add(result)
                pending.append(result)
    return found if is_read else set()


def _moved_together(node: Node) -> set[Value]:
    """Return the operands and results of a node, and whatever has the same codes as these."""
    pending, values = [*node.inputs, *node.outputs], set()
    while pending:
        value = pending.pop()
        if value is None or value in values:
            continue
        values.add(value)
        producer = computed_by(value, *_TRANSPARENT)
        if producer is not None:
            pending += producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]
        for user in readers(value):
            if user.op_type in _TRANSPARENT:
                pending += [*user.outputs, *(user.inputs if user.op_type == "Concat" else ())]
    return values


def with_signed_codes(graph: bytes) -> bytes:
    """Return an ONNX file whose activations have the zero point 0 in place of 128.

    Codes and zero points are 128 less, so every value stays what it was. CPUs with AMX multiply
    signed codes as they are, so OpenVINO reads them right there, and is faster with them: there is
    no zero point to take into account.

    Args:
        graph: the file.

    Returns:
        ``graph`` itself where no zero point is 128.
    """
    onnx = import_optional("onnx", "torchq.onnx")
    model = onnx_ir.from_proto(onnx.load_model_from_string(graph))
    before = _types(model)
    retype_activations(model, ActivationTypes("unsigned", "signed"))
    if _types(model) == before:
        return graph
    changed: bytes = onnx_ir.to_proto(model).SerializeToString()
    return changed


def _types(model: Model) -> list[Any]:
    """Return the dtype of the codes of each quantizer."""
    return [node.outputs[0].dtype for node in nodes_of(model, "QuantizeLinear")]

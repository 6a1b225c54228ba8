"""Rules of files for Qualcomm QNN, as ONNX Runtime's provider reads them.

Sources: the provider's documentation (quantized models as Q/DQ, uint8 or uint16 activations,
symmetric int8 weights) and pull request 20154 of microsoft/onnxruntime (several scales for the
weight of a convolution).
"""

from __future__ import annotations

from collections.abc import Iterator

from torchq.onnx.ir import (
    Model,
    Node,
    attribute,
    data_type,
    is_constant,
    nodes_of,
    readers,
)
from torchq.onnx.qdq import (
    element_type,
    format_of,
    leads_only_to_quantizers,
    pair_name,
    qparams_of,
)
from torchq.runtimes.checks import LAYERS, dequantized, layer_name, scales_of, weight_of


def check_activation_types(model: Model) -> Iterator[str]:
    """Yield activations that are not uint8 or uint16 with one scale."""
    for node in nodes_of(model, "QuantizeLinear"):
        if not all(is_constant(value) for value in node.inputs[1:]):
            continue
        format = format_of(element_type(node))
        if not format.is_integer or format.signed or format.bits not in (8, 16):
            yield f"{pair_name(node)}: QNN takes uint8 or uint16 activations; use 8 or 16 bits"
        if len(scales_of(node)) > 1:
            yield (
                f"{pair_name(node)}: QNN takes one scale for an activation; "
                "use a descriptor without axis"
            )


def check_weights(model: Model) -> Iterator[str]:
    """Yield weights that are not symmetric int8, or have scales per channel and a float result."""
    for node in nodes_of(model, *LAYERS):
        weight = weight_of(node)
        if weight is None:
            continue
        if data_type(weight.inputs[0]).name != "INT8" or not qparams_of(
            weight
        ).has_zero_point(0):
            yield f"{layer_name(node)}: QNN takes symmetric int8 weights; use 8 signed bits"
        if len(scales_of(weight)) > 1 and not _leads_to_codes(node):
            yield (
                f"{layer_name(node)}: QNN takes one scale for the weight of a {node.op_type} whose "
                "result stays float; use quantize_ with target='qnn' and example=, or a weight "
                "descriptor without axis"
            )


def check_float_outputs(model: Model) -> Iterator[str]:
    """Yield layers with a quantized weight whose output is not quantized."""
    for node in nodes_of(model, *LAYERS):
        if weight_of(node) is None:
            continue
        if not _leads_to_codes(node):
            yield (
                f"{layer_name(node)}: its output is not quantized, and QNN's kernels are integer "
                "from end to end; use quantize_ with target='qnn' and example="
            )


#: Lengths of windows with which average pools are computed wrongly, where windows do not overlap.
_WRONG_WINDOWS = (4, 6, 8)


def check_wrong_kernels(model: Model) -> Iterator[str]:
    """Yield operators that onnxruntime-qnn 2.7 computes wrong numbers with, on every chip."""
    for node in nodes_of(model, "ConvTranspose"):
        if attribute(node, "group", 1) > 1 and any(
            attribute(node, "output_padding", ())
        ):
            yield (
                f"{layer_name(node)}: QNN computes wrong numbers for a grouped transposed "
                "convolution with output_padding; use groups=1, or output_padding=0 and a pad"
            )
    for node in nodes_of(model, "AveragePool"):
        window = list(attribute(node, "kernel_shape", ()))
        is_wrong = window == list(attribute(node, "strides", ())) and set(window) & set(
            _WRONG_WINDOWS
        )
        before = dequantized(node.inputs[0])
        behind = readers(node.outputs[0])
        if (
            not is_wrong
            or before is None
            or [user.op_type for user in behind] != ["QuantizeLinear"]
        ):
            continue
        if scales_of(behind[0]) < scales_of(before):
            yield (
                f"{node.name}: QNN computes wrong numbers for an average of {window} places whose "
                "range is smaller than that of its input; use smaller windows, one behind another"
            )


def _leads_to_codes(layer: Node) -> bool:
    return leads_only_to_quantizers(layer.outputs[0], "Relu", "Clip", "Add")

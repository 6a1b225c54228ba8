"""Where TensorRT wants Q/DQ pairs, and with which parameters.

Sources: the onnx-tensorrt importer (10.1), issues 1694, 2380, 3412, 3987 and 4560 of
NVIDIA/TensorRT, and the source of NVIDIA ModelOpt.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    attribute,
    computed_by,
    is_constant,
    nodes_of,
    readers,
)
from torchq.onnx.qdq import axis_of, element_type, format_of, pair_name, qparams_of
from torchq.runtimes.checks import (
    CONVOLUTIONS,
    LAYERS,
    dequantized,
    layer_name,
    scales_of,
    weight_of,
)


def check_activation_types(model: Model) -> Iterator[str]:
    """Yield activations that are not int8 or FP8 with one scale and the zero point 0."""
    for node in nodes_of(model, "QuantizeLinear"):
        if not all(is_constant(value) for value in node.inputs[1:]):
            continue
        format = format_of(element_type(node))
        if format.bits != 8 or not format.signed:
            yield (
                f"{pair_name(node)}: TensorRT takes int8 or FP8 activations; "
                "quantize it with 8 signed bits"
            )
        elif not qparams_of(node).has_zero_point(0):
            yield (
                f"{pair_name(node)}: TensorRT takes no zero point but 0; quantize it symmetrically"
            )
        if len(scales_of(node)) > 1:
            yield (
                f"{pair_name(node)}: TensorRT takes one scale for an activation; "
                "use a descriptor without axis"
            )


def check_transposed_axis(model: Model) -> Iterator[str]:
    """Yield transposed convolutions whose scales lie on the output channels."""
    for node in nodes_of(model, "ConvTranspose"):
        weight = weight_of(node)
        if weight is not None and len(scales_of(weight)) > 1 and axis_of(weight) != 0:
            yield (
                f"{layer_name(node)}: TensorRT scales ConvTranspose weights on axis 0 alone, "
                f"axis {axis_of(weight)} gave wrong results; use Rule('type:ConvTranspose*', "
                "weight=QuantDescriptor(axis=0), input=...) or a scale per tensor"
            )


def check_channels(model: Model) -> Iterator[str]:
    """Yield convolutions whose channels or filters 8-bit kernels do not take."""
    for node in nodes_of(model, *CONVOLUTIONS):
        weight = weight_of(node)
        if weight is None or dequantized(node.inputs[0]) is None:
            continue
        first, second = weight.inputs[0].const_value.shape.numpy()[:2]
        groups = int(attribute(node, "group", 1))
        channels = {first, second * groups}
        if groups == 1 and any(count < 16 and count % 8 for count in channels):
            yield (
                f"{layer_name(node)}: has {min(channels)} channels; TensorRT's 8-bit convolutions "
                "want >= 16 or multiples of 8. Leave it in float with exclude="
            )


def check_residual_adds(model: Model) -> Iterator[str]:
    """Yield additions to the result of a layer that TensorRT cannot fuse with it."""
    for node in nodes_of(model, "Add"):
        from_layer = [_ends_quantized_layer(value) for value in node.inputs]
        if not any(from_layer) or any(is_constant(value) for value in node.inputs):
            continue
        pairs = [dequantized(value) for value in node.inputs]
        if all(pairs):
            of_layers = [
                p
                for p, layer in zip(pairs, from_layer, strict=True)
                if layer and _is_alone(p)
            ]
            for pair in of_layers[-1:]:
                yield (
                    f"{pair_name(pair)}: TensorRT adds before it rounds; switch this quantizer off "
                    "(quantize_ with target='tensorrt' does)"
                )
        elif not any(pairs) and any(computed_by(v, *CONVOLUTIONS) for v in node.inputs):
            yield (
                f"{node.name}: TensorRT fuses an addition whose identity branch is quantized; "
                "use quantize_ with target='tensorrt', or QuantAdd"
            )


def _is_alone(pair: Node) -> bool:
    """Return True if nothing but one node reads the codes of a DequantizeLinear."""
    return len(readers(pair.inputs[0])) == 1 and len(readers(pair.outputs[0])) == 1


def _ends_quantized_layer(value: Value) -> bool:
    """Return True if a layer with a quantized weight computes ``value``, also behind Q/DQ."""
    node: Node | None = computed_by(value)
    while node is not None and node.op_type in ("DequantizeLinear", "QuantizeLinear"):
        node = computed_by(node.inputs[0])
    return node is not None and node.op_type in LAYERS and weight_of(node) is not None


def check_concatenations(model: Model) -> Iterator[str]:
    """Yield concatenations of tensors with different scales."""
    for node in nodes_of(model, "Concat"):
        pairs = [
            pair for value in node.inputs if (pair := dequantized(value)) is not None
        ]
        if len({scales_of(pair) for pair in pairs}) > 1:
            yield (
                f"{pair_name(pairs[0])}: the inputs of {node.name} have different scales; "
                "use QuantCat, or torchq.qat.share_range_"
            )

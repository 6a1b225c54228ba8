"""Convolutions whose results stay float: in ONNX Runtime, no integer kernel returns floats."""

from __future__ import annotations

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    attribute,
    data_type,
    is_constant,
    is_output,
    names,
    nodes_of,
    onnx_ir,
    readers,
    replace_value,
    value_of,
)
from torchq.onnx.passes.matmul_layout import TRANSPOSED
from torchq.onnx.qdq import FLOAT_WEIGHT, pair_name, qparams_of
from torchq.onnx.targets.checks import dequantized, leads_only_to_quantizers, weight_of

__all__ = ["multiply_pointwise", "starts_at_zero", "store_float_weights"]

#: Operators that move elements, or count them: no kernel of a convolution does that as well.
_MOVES = names("Concat Flatten Reshape Resize Shape Slice Split Squeeze Transpose Unsqueeze")
_CODES = ("INT8", "UINT8")


def multiply_pointwise(model: Model) -> None:
    """Write convolutions of 1 x 1 with a float result as products, which have an integer kernel.

    These are the last layers of detectors and of networks for segmentation. In float, ONNX Runtime
    makes floats of the codes and reorders them for its float kernel, which costs more than the
    convolution.

    Before::

        DequantizeLinear -> Conv with a kernel of one element, and no strides, groups or padding ->
        the end of the graph, or nodes that move elements.

    After::

        Transpose to channels last -> MatMul with the weight as (in, out) -> Transpose back -> Add
        of the bias. ONNX Runtime moves the transposes into the kernels around them.
    """
    for node in nodes_of(model, "Conv"):
        weight = weight_of(node)
        if weight is None or not _is_pointwise(node, weight) or dequantized(node.inputs[0]) is None:
            continue
        if _is_moved(node.outputs[0]):
            _as_product(node, weight)


def _is_pointwise(node: Node, weight: Node) -> bool:
    """Return True for a convolution that computes a product of each pixel with its weight alone."""
    codes = weight.inputs[0]
    ones = all(length == 1 for length in codes.const_value.shape.numpy()[2:])
    plain = (
        attribute(node, "group", 1) == 1
        and all(stride == 1 for stride in attribute(node, "strides", ()))
        and not any(attribute(node, "pads", ()))
    )
    others = (weight.inputs[1], *(value for value in node.inputs[2:] if value is not None))
    stored = all(map(is_constant, others)) and not attribute(weight, "block_size", 0)
    alone = len(readers(weight.outputs[0])) == 1
    return ones and plain and stored and alone and data_type(codes).name in _CODES


def _is_moved(value: Value) -> bool:
    """Return True if nothing but the end of the graph and movements of elements reads a value."""
    return all(user.op_type in _MOVES for user in readers(value))


def _as_product(node: Node, weight: Node) -> None:
    """Replace a convolution by a product and an addition."""
    result, graph = node.outputs[0], node.graph
    name, (codes, *_) = str(node.name or result.name), weight.inputs
    matrix = value_of(codes).flatten(1).t()
    stored = f"{str(codes.name).removesuffix('/weight')}{TRANSPOSED}"
    weight.replace_input_with(0, add_initializer(graph, stored, matrix))
    weight.attributes["axis"] = onnx_ir.AttrInt64("axis", 1)
    weight.outputs[0].shape = None
    spatial = list(range(2, len(codes.const_value.shape)))
    last = {"perm": [0, *spatial, 1]}
    first = {"perm": [0, len(spatial) + 1, *(axis - 1 for axis in spatial)]}
    pixels = add_node(node, "Transpose", [node.inputs[0]], f"{name}/pixels", last)
    inputs = [pixels, weight.outputs[0]]
    product = add_node(pixels.producer(), "MatMul", inputs, f"{name}/product")
    image = add_node(product.producer(), "Transpose", [product], f"{name}/image", first)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    if bias is not None:
        channels = value_of(bias).reshape(-1, *[1] * len(spatial))
        column = add_initializer(graph, f"{bias.name}/channels", channels)
        image = add_node(image.producer(), "Add", [image, column], f"{name}/sum")
    replace_value(result, image)


def store_float_weights(model: Model) -> None:
    """Store the weights of convolutions that run in float as the float values of their codes.

    ONNX Runtime keeps a DequantizeLinear in front of a float convolution, whose weight then is no
    constant: no kernel for its memory layout, no fused activation. Such a convolution takes two
    to three and a half times as long as in float32.

    Before::

        Conv(x, DequantizeLinear(codes)) whose result is not quantized, or any ConvTranspose.

    After::

        Conv(x, weight), with ``weight`` the values of the codes.
    """
    for node in nodes_of(model, "Conv", "ConvTranspose"):
        dequantize = weight_of(node)
        if dequantize is None or _runs_on_integers(node):
            continue
        qparams = qparams_of(dequantize)
        values = qparams.dequantize(qparams.centered(value_of(dequantize.inputs[0])))
        name = f"{pair_name(dequantize)}{FLOAT_WEIGHT}"
        node.replace_input_with(1, add_initializer(model.graph, name, values))


def _runs_on_integers(node: Node) -> bool:
    """Return True if a convolution becomes a QLinearConv: codes in, codes out, nothing between."""
    if node.op_type != "Conv" or dequantized(node.inputs[0]) is None:
        return False
    result = node.outputs[0]
    if leads_only_to_quantizers(result):
        return True
    # Codes that begin at 0 include an activation; others leave it, and the convolution in float.
    while not is_output(result) and (activation := _only_reader_of(result)) is not None:
        if activation.op_type not in ("Relu", "Clip"):
            break
        result = activation.outputs[0]
    users = readers(result)
    return leads_only_to_quantizers(result) and all(map(starts_at_zero, users))


def starts_at_zero(quantize: Node) -> bool:
    """Return True if no code of a QuantizeLinear stands for a negative value."""
    stored = is_constant(quantize.inputs[1])
    qparams = qparams_of(quantize) if stored else None
    return qparams is not None and qparams.has_zero_point(qparams.quant_min)


def _only_reader_of(value: Value) -> Node | None:
    users = readers(value)
    return users[0] if len(users) == 1 else None

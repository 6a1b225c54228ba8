"""Passes that files for OpenVINO go through; each avoids what version 2026.4 was seen to do."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchq.onnx.ir import (
    Model,
    Node,
    Rewrite,
    Value,
    add_initializer,
    add_node,
    attribute,
    computed_by,
    data_type,
    is_constant,
    names,
    nodes_of,
    readers,
    replace_stored,
    value_of,
)
from torchq.onnx.passes.constants import Shape, known_shapes
from torchq.onnx.passes.pairs import separate
from torchq.onnx.qdq import (
    leads_only_to_quantizers,
    pair_name,
    qparams_of,
    shared_name,
    store_codes,
)
from torchq.runtimes.checks import (
    LAYERS,
    weight_of,
)


def separate_pairs(model: Model) -> None:
    """Keep two Q/DQ pairs in a row apart, as OpenVINO 2026.4 crashes on them behind a Concat.

    Before: DequantizeLinear -> nothing, a ReLU or a Slice -> QuantizeLinear.
    After: Max(x, x), which is x, stands in front of the QuantizeLinear.
    """
    for node in nodes_of(model, "QuantizeLinear"):
        value = node.inputs[0]
        while (moved := computed_by(value, "Relu", "Clip", "Slice")) is not None:
            value = moved.inputs[0]
        if computed_by(value, "DequantizeLinear") is not None:
            separate(node.inputs[0], node)


#: What OpenVINO moves quantization across.
_TRANSPARENT = names(
    "QuantizeLinear DequantizeLinear Relu Clip MaxPool AveragePool Reshape Transpose Slice Split "
    "Squeeze Unsqueeze Flatten Pad Resize Identity Concat"
)
#: What one tensor goes through as values, without being quantized.
_MOVING = _TRANSPARENT - names("QuantizeLinear DequantizeLinear Concat")
#: What OpenVINO may make a part of the layer behind it.
_AFFINE = names("Add Sub Mul Div BatchNormalization QuantizeLinear DequantizeLinear")
_PRODUCTS = names("MatMul Gemm")
#: What moves elements of tokens, or cuts them at 0.
_MOVING_TOKENS = names(
    "Relu Clip Reshape Transpose Slice Split Squeeze Unsqueeze Flatten Identity Concat"
)


def unsigned_codes(model: Model) -> None:
    """Write unsigned codes where OpenVINO computes wrong numbers with signed ones.

    The kernels of OpenVINO 2026.4 read unsigned codes, so it adds an offset to signed ones. It does
    not subtract the offset again where a convolution or linear layer reads a concatenation or,
    beside a concatenation, the result of max pooling. Files with unsigned codes and a zero point
    are computed right there, and as fast. Signed codes stay where no layer reads a concatenation,
    as in front of the BatchNorm and ReLU of DenseNet: they are right there, and faster. They stay
    too where a product reads tensors that are joined along another dimension than that of their
    features, which is right, and which OpenVINO cannot compile with a zero point.

    Before: A Concat or MaxPool between Q/DQ pairs with signed codes, whatever moves elements beside
    it, and a layer that reads these codes, or reads them behind a norm.
    After: These pairs have unsigned codes, with the zero point 128.
    """
    values: set[Value] = set()
    shapes = known_shapes(model)
    for node in nodes_of(model, "Concat", "MaxPool"):
        if node.outputs[0] not in values:
            moved = _moved_together(node)
            joins = (computed_by(value, "Concat") for value in moved)
            features = all(
                _joins_features(one, shapes) for one in joins if one is not None
            )
            values |= _until_layers(moved, features)
    shared = {
        shared_name(n)
        for n in nodes_of(model, "QuantizeLinear")
        if n.inputs[0] in values
    }
    for node in nodes_of(model, "QuantizeLinear"):
        if shared_name(node) in shared:
            store_codes(node, signed=False)


def separate_joined_tokens(model: Model) -> None:
    """Let products read joined tokens behind a concatenation in float.

    OpenVINO 2026.4 moves quantization across a Concat, with a zero point for each token then, and
    does not compile a product that reads these.

    Before: A Concat of another dimension than that of the features, whose result a product reads
    as codes with a zero point.
    After: Max(x, x), which is x, stands behind the Concat.
    """
    shapes = known_shapes(model)
    for node in nodes_of(model, "Concat"):
        if not _joins_features(node, shapes) and _is_read_with_zero_point(node):
            separate(node.outputs[0])


def _is_read_with_zero_point(node: Node) -> bool:
    """Return True if a product reads a result of a node as codes that have a zero point."""
    pending = [(node.outputs[0], False)]
    seen = set()
    while pending:
        value, has_zero_point = pending.pop()
        if (value, has_zero_point) in seen:
            continue
        seen.add((value, has_zero_point))
        for user in readers(value):
            if user.op_type in _PRODUCTS and has_zero_point:
                return True
            if user.op_type in _MOVING_TOKENS or user.op_type in _AFFINE:
                has_one = user.op_type == "QuantizeLinear" and _has_zero_point(user)
                pending.append((user.outputs[0], has_zero_point or has_one))
    return False


def _has_zero_point(quantize: Node) -> bool:
    """Return True for a QuantizeLinear with another zero point than 0."""
    is_known = is_constant(quantize.inputs[1])
    return is_known and not qparams_of(quantize).has_zero_point(0)


def _joins_features(node: Node, shapes: Mapping[str, Shape]) -> bool:
    """Return True if a Concat joins the last dimensions of its operands, as far as is known."""
    axis = int(attribute(node, "axis"))
    shape = shapes.get(str(node.outputs[0].name))
    return axis == -1 or shape is None or axis == len(shape) - 1


def _until_layers(values: set[Value], features: bool) -> set[Value]:
    """Return values with what norms compute from them; nothing if no layer reads any of these.

    With ``features`` products count as layers, besides convolutions.
    """
    pending = list(values)
    reached = set(values)
    is_read = False
    while pending:
        for user in readers(pending.pop()):
            result = user.outputs[0]
            is_read |= user.op_type in LAYERS and (
                features or user.op_type not in _PRODUCTS
            )
            if user.op_type in _AFFINE and result not in reached:
                reached.add(result)
                pending.append(result)
    return reached if is_read else set()


def _moved_together(node: Node) -> set[Value]:
    """Return the operands and results of a node, and whatever has the same codes as these."""
    pending = [*node.inputs, *node.outputs]
    values = set()
    while pending:
        value = pending.pop()
        if value is None or value in values:
            continue
        values.add(value)
        producer = computed_by(value, *_TRANSPARENT)
        if producer is not None:
            pending += (
                producer.inputs if producer.op_type == "Concat" else producer.inputs[:1]
            )
        for user in readers(value):
            is_joined = user.op_type == "Concat"
            # A Reshape has the lengths of its result as another input, which a Concat joins too.
            if is_joined or (user.op_type in _TRANSPARENT and user.inputs[0] is value):
                pending += [*user.outputs, *(user.inputs if is_joined else ())]
    return values


#: Reductions whose kernels also compute the operators behind them.
_LARGEST = names("ReduceMax ReduceMin GlobalMaxPool")
_MEANS = names("ReduceMean ReduceSum")
#: A bias too small to change a result, and large enough that OpenVINO does not take it for 0.
_LEAST = 1e-30
#: Ends the names of biases that got such a number.
_UNEQUAL = "/bias"


def separate_reductions(model: Model) -> None:
    """Keep quantization out of the kernels of reductions and of padded average pooling.

    OpenVINO 2026.4 quantizes largest values wrongly in the kernel that computes them, and means and
    sums of other dimensions than those of an image as well: results have errors of a tenth and
    more. It also makes signed codes unsigned, and average pooling then takes padding for the code
    0, which is the least value. It computes the larger one of two values in a kernel that does not
    quantize.

    Before: ReduceMax, or ReduceMean that keeps the last dimension; AveragePool of values that may
    be negative, with padding that counts.
    After: Max(x, x), which is x, stands behind the reduction, or in front of the pooling.
    """
    for node in nodes_of(model, *_LARGEST, *_MEANS):
        if node.op_type in _LARGEST or not _of_images(node):
            separate(node.outputs[0])
    for node in nodes_of(model, "AveragePool"):
        value = node.inputs[0]
        if value.producer() and _counts_padding(node) and not _is_nonnegative(value):
            separate(value, node)


#: A factor beyond it costs more of a float32 sum than the order of its terms: 2**6 of 2**24.
_LARGEST_FACTOR = 64.0


def separate_scaled_terms(model: Model) -> None:
    """Keep large factors of one term of a sum out of the sum, as in masks ``(1 - keep) * -1e9``.

    OpenVINO 2026.4 takes any constant factor for the scale of codes, and moves it behind the sum:
    ``(scores / factor + term) * factor`` keeps no digit of scores beside a factor of a million.

    Before: Mul by a large constant, or Div by a small one -> what moves elements -> Add or Sub.
    After: Max(x, x), which is x, stands behind the Mul or Div.
    """
    for node in nodes_of(model, "Add", "Sub"):
        for operand in node.inputs:
            value = operand
            while (moved := computed_by(value, *_TRANSPARENT)) is not None:
                value = moved.inputs[0]
            scaled = computed_by(value, "Mul", "Div")
            if scaled is not None and _largest_factor(scaled) > _LARGEST_FACTOR:
                separate(value)


#: What changes how many dimensions there are.
_RESHAPES = names("Flatten Reshape Squeeze Unsqueeze")
_REDUCES = names(
    "ReduceL1 ReduceL2 ReduceMax ReduceMean ReduceMin ReduceProd ReduceSum"
)


def separate_channel_factors(model: Model) -> None:
    """Keep factors of channels apart from what moves or sums up their dimensions.

    OpenVINO 2026.4 takes them for scales of codes where a quantizer follows, and moves them behind
    a Flatten or a mean of one dimension, with the dimensions that they had before: results have
    errors of a tenth and more.

    Before: Mul or Div by a stored tensor, or BatchNormalization -> Add, ReLU, Transpose or nothing
    -> Flatten, Reshape, Squeeze, Unsqueeze, or a reduction that drops dimensions.
    After: Max(x, x), which is x, stands in front of the last one.
    """
    for node in nodes_of(model, *_RESHAPES, *_REDUCES):
        if node.op_type in _REDUCES and attribute(node, "keepdims", 1):
            continue
        value = node.inputs[0]
        kept_between = "Add", "Sub", "Relu", "Clip", "Transpose"
        while (moved := computed_by(value, *kept_between)) is not None:
            value = moved.inputs[0]
        scaled = computed_by(value, "Mul", "Div", "BatchNormalization")
        if scaled is not None and _has_channel_factors(scaled):
            separate(node.inputs[0], node)


def _has_channel_factors(node: Node) -> bool:
    """Return True if a node multiplies by more than one stored number."""
    return any(
        is_constant(value) and value_of(value).numel() > 1 for value in node.inputs
    )


def _largest_factor(node: Node) -> float:
    """Return the largest size of what a Mul or Div multiplies by; 0 if it is not stored."""
    places = (1,) if node.op_type == "Div" else (0, 1)
    factors = [value_of(node.inputs[k]) for k in places if is_constant(node.inputs[k])]
    if not factors or not factors[0].numel():
        return 0.0
    sizes = factors[0].double().abs()
    return float((sizes.reciprocal() if node.op_type == "Div" else sizes).max())


#: An offset of codes up to here is lost; measured: 1.0e-5.
_LOST_OFFSET = 2e-5


def separate_small_terms(model: Model) -> None:
    """Keep terms whose codes have a tiny offset out of the kernels of convolutions.

    OpenVINO 2026.4 computes a sum of a convolution and codes in one kernel. It makes signed codes
    unsigned, and drops the offset that this adds where it is below 1e-5 in the units of the values:
    the sum is off by half of all codes. So networks are computed whose activations vanish, as those
    of random weights do, and branches that training has switched off.

    Before: DequantizeLinear of codes with such an offset -> what moves elements -> Add or Sub.
    After: Max(x, x), which is x, stands in front of the Add or Sub.
    """
    for node in nodes_of(model, "Add", "Sub"):
        for operand in dict.fromkeys(node.inputs):
            quantize = _quantizer_of(_moved_from(operand))
            if quantize is not None and 0 < _offset(quantize) < _LOST_OFFSET:
                separate(operand, node)


#: The offset of a second factor is lost where all its values are below this; measured: 1e-6.
_LOST_FACTOR = 2e-6


def separate_small_factors(model: Model) -> None:
    """Keep codes of tiny values out of the products whose second factor they are.

    OpenVINO 2026.4 makes the codes of a second factor signed. Where no value of it is as large as
    1e-6, it drops the offset that their zero point has then, and the product is another one.

    Before: DequantizeLinear of such codes -> what moves elements -> the second input of MatMul.
    After: Max(x, x), which is x, stands in front of the MatMul.
    """
    for node in nodes_of(model, "MatMul"):
        operand = node.inputs[1]
        quantize = _quantizer_of(_moved_from(operand))
        if quantize is not None and _largest(quantize) < _LOST_FACTOR:
            separate(operand, node)


def separate_constants(model: Model) -> None:
    """Keep convolutions that depend on no input of the model off integers.

    OpenVINO 2026.4 computes them once, as of a table of positions, and wrongly: the result is not
    that of the codes.

    Before: DequantizeLinear -> Conv, of values that follow from stored tensors alone.
    After: Max(x, x), which is x, stands in front of the Conv.
    """
    read: set[Value] = set(model.graph.inputs)
    for node in model.graph:
        if any(value in read for value in node.inputs):
            read.update(node.outputs)
    for node in nodes_of(model, "Conv"):
        value = node.inputs[0]
        if value not in read and computed_by(value, "DequantizeLinear") is not None:
            separate(value, node)


def _moved_from(value: Value) -> Value:
    """Return the value whose elements were moved, and perhaps cut at 0."""
    while (moved := computed_by(value, *_MOVING)) is not None:
        value = moved.inputs[0]
    return value


def _offset(quantize: Node) -> float:
    """Return how far the least code is below 0, in the units of the values."""
    qparams = qparams_of(quantize)
    offset = qparams.zero_point - qparams.quant_min
    return float((offset * qparams.scale).max())


def _largest(quantize: Node) -> float:
    """Return the largest size of what codes stand for."""
    qparams = qparams_of(quantize)
    codes = (qparams.quant_min, qparams.quant_max)
    return max(
        float(((code - qparams.zero_point) * qparams.scale).abs().max())
        for code in codes
    )


def _counts_padding(pool: Node) -> bool:
    padded = (
        any(attribute(pool, "pads", ()))
        or attribute(pool, "auto_pad", "NOTSET") != "NOTSET"
    )
    return padded and bool(attribute(pool, "count_include_pad", 0))


def _is_nonnegative(value: Value) -> bool:
    """Return True if codes that begin at 0, or a ReLU, show that no value is negative."""
    moved = computed_by(value, "Concat", "MaxPool")
    if moved is not None:
        return all(map(_is_nonnegative, moved.inputs))
    quantize = _quantizer_of(value)
    if quantize is None:
        return computed_by(value, "Relu") is not None
    qparams = qparams_of(quantize)
    return qparams.has_zero_point(qparams.quant_min)


def _quantizer_of(value: Value) -> Node | None:
    """Return the QuantizeLinear with a stored scale whose codes a value has."""
    dequantize = computed_by(value, "DequantizeLinear")
    if dequantize is None:
        return None
    quantize = computed_by(dequantize.inputs[0], "QuantizeLinear")
    is_stored = quantize is not None and is_constant(quantize.inputs[1])
    return quantize if is_stored else None


def _of_images(node: Node) -> bool:
    """Return True if a reduction is one over the last dimensions."""
    axes = attribute(node, "axes")
    if axes is None and len(node.inputs) > 1 and is_constant(node.inputs[1]):
        axes = value_of(node.inputs[1]).tolist()
    return axes is not None and bool({-1, 3} & set(axes))


def own_zero_points(model: Model) -> None:
    """Give each quantized weight a zero point of its own.

    OpenVINO 2026.4 computes a convolution and a product in float whose weights share a tensor of
    zero points, as layers of as many outputs do: once a file with open shapes gets fixed ones, it
    no longer sees that the weights are integers.

    Before: Weights whose DequantizeLinear nodes read one stored tensor of zero points.
    After: Each of these nodes reads a copy.
    """
    read: set[Value] = set()
    for node in nodes_of(model, "DequantizeLinear"):
        zero_points: Value = node.inputs[2] if len(node.inputs) > 2 else None
        if not is_constant(zero_points) or not zero_points.shape:
            continue
        if zero_points in read:
            name = str(zero_points.name)
            codes = value_of(zero_points)
            copy = add_initializer(node.graph, name, codes, data_type(zero_points))
            node.replace_input_with(2, copy)
        read.add(zero_points)


def _unequal_biases(model: Model) -> None:
    """Give convolutions, and layers whose results are quantized, a bias with two values at least.

    OpenVINO 2026.4 makes one kernel of a product of two dimensions and the quantization of its
    result. Where that kernel has no bias, or one number for all channels, it reads memory that
    nobody has written, with one thread and fixed shapes. The codes of a convolution without a bias
    are all 0 where something else reads the result too, before it is quantized; and with an open
    batch its results have the scale of the codes twice where there are two readers, of which a norm
    counts as several.

    Before: Conv whose result is read, or Gemm or MatMul -> Relu or nothing -> QuantizeLinear,
    without a bias, or with equal ones.
    After: The bias of the first channel is the next larger number of float32, or 1e-30 if it was 0.
    """
    for node in nodes_of(model, "Gemm", "MatMul", "Conv"):
        weight = weight_of(node)
        if weight is None or not _needs_a_bias(node):
            continue
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        codes = value_of(weight.inputs[0])
        has_outputs_first = node.op_type == "Conv" or attribute(node, "transB", 0)
        width = codes.shape[0 if has_outputs_first else -1]
        old = torch.zeros(width, dtype=torch.float32, device="cpu")
        if bias is not None:
            old = (
                value_of(bias) if is_constant(bias) else torch.arange(2.0, device="cpu")
            )
        if len(old) < 2 or not bool((old == old.flatten()[0]).all()):
            continue
        name = f"{pair_name(weight)}{_UNEQUAL}"
        stored = add_initializer(node.graph, name, _with_another_first(old))
        if node.op_type != "MatMul":
            node.resize_inputs(3)
            node.replace_input_with(2, stored)
        else:
            result = node.outputs[0]
            uses = list(result.uses())
            total = add_node(node, "Add", [result, stored], f"{name}/added")
            for user, index in uses:
                user.replace_input_with(index, total)


def _needs_a_bias(node: Node) -> bool:
    """Return True if OpenVINO may compute a layer wrongly that has no bias."""
    result = node.outputs[0]
    if node.op_type == "Conv":
        return bool(readers(result))
    return leads_only_to_quantizers(result, "Relu", "Clip")


def _with_another_first(bias: Tensor) -> Tensor:
    """Return a bias whose first number is a little larger."""
    new = bias.clone()
    first = bias[..., :1]
    larger = torch.nextafter(first, torch.full_like(first, torch.inf))
    new[..., :1] = torch.where(first == 0, torch.full_like(first, _LEAST), larger)
    return new


def _equal_biases(model: Model) -> dict[str, str]:
    """Give biases that were equal their first number back; others stay as they are in the file."""
    for name, value in list(model.graph.initializers.items()):
        # Layers with equal weights share these, and so the first part of the name.
        if not str(name).partition("#")[0].endswith(_UNEQUAL):
            continue
        stored = value_of(value)
        bias = stored.clone()
        bias[..., :1] = stored[..., 1:2]
        if torch.equal(_with_another_first(bias), stored):
            replace_stored(value, bias)
    return {}


unequal_biases = Rewrite(_unequal_biases, undo=_equal_biases)

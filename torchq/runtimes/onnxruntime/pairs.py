"""Q/DQ pairs for ONNX Runtime: where its kernels need them, and what runs in float beside them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    attribute,
    computed_by,
    data_type,
    input_at,
    is_constant,
    is_output,
    nodes_of,
    readers,
    replace_stored,
    value_of,
)
from torchq.onnx.passes.convolutions import constant_fill
from torchq.onnx.passes.pairs import insert_pair, separate
from torchq.onnx.qdq import (
    FLOAT_WEIGHT,
    element_type,
    format_of,
    leads_only_to_quantizers,
    pair_name,
    qparams_of,
    starts_at_zero,
)
from torchq.runtimes.checks import dequantized, weight_of

_RESHAPES = ("Flatten", "Reshape", "Squeeze")
#: ONNX Runtime quantizes in front of these itself, and moves codes.
MOVES = (*_RESHAPES, "Transpose", "Unsqueeze")


def store_float_weights(model: Model) -> None:
    """Store the weights of convolutions that run in float as the float values of their codes.

    ONNX Runtime keeps a DequantizeLinear in front of a float convolution, whose weight then is no
    constant: no kernel for its memory layout, no fused activation. Such a convolution takes two
    to three and a half times as long as in float32.

    Before: Conv(x, DequantizeLinear(codes)) whose result is not quantized, or any ConvTranspose.
    After: Conv(x, weight), with ``weight`` the values of the codes. Left is what a BatchNorm stands
    behind, which the file is to be written without.
    """
    for node in nodes_of(model, "Conv", "ConvTranspose"):
        dequantize = weight_of(node)
        if dequantize is None or _runs_on_integers(node) or _has_norm(node):
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
    if _quantizers_behind(result):
        return True
    # Codes that begin at 0 include an activation; others leave it, and the convolution in float.
    while not is_output(result) and (activation := _only_reader_of(result)) is not None:
        if activation.op_type not in ("Relu", "Clip"):
            break
        result = activation.outputs[0]
    quantizers = _quantizers_behind(result)
    return bool(quantizers) and all(map(starts_at_zero, quantizers))


#: What ONNX Runtime folds into the constant weight and bias of a convolution in front of it.
_FOLDED = ("Add", "BatchNormalization", "Mul")


def _has_norm(node: Node) -> bool:
    """Return True if a BatchNorm with constants alone stands behind a convolution."""
    norm = _only_reader_of(node.outputs[0])
    return (
        norm is not None
        and norm.op_type == "BatchNormalization"
        and _is_constant_but_for(norm, node.outputs[0])
    )


def _is_constant_but_for(node: Node, value: Value) -> bool:
    return all(
        other is None or other is value or is_constant(other) for other in node.inputs
    )


def _quantizers_behind(value: Value) -> list[Node]:
    """Return the QuantizeLinear nodes that alone read a value, also behind moves of elements.

    ONNX Runtime quantizes in front of these. Float weights of such a convolution it would quantize
    by itself, with one scale.
    """
    users = readers(value)
    while len(users) == 1 and users[0].op_type in MOVES and not is_output(value):
        value = users[0].outputs[0]
        users = readers(value)
    only = not is_output(value) and all(
        user.op_type == "QuantizeLinear" for user in users
    )
    return users if only else []


def _only_reader_of(value: Value) -> Node | None:
    users = readers(value)
    return users[0] if len(users) == 1 else None


def read_shapes_of_codes(model: Model) -> None:
    """Let Shape read the codes of a tensor, where quantizers are all else that reads the tensor.

    A layer whose result has another reader than a quantizer has no integer kernel. A ViT asks its
    first result for the size of the batch, to repeat the class token.

    Before: Shape and QuantizeLinear read one tensor. After: Shape reads the first of these codes.
    """
    for node in nodes_of(model, "Shape"):
        others = [user for user in readers(node.inputs[0]) if user.op_type != "Shape"]
        if others and all(user.op_type == "QuantizeLinear" for user in others):
            node.replace_input_with(0, others[0].outputs[0])
    model.graph.sort()  # Codes may have been computed behind what reads their shape.


def quantize_unbatched(model: Model) -> None:
    """Quantize what convolutions read once more, behind the batch of one that it is given.

    Before: DequantizeLinear -> Unsqueeze -> Conv, as of one image without a batch.
    After: A Q/DQ pair with the same parameters stands in front of the Conv; no value changes.
    """
    for node in nodes_of(model, "Unsqueeze"):
        source = dequantized(node.inputs[0])
        users = readers(node.outputs[0])
        has_convolutions = users and all(user.op_type == "Conv" for user in users)
        if source is None or attribute(source, "axis") or is_output(node.outputs[0]):
            continue
        if has_convolutions:
            insert_pair(node, list(source.inputs[1:]))


def quantize_reshaped(model: Model) -> None:
    """Quantize what convolutions and means of codes return in front of reshapes and padding.

    Their kernels then return codes; they would run in float otherwise.

    Before: DequantizeLinear -> Conv, AveragePool or GlobalAveragePool -> activations -> reshapes,
    or zeros that are added around images -> QuantizeLinear.
    After: A Q/DQ pair with the parameters of that QuantizeLinear stands in front of the reshapes.
    Behind them may be a ReLU that its codes include, as they begin at 0.
    """
    for node in nodes_of(model, "Conv", "AveragePool", "GlobalAveragePool"):
        if dequantized(node.inputs[0]) is None:
            continue
        last = node
        reader = _only_reader(node)
        while reader is not None and reader.op_type in ("Relu", "Clip"):
            last, reader = reader, _only_reader(reader)
        # ONNX Runtime moves codes in front of all moves, unless something asks for a shape.
        has_others = len(readers(last.outputs[0])) > 1
        moves = MOVES if has_others else _RESHAPES
        if reader is None or not _keeps_codes(reader, moves):
            continue
        is_cut = False
        while reader is not None and (
            reader.op_type == "Relu" or _keeps_codes(reader, moves)
        ):
            is_cut = is_cut or reader.op_type == "Relu"
            reader = _only_reader(reader)
        if (
            reader is None
            or reader.op_type != "QuantizeLinear"
            or attribute(reader, "axis")
            or (is_cut and not starts_at_zero(reader))
        ):
            continue
        insert_pair(last, list(reader.inputs[1:]))


def _keeps_codes(node: Node, moves: Sequence[str]) -> bool:
    """Return True for a node that moves values, or adds zeros to them."""
    return node.op_type in moves or (node.op_type == "Pad" and constant_fill(node) == 0)


def _only_reader(node: Node) -> Node | None:
    """Return the one node that reads a result, beside those that read its shape."""
    users = [user for user in readers(node.outputs[0]) if user.op_type != "Shape"]
    return users[0] if len(users) == 1 and not is_output(node.outputs[0]) else None


def quantize_concatenated(model: Model) -> None:
    """Quantize the result of operators that move equally quantized values once more.

    Before: All operands of a Concat or MaxPool come from DequantizeLinear with the same parameters,
    and a node reads the result in float.
    After: A Q/DQ pair with these parameters follows. It changes no value, and completes the pattern
    of an integer kernel.
    """
    for node in nodes_of(model, "Concat", "MaxPool"):
        pairs = [dequantized(value) for value in node.inputs]
        settings = {tuple(pair.inputs[1:]) for pair in pairs if pair is not None}
        if None in pairs or len(settings) != 1 or is_output(node.outputs[0]):
            continue
        if not leads_only_to_quantizers(node.outputs[0]):
            insert_pair(node, list(settings.pop()))


def quantize_padded(model: Model) -> None:
    """Quantize what convolutions read once more behind padding with values of the image.

    A layer with such a ``padding_mode`` pads what its quantizer gave.

    Before: DequantizeLinear -> Pad, or slices that are concatenated -> Conv.
    After: A Q/DQ pair with the same parameters stands in front of the Conv. It changes no value,
    and completes the pattern of an integer kernel.
    """
    for node in nodes_of(model, "Conv"):
        padded = node.inputs[0].producer()
        sources = set(_sources_of_padding(node.inputs[0]))
        settings = {tuple(pair.inputs[1:]) for pair in sources if pair is not None}
        if padded is None or None in sources or padded in sources or len(settings) != 1:
            continue
        if not any(attribute(pair, "axis") for pair in sources if pair is not None):
            insert_pair(padded, list(settings.pop()))


def _sources_of_padding(value: Value) -> Iterator[Node | None]:
    """Yield the DequantizeLinear nodes that a value was padded from; None for anything else."""
    producer = value.producer()
    if producer is not None and producer.op_type == "Concat":
        for part in producer.inputs:
            yield from _sources_of_padding(part)
    elif producer is not None and (
        producer.op_type == "Slice"
        or (
            producer.op_type == "Pad"
            and attribute(producer, "mode", "constant") != "constant"
        )
    ):
        yield from _sources_of_padding(producer.inputs[0])
    else:
        yield dequantized(value)


def widen_four_bit_weights(model: Model) -> None:
    """Store codes of 4 bits in 8 bits, but for blocks.

    ONNX Runtime has kernels for weights of 4 bits in blocks alone; it would dequantize others on
    every call.

    Before: DequantizeLinear of stored int4 or uint4 codes, with a scale per tensor or channel.
    After: DequantizeLinear of the same codes, stored as int8 or uint8, with a zero point: without
    one a Gemm stays in float.
    """
    for node in nodes_of(model, "DequantizeLinear"):
        codes = node.inputs[0]
        if not is_constant(codes) or data_type(codes).bitwidth != 4:
            continue
        if attribute(node, "block_size", 0):
            continue
        for value in (codes, *node.inputs[2:]):
            if value is not None and data_type(value).bitwidth == 4:
                replace_stored(value, value_of(value))
        if input_at(node, 2) is None:
            scale = value_of(node.inputs[1])
            stored = value_of(node.inputs[0]).dtype
            zeros = torch.zeros(scale.shape, dtype=stored, device="cpu")
            name = f"{pair_name(node)}/zero_point"
            node.resize_inputs(3)
            node.replace_input_with(2, add_initializer(model.graph, name, zeros))
        node.attributes.pop("output_dtype", None)


def separate_clips(model: Model) -> None:
    """Keep activations, and layers, apart from codes that they cannot be fused with.

    ONNX Runtime 1.32 removes a ReLU in front of codes whose zero point is 0, as if they were
    unsigned integers; FP8 codes have a sign. And it quantizes the weight and bias of a float
    convolution in front of an activation and codes once more, with scales of its own; the Clip of
    codes of fewer than 8 bits leaves the convolution in float, and so does an activation that codes
    do not include, as they begin below 0.

    Before: Relu or Clip -> QuantizeLinear to FP8, to fewer codes than the type has, or behind a
    convolution of codes to codes that begin below 0.
    After: Max(x, x), which is x, stands between them.
    """
    for node in nodes_of(model, "QuantizeLinear"):
        behind = computed_by(node.inputs[0], "Relu", "Clip")
        if behind is None:
            continue
        is_unfused = not format_of(element_type(node)).is_integer or (
            _cuts_codes(behind, node) or _follows_float_convolution(behind, node)
        )
        if is_unfused:
            separate(node.inputs[0], node)


def _follows_float_convolution(activation: Node, quantize: Node) -> bool:
    """Return True behind a quantized convolution that an activation keeps in float."""
    layer = computed_by(activation.inputs[0], "Conv")
    return (
        layer is not None
        and weight_of(layer) is not None
        and dequantized(layer.inputs[0]) is not None
        and not starts_at_zero(quantize)
    )


def separate_softmaxes(model: Model) -> None:
    """Keep softmaxes of codes in float.

    QLinearSoftmax of ONNX Runtime 1.32 adds rounded exponentials: a fifth of its codes are one off.

    Before: DequantizeLinear -> Softmax -> QuantizeLinear, with moves of elements between.
    After: Max(x, x), which is x, stands behind the Softmax.
    """
    for node in nodes_of(model, "Softmax"):
        source = node.inputs[0]
        while (move := computed_by(source, *MOVES)) is not None:
            source = move.inputs[0]
        if dequantized(source) is not None and _quantizers_behind(node.outputs[0]):
            separate(node.outputs[0])


def separate_outputs(model: Model) -> None:
    """Keep results of the model apart from transposes of them that are quantized.

    ONNX Runtime 1.32 quantizes in front of such a Transpose, and returns the values of these codes
    as the result of the model, where nothing else reads it.

    Before: A result of the model, read by one Transpose alone -> moves of elements ->
    QuantizeLinear.
    After: Max(x, x), which is x, stands in front of the Transpose.
    """
    for node in nodes_of(model, "Transpose"):
        source = node.inputs[0]
        if source is None or source.producer() is None or not is_output(source):
            continue
        if len(readers(source)) == 1 and _is_quantized(node.outputs[0]):
            separate(source, node)


def separate_float_convolutions(model: Model) -> None:
    """Keep the codes behind a float convolution of codes apart from it.

    ONNX Runtime 1.32 quantizes the weight and bias of such a convolution anew, with scales of its
    own, where quantizers are all that reads the result. It folds constants into them first, looks
    through moves of elements, and does not mind that the model returns the result too.

    Before: Conv or ConvTranspose of codes and of a weight in float -> Relu, Clip, sums and products
    with constants, moves -> QuantizeLinear.
    After: Max(x, x), which is x, stands in front of the QuantizeLinear.
    """
    for node in nodes_of(model, "Conv", "ConvTranspose"):
        if dequantized(node.inputs[0]) is None or weight_of(node) is not None:
            continue
        result = node.outputs[0]
        while (reader := _only_reader_of(result)) is not None:
            folds = reader.op_type in _FOLDED and _is_constant_but_for(reader, result)
            if not folds and reader.op_type not in ("Relu", "Clip", *MOVES):
                break
            result = reader.outputs[0]
        users = readers(result)
        if users and all(user.op_type == "QuantizeLinear" for user in users):
            separate(result)


def _is_quantized(value: Value) -> bool:
    """Return True if a QuantizeLinear reads a value, also behind moves of elements."""
    waiting = [value]
    while waiting:
        for user in readers(waiting.pop()):
            if user.op_type == "QuantizeLinear":
                return True
            if user.op_type in MOVES:
                waiting.append(user.outputs[0])
    return False


def _cuts_codes(clip: Node, quantize: Node) -> bool:
    """Return True if the upper end of a Clip behind a layer cuts codes of a QuantizeLinear off."""
    end = input_at(clip, 2)
    layer = clip.inputs[0].producer()
    stored = end is not None and is_constant(end) and is_constant(quantize.inputs[1])
    if clip.op_type != "Clip" or layer is None or not stored:
        return False
    qparams = qparams_of(quantize)
    highest = value_of(end) / qparams.scale + qparams.zero_point
    return bool((highest < qparams.quant_max - 0.5).all())

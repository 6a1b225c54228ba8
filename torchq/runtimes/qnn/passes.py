"""File passes for QNN: its chips compute a layer whose result is read by one QuantizeLinear alone.

They change no code: what stands between the layer and the codes moves or clips them.
"""

from __future__ import annotations

import torch

from torchq.functional import QParams
from torchq.onnx.ir import (
    Model,
    Node,
    add_initializer,
    are_constant,
    attribute,
    computed_by,
    input_at,
    is_constant,
    is_output,
    names,
    nodes_of,
    onnx_ir,
    readers,
    remove_unused,
    run_passes,
    value_of,
)
from torchq.onnx.passes.constants import fold_shapes
from torchq.onnx.passes.convolutions import fold_pads
from torchq.onnx.passes.pairs import clip_beyond, insert_pair
from torchq.onnx.qdq import (
    element_type,
    leads_only_to_quantizers,
    qparams_of,
    stored_weight,
)
from torchq.runtimes.checks import LAYERS
from torchq.utils.optional import import_optional

#: They move elements, or choose some: the codes of a result are codes of what they read.
_MOVES = names(
    "Reshape Flatten Squeeze Unsqueeze Transpose Slice DepthToSpace SpaceToDepth MaxPool Expand"
)
_CLIPS = names("Relu Clip")
#: What the provider joins with the layer behind it, or gives a grid of its own, where it has 16
#: bits.
_JOINED = names("Sigmoid HardSigmoid Tanh LayerNormalization")
_WIDE = 16


def quantize_before_moves(model: Model) -> None:
    """Quantize what is moved before it is moved.

    Before: A result in float -> moves of elements -> QuantizeLinear nodes of one grid.
    After: A Q/DQ pair of this grid stands in front of the moves too.
    """
    for node in reversed(list(model.graph)):
        if _is_move(node):
            _quantize_input(node)


def quantize_before_activations(model: Model) -> None:
    """Quantize what a ReLU or Clip reads, where the grid behind it is not one that it begins.

    The codes of the clipped value are the clipped codes of the value. A ReLU in front of codes
    whose zero point is 0 is a part of the layer for the provider, and stays.

    Before: A result in float -> Relu or Clip -> QuantizeLinear nodes of one grid that goes beyond
    the ends of the activation.
    After: A Q/DQ pair of this grid stands in front of the activation too.
    """
    for node in reversed(nodes_of(model, *_CLIPS)):
        grid = _grid_behind(node)
        if grid is not None and not _begins_there(node, grid):
            _quantize_input(node)


def flatten_biases(model: Model) -> None:
    """Store biases of products as rows of numbers again, where results are quantized at once.

    ONNX Runtime wants them as (1, N) where they are not. The provider takes a product with scales
    for each channel only together with a bias of one dimension.

    Before: Add(MatMul(x, DequantizeLinear(w)), bias), bias (1, N) -> QuantizeLinear.
    After: The bias is (N,).
    """
    for add in nodes_of(model, "Add"):
        biases = [v for v in add.inputs if is_constant(v) and value_of(v).dim() == 2]
        products = [v for v in add.inputs if computed_by(v, "MatMul") is not None]
        if len(biases) != 1 or len(products) != 1:
            continue
        numbers = value_of(biases[0])
        weight = stored_weight(products[0].producer().inputs[1])
        is_row = weight is not None and numbers.shape[0] == 1
        if is_row and leads_only_to_quantizers(add.outputs[0]):
            name = f"{biases[0].name}/numbers"
            flat = add_initializer(add.graph, name, numbers.reshape(-1))
            add.replace_input_with(list(add.inputs).index(biases[0]), flat)
    remove_unused(model)


def separate_layers(model: Model) -> None:
    """Let layers read 16-bit codes of some operators behind another one, which changes no code.

    The provider gives sigmoids and tanh of 16 bits one grid for all networks, and the layer behind
    them a bias for the grid of the file. A norm is joined with the layer behind it, and wrongly
    for a single image.

    Before: Sigmoid, HardSigmoid, Tanh or LayerNormalization -> a pair of 16 bits -> a layer.
    After: the same operator -> the pair -> Clip beyond the ends of its grid -> a pair of the same
    grid -> the layer.
    """
    for node in nodes_of(model, *_JOINED):
        for quantize in readers(node.outputs[0]):
            if quantize.op_type != "QuantizeLinear" or not _is_wide(quantize):
                continue
            for dequantize in readers(quantize.outputs[0]):
                users = readers(dequantize.outputs[0])
                if any(user.op_type in LAYERS for user in users):
                    _read_apart(dequantize, quantize)


def _is_wide(quantize: Node) -> bool:
    return are_constant(quantize.inputs[1:]) and (
        int(element_type(quantize).bitwidth) == _WIDE
    )


def _read_apart(dequantize: Node, quantize: Node) -> None:
    """Let readers of a pair read its values behind a Clip that cuts none, and the pair again."""
    users = list(dequantize.outputs[0].uses())
    whole = clip_beyond(dequantize, quantize)
    for user, index in users:
        user.replace_input_with(index, whole)
    insert_pair(whole.producer(), list(quantize.inputs[1:]))


def _is_move(node: Node) -> bool:
    if node.op_type == "Pad":
        # Zeros are codes of any grid with a zero point.
        fill = input_at(node, 2)
        is_zero = fill is None or (is_constant(fill) and not value_of(fill).any())
        return attribute(node, "mode", "constant") == "constant" and is_zero
    if node.op_type == "Resize":
        return str(attribute(node, "mode", "nearest")) == "nearest"
    return node.op_type in _MOVES


def _grid_behind(node: Node) -> Node | None:
    """Return one of the QuantizeLinear nodes that alone read a result, if they have one grid."""
    result = node.outputs[0]
    users = readers(result)
    if (
        is_output(result)
        or not users
        or any(user.op_type != "QuantizeLinear" for user in users)
    ):
        return None
    if not all(is_constant(value) for user in users for value in user.inputs[1:]):
        return None
    first = qparams_of(users[0])
    same = all(is_one_grid(first, qparams_of(user)) for user in users)
    return users[0] if same and first.scale.numel() == 1 else None


def is_one_grid(first: QParams, other: QParams) -> bool:
    """Return True if two grids have the same codes for the same values."""
    scales = torch.equal(first.scale, other.scale)
    points = torch.equal(first.zero_point, other.zero_point)
    return scales and points and first.format == other.format


def _begins_there(node: Node, quantize: Node) -> bool:
    """Return True if codes of a grid cut a value off as the activation in front of them does."""
    qparams = qparams_of(quantize)
    low = input_at(node, 1)
    clips_at_zero = low is not None and is_constant(low) and not value_of(low).any()
    cuts_at_zero = node.op_type == "Relu" or clips_at_zero
    return cuts_at_zero and qparams.has_zero_point(int(qparams.quant_min))


def _quantize_input(node: Node) -> None:
    """Insert a pair in front of a node whose result QuantizeLinear nodes of one grid read."""
    grid = _grid_behind(node)
    value = node.inputs[0]
    if grid is None or value is None or is_output(value) or len(readers(value)) > 1:
        return
    producer = value.producer()
    if producer is not None and computed_by(value, "DequantizeLinear") is None:
        insert_pair(producer, list(grid.inputs[1:]))


def with_fixed_shapes(
    graph: bytes, shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> bytes:
    """Return an ONNX file for inputs of these shapes alone, as the chip takes no open lengths."""
    onnx = import_optional("onnx", "torchq.onnx")
    model = onnx.load_model_from_string(graph)
    del model.graph.value_info[:]
    shape_by_name = dict(shapes)
    for graph_input in model.graph.input:
        dimensions = graph_input.type.tensor_type.shape.dim
        for dimension, length in zip(
            dimensions, shape_by_name[graph_input.name], strict=True
        ):
            dimension.dim_value = length
    for graph_output in model.graph.output:
        graph_output.type.tensor_type.ClearField("shape")
    fixed = onnx_ir.from_proto(onnx.shape_inference.infer_shapes(model))
    run_passes(fixed, (fold_shapes, fold_pads))
    written: bytes = onnx_ir.to_proto(fixed).SerializeToString()
    return written

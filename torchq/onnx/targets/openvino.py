"""Intel OpenVINO. Sources: measurements with version 2026.4."""

from __future__ import annotations

import torch

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    attribute,
    computed_by,
    data_type,
    is_constant,
    names,
    nodes_of,
    value_of,
)
from torchq.onnx.passes.idle_nodes import drop_idle_pairs
from torchq.onnx.passes.kernels.separation import separate
from torchq.onnx.qdq import pair_name, qparams_of
from torchq.onnx.targets.activations import ActivationTypes
from torchq.onnx.targets.base import AVG_POOLS, MAX_POOLS, OnnxTarget
from torchq.onnx.targets.checks import (
    check_fused_norms,
    check_one_range_per_tensor,
    leads_only_to_quantizers,
    weight_of,
)
from torchq.onnx.targets.openvino_codes import unsigned_codes
from torchq.onnx.targets.openvino_norms import norms_of_rows

__all__ = ["OPENVINO"]

#: Reductions whose kernels also compute the operators behind them.
_LARGEST = names("ReduceMax ReduceMin GlobalMaxPool")
_MEANS = names("ReduceMean ReduceSum")
#: A bias too small to change a result, and large enough that OpenVINO does not take it for 0.
_LEAST = 1e-30


def separate_reductions(model: Model) -> None:
    """Keep quantization out of the kernels of reductions and of padded average pooling.

    OpenVINO 2026.4 quantizes largest values wrongly in the kernel that computes them, and means and
    sums of other dimensions than those of an image as well: results have errors of a tenth and
    more. It also makes signed codes unsigned, and average pooling then takes padding for the code
    0, which is the least value. It computes the larger one of two values in a kernel that does not
    quantize.

    Before::

        ReduceMax, or ReduceMean that keeps the last dimension; AveragePool of values that may be
        negative, with padding that counts.

    After::

        Max(x, x), which is x, stands behind the reduction, or in front of the pooling.
    """
    for node in nodes_of(model, *_LARGEST, *_MEANS):
        if node.op_type in _LARGEST or not _of_images(node):
            separate(node.outputs[0])
    for node in nodes_of(model, "AveragePool"):
        value = node.inputs[0]
        if value.producer() and _counts_padding(node) and not _is_nonnegative(value):
            separate(value, node)


def _counts_padding(pool: Node) -> bool:
    padded = any(attribute(pool, "pads", ())) or attribute(pool, "auto_pad", "NOTSET") != "NOTSET"
    return padded and bool(attribute(pool, "count_include_pad", 0))


def _is_nonnegative(value: Value) -> bool:
    """Return True if codes that begin at 0, or a ReLU, show that no value is negative."""
    moved = computed_by(value, "Concat", "MaxPool")
    if moved is not None:
        return all(map(_is_nonnegative, moved.inputs))
    dequantize = computed_by(value, "DequantizeLinear")
    quantize = None if dequantize is None else computed_by(dequantize.inputs[0], "QuantizeLinear")
    if quantize is None or not is_constant(quantize.inputs[1]):
        return computed_by(value, "Relu") is not None
    qparams = qparams_of(quantize)
    return qparams.has_zero_point(qparams.quant_min)


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

    Before::

        Weights whose DequantizeLinear nodes read one stored tensor of zero points.

    After::

        Each of these nodes reads a copy.
    """
    read: set[Value] = set()
    for node in nodes_of(model, "DequantizeLinear"):
        zero_points: Value = node.inputs[2] if len(node.inputs) > 2 else None
        if not is_constant(zero_points) or not zero_points.shape:
            continue
        if zero_points in read:
            name, codes = str(zero_points.name), value_of(zero_points)
            copy = add_initializer(node.graph, name, codes, data_type(zero_points))
            node.replace_input_with(2, copy)
        read.add(zero_points)


def unequal_biases(model: Model) -> None:
    """Give linear layers whose results are quantized a bias with two values at least.

    OpenVINO 2026.4 makes one kernel of a product of two dimensions and the quantization of its
    result. Where that kernel has no bias, or one number for all channels, it reads memory that
    nobody has written, with one thread and fixed shapes.

    Before::

        Gemm or MatMul -> Relu or nothing -> QuantizeLinear, without a bias, or with equal ones.

    After::

        The bias of the first channel is the next larger number of float32, or 1e-30 if it was 0.
    """
    for node in nodes_of(model, "Gemm", "MatMul"):
        weight, result = weight_of(node), node.outputs[0]
        if weight is None or not leads_only_to_quantizers(result, "Relu", "Clip"):
            continue
        bias = node.inputs[2] if len(node.inputs) > 2 else None
        codes = value_of(weight.inputs[0])
        width = codes.shape[0 if attribute(node, "transB", 0) else -1]
        old = torch.zeros(width, dtype=torch.float32, device="cpu")
        if bias is not None:
            old = value_of(bias) if is_constant(bias) else torch.arange(2.0, device="cpu")
        if len(old) < 2 or not bool((old == old.flatten()[0]).all()):
            continue
        new, first = old.clone(), old[..., :1]
        larger = torch.nextafter(first, torch.full_like(first, torch.inf))
        new[..., :1] = torch.where(first == 0, torch.full_like(first, _LEAST), larger)
        name = f"{pair_name(weight)}/bias"
        stored = add_initializer(node.graph, name, new)
        if node.op_type == "Gemm":
            node.resize_inputs(3)
            node.replace_input_with(2, stored)
        else:
            uses = list(result.uses())
            total = add_node(node, "Add", [result, stored], f"{name}/added")
            for user, index in uses:
                user.replace_input_with(index, total)


OPENVINO = OnnxTarget(
    name="openvino",
    float_types=(torch.float32, torch.float16, torch.bfloat16),
    operators=frozenset(["add", "mul", "cat", "pool", "matmul", "attention"]),
    modules=(MAX_POOLS, AVG_POOLS),
    # Where a convolution's result is quantized and then added, OpenVINO makes one kernel of all,
    # which cuts that result at the ends of its range but does not round it.
    one_branch=True,
    # The kernels of CPUs without AMX multiply uint8 by int8.
    activation_types=ActivationTypes(nonnegative="unsigned", others="signed"),
    # Without drop_idle_pairs OpenVINO would quantize concatenated codes again, operand by operand.
    passes=(
        unsigned_codes,
        drop_idle_pairs,
        own_zero_points,
        separate_reductions,
        unequal_biases,
        norms_of_rows,
    ),
    checks=(check_one_range_per_tensor, check_fused_norms),
    limits=(
        "OpenVINO computes the float parts in bfloat16 on CPUs that have it; "
        'set INFERENCE_PRECISION_HINT="f32" to compare with float32.',
    ),
)

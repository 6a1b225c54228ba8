"""Intel OpenVINO. Sources: measurements with version 2026.4."""

from __future__ import annotations

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    computed_by,
    data_type,
    is_constant,
    names,
    nodes_of,
    readers,
    value_of,
)
from torchq.onnx.passes.idle_nodes import drop_idle_pairs
from torchq.onnx.qdq import shared_name
from torchq.onnx.targets.activations import ActivationTypes, retype_activations
from torchq.onnx.targets.base import AVG_POOLS, MAX_POOLS, OnnxTarget
from torchq.onnx.targets.checks import LAYERS, check_fused_norms, check_one_range_per_tensor

__all__ = ["OPENVINO"]

#: What OpenVINO moves quantization across.
_TRANSPARENT = names(
    "QuantizeLinear DequantizeLinear Relu Clip MaxPool AveragePool Reshape Transpose Slice Split "
    "Squeeze Unsqueeze Flatten Pad Resize Identity Concat"
)


def unsigned_concatenations(model: Model) -> None:
    """Write concatenated tensors, and what is computed from them at once, with unsigned codes.

    OpenVINO 2026.4 computes wrong numbers where a convolution reads a concatenation with signed
    codes: it makes them unsigned, and forgets what it has added. Unsigned codes with a zero point
    are right, and as fast there. Where no layer reads such codes, as in front of the BatchNorm of
    DenseNet, signed ones are the faster ones.

    Before::

        A Concat between Q/DQ pairs with signed codes, whatever moves elements beside it, and
        a layer that reads these codes.

    After::

        These pairs have unsigned codes, with the zero point 128 or, behind a ReLU, 0.
    """
    values: set[Value] = set()
    for node in nodes_of(model, "Concat"):
        if node.outputs[0] not in values:
            found = _moved_together(node)
            if any(user.op_type in LAYERS for value in found for user in readers(value)):
                values |= found
    shared = {shared_name(n) for n in nodes_of(model, "QuantizeLinear") if n.inputs[0] in values}
    retype_activations(model, ActivationTypes("unsigned", "unsigned"), shared)


def _moved_together(node: Node) -> set[Value]:
    """Return the operands and results of a Concat, and whatever has the same codes as these."""
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


OPENVINO = OnnxTarget(
    name="openvino",
    operators=frozenset(["add", "mul", "cat", "pool", "matmul", "attention"]),
    modules=(MAX_POOLS, AVG_POOLS),
    # Where a convolution's result is quantized and then added, OpenVINO makes one kernel of all,
    # which cuts that result at the ends of its range but does not round it.
    one_branch=True,
    # The kernels of CPUs without AMX multiply uint8 by int8.
    activation_types=ActivationTypes(nonnegative="unsigned", others="signed"),
    # Without the second one it would quantize each operand of a concatenation again.
    passes=(unsigned_concatenations, drop_idle_pairs, own_zero_points),
    checks=(check_one_range_per_tensor, check_fused_norms),
    limits=(
        "OpenVINO computes the float parts in bfloat16 on CPUs that have it; "
        'set INFERENCE_PRECISION_HINT="f32" to compare with float32.',
    ),
)

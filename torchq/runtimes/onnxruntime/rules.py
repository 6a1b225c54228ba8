"""What an ONNX file should be like for ONNX Runtime: checks, each a warning of the export."""

from __future__ import annotations

from collections.abc import Iterator

from torchq.onnx.ir import Model, Node, attribute, computed_by, nodes_of, readers
from torchq.onnx.qdq import leads_only_to_quantizers
from torchq.runtimes.checks import dequantized, has_quantized_weight, layer_name
from torchq.runtimes.onnxruntime.pairs import MOVES

#: What becomes of a convolution of codes in front of a BatchNorm: no kernel has both.
IN_FLOAT = "computed in float"
#: What may stand between a convolution and the quantizer that becomes a part of its kernel.
_FUSED = ("Relu", "Clip", "Max", "Min")
#: A linear layer returns floats from integers, and a transposed convolution has no such kernel.
IN_FLOAT_FOR_NORMS = ("Conv",)


def check_float_outputs(model: Model) -> Iterator[str]:
    """Yield quantized convolutions whose output is not quantized, though integers are faster."""
    for node in nodes_of(model, "Conv"):
        if not has_quantized_weight(node) or dequantized(node.inputs[0]) is None:
            continue
        if any(
            user.op_type == "BatchNormalization" for user in readers(node.outputs[0])
        ):
            continue  # It is said of these once and for all.
        if _is_grouped(node) or any(map(_is_grouped, _behind_relu(node))):
            continue  # Float is the faster one; see ``quantize_results``.
        if not leads_only_to_quantizers(node.outputs[0], *_FUSED, *MOVES):
            yield (
                f"{layer_name(node)}: its output is not quantized, so it runs in float. "
                "Last layers of a detector may, and those in front of operators that calibrate "
                "left in float; else quantize what reads it, or put torchq.nn.QuantIdentity() "
                "behind it, or exclude it"
            )


def _is_grouped(node: Node) -> bool:
    return node.op_type == "Conv" and int(attribute(node, "group", 1)) > 1


def _behind_relu(node: Node) -> list[Node]:
    """Return the nodes that read the result of a node, and those behind a ReLU that reads it."""
    users = readers(node.outputs[0])
    return users + [
        n for u in users if u.op_type == "Relu" for n in readers(u.outputs[0])
    ]


def check_transposed_convolutions(model: Model) -> Iterator[str]:
    """Yield transposed convolutions with a quantized input, which only costs time."""
    for node in nodes_of(model, "ConvTranspose"):
        if computed_by(node.inputs[0], "DequantizeLinear") is not None:
            yield (
                f"{layer_name(node)}: ONNX Runtime has no integer ConvTranspose; "
                "switch its input quantizer off"
            )

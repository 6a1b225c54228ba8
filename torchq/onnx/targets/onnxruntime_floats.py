"""Convolutions whose results stay float: in ONNX Runtime, no integer kernel returns floats."""

from __future__ import annotations

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    is_constant,
    is_output,
    names,
    nodes_of,
    readers,
    value_of,
)
from torchq.onnx.qdq import FLOAT_WEIGHT, pair_name, qparams_of
from torchq.onnx.targets.checks import dequantized, leads_only_to_quantizers, weight_of

__all__ = ["starts_at_zero", "store_float_weights"]

#: Operators that move elements, or count them: no kernel of a convolution does that as well.
_MOVES = names("Concat Flatten Reshape Resize Shape Slice Split Squeeze Transpose Unsqueeze")
_CODES = ("INT8", "UINT8")


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

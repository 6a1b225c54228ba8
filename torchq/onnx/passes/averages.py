"""Nodes that keep quantization out of a kernel, and average pooling of codes."""

from __future__ import annotations

from typing import Any

import torch

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    attribute,
    computed_by,
    fresh_name,
    nodes_of,
    replace_value,
)
from torchq.onnx.passes.shapes import Shape, known_shapes
from torchq.onnx.qdq import element_type, format_of, leads_only_to_quantizers


def separate(value: Value, reader: Node | None = None) -> None:
    """Let all readers of a computed value, or one of them, read the larger one of it and itself.

    That is the value, and no runtime has a kernel for Max that a quantizer becomes a part of.
    """
    producer, uses = value.producer(), [use for use in value.uses() if reader in (None, use[0])]
    assert producer is not None
    name = fresh_name(producer.graph, f"{value.name}/larger")
    larger = add_node(producer, "Max", [value, value], name)
    for user, index in uses:
        user.replace_input_with(index, larger)


def separate_float8(model: Model) -> None:
    """Keep the activations in front of FP8 codes.

    ONNX Runtime 1.32 removes a ReLU in front of codes whose zero point is 0, as if they were
    unsigned integers; FP8 codes have a sign.

    Before: Relu or Clip -> QuantizeLinear to FP8.
    After: Max(x, x), which is x, stands between them.
    """
    for node in nodes_of(model, "QuantizeLinear"):
        behind = computed_by(node.inputs[0], "Relu", "Clip")
        if behind is not None and not format_of(element_type(node)).is_integer:
            separate(node.inputs[0], node)


_KEPT = ("strides", "pads", "dilations")


def convolve_averages(model: Model) -> None:
    """Write average pooling between Q/DQ pairs as a depthwise convolution whose codes are all 1.

    ONNX Runtime's kernel for average pooling of codes takes about five times as long as its
    depthwise convolution, and longer than pooling in float. A mean over whole images has a fast
    one. Where the last window stands over the edge of the image (``ceil_mode``), that kernel
    divides by the area of a whole one, and a convolution would too.

    Before: DequantizeLinear -> AveragePool of images -> QuantizeLinear.
    After: DequantizeLinear -> Conv of each channel by itself, with the codes 1 and the scale 1 /
    (height * width) of the kernel -> QuantizeLinear. Or the pooling in float, behind Max(x, x),
    where a window may stand over the edge.
    """
    pools = [node for node in nodes_of(model, "AveragePool") if _is_between_codes(node)]
    shapes = known_shapes(model) if pools else {}
    for node in pools:
        shape = shapes.get(str(node.inputs[0].name), ())
        if len(shape) == 4 and isinstance(shape[1], int) and _is_regular(node, shape[2:]):
            replace_value(node.outputs[0], _convolution(node, shape[1]))
        elif attribute(node, "ceil_mode", 0):
            separate(node.inputs[0], node)


def _is_between_codes(node: Node) -> bool:
    """Return True for pooling of codes to codes, the pattern of an integer kernel."""
    from_codes = computed_by(node.inputs[0], "DequantizeLinear") is not None
    return from_codes and leads_only_to_quantizers(node.outputs[0])


def _is_regular(node: Node, lengths: Shape) -> bool:
    """Return True if every result is the sum over a whole kernel, divided by its area."""
    pads = attribute(node, "pads", (0, 0, 0, 0))
    if any(pads) and not attribute(node, "count_include_pad", 0):
        return False
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET":
        return False
    if not attribute(node, "ceil_mode", 0):
        return True
    # The last kernel may stand over the edge, unless the others fill the image.
    strides, kernel = attribute(node, "strides", (1, 1)), attribute(node, "kernel_shape")
    dilated = any(n != 1 for n in attribute(node, "dilations", (1, 1)))
    return not dilated and all(
        isinstance(length, int) and (length + before + after - size) % stride == 0
        for length, before, after, size, stride in zip(
            lengths, pads[:2], pads[2:], kernel, strides, strict=True
        )
    )


def _convolution(node: Node, channels: int) -> Any:
    """Insert the convolution behind the pooling, and return its result."""
    kernel = list(attribute(node, "kernel_shape"))
    name = f"{node.name or node.outputs[0].name}/average"
    area = torch.Size(kernel).numel()
    parts = {
        "codes": torch.ones(channels, 1, *kernel, dtype=torch.int8, device="cpu"),
        "scale": torch.tensor(1 / area, dtype=torch.float32, device="cpu"),
        "zero_point": torch.tensor(0, dtype=torch.int8, device="cpu"),
    }
    stored = [add_initializer(node.graph, f"{name}/{part}", t) for part, t in parts.items()]
    before = node.inputs[0].producer()
    weight = add_node(before, "DequantizeLinear", stored, f"{name}/DequantizeLinear")
    kept = {key: attribute(node, key) for key in _KEPT if key in node.attributes}
    settings = {**kept, "kernel_shape": kernel, "group": channels}
    return add_node(node, "Conv", [node.inputs[0], weight], f"{name}/Conv", settings)

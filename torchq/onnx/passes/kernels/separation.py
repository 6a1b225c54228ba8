"""A node that keeps quantization out of the kernel behind it."""

from __future__ import annotations

from torchq.onnx.ir import Model, Node, Value, add_node, computed_by, fresh_name, nodes_of
from torchq.onnx.qdq import element_type, format_of

__all__ = ["separate", "separate_float8"]


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

    Before::

        Relu or Clip -> QuantizeLinear to FP8.

    After::

        Max(x, x), which is x, stands between them.
    """
    for node in nodes_of(model, "QuantizeLinear"):
        behind = computed_by(node.inputs[0], "Relu", "Clip")
        if behind is not None and not format_of(element_type(node)).is_integer:
            separate(node.inputs[0], node)

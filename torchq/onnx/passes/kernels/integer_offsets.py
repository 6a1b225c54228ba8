"""Stored numbers that are added to codes, as codes."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.onnx.ir import (
    Model,
    Node,
    add_initializer,
    add_node,
    computed_by,
    data_type,
    is_constant,
    is_output,
    nodes_of,
    readers,
    value_of,
)

__all__ = ["quantize_offsets"]


def quantize_offsets(model: Model) -> None:
    """Store a number that is added between two Q/DQ pairs as the code of itself, without rounding.

    ONNX Runtime has an integer kernel for the sum of two quantized tensors. With a float operand it
    writes the values of the codes to memory, adds, and quantizes them again.

    Before::

        DequantizeLinear -> Add with one stored number -> QuantizeLinear.

    After::

        The number is a DequantizeLinear of one code: 1 with the scale ``number``, or 0 with the
        zero point 1 and the scale ``-number``.
    """
    for node in nodes_of(model, "Add"):
        users = readers(node.outputs[0])
        alone = len(users) == 1 and users[0].op_type == "QuantizeLinear"
        if not alone or is_output(node.outputs[0]):
            continue
        for index, value in enumerate(node.inputs):
            other = computed_by(node.inputs[1 - index], "DequantizeLinear")
            if other is None or not is_constant(value) or data_type(value).name != "FLOAT":
                continue
            number = value_of(value)
            if number.numel() == 1 and float(number.abs()) > torch.finfo(torch.float32).tiny:
                _store_code(node, index, number, other)


def _store_code(add: Node, index: int, number: Tensor, before: Node) -> None:
    """Let an addition read a number from its code."""
    negative = bool(number < 0)
    name = f"{add.name}/offset"
    parts = {
        "code": torch.full(number.shape, 0 if negative else 1, dtype=torch.uint8, device="cpu"),
        "scale": number.abs().reshape(()),
        "zero_point": torch.tensor(int(negative), dtype=torch.uint8, device="cpu"),
    }
    inputs = [add_initializer(add.graph, f"{name}/{part}", t) for part, t in parts.items()]
    add.replace_input_with(index, add_node(before, "DequantizeLinear", inputs, f"{name}/value"))

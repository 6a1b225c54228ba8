"""Norms in the form that OpenVINO computes fast."""

from __future__ import annotations

import math

import torch

from torchq.onnx.ir import (
    Model,
    Value,
    add_initializer,
    add_node,
    attribute,
    is_output,
    nodes_of,
    readers,
    replace_value,
)
from torchq.onnx.passes.example import lengths_of_example
from torchq.onnx.passes.fold_shapes import known_shapes
from torchq.onnx.passes.kernels.separation import separate

__all__ = ["norms_of_concatenations", "norms_of_rows"]

#: The mean number of elements of concatenated parts up to which one kernel is faster than one for
#: each part. In DenseNet-121 limits of 15,000 to 120,000 gain the same for one image; without a
#: limit files for eight images are 2 % slower.
_SMALL_PART = 50_000


def norms_of_rows(model: Model) -> None:
    """Let LayerNorm read tensors of three dimensions.

    OpenVINO 2026.4 has one kernel for these. For images with the channels last, as in ConvNeXt and
    Swin, it computes the mean, the difference and the rest in kernels of their own, with tensors in
    another order between them.

    Before::

        LayerNormalization over the last one of four dimensions or more: (N, ..., C).

    After::

        Reshape to (N, rows, C), the norm, and Reshape to the shape from before.
    """
    shapes = known_shapes(model)
    for node in nodes_of(model, "LayerNormalization"):
        x, result = node.inputs[0], node.outputs[0]
        shape, producer = shapes.get(str(x.name), ()), x.producer()
        last = attribute(node, "axis", -1) in (-1, len(shape) - 1)
        if len(shape) < 4 or not last or len(node.outputs) > 1 or producer is None:
            continue
        channels = shape[-1]
        if not isinstance(channels, int):
            continue
        name = str(result.name)
        rows = add_initializer(
            node.graph, f"{name}/rows", torch.tensor([0, -1, channels], device="cpu")
        )
        lengths = add_node(producer, "Shape", [x], f"{name}/shape")
        node.replace_input_with(0, add_node(producer, "Reshape", [x, rows], f"{name}/flat"))
        back = add_node(node, "Reshape", [result, lengths], f"{name}/image")
        replace_value(result, back)
        back.producer().replace_input_with(0, result)


def norms_of_concatenations(model: Model) -> None:
    """Let BatchNorm and the quantizer behind it read small tensors after they are concatenated.

    OpenVINO 2026.4 quantizes the parts and concatenates the codes. Where quantization has factors
    by channel, as behind a BatchNorm, each part then has a kernel of its own: 462 of them in
    DenseNet-121, whose layers read the results of all layers before them. One kernel for all parts
    takes a tenth less time for the whole network, but reads and writes more.

    Before::

        Concat of small tensors -> BatchNormalization -> Relu or nothing -> QuantizeLinear.

    After::

        Max(x, x), which is x, stands behind the Concat.
    """
    nodes = [node for node in nodes_of(model, "Concat") if _leads_to_norm(node.outputs[0])]
    shapes = known_shapes(model, lengths_of_example(model)) if nodes else {}
    for node in nodes:
        lengths = shapes.get(str(node.outputs[0].name), (None,))
        known = [length for length in lengths if isinstance(length, int)]
        if len(known) == len(lengths) and math.prod(known) <= _SMALL_PART * len(node.inputs):
            separate(node.outputs[0])


def _leads_to_norm(value: Value) -> bool:
    """Return True if a BatchNorm reads a value, and a quantizer what it returns; nothing else."""
    for kinds in (("BatchNormalization",), ("Relu", "QuantizeLinear"), ("QuantizeLinear",)):
        users = readers(value)
        if is_output(value) or len(users) != 1 or users[0].op_type not in kinds:
            return False
        if users[0].op_type == "QuantizeLinear":
            return True
        value = users[0].outputs[0]
    return False

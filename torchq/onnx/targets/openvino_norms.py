"""Norms in the form that OpenVINO computes fast."""

from __future__ import annotations

import torch

from torchq.onnx.ir import (
    Model,
    add_initializer,
    add_node,
    attribute,
    nodes_of,
    replace_value,
)
from torchq.onnx.passes.fold_shapes import known_shapes

__all__ = ["norms_of_rows"]


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

"""Nodes that return what they read."""

from __future__ import annotations

from torchq.onnx.ir import Model, Node, bypass, is_constant, is_output, nodes_of, value_of
from torchq.onnx.passes.fold_shapes import Shape, known_shapes

__all__ = ["drop_idle_slices"]


def drop_idle_slices(model: Model) -> None:
    """Remove each Slice that keeps all of a tensor.

    GhostNet cuts its concatenations to a number of channels that most of them have. ONNX Runtime
    copies there, and the Q/DQ pairs on both sides of the Slice stay apart.

    Before::

        Slice from the first to the last element of dimensions with known lengths.

    After::

        What the Slice reads.
    """
    slices = [node for node in nodes_of(model, "Slice") if _has_stored_bounds(node)]
    shapes = known_shapes(model) if slices else {}
    for node in slices:
        if not is_output(node.outputs[0]) and _keeps_all(node, shapes.get(node.inputs[0].name, ())):
            bypass(node)


def _has_stored_bounds(node: Node) -> bool:
    return len(node.inputs) > 2 and all(is_constant(v) for v in node.inputs[1:] if v is not None)


def _keeps_all(node: Node, shape: Shape) -> bool:
    """Return True if a Slice with stored bounds keeps every element of a tensor of this shape."""
    given = [[] if value is None else value_of(value).tolist() for value in node.inputs[1:]]
    starts, ends, axes, strides = (*given, [], [])[:4]
    axes, strides = axes or list(range(len(starts))), strides or [1] * len(starts)
    for axis, start, end, stride in zip(axes, starts, ends, strides, strict=True):
        length = shape[axis] if -len(shape) <= axis < len(shape) else None
        if not isinstance(length, int) or stride != 1:
            return False
        if not (start == 0 or start <= -length) or end < length:
            return False
    return True

"""Fourier transforms in the form that OpenVINO 2026.4 computes rightly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    add_numbers,
    attribute,
    fresh_name,
    input_at,
    is_constant,
    nodes_of,
    opset_of,
    replace_value,
    value_of,
)
from torchq.onnx.passes.constants import Shape, known_shapes

#: The dimension that OpenVINO transforms where that is an input.
_FIRST = 1
#: The opset from which on the dimension is an input.
_IS_INPUT = 20


@dataclass(frozen=True)
class _Transform:
    """What a DFT does.

    Attributes:
        shape: of what it reads; its last dimension has the real and the imaginary part.
        axis: the dimension that it transforms.
        length: how many numbers it transforms; None where the file computes that.
        inverse: from frequencies to a signal.
        onesided: the frequencies are those of a real signal, without their mirror images.
        by_attribute: the dimension is an attribute, as up to opset 19.
    """

    shape: Shape
    axis: int
    length: int | None
    inverse: bool
    onesided: bool
    by_attribute: bool

    @property
    def is_plain(self) -> bool:
        """True for what OpenVINO computes rightly."""
        return not self.onesided and (self.by_attribute or self.axis == _FIRST)

    @property
    def is_known(self) -> bool:
        """False for an inverse of frequencies of a real signal whose number is open."""
        frequencies = self.shape[self.axis]
        has_lengths = isinstance(frequencies, int) and self.length is not None
        return has_lengths or not (self.inverse and self.onesided)


def plain_transforms(model: Model) -> None:
    """Let each DFT transform dimension 1, and read or return all frequencies.

    OpenVINO 2026.4 does not read the dimension of a DFT where that is an input, as it is from opset
    20 on, and transforms dimension 1. With ``onesided=1`` it returns a tensor with one dimension
    more, and an inverse one with one dimension less.

    Before: A DFT of another dimension, or one with ``onesided=1``.
    After: A DFT of dimension 1 stands between two Transpose; one whose dimension is an attribute
    stays where it is. A Slice behind it takes the first half of the frequencies. In front of an
    inverse one factors of 2 stand for the other half, and a Slice takes the real part.
    """
    for node, transform in _transforms(model).items():
        if transform is not None and transform.is_known and not transform.is_plain:
            _write_plainly(node, transform)


def check_transforms(model: Model) -> Iterator[str]:
    """Yield transforms that :func:`plain_transforms` could not write in another form."""
    for node, transform in _transforms(model).items():
        if transform is None or not transform.is_plain:
            yield (
                f"{node.name}: OpenVINO 2026.4 computes another transform than this DFT, whose "
                "dimension or length is open; pass dynamic_batch=False or dynamic_shapes={}, so "
                "that the file has the lengths of the example"
            )


def _transforms(model: Model) -> dict[Node, _Transform | None]:
    """Return what each DFT does; None where the file does not tell it."""
    shapes = known_shapes(model)
    return {node: _transform_of(node, model, shapes) for node in nodes_of(model, "DFT")}


def _transform_of(
    node: Node, model: Model, shapes: Mapping[str, Shape]
) -> _Transform | None:
    shape = shapes.get(str(node.inputs[0].name))
    by_attribute = opset_of(model) < _IS_INPUT
    stored = None if by_attribute else input_at(node, 2)
    if shape is None or not (stored is None or is_constant(stored)):
        return None
    axis = int(attribute(node, "axis", 1)) if by_attribute else -2
    if stored is not None:
        axis = int(value_of(stored).item())
    axis %= len(shape)
    length = shape[axis]
    count = input_at(node, 1)
    if count is not None:
        length = int(value_of(count).item()) if is_constant(count) else None
    return _Transform(
        shape=shape,
        axis=axis,
        length=length if isinstance(length, int) else None,
        inverse=bool(attribute(node, "inverse", 0)),
        onesided=bool(attribute(node, "onesided", 0)),
        by_attribute=by_attribute,
    )


def _write_plainly(node: Node, transform: _Transform) -> None:
    """Put the nodes of a transform that OpenVINO computes in the place of a DFT."""
    graph = node.graph
    name = fresh_name(graph, f"{node.name}/plain")
    value: Value = node.inputs[0]
    axis = transform.axis
    last = node
    order = list(range(len(transform.shape)))
    if not transform.by_attribute:
        order[_FIRST], order[axis] = axis, _FIRST
        axis = _FIRST
    moves = order != sorted(order)
    if moves:
        value = add_node(last, "Transpose", [value], f"{name}/front", {"perm": order})
        last = value.producer()
    if transform.onesided and transform.inverse:
        factors = add_initializer(graph, f"{name}/factors", _factors(transform, axis))
        value = add_node(last, "Mul", [value, factors], f"{name}/both halves")
        last = value.producer()
    inputs = [value, input_at(node, 1)]
    attributes = {"inverse": int(transform.inverse), "onesided": 0}
    if transform.by_attribute:
        attributes["axis"] = axis
    else:
        inputs.append(add_initializer(graph, f"{name}/axis", torch.tensor(axis)))
    value = add_node(last, "DFT", inputs, f"{name}/all", attributes)
    if transform.onesided:
        value = _real_part(value) if transform.inverse else _first_half(value, axis)
    if moves:
        back = {"perm": order}
        value = add_node(value.producer(), "Transpose", [value], f"{name}/back", back)
    replace_value(node.outputs[0], value)
    graph.remove(node, safe=True)


def _factors(transform: _Transform, axis: int) -> Tensor:
    """Return how often the frequencies of a real signal count in its real part.

    Each has a mirror image, but for the first one, and the one in the middle of an even number.
    """
    frequencies = transform.shape[transform.axis]
    length = transform.length
    assert isinstance(frequencies, int)
    assert length is not None
    factors = torch.full((frequencies,), 2.0)
    factors[0] = 1
    if length % 2 == 0:
        factors[length // 2 : length // 2 + 1] = 1
    factors[length // 2 + 1 :] = 0
    return factors.reshape([-1, *[1] * (len(transform.shape) - axis - 1)])


def _real_part(numbers: Value) -> Value:
    """Return the real part of complex numbers, in a last dimension of length 1."""
    node = numbers.producer()
    name = f"{node.name}/real"
    zero, one, last = (
        add_numbers(node.graph, f"{name}/{key}", [number])
        for key, number in (("zero", 0), ("one", 1), ("last", -1))
    )
    return add_node(node, "Slice", [numbers, zero, one, last], name)


def _first_half(frequencies: Value, axis: int) -> Value:
    """Return the first half of the frequencies, with the one in the middle."""
    node = frequencies.producer()
    name = f"{node.name}/half"
    zero, one, two, place = (
        add_numbers(node.graph, f"{name}/{key}", [number])
        for key, number in (("zero", 0), ("one", 1), ("two", 2), ("place", axis))
    )
    lengths = add_node(node, "Shape", [frequencies], f"{name}/lengths")
    length = add_node(lengths.producer(), "Gather", [lengths, place], f"{name}/length")
    half = add_node(length.producer(), "Div", [length, two], f"{name}/rounded")
    end = add_node(half.producer(), "Add", [half, one], f"{name}/end")
    inputs: list[Value | None] = [frequencies, zero, end, place]
    return add_node(end.producer(), "Slice", inputs, name)

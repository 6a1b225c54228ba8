"""Convolutions over windows of a width that OpenVINO 2026.4 computes wrong numbers with."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.onnx.ir import (
    Model,
    Node,
    Rewrite,
    add_initializer,
    are_constant,
    attribute,
    data_type,
    nodes_of,
    readers,
    set_attribute,
    value_of,
)
from torchq.onnx.qdq import (
    add_to_record,
    pair_name,
    qparams_of,
    read_record,
    stored_weight,
    weight_nodes,
)

#: Channels of a group: kernels for AMX multiply so many at once, and fewer of them by 4.
_FULL, _FOUR = 32, 4
#: The step from which on groups are affected that have up to twice as many.
_LONG_STEP = 4
#: The numbers of a row that they multiply at once.
_ROW = 64
_WIDENED = "widened windows"


def _widen_windows(model: Model) -> None:
    """Put zeros behind the windows of convolutions whose rows fill whole registers.

    The kernels of OpenVINO 2026.4 for CPUs with AMX compute another result where a group has fewer
    than 32 channels, in fours, and a row of the window has a multiple of 64 numbers, from 128 on:
    8 places of 16 channels, say. With strides of 4 and more it is fewer than 64 channels. Of
    windows that are one place wide the columns count as rows. With strides whether it happens
    depends on the length of the image too, which files may leave open, so no length is looked at.
    Measured for all numbers of channels up to 71 and windows of up to 33 places and of 48, 64 and
    128 with stride 1, and for strides up to 16 with windows of up to 16.

    Before: Conv with such a window. After: the window is one place wider, with zeros there, and one
    place more of padding. The record names the weights, with the dimension.
    """
    widened: dict[str, int] = {}
    for node in nodes_of(model, "Conv"):
        weight = stored_weight(node.inputs[1])
        if weight is None or pair_name(weight) in widened:
            continue
        layers = readers(weight.outputs[0])
        dimension = _dimension(value_of(weight.inputs[0]), max(map(_stride, layers)))
        is_plain = all(map(_pads_by_numbers, layers)) and are_constant(weight.inputs)
        if dimension is None or not is_plain:
            continue
        _store(weight, _with_zeros(weight, dimension))
        for layer in layers:
            _add_place(layer, dimension, 1)
        widened[pair_name(weight)] = dimension
    if widened:
        add_to_record(model, _WIDENED, widened)


def _narrow_windows(model: Model) -> dict[str, str]:
    """Take away what :func:`_widen_windows` put behind windows, unless it is not zero."""
    record = read_record(model).get(_WIDENED, {})
    wrong: dict[str, str] = {}
    for name, weight in weight_nodes(model).items():
        dimension = record.get(name)
        codes = value_of(weight.inputs[0])
        if not isinstance(dimension, int) or not 1 < dimension < codes.dim():
            continue
        _store(weight, codes.narrow(dimension, 0, codes.shape[dimension] - 1))
        if not torch.equal(_with_zeros(weight, dimension), codes):
            wrong[name] = "has other numbers than zeros behind its window"
        for layer in readers(weight.outputs[0]):
            _add_place(layer, dimension, -1)
    return wrong


widen_windows = Rewrite(_widen_windows, undo=_narrow_windows)


def _stride(node: Node) -> int:
    """Return the longest step of a convolution; 1 for other operators."""
    return max(attribute(node, "strides", (1,)))


def _dimension(codes: Tensor, stride: int) -> int | None:
    """Return the dimension of a weight whose places make a row; None for other windows."""
    channels = codes.shape[1]
    most = _FULL if stride < _LONG_STEP else 2 * _FULL
    wider = [n for n in range(2, codes.dim()) if codes.shape[n] > 1]
    if not wider or channels % _FOUR or channels >= most:
        return None
    numbers = channels * codes.shape[wider[-1]]
    return wider[-1] if numbers % _ROW == 0 and numbers > _ROW else None


def _pads_by_numbers(node: Node) -> bool:
    """Return True for a convolution whose padding is told in numbers."""
    automatic = attribute(node, "auto_pad", "NOTSET")
    return node.op_type == "Conv" and automatic in ("NOTSET", b"NOTSET")


def _with_zeros(weight: Node, dimension: int) -> Tensor:
    """Return the codes of a weight with one place more, whose codes stand for 0."""
    codes = value_of(weight.inputs[0])
    zero = qparams_of(weight).zero_point.reshape(-1, *[1] * (codes.dim() - 1))
    zeros = zero.to(codes.dtype).expand_as(codes).narrow(dimension, 0, 1)
    return torch.cat([codes, zeros], dimension)


def _store(weight: Node, codes: Tensor) -> None:
    """Give a weight codes of its own."""
    old = weight.inputs[0]
    new = add_initializer(weight.graph, str(old.name), codes, data_type(old))
    weight.replace_input_with(0, new)
    weight.outputs[0].shape = None


def _add_place(node: Node, dimension: int, count: int) -> None:
    """Let a convolution have a window that is wider by ``count``, with the same results."""
    place = dimension - 2
    kernel = attribute(node, "kernel_shape")
    if kernel is not None:
        lengths = list(kernel)
        lengths[place] += count
        set_attribute(node, "kernel_shape", lengths)
    dimensions = value_of(node.inputs[1].producer().inputs[0]).dim() - 2
    pads = list(attribute(node, "pads", (0,) * 2 * dimensions))
    dilations = attribute(node, "dilations", (1,) * dimensions)
    pads[dimensions + place] += count * dilations[place]
    set_attribute(node, "pads", pads)

"""File passes for QNN: averages, factors and some windows as convolutions that it computes rightly.

A convolution of each channel by itself is computed on integers, and its codes are those of the
simulation but for a few at ties. The same numbers by the operators that they come from are computed
in float16 or wrongly. No pass changes a code beyond that.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.onnx.ir import (
    Model,
    Node,
    Rewrite,
    Value,
    add_initializer,
    add_node,
    are_constant,
    attribute,
    computed_by,
    is_constant,
    names,
    nodes_of,
    readers,
    remove_unused,
    replace_stored,
    replace_value,
    set_attribute,
    value_of,
)
from torchq.onnx.passes.constants import Shape, known_shapes
from torchq.onnx.passes.pairs import insert_pair
from torchq.onnx.qdq import (
    AVERAGE,
    add_to_record,
    element_type,
    is_average,
    leads_only_to_quantizers,
    pair_name,
    qparams_of,
    read_record,
    stored_weight,
    weight_nodes,
)
from torchq.runtimes.qnn.passes import is_one_grid

#: The code of every place of a weight that is one number: the scale holds the number.
_CODE = 127
#: Kernels and strides that the chip takes where each channel is by itself.
_LARGEST_KERNEL = 11
_LARGEST_STRIDE = 3
#: A smaller one does not compile on the oldest chips, so zeros are put around it.
_LEAST_KERNEL = 3
#: Numbers that float16 holds with all of its digits.
_SMALLEST = 2.0**-14
_LARGEST = 65504.0
_WIDE = 16
_IMAGE = 4
#: What moves codes of one grid.
_MOVES = names("Transpose Reshape Concat Slice")
_WIDENED = "widened kernels"


def average_by_convolutions(model: Model) -> None:
    """Compute averages over windows as convolutions with a weight of equal numbers.

    Before: codes -> AveragePool whose windows all have the same number of places -> codes.
    After: codes -> Conv of each channel by itself -> codes. Of strides beyond 3, a MaxPool of
    single places behind it takes a part.
    """
    shapes = known_shapes(model)
    for node in nodes_of(model, "AveragePool"):
        window = list(attribute(node, "kernel_shape", ()))
        channels = _channels(node, shapes)
        if channels is None or not _is_plain(node):
            continue
        if max(window) == 1 or max(window) > _LARGEST_KERNEL:
            continue
        strides = list(attribute(node, "strides", (1, 1)))
        pads = list(attribute(node, "pads", (0,) * _IMAGE))
        kernel = Kernel(torch.full((channels,), 1.0 / math.prod(window)), window)
        near = [_near_stride(stride) for stride in strides]
        far = [stride // part for stride, part in zip(strides, near, strict=True)]
        result = _convolve(node, f"{node.name}{AVERAGE}", kernel, near, pads)
        if max(far) > 1:
            _choose(result, far)
    remove_unused(model)


def _choose(result: Value, strides: Sequence[int]) -> None:
    """Keep one place of so many in each dimension of a result that one QuantizeLinear reads.

    Activations between them stay in front.
    """
    producer = result.producer()
    (quantize,) = readers(result)
    while quantize.op_type != "QuantizeLinear":
        producer = quantize
        (quantize,) = readers(producer.outputs[0])
    insert_pair(producer, list(quantize.inputs[1:]))
    values = quantize.inputs[0]
    windows = {"kernel_shape": [1, 1], "strides": list(strides)}
    chosen = add_node(
        values.producer(), "MaxPool", [values], f"{producer.name}/places", windows
    )
    quantize.replace_input_with(0, chosen)


def scale_by_convolutions(model: Model) -> None:
    """Multiply channels of images by their numbers as convolutions do, not in float16.

    That is where results have 16 bits, or where a number is one that float16 does not hold, as the
    layer scales of 1e-6 that networks begin with.

    Before: codes -> Mul by a stored number for each channel, or BatchNormalization -> codes.
    After: codes -> Conv of each channel by itself, with one place -> codes.
    """
    shapes = known_shapes(model)
    for node in nodes_of(model, "Mul", "BatchNormalization"):
        channels = _channels(node, shapes)
        kernel = None if channels is None else _affine(node, channels)
        if kernel is not None and (_is_wide(node) or _is_coarse(kernel.factors)):
            _convolve(node, f"{node.name}/scale", kernel)
    remove_unused(model)


def _widen_kernels(model: Model) -> None:
    """Put zeros around kernels of 5 x 5 in steps of 2, which QNN computes wrongly with 16 bits.

    Before: codes of 16 bits -> Conv of each channel by itself, 5 x 5 places, in steps of 2.
    After: the same with 7 x 7 places. The record names the weights.
    """
    widened: dict[str, bool] = {}
    for node in nodes_of(model, "Conv"):
        weight = stored_weight(node.inputs[1])
        if weight is None or not _is_wide(node) or not _is_computed_wrongly(node):
            continue
        if len(readers(weight.outputs[0])) > 1 or not are_constant(weight.inputs):
            continue
        _put_around(node, weight, 1)
        widened[pair_name(weight)] = True
    if widened:
        add_to_record(model, _WIDENED, widened)


def _narrow_kernels(model: Model) -> dict[str, str]:
    """Take away what :func:`_widen_kernels` put around weights, unless it is not zero."""
    record = read_record(model).get(_WIDENED, {})
    wrong: dict[str, str] = {}
    for name, weight in weight_nodes(model).items():
        if name not in record:
            continue
        codes = value_of(weight.inputs[0])
        inner = codes[:, :, 1:-1, 1:-1]
        if int(codes.count_nonzero()) != int(inner.count_nonzero()):
            wrong[name] = "has other numbers than zeros around its kernel"
        for convolution in readers(weight.outputs[0]):
            _put_around(convolution, weight, -1)
    return wrong


widen_kernels = Rewrite(_widen_kernels, undo=_narrow_kernels)


def _channels(node: Node, shapes: dict[str, Shape]) -> int | None:
    """Return the channels of images that a node reads as codes, if a layer may take its place."""
    value = _activation(node)
    shape = shapes.get(str(value.name), ()) if value is not None else ()
    if value is None or len(shape) != _IMAGE or not isinstance(shape[1], int):
        return None
    return shape[1] if _result_is_codes(node) and _grid_of(value) is not None else None


def _activation(node: Node) -> Value | None:
    """Return the only input of a node that is not stored."""
    values = [v for v in node.inputs if v is not None and not is_constant(v)]
    return values[0] if len(values) == 1 else None


def _result_is_codes(node: Node) -> bool:
    """Return True if one QuantizeLinear reads a result, perhaps behind one Relu or Clip."""
    value = node.outputs[0]
    users = readers(value)
    while len(users) == 1 and users[0].op_type in ("Relu", "Clip"):
        users = readers(users[0].outputs[0])
    return len(users) == 1 and leads_only_to_quantizers(value, "Relu", "Clip")


def _grid_of(value: Value) -> Node | None:
    """Return a QuantizeLinear whose grid all that is moved to a value has; None for no such."""
    grids: list[Node] = []
    pending: list[Value] = [value]
    while pending:
        node = pending.pop().producer()
        if node is None:
            return None
        if node.op_type == "DequantizeLinear":
            quantize = computed_by(node.inputs[0], "QuantizeLinear")
            if quantize is None or not are_constant(quantize.inputs[1:]):
                return None
            grids.append(quantize)
        elif node.op_type == "Concat":
            pending += node.inputs
        elif node.op_type in _MOVES:
            pending.append(node.inputs[0])
        else:
            return None
    first = qparams_of(grids[0])
    same = all(is_one_grid(first, qparams_of(grid)) for grid in grids)
    return grids[0] if same and first.scale.numel() == 1 else None


def _convolve(
    node: Node,
    name: str,
    kernel: Kernel,
    strides: Sequence[int] = (1, 1),
    pads: Sequence[int] = (0,) * _IMAGE,
) -> Value:
    """Put a convolution of each channel by itself in the place of a node; return its result.

    Args:
        node: that reads codes, or what was moved of them.
        name: of the convolution.
        kernel: what it multiplies by.
        strides: of each dimension.
        pads: in front of each dimension, then behind each.
    """
    source = _codes_in_front(node)
    weight = kernel.stored_behind(source.producer(), name)
    inputs: list[Value | None] = [source, weight]
    if kernel.offsets is not None:
        inputs.append(add_initializer(node.graph, f"{name}/bias", kernel.offsets))
    zeros = (*kernel.zeros_in_front, *kernel.zeros_behind)
    attributes = {
        "group": len(kernel.factors),
        "kernel_shape": kernel.size,
        "strides": list(strides),
        "pads": [pad + zero for pad, zero in zip(pads, zeros, strict=True)],
    }
    result = add_node(weight.producer(), "Conv", inputs, name, attributes)
    replace_value(node.outputs[0], result)
    return result


def _codes_in_front(node: Node) -> Value:
    """Return what a node reads; behind moves it becomes codes first."""
    source = _activation(node)
    assert source is not None
    grid = _grid_of(source)
    if source.producer().op_type != "DequantizeLinear" and grid is not None:
        insert_pair(source.producer(), list(grid.inputs[1:]))
        source = _activation(node)
    assert source is not None
    return source


@dataclass(frozen=True)
class Kernel:
    """A kernel whose places all have the number of their channel.

    Attributes:
        factors: (channels,), the numbers.
        window: the places of each dimension.
        offsets: (channels,), what is added to each channel; None for nothing.
    """

    factors: Tensor
    window: Sequence[int]
    offsets: Tensor | None = None

    @property
    def size(self) -> list[int]:
        """The places of each dimension with the zeros around it."""
        return [max(_LEAST_KERNEL, length) for length in self.window]

    @property
    def zeros_in_front(self) -> list[int]:
        """Zeros in front of each dimension."""
        pairs = zip(self.size, self.window, strict=True)
        return [(size - length) // 2 for size, length in pairs]

    @property
    def zeros_behind(self) -> list[int]:
        """Zeros behind each dimension."""
        parts = zip(self.size, self.window, self.zeros_in_front, strict=True)
        return [size - length - front for size, length, front in parts]

    def codes(self) -> Tensor:
        """Return the codes, (channels, 1, height, width), int8."""
        signs = (_CODE * self.factors.sign()).to(torch.int8).reshape(-1, 1, 1, 1)
        filled = signs.expand(-1, 1, *self.window)
        (top, left), (bottom, right) = self.zeros_in_front, self.zeros_behind
        return torch.nn.functional.pad(filled, (left, right, top, bottom)).contiguous()

    def scales(self) -> Tensor:
        """Return the scale of each channel, of which a factor is 127 or none."""
        scales = self.factors.abs() / _CODE
        return torch.where(scales > 0, scales, 1.0)

    def stored_behind(self, node: Node, name: str) -> Value:
        """Store the kernel in a graph, and return its values."""
        scales = self.scales()
        parts = {
            "weight": self.codes(),
            "scale": scales,
            "zero_point": torch.zeros(len(scales), dtype=torch.int8),
        }
        stored: list[Value | None] = [
            add_initializer(node.graph, f"{name}/{part}", tensor)
            for part, tensor in parts.items()
        ]
        return add_node(node, "DequantizeLinear", stored, f"{name}/value", {"axis": 0})


def averaged(node: Node) -> int:
    """Return how many places a node averages; 0 where it does not."""
    if node.op_type == "AveragePool":
        return math.prod(attribute(node, "kernel_shape", ()))
    if not is_average(node):
        return 0
    weight = stored_weight(node.inputs[1])
    assert weight is not None
    codes = value_of(weight.inputs[0])
    return int(codes.count_nonzero()) // len(codes)


def _is_plain(pool: Node) -> bool:
    """Return True if all windows of an AveragePool have the same number of places."""
    counts = bool(attribute(pool, "count_include_pad", 0))
    padded = any(attribute(pool, "pads", ()))
    spread = set(attribute(pool, "dilations", (1,)))
    automatic = str(attribute(pool, "auto_pad", "NOTSET"))
    is_even = counts or not padded
    return (
        is_even
        and not attribute(pool, "ceil_mode", 0)
        and spread == {1}
        and automatic == "NOTSET"
    )


def _near_stride(stride: int) -> int:
    """Return the largest part of a stride that a convolution takes."""
    return max(part for part in range(1, _LARGEST_STRIDE + 1) if stride % part == 0)


def _affine(node: Node, channels: int) -> Kernel | None:
    """Return what a node multiplies channels of images by and adds to them; None for others."""
    if node.op_type == "Mul":
        (stored,) = (v for v in node.inputs if is_constant(v))
        factors = value_of(stored).float()
        shape = (1,) * (_IMAGE - factors.dim()) + tuple(factors.shape)
        of_channels = shape == (1, channels, 1, 1)
        return Kernel(factors.flatten(), (1, 1)) if of_channels else None
    if not are_constant(node.inputs[1:]):
        return None
    scale, offset, mean, variance = (value_of(v).double() for v in node.inputs[1:5])
    factors = scale / (variance + attribute(node, "epsilon", 1e-5)).sqrt()
    offsets = (offset - mean * factors).float()
    return Kernel(factors.float(), (1, 1), offsets)


def _is_coarse(factors: Tensor) -> bool:
    """Return True if float16 does not hold the largest number with all of its digits."""
    largest = float(factors.abs().max())
    return 0 < largest < _SMALLEST or largest > _LARGEST


def _is_wide(node: Node) -> bool:
    """Return True if the codes of a result have 16 bits."""
    users = readers(node.outputs[0])
    while len(users) == 1 and users[0].op_type in ("Relu", "Clip"):
        users = readers(users[0].outputs[0])
    return any(
        user.op_type == "QuantizeLinear" and _has_wide_codes(user) for user in users
    )


def _has_wide_codes(quantize: Node) -> bool:
    return is_constant(quantize.inputs[1]) and (
        int(element_type(quantize).bitwidth) == _WIDE
    )


def _is_computed_wrongly(convolution: Node) -> bool:
    weight = stored_weight(convolution.inputs[1])
    assert weight is not None
    shape = tuple(weight.inputs[0].const_value.shape.numpy())
    by_channel = shape[0] == attribute(convolution, "group", 1) > 1
    steps = list(attribute(convolution, "strides", ()))
    spread = set(attribute(convolution, "dilations", (1,)))
    return by_channel and shape[1:] == (1, 5, 5) and 2 in steps and spread == {1}


def _put_around(convolution: Node, weight: Node, zeros: int) -> None:
    """Put so many zeros around a kernel and its image; below 0 takes them away."""
    codes = value_of(weight.inputs[0])
    replace_stored(
        weight.inputs[0], torch.nn.functional.pad(codes, (zeros,) * 4).contiguous()
    )
    weight.outputs[0].shape = None
    size = [length + 2 * zeros for length in codes.shape[2:]]
    pads = list(attribute(convolution, "pads", (0,) * _IMAGE))
    set_attribute(convolution, "kernel_shape", size)
    set_attribute(convolution, "pads", [pad + zeros for pad in pads])

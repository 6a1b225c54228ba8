"""Additions in a form that lets the kernels of convolutions compute them."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    add_node,
    attribute,
    bypass,
    computed_by,
    data_type,
    is_constant,
    is_output,
    nodes_of,
    onnx_ir,
    raise_opset,
    readers,
    value_of,
)
from torchq.onnx.passes.example import lengths_of_example
from torchq.onnx.passes.fold_shapes import Shape, known_shapes
from torchq.onnx.qdq import NodeQParams, qparams_of, stored_weight

__all__ = ["limit_sums", "remove_limits"]

#: The first opset whose QuantizeLinear writes 16 bits.
_OPSET = 21
_LARGEST_CODE = 2**15 - 1
#: Elements of a result, for each element of the kernel, above which one kernel is faster than two.
#: A result of 200,000 numbers in float32 fills much of an L2 cache.
_LEAST_ELEMENTS = 200_000
#: Kernels add to channels in groups of this many; the rest of them is slow.
_CHANNELS = 16
#: End the names of the nodes of a limit.
_CODES, _LIMITED = "/limited codes", "/limited"


def limit_sums(model: Model) -> None:
    """Let convolutions add the branches of a network to their large results.

    OpenVINO 2026.4 compiles an addition as a kernel of its own unless one operand is a convolution
    with a bias and nothing else, or with a quantizer. So the convolution writes floats, which that
    kernel reads. With a quantizer, the convolution adds the other operand and writes codes. Before
    an addition it does not round: all that a quantizer does there is to cut. So one whose range is
    wide enough for all sums that the quantizer behind the addition does not cut changes nothing. It
    has 16 bits, for runtimes that do round. OpenVINO removes quantizers of 16 bits whose two scales
    are equal. So the convolution computes half of its result, which is exact, and the second scale
    doubles it again.

    Before::

        Conv -> Add -> (Relu, Clip) -> QuantizeLinear, where the Add also reads dequantized codes
        that something else reads too, or that no convolution has computed; the result is large.

    After::

        Conv with halved scales and bias -> QuantizeLinear to int16 -> DequantizeLinear with the
        doubled scale -> Add. The opset is 21 or higher; where it must not be, nothing changes.
    """
    sums = [pair for node in nodes_of(model, "Add") if (pair := _operands(node)) is not None]
    shapes = known_shapes(model, lengths_of_example(model)) if sums else {}
    sums = [pair for pair in sums if _is_large(pair[0], shapes) and _factors(pair[0])]
    if sums and raise_opset(model, _OPSET):
        for convolution, limit in sums:
            _limit(convolution, limit)


def remove_limits(model: Model) -> list[str]:
    """Undo :func:`limit_sums`: for runtimes that round, and for comparisons.

    Before::

        A file with limits.

    After::

        The additions read what the convolutions compute.

    Returns:
        The nodes that change what is added: their range cuts off what the quantizer behind the
        addition does not, or they do not double what the convolution has halved.
    """
    wrong = []
    for node in nodes_of(model, "DequantizeLinear"):
        quantize = computed_by(node.inputs[0], "QuantizeLinear")
        if quantize is None or not str(node.name).endswith(_LIMITED):
            continue
        reach, exact = float(value_of(node.inputs[1])) * _LARGEST_CODE, _doubles(quantize, node)
        users, convolution = readers(node.outputs[0]), computed_by(quantize.inputs[0], "Conv")
        if convolution is None:
            continue
        bypass(node)
        bypass(quantize)
        _multiply(convolution, 2.0)
        needed = [pair[1] for user in users if (pair := _operands(user)) is not None]
        if not exact or len(needed) < len(users) or max(needed, default=0) > reach:
            wrong.append(str(node.name))
    return wrong


def _doubles(quantize: Node, dequantize: Node) -> bool:
    """Return True if values behind a pair are twice those in front of it, but for rounding."""
    qparams, scale = qparams_of(quantize), value_of(dequantize.inputs[1])
    same_zero_point = quantize.inputs[2] is dequantize.inputs[2] and qparams.has_zero_point(0)
    return same_zero_point and torch.equal(2 * qparams.scale, scale)


def _operands(node: Node) -> tuple[Node, float] | None:
    """Return the convolution of an addition, and the largest number that the sum can make use of.

    None for additions that need no limit, or that can have none.
    """
    behind = _quantizer_behind(node.outputs[0])
    if node.op_type != "Add" or behind is None:
        return None
    for value, other in (node.inputs, node.inputs[::-1]):
        convolution, added = computed_by(value, "Conv"), _activation(other)
        alone = convolution is not None and _is_read_once(value)
        if alone and added is not None and not _is_a_result(other):
            (low, high), (least, largest) = _ends(behind), _ends(added)
            return convolution, max(abs(low - largest), abs(high - least))
    return None


def _quantizer_behind(value: Value) -> NodeQParams | None:
    """Return the only quantizer that reads a value, also behind activations that cut."""
    while _is_read_once(value):
        (node,) = readers(value)
        if node.op_type == "QuantizeLinear":
            return _per_tensor(node)
        if node.op_type not in ("Relu", "Clip") or node.inputs[0] is not value:
            return None
        value = node.outputs[0]
    return None


def _activation(value: Value) -> NodeQParams | None:
    """Return the parameters of the codes that a value stands for; None for other values."""
    while (pool := computed_by(value, "MaxPool")) is not None:
        value = pool.inputs[0]
    node = computed_by(value, "DequantizeLinear")
    quantize = None if node is None else computed_by(node.inputs[0], "QuantizeLinear")
    return None if quantize is None else _per_tensor(quantize)


def _per_tensor(quantize: Node) -> NodeQParams | None:
    """Return the parameters of a quantizer with one scale for integer codes."""
    if not all(value is None or is_constant(value) for value in quantize.inputs[1:]):
        return None
    qparams = qparams_of(quantize)
    one = qparams.scale.numel() == 1 and not qparams.block_size
    return qparams if one and qparams.format.is_integer else None


def _is_a_result(value: Value) -> bool:
    """Return True if dequantized codes are a convolution's result that nothing else reads.

    The convolution that computes these adds the other operand without being told.
    """
    while True:
        node = computed_by(value, "DequantizeLinear", "QuantizeLinear", "Relu", "Clip", "Conv")
        if node is None or not _is_read_once(value):
            return False
        if node.op_type == "Conv":
            return True
        value = node.inputs[0]


def _is_read_once(value: Value) -> bool:
    return len(readers(value)) == 1 and not is_output(value)


def _ends(qparams: NodeQParams) -> tuple[float, float]:
    """Return the least and the largest number that codes stand for."""
    scale, zero_point = float(qparams.scale), float(qparams.zero_point)
    return (qparams.quant_min - zero_point) * scale, (qparams.quant_max - zero_point) * scale


def _is_large(convolution: Node, shapes: Mapping[str, Shape]) -> bool:
    """Return True if one kernel is faster than two, as far as lengths are known."""
    result = _lengths(shapes.get(str(convolution.outputs[0].name)))
    weight = _lengths(shapes.get(str(convolution.inputs[1].name)))
    if len(result) != 4 or result[1] % _CHANNELS or attribute(convolution, "group", 1) != 1:
        return False
    return math.prod(result) >= _LEAST_ELEMENTS * math.prod(weight[2:])


def _lengths(shape: Shape | None) -> tuple[int, ...]:
    """Return a shape whose lengths are all known, or an empty one."""
    known = tuple(length for length in shape or () if isinstance(length, int))
    return known if shape and len(known) == len(shape) else ()


def _limit(convolution: Node, limit: float) -> None:
    """Insert a pair of 16 bits behind a convolution, which reaches as far as ``limit``."""
    value, graph = convolution.outputs[0], convolution.graph
    (addition,) = readers(value)
    # A little more, because the division rounds.
    name, reach = str(value.name), limit / _LARGEST_CODE * (1 + 1e-6)
    scale = torch.tensor(reach, dtype=torch.float32, device="cpu")
    scales = [
        add_initializer(graph, f"{name}{_CODES}/scale", scale / 2),
        add_initializer(graph, f"{name}{_LIMITED}/scale", scale),
    ]
    zero_point = add_initializer(
        graph, f"{name}{_CODES}/zero_point", torch.tensor(0, dtype=torch.int16, device="cpu")
    )
    inputs = [value, scales[0], zero_point]
    codes = add_node(convolution, "QuantizeLinear", inputs, f"{name}{_CODES}")
    codes.type = onnx_ir.TensorType(onnx_ir.DataType.INT16)
    inputs = [codes, scales[1], zero_point]
    limited = add_node(codes.producer(), "DequantizeLinear", inputs, f"{name}{_LIMITED}")
    limited.type = onnx_ir.TensorType(onnx_ir.DataType.FLOAT)
    addition.replace_input_with(list(addition.inputs).index(value), limited)
    _multiply(convolution, 0.5)


def _factors(convolution: Node) -> list[tuple[Node, int]]:
    """Return the inputs that the results of a convolution are proportional to, if it has these.

    They are the scales of its weight, and its bias or the scales of that; in float32, as halves of
    small numbers in float16 are not exact.
    """
    found: list[tuple[Node, int]] = []
    for index, value in enumerate(convolution.inputs[1:], 1):
        stored = None if value is None else stored_weight(value)
        if stored is not None and is_constant(stored.inputs[1]) and _is_read_once(value):
            found.append((stored, 1))
        elif index > 1 and is_constant(value):
            found.append((convolution, index))
        elif value is not None:
            return []
    exact = all(data_type(node.inputs[index]).name == "FLOAT" for node, index in found)
    return found if exact else []


def _multiply(convolution: Node, factor: float) -> None:
    """Multiply the results of a convolution, by its stored tensors."""
    for node, index in _factors(convolution):
        old = node.inputs[index]
        new = add_initializer(node.graph, str(old.name), value_of(old) * factor)
        node.replace_input_with(index, new)

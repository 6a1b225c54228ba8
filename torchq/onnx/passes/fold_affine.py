"""Factors and offsets behind convolutions and codes, as part of stored weights and scales."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.onnx.ir import (
    Model,
    Node,
    Value,
    add_initializer,
    attribute,
    bypass,
    computed_by,
    data_type,
    is_constant,
    is_output,
    nodes_of,
    onnx_ir,
    readers,
    replace_stored,
    value_of,
)
from torchq.onnx.passes.matmul_layout import TRANSPOSED
from torchq.onnx.qdq import (
    FLOAT_WEIGHT,
    pair_name,
    read_record,
    shared_name,
    stored_weight,
    write_record,
)

__all__ = ["fold_affine", "fold_code_factors", "unfold_code_factors", "unfold_weight_factors"]

_WEIGHTS, _CODES = "weight factors", "code factors"


def fold_affine(model: Model) -> None:
    """Fold BatchNorm, factors and offsets by channel into the convolution before them.

    Scales of the weight are multiplied by the magnitude of the factors, and codes are negated
    where a factor is negative, so nothing is rounded anew.

    Before::

        Conv with a stored quantized weight -> BatchNormalization, or Mul or Add with stored
        numbers by channel.

    After::

        The Conv alone. The record has under ``weight factors`` what each weight was multiplied by.
    """
    factors: dict[str, list[float]] = {}
    for node in nodes_of(model, "Conv"):
        weight = stored_weight(node.inputs[1])
        if weight is None or len(readers(weight.outputs[0])) != 1:
            continue
        while (found := _affine_behind(node)) is not None:
            user, factor, offset = found
            _scale(node, weight, factor, offset)
            name = pair_name(weight)
            old = _stored(factors.get(name, [1.0] * len(factor)))
            factors[name] = (old * factor).tolist()
            bypass_to(user, node.outputs[0])
    if factors:
        write_record(model, **{_WEIGHTS: {**read_record(model).get(_WEIGHTS, {}), **factors}})


def unfold_weight_factors(model: Model) -> None:
    """Divide weights by what :func:`fold_affine` noted, to compare them.

    Before::

        Weights that include factors: codes with their scales, or the float values of codes.

    After::

        The weights of the layers; the graph no longer computes what the file does.
    """
    record = read_record(model).get(_WEIGHTS, {})
    for node in nodes_of(model, "DequantizeLinear"):
        if pair_name(node) in record and is_constant(node.inputs[0]):
            _multiply(node, 1 / _stored(record[pair_name(node)]))
    for name, value in list(model.graph.initializers.items()):
        if (pair := name.removesuffix(FLOAT_WEIGHT)) in record and pair != name:
            weight, factor = value_of(value), _stored(record[pair])
            replace_stored(value, weight / factor.reshape(-1, *[1] * (weight.dim() - 1)))


def _stored(numbers: list[float]) -> Tensor:
    """Return numbers of a record as the tensor that they were."""
    return torch.tensor(numbers, dtype=torch.float32, device="cpu")


def fold_code_factors(model: Model) -> None:
    """Read codes with a multiplied scale instead of multiplying their values.

    Before::

        DequantizeLinear -> Mul with one stored positive number, and no other reader.

    After::

        DequantizeLinear with that number times the scale. The record has under ``code factors``
        the factor of each quantizer.
    """
    factors: dict[str, float] = {}
    for node in nodes_of(model, "Mul"):
        pair = next((p for v in node.inputs if (p := _activation(v)) is not None), None)
        number = next((v for v in node.inputs if is_constant(v) and v.const_value.size == 1), None)
        if pair is None or number is None or len(readers(pair.outputs[0])) != 1:
            continue
        factor = float(value_of(number))
        ndim = len(number.const_value.shape)
        if factor <= 0 or ndim > 1 or is_output(node.outputs[0]):
            continue
        _set_scale(pair, value_of(pair.inputs[1]) * factor)
        factors[pair_name(pair)] = factor
        bypass_to(node, pair.outputs[0])
    if factors:
        write_record(model, **{_CODES: {**read_record(model).get(_CODES, {}), **factors}})


def unfold_code_factors(model: Model) -> None:
    """Undo :func:`fold_code_factors` with the help of the record.

    Before::

        DequantizeLinear with a multiplied scale.

    After::

        DequantizeLinear with the divided scale -> Mul.
    """
    record = read_record(model).get(_CODES, {})
    for node in nodes_of(model, "DequantizeLinear"):
        factor = record.get(pair_name(node))
        quantize = computed_by(node.inputs[0], "QuantizeLinear")
        if factor is None or quantize is None:
            continue
        own = value_of(quantize.inputs[1])
        if torch.allclose(own * factor, value_of(node.inputs[1]), rtol=1e-6, atol=0):
            node.replace_input_with(1, quantize.inputs[1])
        else:
            _set_scale(node, value_of(node.inputs[1]) / factor)
        users = list(node.outputs[0].uses())
        name = f"{node.name}/factor"
        number = add_initializer(
            node.graph, name, torch.tensor(factor, dtype=own.dtype, device="cpu")
        )
        product = onnx_ir.node("Mul", [node.outputs[0], number], name=f"{name}/product")
        product.outputs[0].name = f"{name}/value"
        node.append(product)
        for user, index in users:
            user.replace_input_with(index, product.outputs[0])


def bypass_to(node: Node, value: Value) -> None:
    """Remove a node whose result ``value`` is now."""
    node.replace_input_with(0, value)
    bypass(node)


def _activation(value: Value | None) -> Node | None:
    """Return the DequantizeLinear of codes of an activation, with one scale."""
    node = computed_by(value, "DequantizeLinear")
    quantize = None if node is None else computed_by(node.inputs[0], "QuantizeLinear")
    if quantize is None or not is_constant(quantize.inputs[1]):
        return None
    first_call = pair_name(quantize) == shared_name(quantize)
    return node if first_call and quantize.inputs[1].const_value.size == 1 else None


def _set_scale(node: Node, scale: Tensor) -> None:
    name = f"{node.name}/scale"
    node.replace_input_with(1, add_initializer(node.graph, name, scale.to(torch.float32)))


def _affine_behind(node: Node) -> tuple[Node, Tensor, Tensor] | None:
    """Return the node behind a convolution that multiplies and adds by channel, with its numbers.

    Returns:
        The node, the factors and the offsets, (channels,) each; None where there is none, or a
        factor is 0 or not finite.
    """
    result = node.outputs[0]
    users = readers(result)
    if len(users) != 1 or is_output(result) or not all(map(_is_bias, node.inputs[2:])):
        return None
    user, (channels, *rest) = (
        users[0],
        node.inputs[1].producer().inputs[0].const_value.shape.numpy(),
    )
    ones = torch.ones(channels, dtype=torch.float32, device="cpu")
    zeros = torch.zeros_like(ones)
    if user.op_type == "BatchNormalization":
        if not all(map(is_constant, user.inputs[1:5])) or attribute(user, "training_mode", 0):
            return None
        gamma, beta, mean, variance = (value_of(v).float() for v in user.inputs[1:5])
        factor = gamma / torch.sqrt(variance + attribute(user, "epsilon", 1e-5))
        offset = beta - mean * factor
    elif user.op_type in ("Mul", "Add"):
        other = user.inputs[0] if user.inputs[1] is result else user.inputs[1]
        numbers = _by_channel(other, channels, len(rest) + 1)
        if numbers is None or user.inputs[0] is user.inputs[1]:
            return None
        factor, offset = (numbers, zeros) if user.op_type == "Mul" else (ones, numbers)
    else:
        return None
    usable = bool(factor.isfinite().all() and (factor != 0).all() and offset.isfinite().all())
    weight = node.inputs[1].producer()
    return (user, factor, offset) if usable and _can_multiply(weight, factor) else None


def _can_multiply(weight: Node, factor: Tensor) -> bool:
    """Return True if every code has its negative, wherever the factor is negative."""
    codes = value_of(weight.inputs[0])
    zero_point = weight.inputs[2] if len(weight.inputs) > 2 else None
    symmetric = zero_point is None or not bool(value_of(zero_point).any())
    least = -(2 ** (data_type(weight.inputs[0]).bitwidth - 1))
    has_negatives = codes.dtype == torch.int8 and symmetric and int(codes.min()) > least
    by_channel = len(weight.inputs[1].const_value.shape) <= 1
    return by_channel and (has_negatives or bool((factor > 0).all()))


def _is_bias(value: Value | None) -> bool:
    return value is None or is_constant(value)


def _by_channel(value: Value, channels: int, ndim: int) -> Tensor | None:
    """Return stored numbers, one for each channel of images; None for other values."""
    if not is_constant(value) or data_type(value).name != "FLOAT":
        return None
    shape = [1] * (ndim - len(value.const_value.shape)) + list(value.const_value.shape.numpy())
    if len(shape) != ndim or any(n != 1 for i, n in enumerate(shape) if i != 1):
        return None
    return value_of(value).reshape(-1).expand(channels) if shape[1] in (1, channels) else None


def _scale(node: Node, weight: Node, factor: Tensor, offset: Tensor) -> None:
    """Multiply the weight and bias of a convolution by channel, and add to the bias."""
    _multiply(weight, factor)
    bias = node.inputs[2] if len(node.inputs) > 2 else None
    old = torch.zeros_like(offset) if bias is None else value_of(bias)
    new = (old.double() * factor.double() + offset.double()).float()
    name = f"{pair_name(weight)}/bias" if bias is None else str(bias.name)
    node.resize_inputs(3)
    node.replace_input_with(2, add_initializer(node.graph, name, new))


def _multiply(weight: Node, factor: Tensor) -> None:
    """Multiply the scales of a stored weight, and negate codes where the factor is negative."""
    codes, scale = value_of(weight.inputs[0]), value_of(weight.inputs[1])
    name, dtype = str(weight.inputs[0].name), data_type(weight.inputs[0])
    axis = 1 if name.endswith(TRANSPOSED) else 0
    shape = [-1 if dim == axis else 1 for dim in range(codes.dim())]
    signs = factor.sign().reshape(shape).to(torch.int32)
    if bool((signs < 0).any()):
        negated = (codes.to(torch.int32) * signs).to(codes.dtype)
        ending = TRANSPOSED if axis else ""
        new = add_initializer(weight.graph, f"{name}/negated{ending}", negated, dtype)
        weight.replace_input_with(0, new)
    scaled = (scale.double() * factor.abs().double()).float()
    if len(weight.inputs) > 2 and weight.inputs[2] is not None and not scale.dim():
        zeros = value_of(weight.inputs[2]).expand(len(factor)).contiguous()
        weight.replace_input_with(2, add_initializer(weight.graph, f"{weight.name}/zeros", zeros))
    weight.replace_input_with(1, add_initializer(weight.graph, f"{weight.name}/scales", scaled))
    weight.attributes["axis"] = onnx_ir.AttrInt64("axis", axis)

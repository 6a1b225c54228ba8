"""Biases as the 32-bit numbers that integer kernels add."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.functional import QParams
from torchq.onnx.ir import (
    Model,
    Node,
    Rewrite,
    add_initializer,
    attribute,
    computed_by,
    data_type,
    input_at,
    is_constant,
    nodes_of,
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

_RAISED = "raised scales"
# A bias takes at most half of int32; the other half is for the sum of products.
_LARGEST = 2.0**30


def _fit_biases(model: Model) -> None:
    """Raise the scales of weights whose bias would not fit into 32 bits.

    A runtime rounds the bias of an integer convolution to int32, in units of the scale of the input
    times that of the weight, and saturates without a word. Trained networks have such channels:
    their weights have died, at 1e-10, say, and the bias is all that they return.

    Before: Conv, ConvTranspose or Gemm of codes, with a stored bias that is too large for these
    units.
    After: The weights of these channels have the scale that the bias needs, and their codes are
    rounded to it. The record has under ``raised scales`` the scale by channel.
    """
    raised: dict[str, dict[str, float]] = {}
    for node in nodes_of(model, "Conv", "ConvTranspose", "Gemm"):
        weight, least = stored_weight(node.inputs[1]), _least_scales(node)
        if weight is None or least is None or attribute(weight, "block_size", 0):
            continue
        old = qparams_of(weight)
        if old.scale.numel() not in (1, len(least)):
            continue
        if node.op_type != "Conv" and old.scale.numel() == 1:
            least = least.max().reshape(1)  # Not every runtime takes several scales here.
        scale = old.scale.double().reshape(-1).expand(len(least))
        channels = (least > scale).nonzero().flatten().tolist()
        if channels:
            new = torch.maximum(least, scale).float()
            _requantize(weight, old, new)
            found = raised.setdefault(pair_name(weight), {})
            found.update({str(channel): float(new[channel]) for channel in channels})
    if raised:
        add_to_record(model, _RAISED, raised)


def _note_raised(model: Model) -> dict[str, str]:
    """Note at each weight, under ``meta["raised"]``, the channels whose scales are the file's own.

    They count along the first dimension; one scale is that of all channels. Where a scale is
    another one than the record says, its channel is left out.
    """
    record = read_record(model).get(_RAISED, {})
    for name, node in weight_nodes(model).items():
        scales = record.get(name)
        if scales is None:
            continue
        found = value_of(node.inputs[1]).reshape(-1).tolist()
        same = [int(key) for key, scale in scales.items() if found[int(key)] == scale]
        count = node.inputs[0].const_value.shape.numpy()[0]
        node.meta["raised"] = list(range(count)) if same and len(found) == 1 else same
    return {}


fit_biases = Rewrite(_fit_biases, undo=_note_raised)


def _least_scales(node: Node) -> Tensor | None:
    """Return the least scale of the weight for each number of a stored bias, in float64."""
    before = computed_by(node.inputs[0], "DequantizeLinear")
    bias = input_at(node, 2)
    if before is None or not is_constant(bias) or not is_constant(before.inputs[1]):
        return None
    of_input = value_of(before.inputs[1]).double()
    if of_input.numel() != 1 or not bool(of_input > 0):
        return None
    return value_of(bias).double().flatten().abs() / (of_input.reshape(()) * _LARGEST)


def _requantize(weight: Node, old: QParams, scale: Tensor) -> None:
    """Give a stored weight new scales, (channels,) or (1,), and round its codes to them."""
    codes, dtype = value_of(weight.inputs[0]), data_type(weight.inputs[0])
    axis = old.axis if old.scale.numel() > 1 else 0
    zero_point = old.zero_point.reshape(-1).expand(len(scale)).contiguous()
    if not old.scale.dim():
        scale, zero_point = (t.reshape(()) if len(t) == 1 else t for t in (scale, zero_point))
    new = QParams(scale, zero_point, old.format, axis)
    values = old.dequantize(old.centered(codes)).double()
    rounded = new.codes(new.scaled(values))
    name, graph = str(weight.name), weight.graph
    stored = [rounded.to(codes.dtype), scale.float(), zero_point.to(codes.dtype)]
    for index, (tensor, what) in enumerate(zip(stored, ("codes", "scales", "zeros"), strict=True)):
        if input_at(weight, index) is not None:
            kind = None if index == 1 else dtype
            value = add_initializer(graph, f"{name}/fitted {what}", tensor, kind)
            weight.replace_input_with(index, value)
    set_attribute(weight, "axis", axis)

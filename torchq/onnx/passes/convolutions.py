"""Convolutions: zeros around images, and biases that do not fit into 32 bits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from torchq.functional import QParams
from torchq.onnx.ir import (
    Model,
    Node,
    Rewrite,
    Value,
    add_initializer,
    are_constant,
    attribute,
    bypass,
    computed_by,
    data_type,
    input_at,
    is_constant,
    is_output,
    nodes_of,
    onnx_ir,
    readers,
    run_passes,
    set_attribute,
    value_of,
)
from torchq.onnx.passes.constants import fold_shapes
from torchq.onnx.qdq import (
    add_to_record,
    axis_of,
    pair_name,
    qparams_of,
    quantizer_nodes,
    read_record,
    stored_weight,
    weight_nodes,
    write_record,
)
from torchq.utils.optional import import_optional

_FOLDED = "folded pads"
#: Elements added to each dimension: in front of all of them, then behind all, as ONNX has them.
Amounts: TypeAlias = tuple[int, ...]


def _fold_pads(model: Model) -> None:
    """Let convolutions add the zeros that a Pad adds in front of them.

    Runtimes do this where nothing stands between the two. Where a quantizer does, the convolution
    in front of the Pad returns floats, which are copied and then quantized.

    Before: Pad with zeros around images, and convolutions or Q/DQ pairs in front of such as its
    only readers.
    After: The convolutions have larger pads, and the pairs, for which 0 is 0, read what Pad read.
    The record has under ``folded pads`` what was added in front of each quantizer.
    """
    folded: dict[str, list[int]] = dict(read_record(model).get(_FOLDED, {}))
    # Of two in a row, the second one comes first.
    for node in reversed(nodes_of(model, "Pad")):
        pairs, convolutions = _read_by(node.outputs[0])
        dims = min(map(_dims, convolutions), default=0)
        amounts = _zeros_around(node, dims) if dims else None
        if amounts is None:
            continue
        bypass(node)
        for convolution in convolutions:
            pads = zip(_pads(convolution), _spatial(amounts), strict=True)
            set_attribute(convolution, "pads", [a + b for a, b in pads])
            convolution.attributes.pop("auto_pad", None)
        for pair in pairs:
            pair.outputs[0].shape = None
            if pair.op_type == "QuantizeLinear":
                before = folded.get(pair_name(pair), [0] * len(amounts))
                folded[pair_name(pair)] = [
                    a + b for a, b in zip(before, amounts, strict=True)
                ]
    if folded:
        write_record(model, **{_FOLDED: folded})


def _note_folded(model: Model) -> dict[str, str]:
    """Note at each quantizer, under ``meta["pads"]``, what a Pad in front of it added."""
    record = read_record(model).get(_FOLDED, {})
    for name, node in quantizer_nodes(model).items():
        node.meta["pads"] = tuple(record.get(name, ()))
    return {}


fold_pads = Rewrite(_fold_pads, undo=_note_folded)


def without_pads(x: Tensor, amounts: Amounts) -> Tensor:
    """Return ``x`` without what a Pad has added; ``x`` itself for no amounts."""
    for dim in range(len(amounts) // 2):
        behind = amounts[len(amounts) // 2 + dim]
        x = x.narrow(dim, amounts[dim], x.shape[dim] - amounts[dim] - behind)
    return x


def constant_fill(pad: Node) -> float | None:
    """Return the number that a Pad adds; None where it is not stored, or repeats elements."""
    fill = input_at(pad, 2)
    if attribute(pad, "mode", "constant") != "constant" or not (
        fill is None or is_constant(fill)
    ):
        return None
    return float(attribute(pad, "value", 0) if fill is None else value_of(fill).item())


def with_lengths(graph: bytes, shapes: Iterable[tuple[str, Sequence[int]]]) -> bytes:
    """Return an ONNX file for inputs of known lengths, where it has fewer Pad nodes.

    How many zeros "same" padding adds in front of a layer with strides depends on the lengths of
    the image. Where these are open, the file computes the number and pads in a node of its own,
    which :func:`fold_pads` has to leave. The first dimension, that of the batch, stays as it is. It
    is ``graph`` itself where these lengths would remove no Pad.
    """
    if b"Pad" not in graph:
        return graph
    onnx = import_optional("onnx", "torchq.onnx")
    model = onnx_ir.from_proto(onnx.load_model_from_string(graph))
    shape_by_name = dict(shapes)
    for value in model.graph.inputs:
        if value.name in shape_by_name and value.shape is not None:
            value.shape = onnx_ir.Shape(
                [*value.shape[:1], *shape_by_name[value.name][1:]]
            )
    before = len(nodes_of(model, "Pad"))
    run_passes(model, (fold_shapes, fold_pads))
    if len(nodes_of(model, "Pad")) == before:
        return graph
    changed: bytes = onnx_ir.to_proto(model).SerializeToString()
    return changed


def _read_by(value: Value) -> tuple[list[Node], list[Node]]:
    """Return the Q/DQ pairs and the convolutions that read a value; none if others read it too."""
    pairs: list[Node] = []
    convolutions: list[Node] = []
    pending = [value]
    while pending:
        current = pending.pop(0)
        for node in readers(current):
            if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
                pairs.append(node)
                pending.append(node.outputs[0])
                is_understood = _is_same_at_each_pixel(node)
            else:
                convolutions.append(node)
                explicit = attribute(node, "auto_pad", "NOTSET") in _EXPLICIT
                is_understood = node.op_type == "Conv" and explicit
            if not is_understood:
                return [], []
        if is_output(current):
            return [], []
    return pairs, convolutions


#: Values of ``auto_pad`` with which the attribute ``pads`` counts.
_EXPLICIT = ("NOTSET", "VALID")


def _is_same_at_each_pixel(node: Node) -> bool:
    """Return True for a quantizer with one scale, or one for each channel."""
    if attribute(node, "block_size", 0) or not is_constant(node.inputs[1]):
        return False
    return node.inputs[1].const_value.size == 1 or axis_of(node) == 1


def _zeros_around(pad: Node, dims: int) -> Amounts | None:
    """Return what a Pad adds to all dimensions; None if it does not add zeros around images."""
    counts = input_at(pad, 1)
    chosen = input_at(pad, 3)
    if constant_fill(pad) != 0 or not are_constant([counts, chosen]):
        return None
    amounts_of_axes = (
        attribute(pad, "pads", ()) if counts is None else value_of(counts).tolist()
    )
    axes = range(dims) if chosen is None else value_of(chosen).tolist()
    if len(amounts_of_axes) != 2 * len(axes):
        return None
    amounts = [0] * (2 * dims)
    for number, axis in enumerate(axes):
        amounts[axis % dims] = amounts_of_axes[number]
        amounts[axis % dims + dims] = amounts_of_axes[number + len(axes)]
    others = (*amounts[:2], *amounts[dims : dims + 2])
    return None if any(others) or min(amounts) < 0 else tuple(amounts)


def _spatial(amounts: Amounts) -> list[int]:
    """Return amounts without those of the batch and the channels."""
    dims = len(amounts) // 2
    return [*amounts[2:dims], *amounts[dims + 2 :]]


def _dims(convolution: Node) -> int:
    """Return the number of dimensions of a stored weight; 0 for one that is computed."""
    weight = stored_weight(convolution.inputs[1])
    stored = convolution.inputs[1] if weight is None else weight.inputs[0]
    return len(stored.const_value.shape) if is_constant(stored) else 0


def _pads(convolution: Node) -> list[int]:
    return list(attribute(convolution, "pads", ())) or [0] * (
        2 * (_dims(convolution) - 2)
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
        weight = stored_weight(node.inputs[1])
        least = _least_scales(node)
        if weight is None or least is None or attribute(weight, "block_size", 0):
            continue
        old = qparams_of(weight)
        if old.scale.numel() not in (1, len(least)):
            continue
        if node.op_type != "Conv" and old.scale.numel() == 1:
            # Not every runtime takes several scales here.
            least = least.max().reshape(1)
        scale = old.scale.double().reshape(-1).expand(len(least))
        channels = (least > scale).nonzero().flatten().tolist()
        if channels:
            new = torch.maximum(least, scale).float()
            _requantize(weight, old, new)
            raised_channels = raised.setdefault(pair_name(weight), {})
            raised_channels.update(
                {str(channel): float(new[channel]) for channel in channels}
            )
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
        file_scales = value_of(node.inputs[1]).reshape(-1).tolist()
        same = [
            int(key) for key, scale in scales.items() if file_scales[int(key)] == scale
        ]
        count = node.inputs[0].const_value.shape.numpy()[0]
        node.meta["raised"] = (
            list(range(count)) if same and len(file_scales) == 1 else same
        )
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
    codes = value_of(weight.inputs[0])
    dtype = data_type(weight.inputs[0])
    axis = old.axis if old.scale.numel() > 1 else 0
    zero_point = old.zero_point.reshape(-1).expand(len(scale)).contiguous()
    if not old.scale.dim():
        scale, zero_point = (
            t.reshape(()) if len(t) == 1 else t for t in (scale, zero_point)
        )
    new = QParams(scale, zero_point, old.format, axis)
    values = old.dequantize(old.centered(codes)).double()
    rounded = new.codes(new.scaled(values))
    name = str(weight.name)
    graph = weight.graph
    stored = [rounded.to(codes.dtype), scale.float(), zero_point.to(codes.dtype)]
    for index, (tensor, what) in enumerate(
        zip(stored, ("codes", "scales", "zeros"), strict=True)
    ):
        if input_at(weight, index) is not None:
            kind = None if index == 1 else dtype
            value = add_initializer(graph, f"{name}/fitted {what}", tensor, kind)
            weight.replace_input_with(index, value)
    set_attribute(weight, "axis", axis)

"""Convolutions for ONNX Runtime: groups, shuffled channels, and averages as convolutions."""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

from torchq.onnx.coverage import MERGED_GROUPS
from torchq.onnx.ir import (
    Model,
    Node,
    Rewrite,
    Value,
    add_initializer,
    add_node,
    add_numbers,
    are_constant,
    attribute,
    computed_by,
    data_type,
    input_at,
    is_constant,
    is_output,
    nodes_of,
    readers,
    replace_stored,
    replace_value,
    set_attribute,
    value_of,
)
from torchq.onnx.passes.constants import Shape, known_shapes
from torchq.onnx.passes.pairs import separate
from torchq.onnx.qdq import (
    add_to_record,
    leads_only_to_quantizers,
    pair_name,
    qparams_of,
    read_record,
    stored_weight,
)

#: The channels that a merged group should have at least, and the most that it may have. In ResNeXt
#: 32 were faster than 16 and 64; in RegNetY, with 8, 16 or 104 to choose from, 104.
_LEAST, _MOST = 32, 128


def _merge_groups(model: Model) -> None:
    """Put several groups of integer convolutions into one, with weights of 0 between them.

    ONNX Runtime computes codes group by group, each with copies of its inputs; groups of 8 channels
    take longer than in float. Depthwise convolutions have a kernel of their own, and stay.

    Before: Conv with 26 groups of 8 channels, whose weights are codes with the zero point 0.
    After: Conv with 2 groups of 104 channels. The additional weights are 0, so no code changes. The
    record has under ``merged groups`` the number of groups before.
    """
    merged: dict[str, int] = {}
    for node in nodes_of(model, "Conv"):
        groups = int(attribute(node, "group", 1))
        weight = stored_weight(node.inputs[1])
        if groups == 1 or weight is None or len(readers(weight.outputs[0])) != 1:
            continue
        codes = value_of(weight.inputs[0])
        count = _count(groups, codes.shape[1])
        if count > 1 and qparams_of(weight).has_zero_point(0):
            merged[pair_name(weight)] = groups
            _store(node, weight, _spread(codes, groups, count), groups // count)
    if merged:
        add_to_record(model, MERGED_GROUPS, merged)


def _split_groups(model: Model) -> dict[str, str]:
    """Give layers the groups that they were exported with; name weights that are not 0 between."""
    record = read_record(model).get(MERGED_GROUPS, {})
    wrong = {}
    for node in nodes_of(model, "Conv"):
        weight = stored_weight(node.inputs[1])
        groups = None if weight is None else record.get(pair_name(weight))
        if weight is None or not isinstance(groups, int):
            continue
        codes = value_of(weight.inputs[0])
        now = int(attribute(node, "group", 1))
        out, channels = codes.shape[:2]
        if groups < now or groups % now or out % groups or channels % (groups // now):
            continue  # The record is damaged, and the shape of the weight stays wrong.
        of_groups = _gathered(codes, groups, groups // now)
        if int((codes != 0).sum()) != int((of_groups != 0).sum()):
            wrong[pair_name(weight)] = "added channels are not 0"
        _store(node, weight, of_groups, groups)
    return wrong


merge_groups = Rewrite(_merge_groups, undo=_split_groups)


def _count(groups: int, channels: int) -> int:
    """Return how many groups of ``channels`` channels become one."""
    counts = [
        n for n in range(1, groups + 1) if groups % n == 0 and n * channels <= _MOST
    ]
    enough = [n for n in counts if n * channels >= _LEAST]
    return min(enough, default=max(counts, default=1)) if channels > 1 else 1


def _spread(codes: Tensor, groups: int, count: int) -> Tensor:
    """Return weights of shape (out, count * channels, ...) that are 0 outside their own group."""
    out, channels = codes.shape[:2]
    spread = torch.zeros(out, count, *codes.shape[1:], dtype=codes.dtype, device="cpu")
    spread[torch.arange(out, device="cpu"), _places(out, groups, count)] = codes
    return spread.reshape(out, count * channels, *codes.shape[2:])


def _gathered(codes: Tensor, groups: int, count: int) -> Tensor:
    """Return what :func:`_spread` was given."""
    out = codes.shape[0]
    parts = codes.reshape(out, count, codes.shape[1] // count, *codes.shape[2:])
    return parts[torch.arange(out, device="cpu"), _places(out, groups, count)]


def _places(out: int, groups: int, count: int) -> Tensor:
    """Return which of the merged groups each output channel belongs to."""
    return torch.arange(out, device="cpu") // (out // groups) % count


def _store(node: Node, weight: Node, codes: Tensor, groups: int) -> None:
    """Give a convolution other weights and another number of groups."""
    replace_stored(weight.inputs[0], codes, data_type(weight.inputs[0]))
    weight.outputs[0].shape = None
    set_attribute(node, "group", groups)


#: A value, and the indices of its channels before the shuffle.
_Part: TypeAlias = tuple[Value, Tensor]


def gather_shuffled(model: Model) -> None:
    """Write the channel shuffle of ShuffleNet as a Gather, together with the split behind it.

    ONNX Runtime computes integer convolutions with their channels last in memory, and does the same
    with a shuffle between them, which then transposes single bytes. It leaves a Gather as it is,
    which copies whole channels.

    Before: Reshape to (N, groups, channels, H, W) -> Transpose of groups and channels -> Reshape to
    (N, groups * channels, H, W) -> Slice or Split of the channels.
    After: A Gather for each part that is read.
    """
    transposes = [
        node for node in nodes_of(model, "Transpose") if _exchanges_groups(node)
    ]
    shapes = known_shapes(model, open_names=True) if transposes else {}
    for node in transposes:
        part = _shuffled(node, shapes)
        if part is None:
            continue
        source = node.inputs[0].producer().inputs[0]
        for value, channels in _read_parts(*part):
            name = f"{value.name}/channels"
            indices = add_initializer(model.graph, name, channels)
            inputs = [source, indices]
            replace_value(
                value, add_node(value.producer(), "Gather", inputs, name, {"axis": 1})
            )


def _exchanges_groups(node: Node) -> bool:
    """Return True for the Transpose between two Reshapes that nothing else reads."""
    behind = readers(node.outputs[0])
    before = node.inputs[0].producer()
    if (
        list(attribute(node, "perm", ())) != [0, 2, 1, 3, 4]
        or before is None
        or len(behind) != 1
    ):
        return False
    if len(readers(before.outputs[0])) != 1 or is_output(before.outputs[0]):
        return False
    return before.op_type == behind[0].op_type == "Reshape" and not is_output(
        node.outputs[0]
    )


def _shuffled(node: Node, shapes: dict[str, Shape]) -> _Part | None:
    """Return the shuffled value and its channels, if the Reshapes change channels alone."""
    before = node.inputs[0].producer()
    (behind,) = readers(node.outputs[0])
    values = (before.inputs[0], before.outputs[0], behind.outputs[0])
    source, middle, last = (shapes.get(str(value.name), ()) for value in values)
    if len(source) != 4 or len(middle) != 5:
        return None
    groups, channels = middle[1:3]
    if not isinstance(groups, int) or not isinstance(channels, int):
        return None
    if source[1] != groups * channels or not _equal(last, source):
        return None
    if not _equal(middle, (source[0], groups, channels, *source[2:])):
        return None
    order = (
        torch.arange(groups * channels, device="cpu")
        .reshape(groups, channels)
        .T.reshape(-1)
    )
    return behind.outputs[0], order


def _equal(found: Shape, wanted: Shape) -> bool:
    """Return True if two shapes of as many elements are equal: one length follows from the rest."""
    if len(found) != len(wanted):
        return False
    return (
        sum(n is None or n != other for n, other in zip(found, wanted, strict=True)) < 2
    )


def _read_parts(value: Value, channels: Tensor) -> list[_Part]:
    """Return the slices of a value if nothing else reads it, or else the value itself."""
    parts: list[_Part] = []
    for reader in readers(value):
        slices = _parts_of(reader, channels)
        if not slices:
            return [(value, channels)]
        parts += slices
    return [(value, channels)] if is_output(value) else parts


def _parts_of(node: Node, channels: Tensor) -> list[_Part]:
    """Return what a Slice or Split of channels gives; nothing for other nodes."""
    if not are_constant(node.inputs[1:]):
        return []
    if node.op_type == "Split" and attribute(node, "axis", 0) == 1:
        lengths = value_of(node.inputs[1]).tolist() if len(node.inputs) > 1 else None
        count = len(node.outputs)
        pieces = channels.split(lengths) if lengths else channels.tensor_split(count)
        return list(zip(node.outputs, pieces, strict=True))
    if node.op_type == "Slice" and len(node.inputs) > 3:
        start, end, axis = (value_of(value).tolist() for value in node.inputs[1:4])
        stride = value_of(node.inputs[4]).tolist() if len(node.inputs) > 4 else [1]
        if axis == [1] and stride == [1]:
            return [(node.outputs[0], channels[start[0] : end[0]])]
    return []


def pool_means(model: Model) -> None:
    """Write the mean over whole images of codes as global pooling, which has an integer kernel.

    Before: DequantizeLinear -> ReduceMean over all dimensions but the first two.
    After: DequantizeLinear -> GlobalAveragePool, and Squeeze where the mean drops dimensions.
    """
    means = [
        node
        for node in nodes_of(model, "ReduceMean")
        if computed_by(node.inputs[0], "DequantizeLinear") is not None
    ]
    shapes = known_shapes(model, open_names=True) if means else {}
    for node in means:
        dims = len(shapes.get(str(node.inputs[0].name), ()))
        if dims < _IMAGES or _axes_of(node, dims) != list(range(2, dims)):
            continue
        name = str(node.outputs[0].name)
        pooled = add_node(node, "GlobalAveragePool", [node.inputs[0]], f"{name}/pooled")
        if not attribute(node, "keepdims", 1):
            axes = add_numbers(node.graph, f"{name}/axes", list(range(2, dims)))
            pooled = add_node(
                pooled.producer(), "Squeeze", [pooled, axes], f"{name}/squeezed"
            )
        replace_value(node.outputs[0], pooled)


#: Dimensions of a batch of signals, the fewest that can be pooled.
_IMAGES = 3


def _axes_of(mean: Node, dims: int) -> list[int]:
    """Return the dimensions that a ReduceMean averages over; nothing where no file says so."""
    axes = attribute(mean, "axes", None)
    if axes is None:
        operand = input_at(mean, 1)
        if operand is None or not is_constant(operand):
            return []
        axes = value_of(operand).flatten().tolist()
    return sorted(int(axis) % dims for axis in axes)


_KEPT = ("strides", "pads", "dilations")


def convolve_averages(model: Model) -> None:
    """Write average pooling between Q/DQ pairs as a depthwise convolution whose codes are all 1.

    ONNX Runtime's kernel for average pooling of codes takes about five times as long as its
    depthwise convolution, and longer than pooling in float. A mean over whole images has a fast
    one. Where the last window stands over the edge of the image (``ceil_mode``), that kernel
    divides by the area of a whole one, and a convolution would too.

    Before: DequantizeLinear -> AveragePool of images -> QuantizeLinear.
    After: DequantizeLinear -> Conv of each channel by itself, with the codes 1 and the scale 1 /
    (height * width) of the kernel -> QuantizeLinear. Or the pooling in float, behind Max(x, x),
    where a window may stand over the edge.
    """
    pools = [node for node in nodes_of(model, "AveragePool") if _is_between_codes(node)]
    shapes = known_shapes(model) if pools else {}
    for node in pools:
        shape = shapes.get(str(node.inputs[0].name), ())
        if (
            len(shape) == 4
            and isinstance(shape[1], int)
            and _is_regular(node, shape[2:])
        ):
            replace_value(node.outputs[0], _convolution(node, shape[1]))
        elif attribute(node, "ceil_mode", 0):
            separate(node.inputs[0], node)


def _is_between_codes(node: Node) -> bool:
    """Return True for pooling of codes to codes, the pattern of an integer kernel."""
    from_codes = computed_by(node.inputs[0], "DequantizeLinear") is not None
    return from_codes and leads_only_to_quantizers(node.outputs[0])


def _is_regular(node: Node, lengths: Shape) -> bool:
    """Return True if every result is the sum over a whole kernel, divided by its area."""
    pads = attribute(node, "pads", (0, 0, 0, 0))
    if any(pads) and not attribute(node, "count_include_pad", 0):
        return False
    if attribute(node, "auto_pad", "NOTSET") != "NOTSET":
        return False
    if not attribute(node, "ceil_mode", 0):
        return True
    # The last kernel may stand over the edge, unless the others fill the image.
    strides = attribute(node, "strides", (1, 1))
    kernel = attribute(node, "kernel_shape")
    dilated = any(n != 1 for n in attribute(node, "dilations", (1, 1)))
    return not dilated and all(
        isinstance(length, int) and (length + before + after - size) % stride == 0
        for length, before, after, size, stride in zip(
            lengths, pads[:2], pads[2:], kernel, strides, strict=True
        )
    )


def _convolution(node: Node, channels: int) -> Any:
    """Insert the convolution behind the pooling, and return its result."""
    kernel = list(attribute(node, "kernel_shape"))
    name = f"{node.name or node.outputs[0].name}/average"
    area = torch.Size(kernel).numel()
    parts = {
        "codes": torch.ones(channels, 1, *kernel, dtype=torch.int8, device="cpu"),
        "scale": torch.tensor(1 / area, dtype=torch.float32, device="cpu"),
        "zero_point": torch.tensor(0, dtype=torch.int8, device="cpu"),
    }
    stored = [
        add_initializer(node.graph, f"{name}/{part}", t) for part, t in parts.items()
    ]
    before = node.inputs[0].producer()
    weight = add_node(before, "DequantizeLinear", stored, f"{name}/DequantizeLinear")
    pooling_settings = {
        key: attribute(node, key) for key in _KEPT if key in node.attributes
    }
    settings = {**pooling_settings, "kernel_shape": kernel, "group": channels}
    return add_node(node, "Conv", [node.inputs[0], weight], f"{name}/Conv", settings)

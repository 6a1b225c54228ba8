"""Grouped convolutions with fewer groups, where a runtime computes small groups slowly."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.onnx.ir import (
    Model,
    Node,
    attribute,
    data_type,
    nodes_of,
    onnx_ir,
    readers,
    replace_stored,
    value_of,
)
from torchq.onnx.qdq import pair_name, qparams_of, read_record, stored_weight, write_record

__all__ = ["merge_groups", "split_groups"]

#: The channels that a merged group should have at least, and the most that it may have. In ResNeXt
#: 32 were faster than 16 and 64; in RegNetY, with 8, 16 or 104 to choose from, 104.
_LEAST, _MOST = 32, 128
_MERGED = "merged groups"


def merge_groups(model: Model) -> None:
    """Put several groups of integer convolutions into one, with weights of 0 between them.

    ONNX Runtime computes codes group by group, each with copies of its inputs; groups of 8 channels
    take longer than in float. Depthwise convolutions have a kernel of their own, and stay.

    Before::

        Conv with 26 groups of 8 channels, whose weights are codes with the zero point 0.

    After::

        Conv with 2 groups of 104 channels. The additional weights are 0, so no code changes. The
        record has under ``merged groups`` the number of groups before.
    """
    merged: dict[str, int] = {}
    for node in nodes_of(model, "Conv"):
        groups, weight = int(attribute(node, "group", 1)), stored_weight(node.inputs[1])
        if groups == 1 or weight is None or len(readers(weight.outputs[0])) != 1:
            continue
        codes = value_of(weight.inputs[0])
        count = _count(groups, codes.shape[1])
        if count > 1 and qparams_of(weight).has_zero_point(0):
            merged[pair_name(weight)] = groups
            _store(node, weight, _spread(codes, groups, count), groups // count)
    if merged:
        write_record(model, **{_MERGED: {**merged, **read_record(model).get(_MERGED, {})}})


def split_groups(model: Model) -> list[str]:
    """Undo :func:`merge_groups` with the help of the record.

    Before::

        A file with merged groups.

    After::

        The groups of the layers that were exported.

    Returns:
        The quantizers of weights that are not 0 between groups.
    """
    record, wrong = read_record(model).get(_MERGED, {}), []
    for node in nodes_of(model, "Conv"):
        weight = stored_weight(node.inputs[1])
        groups = None if weight is None else record.get(pair_name(weight))
        if weight is None or not isinstance(groups, int):
            continue
        codes, now = value_of(weight.inputs[0]), int(attribute(node, "group", 1))
        out, channels = codes.shape[:2]
        if groups < now or groups % now or out % groups or channels % (groups // now):
            continue  # The record is damaged, and the shape of the weight stays wrong.
        own = _gathered(codes, groups, groups // now)
        if int((codes != 0).sum()) != int((own != 0).sum()):
            wrong.append(pair_name(weight))
        _store(node, weight, own, groups)
    return wrong


def _count(groups: int, channels: int) -> int:
    """Return how many groups of ``channels`` channels become one."""
    counts = [n for n in range(1, groups + 1) if groups % n == 0 and n * channels <= _MOST]
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
    node.attributes["group"] = onnx_ir.AttrInt64("group", groups)

"""Functions that graphs of several formats call."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.frontends.building.one_call import one_call

_MAX = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def pad_amounts(pads: Sequence[int]) -> list[int]:
    """Return pads (all before, then all behind) in the order of ``F.pad``."""
    half = len(pads) // 2
    return [
        side
        for axis in reversed(range(half))
        for side in (pads[axis], pads[half + axis])
    ]


def same_pads(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    upper: bool,
) -> list[int]:
    """Return pads for ``ceil(size / stride)`` results; ``upper`` puts the odd element behind."""
    before, behind = [], []
    for axis, (k, s, d) in enumerate(
        zip(kernel, stride, dilation, strict=True), start=2
    ):
        size = x.shape[axis]
        missing = max(0, (-(-size // s) - 1) * s + d * (k - 1) + 1 - size)
        before.append(missing // 2 if upper else missing - missing // 2)
        behind.append(missing - before[-1])
    return before + behind


@one_call
def pool(
    x: Tensor,
    kind: str,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int] | str,
    convention: str,
    include_pad: bool,
) -> Tensor:
    """Return the maxima, means or sums of windows of ``x`` (N, C, ...).

    Pads are numbers (all before, then all behind), or SAME_UPPER or SAME_LOWER. The convention
    ``"valid"`` rounds the number of windows down, ``"ceil"`` up but for a window that begins behind
    the input, ``"full"`` always up. Means with ``include_pad`` count the padding.
    """
    if isinstance(pads, str):
        pads = same_pads(x, kernel, stride, dilation, pads == "SAME_UPPER")
    window = list(stride), 0, list(dilation)
    reached = _reached(x, kernel, stride, dilation, pads, convention)
    if kind == "max":
        lowest = torch.finfo(x.dtype).min if convention == "full" else -torch.inf
        return _MAX[len(kernel)](F.pad(x, reached, value=lowest), list(kernel), *window)
    sums = _sums(F.pad(x, reached), kernel, window)
    if kind == "sum":
        return sums
    inside = torch.ones((1, 1, *x.shape[2:]), dtype=x.dtype, device=x.device)
    if include_pad:
        padding = pad_amounts(pads)
        inside = F.pad(inside, padding, value=1.0)
        reached = [extra - side for extra, side in zip(reached, padding, strict=True)]
    return sums / _sums(F.pad(inside, reached), kernel, window)


def _reached(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int],
    convention: str,
) -> list[int]:
    """Return how far windows reach beyond ``x``, in the order of ``F.pad``."""
    reached: list[int] = []
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        before = pads[axis]
        size = x.shape[2 + axis]
        room = size + before + pads[len(kernel) + axis] - d * (k - 1) - 1
        last = room // s if convention == "valid" else -(-room // s)
        if convention == "ceil" and last * s >= size + before:
            last -= 1
        reached = [before, last * s + d * (k - 1) + 1 - before - size, *reached]
    return reached


@one_call
def max_pool_with_places(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    dilation: Sequence[int],
    pads: Sequence[int] | str,
    convention: str,
    column_major: bool,
) -> tuple[Tensor, Tensor]:
    """Return the maxima of windows, and where in all of ``x`` they are; see :func:`pool`.

    ``column_major`` counts the places of a plane with the first spatial dimension innermost.
    """
    if isinstance(pads, str):
        pads = same_pads(x, kernel, stride, dilation, pads == "SAME_UPPER")
    reached = _reached(x, kernel, stride, dilation, pads, convention)
    padded = F.pad(x, reached, value=-torch.inf)
    window = list(kernel), list(stride), 0, list(dilation)
    function: Any = _MAX[len(kernel)]
    largest, places = function(padded, *window, return_indices=True)
    found = torch.zeros_like(places)
    factor = 1
    axes = list(range(len(kernel)))
    at = {}
    for axis in reversed(axes):
        size = padded.shape[2 + axis]
        at[axis] = places % size - reached[2 * (len(kernel) - 1 - axis)]
        places = places // size
    for axis in axes if column_major else reversed(axes):
        found = found + at[axis] * factor
        factor = factor * x.shape[2 + axis]
    planes = torch.arange(x.shape[0] * x.shape[1], device=x.device) * factor
    return largest, found + planes.view(*x.shape[:2], *[1] * len(kernel))


def _sums(x: Tensor, kernel: Sequence[int], window: tuple[Any, ...]) -> Tensor:
    """Return the sums of windows, a convolution of each channel with ones."""
    ones = torch.ones((1, 1, *kernel), dtype=x.dtype, device=x.device)
    planes = x.reshape(-1, 1, *x.shape[2:])
    sums = _CONV[len(kernel)](planes, ones, None, *window)
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


@one_call
def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Return a convolution with a weight that the network computes."""
    window = list(stride), list(padding), list(dilation)
    return _CONV[weight.dim() - 2](x, weight, bias, *window, groups)


@one_call
def hard_sigmoid(x: Tensor, alpha: float, beta: float) -> Tensor:
    """Return ``alpha * x + beta``, at least 0 and at most 1."""
    return (x * alpha + beta).clamp(0, 1)


@one_call
def group_norm(
    x: Tensor, scale: Tensor, bias: Tensor, groups: int, eps: float
) -> Tensor:
    """Return groups of channels normalized; scales belong to channels, or to groups."""
    each = x.shape[1] // scale.numel()
    return F.group_norm(
        x, groups, scale.repeat_interleave(each), bias.repeat_interleave(each), eps
    )


@one_call
def slice_axis(x: Tensor, axis: int, first: object, last: object, step: int) -> Tensor:
    """Return a slice of one dimension as Python takes it; a negative step runs backwards."""
    axis = axis % x.dim()
    if step > 0:
        return x[(slice(None),) * axis + (slice(first, last, step),)]
    places = range(*slice(first, last, step).indices(x.shape[axis]))
    return x.index_select(
        axis, torch.tensor(list(places), dtype=torch.int64, device=x.device)
    )


@one_call
def permuted(x: Tensor, order: Sequence[int] | None) -> Tensor:
    """Return ``x`` with its dimensions in an order, reversed where there is none."""
    return x.permute(list(order or range(x.dim() - 1, -1, -1)))


@one_call
def depth_to_space(x: Tensor, block: int) -> Tensor:
    """Return channels laid out as blocks of pixels; the channels of a block come first."""
    parts = x.unflatten(1, (block * block, -1)).transpose(1, 2)
    return F.pixel_shuffle(parts.flatten(1, 2), block)


@one_call
def space_to_depth(x: Tensor, block: int) -> Tensor:
    """Return blocks of pixels laid out as channels; the places in a block come first."""
    parts = F.pixel_unshuffle(x, block).unflatten(1, (-1, block * block))
    return parts.transpose(1, 2).flatten(1, 2)


def write_operator(
    op_type: str,
    version: int,
    inputs: Sequence[Tensor],
    attributes: dict[str, Any],
    sizes: Sequence[int],
    dtype: torch.dtype,
    example: Tensor | None,
) -> Tensor:
    """Write an operator in an export: torch.export needs sizes, TorchScript an example."""
    if torch.jit.is_tracing():
        assert example is not None
        return _Written.apply(op_type, attributes, example, *inputs)
    return torch.onnx.ops.symbolic(
        op_type, inputs, attributes, dtype=dtype, shape=sizes, version=version
    )


class _Written(torch.autograd.Function):
    """The operator for the TorchScript exporter, which calls ``symbolic``."""

    @staticmethod
    def forward(
        ctx: Any,
        op_type: str,
        attributes: dict[str, Any],
        example: Tensor,
        *inputs: Tensor,
    ) -> Tensor:
        return example.clone()

    @staticmethod
    def symbolic(
        g: Any, op_type: str, attributes: Any, example: Any, *inputs: Any
    ) -> object:
        kinds = {int: "i", float: "f", str: "s"}
        named = {f"{name}_{kinds[type(v)]}": v for name, v in attributes.items()}
        result = g.op(op_type, *inputs, **named)
        result.setType(example.type().with_sizes([None] * example.type().dim()))
        return result


_LIBRARY = torch.library.Library("torchq", "FRAGMENT")
_LIBRARY.define(
    "non_max_suppression(Tensor boxes, Tensor scores, int most, float iou_limit, "
    "float? score_limit, bool center_form) -> Tensor"
)


def _iou(boxes: Tensor, one: Tensor) -> Tensor:
    """Return the overlap of boxes (y1, x1, y2, x2) with one box, over their union."""
    low = torch.maximum(boxes[:, :2], one[:2])
    high = torch.minimum(boxes[:, 2:], one[2:])
    common = (high - low).clamp(min=0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return common / (areas + (one[2:] - one[:2]).prod() - common)


@one_call
def non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    most: Tensor | int,
    iou_limit: Tensor | float,
    score_limit: Tensor | float | None,
    center_form: bool,
) -> Tensor:
    """Return (batch, class, box) of the boxes that no better box of a class overlaps too much.

    Boxes (batch, boxes, 4) are two opposite corners (y, x, y, x), or centre and size (x, y, w, h);
    scores are (batch, classes, boxes).
    """
    if torch.onnx.is_in_onnx_export():
        limits = [limit for limit in (iou_limit, score_limit) if limit is not None]
        # No other types.
        inputs = [
            boxes.float(),
            scores.float(),
            _scalar(most, torch.int64),
        ]
        inputs += [_scalar(limit, torch.float32) for limit in limits]
        return _written_suppression(inputs, center_form)
    numbers = (
        int(most),
        float(iou_limit),
        None if score_limit is None else float(score_limit),
    )
    if torch.compiler.is_compiling():  # the loop below is no part of a graph
        return torch.ops.torchq.non_max_suppression(
            boxes, scores, *numbers, center_form
        )
    return _suppress(boxes, scores, *numbers, center_form)


def _suppress(
    boxes: Tensor,
    scores: Tensor,
    most: int,
    iou_limit: float,
    score_limit: float | None,
    center_form: bool,
) -> Tensor:
    """Return the kept boxes, computed one by one."""
    if center_form:
        middle = boxes[..., :2].flip(-1)
        half = boxes[..., 2:].flip(-1) / 2
        corners = torch.cat([middle - half, middle + half], -1)
    else:
        first = boxes[..., :2]
        second = boxes[..., 2:]
        corners = torch.cat(
            [torch.minimum(first, second), torch.maximum(first, second)], -1
        )
    detections = []
    for batch in range(scores.shape[0]):
        for kind in range(scores.shape[1]):
            class_scores = scores[batch, kind]
            order = torch.sort(class_scores, descending=True, stable=True).indices
            if score_limit is not None:
                order = order[class_scores[order] > score_limit]
            detections += [
                [batch, kind, i] for i in _keep(corners[batch], order, most, iou_limit)
            ]
    return torch.tensor(detections, dtype=torch.int64, device=boxes.device).reshape(
        -1, 3
    )


def _fake_suppression(boxes: Tensor, scores: Tensor, *_: object) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return boxes.new_empty((size, 3), dtype=torch.int64)


_LIBRARY.impl("non_max_suppression", _suppress, "CompositeExplicitAutograd")
torch.library.register_fake(
    "torchq::non_max_suppression", _fake_suppression, lib=_LIBRARY
)


def _scalar(value: Tensor | float, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(()).to(dtype)
    return torch.full((), value, dtype=dtype)


def _written_suppression(inputs: Sequence[Tensor], center_form: bool) -> Tensor:
    """Return the kept boxes as the ONNX operator, during an export."""
    boxes, scores, *_ = inputs
    example = None
    sizes: tuple[int, ...] = ()
    if torch.jit.is_tracing():
        example = boxes.new_zeros((scores.shape[0], 3), dtype=torch.int64)
    else:
        # Some number that no one knows yet.
        count = torch.nonzero(scores.reshape(-1)).shape[0]
        sizes = (count, 3)
    options = {"center_point_box": int(center_form)}
    return write_operator(
        "NonMaxSuppression", 11, inputs, options, sizes, torch.int64, example
    )


def _keep(corners: Tensor, order: Tensor, most: int, overlap: float) -> list[int]:
    """Return the boxes, best first, that no better box overlaps by more than ``overlap``."""
    kept_indices: list[int] = []
    while len(order) and len(kept_indices) < most:
        best = int(order[0])
        kept_indices.append(best)
        remaining = order[1:]
        # Boxes without an area overlap nothing: their share is NaN, which is not greater.
        order = remaining[~(_iou(corners[remaining], corners[best]) > overlap)]
    return kept_indices


@one_call
def kept_boxes(
    boxes: Tensor, scores: Tensor, overlap: float, score_limit: float
) -> Tensor:
    """Return which boxes a class keeps, as ``scores``; wrong corners count as an area of 0."""
    low = boxes[..., :2]
    high = boxes[..., 2:]
    boxes = torch.cat([low, torch.maximum(low, high)], -1).detach()
    scores = scores.detach()
    kinds, places = scores.shape[1:]
    detections = non_max_suppression(boxes, scores, places, overlap, score_limit, False)
    flat = (detections[:, 0] * kinds + detections[:, 1]) * places + detections[:, 2]
    return (
        torch.zeros_like(scores).reshape(-1).scatter(0, flat, 1.0).reshape(scores.shape)
        > 0
    )


@one_call
def ranked(
    x: Tensor, count: Tensor | int, axis: int = -1, largest: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the extreme elements in order, and their places; of equal ones the first."""
    # The operator TopK takes the first of equals as well.
    if torch.onnx.is_in_onnx_export():
        return torch.topk(x, int(count), axis, largest)
    values, places = torch.sort(x, dim=axis, descending=largest, stable=True)
    return values.narrow(axis, 0, int(count)), places.narrow(axis, 0, int(count))


def positive(indices: Tensor, size: int) -> Tensor:
    """Return indices of which negative ones counted from the end."""
    indices = indices.to(torch.int64)
    return torch.where(indices < 0, indices + size, indices)


@one_call
def lookup(x: Tensor, places: Tensor, axis: int) -> Tensor:
    """Return entries of ``x`` along ``axis``, which is not negative, in the shape of ``places``."""
    selected = x.index_select(axis, places.reshape(-1))
    return selected.reshape((*x.shape[:axis], *places.shape, *x.shape[axis + 1 :]))

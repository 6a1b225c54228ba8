"""The boxes of detectors: which ones are kept, and what lies inside them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchq.frontends.onnx.functions.written import write_operator

__all__ = ["non_max_suppression", "roi_align"]

_LIBRARY = torch.library.Library("torchq", "FRAGMENT")
_LIBRARY.define(
    "non_max_suppression(Tensor boxes, Tensor scores, int most, float iou_limit, "
    "float? score_limit, bool center_form) -> Tensor"
)


def _iou(boxes: Tensor, one: Tensor) -> Tensor:
    """Return the overlap of boxes (y1, x1, y2, x2) with one box, over their union."""
    low, high = torch.maximum(boxes[:, :2], one[:2]), torch.minimum(boxes[:, 2:], one[2:])
    common = (high - low).clamp(min=0).prod(1)
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    return common / (areas + (one[2:] - one[:2]).prod() - common)


def non_max_suppression(
    boxes: Tensor,
    scores: Tensor,
    most: Tensor | int,
    iou_limit: Tensor | float,
    score_limit: Tensor | float | None,
    center_form: bool,
) -> Tensor:
    """Return (batch, class, box) of the boxes that no better box of their class overlaps too much.

    Args:
        boxes: (batch, boxes, 4): two opposite corners (y, x, y, x), or centre and size (x, y, w,
            h).
        scores: (batch, classes, boxes).
        most: kept boxes of each class and batch at most.
        iou_limit: a box that overlaps a better one by more than this share of their union goes.
        score_limit: boxes with a score up to this go; None for all.
        center_form: the second form of boxes.
    """
    if torch.onnx.is_in_onnx_export():
        return _written_suppression(boxes, scores, most, iou_limit, score_limit, center_form)
    numbers = (int(most), float(iou_limit), None if score_limit is None else float(score_limit))
    if torch.compiler.is_compiling():  # the loop below is no part of a graph
        return torch.ops.torchq.non_max_suppression(boxes, scores, *numbers, center_form)
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
        middle, half = boxes[..., :2].flip(-1), boxes[..., 2:].flip(-1) / 2
        corners = torch.cat([middle - half, middle + half], -1)
    else:
        first, second = boxes[..., :2], boxes[..., 2:]
        corners = torch.cat([torch.minimum(first, second), torch.maximum(first, second)], -1)
    found = []
    for batch in range(scores.shape[0]):
        for kind in range(scores.shape[1]):
            own = scores[batch, kind]
            order = torch.sort(own, descending=True, stable=True).indices
            if score_limit is not None:
                order = order[own[order] > score_limit]
            found += [[batch, kind, i] for i in _keep(corners[batch], order, most, iou_limit)]
    return torch.tensor(found, dtype=torch.int64, device=boxes.device).reshape(-1, 3)


def _fake_suppression(boxes: Tensor, scores: Tensor, *_: object) -> Tensor:
    size = torch.library.get_ctx().new_dynamic_size()
    return boxes.new_empty((size, 3), dtype=torch.int64)


_LIBRARY.impl("non_max_suppression", _suppress, "CompositeExplicitAutograd")
torch.library.register_fake("torchq::non_max_suppression", _fake_suppression, lib=_LIBRARY)


def _scalar(value: Tensor | float, dtype: torch.dtype) -> Tensor:
    if isinstance(value, Tensor):
        return value.reshape(()).to(dtype)
    return torch.full((), value, dtype=dtype)


def _written_suppression(
    boxes: Tensor,
    scores: Tensor,
    most: Tensor | int,
    iou_limit: Tensor | float,
    score_limit: Tensor | float | None,
    center_form: bool,
) -> Tensor:
    """Return the kept boxes as the ONNX operator, during an export."""
    inputs = [boxes, scores]
    for value, dtype in ((most, torch.int64), (iou_limit, torch.float32)):
        inputs.append(_scalar(value, dtype))
    if score_limit is not None:
        inputs.append(_scalar(score_limit, torch.float32))
    sizes: tuple[int, ...] = ()
    example = None
    if torch.jit.is_tracing():
        example = boxes.new_zeros((scores.shape[0], 3), dtype=torch.int64)
    else:
        count = torch.nonzero(scores.reshape(-1)).shape[0]  # some number that no one knows yet
        sizes = (count, 3)
    return write_operator(
        "NonMaxSuppression", 11, inputs, {"center_point_box": int(center_form)}, sizes,
        torch.int64, example,
    )  # fmt: skip


def _keep(corners: Tensor, order: Tensor, most: int, overlap: float) -> list[int]:
    kept: list[int] = []
    while len(order) and len(kept) < most:
        best = int(order[0])
        kept.append(best)
        rest = order[1:]
        # Boxes without an area overlap nothing: their share is NaN, which is not greater.
        order = rest[~(_iou(corners[rest], corners[best]) > overlap)]
    return kept


def roi_align(
    x: Tensor,
    rois: Tensor,
    batches: Tensor,
    size: tuple[int, int],
    ratio: int,
    scale: float,
    half_pixel: bool,
    largest: bool,
) -> Tensor:
    """Return regions of feature maps resampled to one size (Mask R-CNN, He et al. 2017, 3).

    Args:
        x: (N, C, H, W).
        rois: (regions, 4) as x1, y1, x2, y2.
        batches: the image of each region.
        size: height and width of the results.
        ratio: samples along each side of a bin; 0 for as many as fit.
        scale: from coordinates of regions to those of ``x``.
        half_pixel: pixels lie at half coordinates.
        largest: take the largest of the weighted samples instead of the mean.
    """
    results = [
        _align_one(
            x[int(b)], roi * scale - (0.5 if half_pixel else 0.0), size, ratio, half_pixel, largest
        )
        for roi, b in zip(rois, batches, strict=True)
    ]
    return torch.stack(results) if results else x.new_zeros(0, x.shape[1], *size)


def _align_one(
    image: Tensor, roi: Tensor, size: tuple[int, int], ratio: int, half_pixel: bool, largest: bool
) -> Tensor:
    x1, y1, x2, y2 = roi.tolist()
    width, height = x2 - x1, y2 - y1
    if not half_pixel:
        width, height = max(width, 1.0), max(height, 1.0)
    (rows, row_weights, ny) = _samples(y1, height, size[0], ratio, image.shape[1])
    (columns, column_weights, nx) = _samples(x1, width, size[1], ratio, image.shape[2])
    corners = [
        [
            image[:, rows[i]][:, :, columns[j]]
            * (row_weights[i][:, None] * column_weights[j]).to(image)
            for j in (0, 1)
        ]
        for i in (0, 1)
    ]
    shape = (image.shape[0], size[0], ny, size[1], nx)
    if largest:
        stacked = torch.stack([part for pair in corners for part in pair]).amax(0)
        return stacked.view(shape).amax((2, 4))
    return (corners[0][0] + corners[0][1] + corners[1][0] + corners[1][1]).view(shape).mean((2, 4))


def _samples(
    start: float, length: float, bins: int, ratio: int, size: int
) -> tuple[list[Tensor], list[Tensor], int]:
    """Return two neighbours and their weights for every sample, and the samples in a bin."""
    count = ratio if ratio > 0 else max(1, math.ceil(length / bins))
    at = start + (torch.arange(bins * count, dtype=torch.float64) + 0.5) * (length / bins / count)
    outside = (at < -1.0) | (at > size)
    at = at.clamp(min=0)
    low = at.floor().long()
    last = low >= size - 1
    low = torch.where(last, size - 1, low)
    high = torch.where(last, size - 1, low + 1)
    fraction = torch.where(last, 0.0, at - low)
    alive = (~outside).double()
    return [low, high], [(1 - fraction) * alive, fraction * alive], count

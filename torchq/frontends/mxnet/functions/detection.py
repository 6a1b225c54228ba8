"""The boxes of SSD in MXNet: default boxes, detections, and suppression."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["box_nms", "multibox_detection", "multibox_prior"]


def multibox_prior(
    features: Tensor,
    sizes: Sequence[float],
    ratios: Sequence[float],
    clip: bool,
    steps: Sequence[float],
    offsets: Sequence[float],
) -> Tensor:
    """Return default boxes (1, places * boxes, 4) as corners in fractions of the image.

    Each place has all sizes with the first ratio, then the first size with the other ratios.

    Args:
        features: (N, C, H, W), of which only the size counts.
        sizes: of boxes, in fractions of the height.
        ratios: of width to height.
        clip: cut boxes off at the image.
        steps: between places in y and x; -1 divides the image by the number of places.
        offsets: of the first place in y and x, in steps.
    """
    rows, columns = features.shape[2:]
    shapes = [(size, math.sqrt(ratios[0])) for size in sizes]
    shapes += [(sizes[0], math.sqrt(ratio)) for ratio in ratios[1:]]
    half = torch.tensor(
        [(size * rows / columns * root / 2, size / root / 2) for size, root in shapes]
    ).to(features)
    step_y = steps[0] if steps[0] > 0 else 1 / rows
    step_x = steps[1] if steps[1] > 0 else 1 / columns
    y = (torch.arange(rows).to(features) + offsets[0]) * step_y
    x = (torch.arange(columns).to(features) + offsets[1]) * step_x
    centers = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).unsqueeze(2)
    boxes = torch.cat([centers - half, centers + half], -1).reshape(1, -1, 4)
    return boxes.clamp(0, 1) if clip else boxes


def _overlaps(boxes: Tensor, one: Tensor) -> Tensor:
    """Return the overlap of boxes (corners) with one box, over their union; 0 for no area."""
    low, high = torch.maximum(boxes[:, :2], one[:2]), torch.minimum(boxes[:, 2:], one[2:])
    common = (high - low).clamp(min=0).prod(1)
    union = (boxes[:, 2:] - boxes[:, :2]).prod(1) + (one[2:] - one[:2]).prod() - common
    return torch.where(union > 0, common / union, 0.0)


def multibox_detection(
    scores: Tensor,
    locations: Tensor,
    anchors: Tensor,
    clip: bool,
    threshold: float,
    overlap: float,
    across_classes: bool,
    variances: Sequence[float],
    most: int,
) -> Tensor:
    """Return (N, boxes, 6) rows of class, score and corners; a class of -1 is no detection.

    Args:
        scores: (N, classes, boxes), the background first.
        locations: (N, boxes * 4).
        anchors: (1, boxes, 4) corners.
        clip: cut boxes off at the image.
        threshold: the least score.
        overlap: a box that overlaps a better one by so much is no detection.
        across_classes: compare boxes of different classes too.
        variances: factors of the locations.
        most: detections that are kept, -1 for all.
    """
    corners = anchors[0]
    size, center = corners[:, 2:] - corners[:, :2], (corners[:, 2:] + corners[:, :2]) / 2
    moved = locations.reshape(len(scores), -1, 4) * torch.tensor(list(variances)).to(locations)
    middle, half = moved[..., :2] * size + center, moved[..., 2:].exp() * size / 2
    boxes = torch.cat([middle - half, middle + half], -1)
    boxes = boxes.clamp(0, 1) if clip else boxes
    best, kinds = scores[:, 1:].max(1)
    results = []
    for own_boxes, own_scores, own_kinds in zip(boxes, best, kinds, strict=True):
        valid = torch.nonzero(own_scores >= threshold).flatten()
        rows = torch.full((len(own_scores), 6), -1.0, dtype=scores.dtype, device=scores.device)
        count = len(valid)
        found = [own_kinds[valid].to(rows).unsqueeze(1), own_scores[valid].unsqueeze(1)]
        rows[:count] = torch.cat([*found, own_boxes[valid]], 1)
        if 0 < overlap <= 1:
            order = torch.sort(rows[:count, 1], descending=True, stable=True).indices
            limit = min(most, count) if most > 0 else count
            rows[:limit] = rows[order[:limit]]
            rows[limit:count, 0] = -1  # MXNet leaves the rest of these rows where it was
            _suppress(rows[:limit], overlap, across_classes)
        results.append(rows)
    return torch.stack(results)


def _suppress(rows: Tensor, overlap: float, across_classes: bool) -> None:
    """Give the class -1 to rows that overlap a better one, in place."""
    for place in range(len(rows)):
        if rows[place, 0] < 0:
            continue
        rest = rows[place + 1 :]
        hit = _overlaps(rest[:, 2:], rows[place, 2:]) >= overlap
        if not across_classes:
            hit &= rest[:, 0] == rows[place, 0]
        rest[hit, 0] = -1


def box_nms(
    data: Tensor,
    overlap: float,
    threshold: float,
    most: int,
    start: int,
    score_index: int,
    id_index: int,
    background: int,
    across_classes: bool,
    is_center: bool,
) -> Tensor:
    """Return rows of boxes in the order of their scores, those that are dropped as -1.

    Args:
        data: (..., boxes, numbers).
        overlap: a box that overlaps a better one by more than this goes.
        threshold: boxes with a score up to this go.
        most: boxes with the best scores that are compared, -1 for all.
        start: where the four numbers of a box begin.
        score_index: where its score is.
        id_index: where its class is, -1 for nowhere.
        background: the class that goes, -1 for none.
        across_classes: compare boxes of different classes too.
        is_center: boxes are centre and size, not corners.
    """
    flat = data.reshape(-1, *data.shape[-2:])
    results = torch.full_like(flat, -1)
    for rows, result in zip(flat, results, strict=True):
        scores = rows[:, score_index]
        valid = scores > threshold
        if id_index >= 0 and background >= 0:
            valid &= rows[:, id_index] != background
        order = torch.nonzero(valid).flatten()
        order = order[torch.sort(scores[order], descending=True, stable=True).indices]
        order = order[:most] if most > 0 else order
        boxes = rows[:, start : start + 4]
        if is_center:
            boxes = torch.cat([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2], 1)
        kept = []
        while len(order):
            kept.append(int(order[0]))
            rest = order[1:]
            hit = _overlaps(boxes[rest], boxes[order[0]]) > overlap
            if id_index >= 0 and not across_classes:
                hit &= rows[rest, id_index] == rows[order[0], id_index]
            order = rest[~hit]
        result[: len(kept)] = rows[kept]
    return results.reshape(data.shape)

"""The boxes of detectors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.frontends.building.functions import kept_boxes, ranked
from torchq.frontends.building.graph import Value
from torchq.frontends.mxnet.node import SymbolContext, converter


@converter("_contrib_MultiBoxPrior", "MultiBoxPrior")
def _prior(node: SymbolContext) -> Value:
    sizes, ratios = node.numbers("sizes", (1.0,)), node.numbers("ratios", (1.0,))
    clip = node.flag("clip", False)
    steps, offsets = node.numbers("steps", (-1.0, -1.0)), node.numbers("offsets", (0.5, 0.5))
    kind = [node.call(getattr, node.inputs[0], name) for name in ("shape", "dtype", "device")]
    return node.call(multibox_prior, *kind, sizes, ratios, clip, steps, offsets)


@converter("_contrib_MultiBoxDetection", "MultiBoxDetection")
def _detection(node: SymbolContext) -> Value:
    node.expect("background_id", "0")
    return node.call(
        multibox_detection,
        *node.inputs,
        node.flag("clip", True),
        node.number("threshold", 0.01),
        node.number("nms_threshold", 0.5),
        node.flag("force_suppress", False),
        node.numbers("variances", (0.1, 0.1, 0.2, 0.2)),
        node.integer("nms_topk", -1),
    )


@converter("_contrib_box_nms", "_contrib_box_non_maximum_suppression")
def _box_nms(node: SymbolContext) -> Value:
    kind = node.text("in_format", "corner")
    node.expect("out_format", kind)
    overlap = node.number("overlap_thresh", 0.5)
    if not 0 <= overlap <= 1:
        node.refuse(f"overlap_thresh is {overlap}; expected 0 to 1")
    return node.call(
        box_nms,
        node.inputs[0],
        overlap,
        node.number("valid_thresh", 0.0),
        node.integer("topk", -1),
        node.integer("coord_start", 2),
        node.integer("score_index", 1),
        node.integer("id_index", -1),
        node.integer("background_id", -1),
        node.flag("force_suppress", False),
        kind == "center",
    )


def multibox_prior(
    features: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    sizes: Sequence[float],
    ratios: Sequence[float],
    clip: bool,
    steps: Sequence[float],
    offsets: Sequence[float],
) -> Tensor:
    """Return default boxes (1, places * boxes, 4) as corners in fractions of the image.

    Each place has all sizes with the first ratio, then the first size with the other ratios. The
    function takes a shape, so that a graph shows that the boxes do not depend on data. Sizes are
    fractions of the height, ratios of width to height, steps and offsets in y and x; a step of -1
    divides the image by the number of places.
    """
    rows, columns = features[2:]
    kind: dict[str, Any] = {"dtype": dtype, "device": device}
    shapes = [(size, math.sqrt(ratios[0])) for size in sizes]
    shapes += [(sizes[0], math.sqrt(ratio)) for ratio in ratios[1:]]
    half = torch.tensor(
        [(size * rows / columns * root / 2, size / root / 2) for size, root in shapes]
    ).to(**kind)
    step_y = steps[0] if steps[0] > 0 else 1 / rows
    step_x = steps[1] if steps[1] > 0 else 1 / columns
    y = (torch.arange(rows).to(**kind) + offsets[0]) * step_y
    x = (torch.arange(columns).to(**kind) + offsets[1]) * step_x
    centers = torch.stack(torch.meshgrid(x, y, indexing="xy"), -1).unsqueeze(2)
    boxes = torch.cat([centers - half, centers + half], -1).reshape(1, -1, 4)
    return boxes.clamp(0, 1) if clip else boxes


def _decoded(locations: Tensor, anchors: Tensor, variances: Sequence[float]) -> Tensor:
    """Return the corners of boxes (N, boxes, 4) from what the network says about anchors."""
    corners = anchors[0]
    size, center = corners[:, 2:] - corners[:, :2], (corners[:, 2:] + corners[:, :2]) / 2
    moved = locations.reshape(locations.shape[0], -1, 4) * torch.tensor(list(variances)).to(
        locations
    )
    middle, half = moved[..., :2] * size + center, moved[..., 2:].exp() * size / 2
    return torch.cat([middle - half, middle + half], -1)


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

    Scores are (N, classes, boxes), the background first, locations (N, boxes * 4), and anchors
    (1, boxes, 4) corners. ``most`` detections are kept, -1 for all.
    """
    boxes = _decoded(locations, anchors, variances)
    boxes = boxes.clamp(0, 1) if clip else boxes
    best, kinds = scores[:, 1:].max(1)
    valid, count = best >= threshold, best.shape[1]
    place = torch.arange(count, device=scores.device)
    _, order = ranked(valid.to(best), count)
    limit = count
    if 0 < overlap <= 1:
        limit = min(most, count) if most > 0 else count
        _, better = ranked(torch.where(valid, best, -torch.inf), count)
        order = torch.where(place < limit, better, order)  # MXNet leaves the others where they were
    best, kinds = best.gather(1, order), kinds.gather(1, order)
    boxes = boxes.gather(1, order.unsqueeze(-1).expand(-1, -1, 4))
    valid = place < valid.sum(1, keepdim=True)
    kept = valid & (place < limit)
    if 0 < overlap <= 1:
        own = kept.unsqueeze(1)
        if not across_classes:
            labels = torch.arange(scores.shape[1] - 1, device=scores.device)
            own = own & (kinds.unsqueeze(1) == labels.view(-1, 1))
        masked = torch.where(own, best.unsqueeze(1), -torch.inf)
        # A box that overlaps by just so much goes too.
        below = float(np.nextafter(np.float32(overlap), np.float32(0)))
        kept = kept_boxes(boxes, masked, below, torch.finfo(torch.float32).min).any(1)
    label = torch.where(kept, kinds.to(best), -1.0)
    rows = torch.cat([torch.stack([label, best], -1), boxes], -1)
    return torch.where(valid.unsqueeze(-1), rows, -1.0)


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
    """Return rows of boxes (..., boxes, numbers) by their scores, those that are dropped as -1.

    The four numbers of a box begin at ``start``. ``most`` boxes are compared, -1 for all; an
    ``id_index`` or a ``background`` of -1 stands for none.
    """
    flat = data.reshape(-1, *data.shape[-2:])
    total = flat.shape[1]
    scores = flat[..., score_index]
    valid = scores > threshold
    if id_index >= 0 and background >= 0:
        valid = valid & (flat[..., id_index] != background)
    count = min(most, total) if most > 0 else total
    scores, order = ranked(torch.where(valid, scores, -torch.inf), count)
    rows = _rows_at(flat, order)
    boxes = rows[..., start : start + 4]
    if is_center:
        middle, half = boxes[..., :2], boxes[..., 2:] / 2
        boxes = torch.cat([middle - half, middle + half], -1)
    scores = scores.unsqueeze(1)
    if id_index >= 0 and not across_classes:
        own = rows[..., id_index]
        labels = torch.unique(own.detach())
        scores = torch.where(own.unsqueeze(1) == labels.view(-1, 1), scores, -torch.inf)
    kept = kept_boxes(boxes, scores, overlap, torch.finfo(torch.float32).min).any(1)
    _, order = ranked(kept.to(flat), count)  # those that are kept come to the front
    place = torch.arange(count, device=data.device)
    found = place < kept.sum(1, keepdim=True)
    rows = torch.where(found.unsqueeze(-1), _rows_at(rows, order), -1.0)
    return F.pad(rows, (0, 0, 0, total - count), value=-1.0).reshape(data.shape)


def _rows_at(rows: Tensor, order: Tensor) -> Tensor:
    """Return rows (N, rows, numbers) at places (N, count)."""
    return rows.gather(1, order.unsqueeze(-1).expand(-1, -1, rows.shape[2]))

"""The layers of SSD: default boxes, and the choice of detections."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

__all__ = ["DetectionOptions", "Detections", "PriorBoxes", "PriorOptions"]


@dataclass(frozen=True)
class PriorOptions:
    """How default boxes are laid out.

    Attributes:
        min_sizes, max_sizes: sides of squares in pixels; none or equally many maxima.
        ratios: of width to height, without 1.
        clip: cut boxes off at the image.
        variances: one, or one for each coordinate.
        image: width and height, 0 for those of the image that the network reads.
        steps: pixels between boxes in x and y, 0 to divide the image by the number of places.
        offset: of the first box, in steps.
    """

    min_sizes: tuple[float, ...]
    max_sizes: tuple[float, ...]
    ratios: tuple[float, ...]
    clip: bool
    variances: tuple[float, ...]
    image: tuple[int, int]
    steps: tuple[float, float]
    offset: float


def _sides(options: PriorOptions) -> list[tuple[float, float]]:
    """Return width and height of the boxes of one place, in Caffe's order."""
    result = []
    for number, small in enumerate(options.min_sizes):
        result.append((small, small))
        if options.max_sizes:
            side = math.sqrt(small * options.max_sizes[number])
            result.append((side, side))
        for ratio in options.ratios:
            root = math.sqrt(ratio)
            result.append((small * root, small / root))
    return result


class PriorBoxes(nn.Module):
    """Default boxes of a map: corners as fractions of the image, and variances.

    Args:
        options: how the boxes are laid out.
    """

    def __init__(self, options: PriorOptions) -> None:
        super().__init__()
        self.options = options

    def forward(self, features: Tensor, image: Tensor) -> Tensor:
        """Return (1, 2, boxes * 4); of a map and of the image only the sizes count."""
        options, (rows, columns) = self.options, features.shape[2:]
        width, height = options.image[0] or image.shape[3], options.image[1] or image.shape[2]
        distance_x, distance_y = (
            options.steps[0] or width / columns,
            options.steps[1] or height / rows,
        )
        x = (torch.arange(columns).to(features) + options.offset) * distance_x
        y = (torch.arange(rows).to(features) + options.offset) * distance_y
        half = torch.tensor(_sides(options)).to(features) / 2
        grid = (rows, columns, len(half))
        left = (x.view(1, -1, 1) - half[:, 0]).expand(grid) / width
        right = (x.view(1, -1, 1) + half[:, 0]).expand(grid) / width
        top = (y.view(-1, 1, 1) - half[:, 1]).expand(grid) / height
        bottom = (y.view(-1, 1, 1) + half[:, 1]).expand(grid) / height
        boxes = torch.stack([left, top, right, bottom], -1).reshape(1, 1, -1)
        if options.clip:
            boxes = boxes.clamp(0, 1)
        repeated = options.variances * (4 // len(options.variances))
        spread = torch.tensor(repeated).to(features).repeat(boxes.shape[2] // 4)
        return torch.cat([boxes, spread.view(1, 1, -1)], 1)


@dataclass(frozen=True)
class DetectionOptions:
    """How detections are chosen.

    Attributes:
        classes: how many there are, the background included.
        shared: one box for all classes.
        background: the class that is no detection, -1 for none.
        code: ``"CORNER"``, ``"CENTER_SIZE"`` or ``"CORNER_SIZE"``: what locations say.
        scaled: locations are not yet multiplied by the variances.
        confidence: the least score.
        overlap: boxes that overlap more with a better one are dropped.
        candidates: boxes of each class that are compared, -1 for all.
        kept: detections of each image, -1 for all.
    """

    classes: int
    shared: bool
    background: int
    code: str
    scaled: bool
    confidence: float
    overlap: float
    candidates: int
    kept: int


class Detections(nn.Module):
    """The choice of detections among decoded boxes.

    Args:
        options: how they are chosen.
    """

    def __init__(self, options: DetectionOptions) -> None:
        super().__init__()
        self.options = options

    def forward(self, locations: Tensor, scores: Tensor, priors: Tensor) -> Tensor:
        """Return detections as (1, 1, count, 7): image, class, score and corners of a box.

        A batch without detections gives one row of -1.

        Args:
            locations: (N, boxes * 4), or four for each class.
            scores: (N, boxes * classes).
            priors: of :class:`PriorBoxes`.
        """
        options, boxes = self.options, priors.shape[2] // 4
        places = 1 if options.shared else options.classes
        corners, spread = priors[0].reshape(2, boxes, 1, 4)
        decoded = _decode(locations.reshape(-1, boxes, places, 4), corners, spread, options)
        confidence = scores.reshape(len(decoded), boxes, options.classes)
        rows = [
            row
            for number in range(len(decoded))
            for row in _of_image(number, decoded[number], confidence[number], options)
        ]
        if not rows:
            return torch.full((1, 1, 1, 7), -1.0, dtype=scores.dtype, device=scores.device)
        return torch.stack(rows).view(1, 1, -1, 7)


def _decode(x: Tensor, prior: Tensor, spread: Tensor, options: DetectionOptions) -> Tensor:
    """Return the corners of boxes from what the network says about default boxes."""
    x = x if options.scaled else x * spread
    if options.code == "CORNER":
        return prior + x
    size = prior[..., 2:] - prior[..., :2]
    if options.code == "CORNER_SIZE":
        return prior + x * torch.cat([size, size], -1)
    middle = (prior[..., 2:] + prior[..., :2]) / 2 + x[..., :2] * size
    half = torch.exp(x[..., 2:]) * size / 2
    return torch.cat([middle - half, middle + half], -1)


def _of_image(
    number: int, boxes: Tensor, scores: Tensor, options: DetectionOptions
) -> list[Tensor]:
    """Return the rows of one image: classes in order, each with its best boxes first."""
    found: list[tuple[float, int, int]] = []
    for label in range(options.classes):
        if label != options.background:
            own = boxes[:, 0 if options.shared else label]
            kept = _suppress(own.detach(), scores[:, label].detach(), options)
            found += [(float(scores[place, label].detach()), label, place) for place in kept]
    if -1 < options.kept < len(found):
        best = sorted(found, key=lambda item: -item[0])[: options.kept]
        chosen = set(best)
        found = [item for item in found if item in chosen]
    rows = []
    for _, label, place in found:
        head = scores.new_tensor([number, label])
        box = boxes[place, 0 if options.shared else label]
        rows.append(torch.cat([head, scores[place, label].reshape(1), box]))
    return rows


def _suppress(boxes: Tensor, scores: Tensor, options: DetectionOptions) -> list[int]:
    """Return the places of boxes that overlap no better one too much, the best first."""
    order = torch.sort(scores, descending=True, stable=True).indices
    order = order[scores[order] > options.confidence]
    if options.candidates > -1:
        order = order[: options.candidates]
    kept: list[int] = []
    for place in order.tolist():
        if all(_overlap(boxes[place], boxes[other]) <= options.overlap for other in kept):
            kept.append(place)
    return kept


def _overlap(a: Tensor, b: Tensor) -> float:
    """Return the area that two boxes share over the area that they cover."""
    sides = torch.minimum(a[2:], b[2:]) - torch.maximum(a[:2], b[:2])
    if bool((sides < 0).any()):
        return 0.0
    shared = float(sides[0] * sides[1])
    areas = [
        float((box[2] - box[0]).clamp(min=0) * (box[3] - box[1]).clamp(min=0)) for box in (a, b)
    ]
    return shared / max(areas[0] + areas[1] - shared, 1e-12)

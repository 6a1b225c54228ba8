"""The layers of SSD detectors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.frontends.building.functions import kept_boxes, ranked
from torchq.frontends.building.graph import Value
from torchq.frontends.caffe.node import CaffeLayer, converter


def _ratios(layer: CaffeLayer) -> list[float]:
    """Return the ratios of boxes that are no squares, each once, with their inverses if asked."""
    flip = layer.attr("flip", True)
    result = list[float]()
    for ratio in layer.settings.numbers("aspect_ratio"):
        if any(abs(ratio - other) < 1e-6 for other in (1.0, *result)):
            continue
        result += [ratio, 1 / ratio] if flip else [ratio]
    return result


@converter("PriorBox", about="prior_box_param")
def _prior_box(layer: CaffeLayer) -> Value:
    names = ("min_size", "max_size", "variance")
    small, large, variances = (layer.settings.numbers(name) for name in names)
    variances = variances or [0.1]
    if (
        not small
        or (large and len(large) != len(small))
        or len(variances) not in (1, 4)
    ):
        layer.refuse(f"got min_size {small}, max_size {large}, variance {variances}")
    both = layer.attr("img_size", 0)
    distance = layer.attr("step", 0.0)
    options = PriorOptions(
        min_sizes=tuple(small),
        max_sizes=tuple(large),
        ratios=tuple(_ratios(layer)),
        clip=layer.attr("clip", False),
        variances=tuple(variances),
        image=(layer.attr("img_w", both), layer.attr("img_h", both)),
        steps=(layer.attr("step_w", distance), layer.attr("step_h", distance)),
        offset=layer.attr("offset", 0.5),
    )
    layer.result_ndim = 3
    shapes = [layer.call(getattr, value, "shape") for value in layer.inputs[:2]]
    kind = [layer.call(getattr, layer.inputs[0], name) for name in ("dtype", "device")]
    return layer.module(PriorBoxes(options), *shapes, *kind)


@converter("DetectionOutput", about="detection_output_param")
def _detection_output(layer: CaffeLayer) -> Value:
    settings = layer.settings
    nms = settings.settings("nms_param")
    if nms.attr("eta", 1.0) != 1:
        layer.refuse("a threshold that changes (eta) is not supported")
    for name in ("save_output_param", "visualize", "visualize_threshold", "save_file"):
        settings.settings(name)  # they write files, and do not change the result
    overlap = nms.attr("nms_threshold", 0.3)
    if not 0 <= overlap <= 1:
        layer.refuse(f"nms_threshold is {overlap}; expected 0 to 1")
    options = DetectionOptions(
        classes=layer.attr("num_classes", int),
        shared=layer.attr("share_location", True),
        background=layer.attr("background_label_id", 0),
        code=settings.choice(
            "code_type", "CORNER", "CENTER_SIZE", "CORNER_SIZE", first=1
        ),
        scaled=layer.attr("variance_encoded_in_target", False),
        confidence=layer.attr("confidence_threshold", -3.4e38),
        overlap=overlap,
        candidates=nms.attr("top_k", -1),
        kept=layer.attr("keep_top_k", -1),
    )
    layer.result_ndim = 4
    return layer.module(Detections(options), *layer.inputs[:3])


@dataclass(frozen=True)
class PriorOptions:
    """How default boxes are laid out."""

    min_sizes: tuple[float, ...]  # sides of squares in pixels
    max_sizes: tuple[float, ...]
    ratios: tuple[float, ...]  # of width to height, without 1
    clip: bool
    variances: tuple[float, ...]  # one, or one for each coordinate
    # Width and height, 0 for those of the image that the network reads.
    image: tuple[int, int]
    # Pixels in x and y, 0 to divide the image by the number of places.
    steps: tuple[float, float]
    offset: float  # of the first box, in steps


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
    """Default boxes (corners as shares of the image) and variances, made from sizes alone."""

    def __init__(self, options: PriorOptions) -> None:
        super().__init__()
        self.options = options

    def forward(
        self,
        features: Sequence[int],
        image: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Tensor:
        """Return (1, 2, boxes * 4)."""
        options = self.options
        rows, columns = features[2:]
        width = options.image[0] or image[3]
        height = options.image[1] or image[2]
        across, down = options.steps
        distance_x = across or width / columns
        distance_y = down or height / rows
        kind: dict[str, Any] = {"dtype": dtype, "device": device}
        x = (torch.arange(columns).to(**kind) + options.offset) * distance_x
        y = (torch.arange(rows).to(**kind) + options.offset) * distance_y
        half = torch.tensor(_sides(options)).to(**kind) / 2
        grid = (rows, columns, half.shape[0])
        left = (x.view(1, -1, 1) - half[:, 0]).expand(grid) / width
        right = (x.view(1, -1, 1) + half[:, 0]).expand(grid) / width
        top = (y.view(-1, 1, 1) - half[:, 1]).expand(grid) / height
        bottom = (y.view(-1, 1, 1) + half[:, 1]).expand(grid) / height
        boxes = torch.stack([left, top, right, bottom], -1).reshape(1, 1, -1)
        if options.clip:
            boxes = boxes.clamp(0, 1)
        repeated = options.variances * (4 // len(options.variances))
        spread = torch.tensor(repeated).to(**kind).repeat(boxes.shape[2] // 4)
        return torch.cat([boxes, spread.view(1, 1, -1)], 1)


@dataclass(frozen=True)
class DetectionOptions:
    """How detections are chosen."""

    classes: int
    shared: bool
    background: int  # -1 for none
    code: str
    scaled: bool  # locations are not yet multiplied by the variances
    confidence: float
    overlap: float
    candidates: int  # of each class, -1 for all
    kept: int  # of each image, -1 for all


class Detections(nn.Module):
    """The choice of detections among decoded boxes."""

    def __init__(self, options: DetectionOptions) -> None:
        super().__init__()
        self.options = options

    def forward(self, locations: Tensor, scores: Tensor, priors: Tensor) -> Tensor:
        """Return detections as (1, 1, count, 7): image, class, score and corners of a box.

        Locations are (N, boxes * 4), or four for each class; scores are (N, boxes * classes).

        Classes come in order, each with its best boxes first. A batch without detections gives one
        row of -1.
        """
        options = self.options
        count = priors.shape[2] // 4
        labels = [
            label for label in range(options.classes) if label != options.background
        ]
        places = 1 if options.shared else options.classes
        corners, spread = priors[0].reshape(2, count, 1, 4)
        decoded = _decode(
            locations.reshape(-1, count, places, 4), corners, spread, options
        )
        decoded = decoded.transpose(1, 2)
        if not options.shared:
            decoded = decoded[:, labels]
        confidence = scores.reshape(-1, count, options.classes)[:, :, labels].transpose(
            1, 2
        )
        compared = min(options.candidates, count) if options.candidates > -1 else count
        confidence, order = ranked(confidence, compared)
        index = order.unsqueeze(-1).expand(-1, -1, -1, 4)
        boxes = decoded.expand(-1, len(labels), -1, -1).gather(2, index)
        is_kept = self._kept(boxes, confidence)
        image = (
            torch.arange(is_kept.shape[0])
            .to(scores)
            .view(-1, 1, 1)
            .expand(is_kept.shape)
        )
        label = torch.tensor(labels).to(scores).view(1, -1, 1).expand(is_kept.shape)
        rows = torch.cat(
            [torch.stack([image, label, confidence], -1), boxes], -1
        ).reshape(-1, 7)
        # The last row stands for no detection.
        rows = torch.cat([rows, torch.full_like(rows[:1], -1.0)])
        found = torch.cat([is_kept.reshape(-1), ~is_kept.any().reshape(1)])
        return rows[torch.nonzero(found).squeeze(1)].unsqueeze(0).unsqueeze(0)

    def _kept(self, boxes: Tensor, scores: Tensor) -> Tensor:
        """Return which boxes (N, classes, boxes, 4), the best first, are detections."""
        options = self.options
        flat = kept_boxes(
            boxes.flatten(0, 1), scores.flatten(0, 1).unsqueeze(1), options.overlap,
            options.confidence,
        )  # fmt: skip
        is_kept = flat.reshape(scores.shape).flatten(1)
        if options.kept > -1:
            most = min(options.kept, is_kept.shape[1])
            _, best = ranked(torch.where(is_kept, scores.flatten(1), -torch.inf), most)
            is_kept = is_kept & (
                torch.zeros_like(scores).flatten(1).scatter(1, best, 1.0) > 0
            )
        return is_kept.reshape(scores.shape)


def _decode(
    x: Tensor, prior: Tensor, spread: Tensor, options: DetectionOptions
) -> Tensor:
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

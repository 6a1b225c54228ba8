"""Detections of a quantized model beside those of the float model: a metric that needs no labels.

The squared error of a detector's output counts every position alike, and nearly all are
background. Here boxes are matched instead: the float model's detections are the truth.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import CalibrationError, ConfigError
from torchq.graph import call_model, map_tensors, tensors_in
from torchq.utils import device_of, network_of, short_repr, untouched

#: Boxes of an image that are looked at, each with a label: those with the largest scores.
_MOST = 300
#: Detections of all batches below which a figure says little.
_FEW = 20
#: How far from 1 the scores of a place may add up to be those of a softmax, after quantization.
_SOFTMAX = 0.05
#: A column of which half of the places have so much holds no scores.
_USUAL = 0.25
#: Images of a head of YOLO have at least so many places.
_PLACES = 8
_OWN_LAYOUT = (
    "Pass torchq.analysis.Detections(layout=function), which returns a Detected for each "
    "image"
)


@dataclass(frozen=True)
class Detected:
    """What was detected in one image.

    Attributes:
        boxes: (n, 4), two opposite corners (x1, y1, x2, y2), in any unit.
        scores: (n,), between 0 and 1.
        labels: (n,), whole numbers.
        masks: (n, H, W), between 0 and 1; None for boxes alone.
    """

    boxes: Tensor
    scores: Tensor
    labels: Tensor
    masks: Tensor | None = None

    def above(self, threshold: float) -> Detected:
        """Return those with at least this score, the best ones first."""
        order = self.scores.argsort(descending=True, stable=True)
        order = order[self.scores[order] >= threshold][:_MOST]
        masks = None if self.masks is None else self.masks[order]
        return Detected(
            self.boxes[order], self.scores[order], self.labels[order], masks
        )


#: From an output of a model to what it detects in each image of the batch.
Layout = Callable[[Any], Sequence[Detected]]


@dataclass(frozen=True)
class DetectionAgreement:
    """How far two models detect the same.

    Attributes:
        precision: the share of the quantized model's detections that the float model has too.
        recall: the share of the float model's detections that the quantized model has too.
        precision_with_slack, recall_with_slack: the same where a box may have a score a little
            below the threshold in the other model, which crossing it by chance makes common.
        score_change: the mean change of the scores of boxes that both models have.
        mask_overlap: the mean intersection over union of their masks; NaN without masks.
        count: detections of the float model.
    """

    precision: float
    recall: float
    precision_with_slack: float
    recall_with_slack: float
    score_change: float
    mask_overlap: float
    count: int

    @property
    def value(self) -> float:
        """The harmonic mean of precision and recall with slack, and of the overlap of masks."""
        parts = [self.precision_with_slack, self.recall_with_slack]
        if not math.isnan(self.mask_overlap):
            parts.append(self.mask_overlap)
        if any(math.isnan(part) for part in parts):
            return math.nan
        return len(parts) / sum(1 / part for part in parts) if all(parts) else 0.0

    def __str__(self) -> str:
        masks = (
            "" if math.isnan(self.mask_overlap) else f", masks {self.mask_overlap:.3f}"
        )
        return (
            f"precision {self.precision:.3f}, recall {self.recall:.3f} (with slack "
            f"{self.precision_with_slack:.3f}, {self.recall_with_slack:.3f}), scores "
            f"{self.score_change:+.3f}{masks}, {self.count} detections"
        )


class Detections:
    """The metric "detections": boxes of a quantized model matched with those of the float model.

    Two boxes match where their labels are equal and they overlap by ``iou``; each is matched once,
    those with the largest scores first. A box with scores for several labels is a detection of each
    label whose score is large enough, as in evaluations of mean average precision.

    Args:
        layout: from an output to a :class:`Detected` for each image. None finds out: lists of
            dicts with "boxes", "scores" and "labels" (torchvision); boxes (N, A, 4) and scores
            (N, A, C) beside each other, of which the scores of a softmax have a column for the
            background, the largest one; (N, K, 6) with corners, score and label; heads of YOLO as
            (N, 4 + C, A), or (N, A, 5 + C) with a score for objects, of centres and sizes; of DETR
            as (N, A, 4 + C). Keypoints, angles and factors of masks may follow the scores.
        threshold: scores from which on a box counts.
        slack: how far below it a box of the other model may be, to be no error.
        iou: the least overlap, over the union.

    Raises:
        ConfigError: the layout of an output is none of these.

    Example:
        >>> boxes = torch.tensor([[0.0, 0.0, 4.0, 4.0], [5.0, 5.0, 9.0, 9.0]])
        >>> labels = torch.tensor([1, 2])
        >>> of_float = [{"boxes": boxes, "scores": torch.tensor([0.9, 0.27]), "labels": labels}]
        >>> quantized = [{"boxes": boxes, "scores": torch.tensor([0.8, 0.22]), "labels": labels}]
        >>> print(Detections().agreement(quantized, of_float))
        precision 1.000, recall 0.500 (with slack 1.000, 1.000), scores -0.075, 2 detections
    """

    name, unit = "detections", ""

    def __init__(
        self,
        layout: Layout | None = None,
        *,
        threshold: float = 0.25,
        slack: float = 0.05,
        iou: float = 0.5,
    ) -> None:
        are_numbers = all(
            isinstance(number, (int, float)) for number in (slack, threshold, iou)
        )
        if not are_numbers or not (0 <= slack < threshold < 1 and 0 < iou < 1):
            raise ConfigError(
                f"Detections: got threshold={threshold}, slack={slack}, iou={iou}; expected "
                "0 <= slack < threshold < 1 and 0 < iou < 1"
            )
        self.layout, self.threshold, self.slack, self.iou = (
            layout,
            threshold,
            slack,
            iou,
        )

    def sums(
        self, output: object, reference: object, batch: object = None
    ) -> list[float]:
        """Return the counts and sums of one batch, which add up over batches."""
        read = self.layout or detections_in
        detected, expected = read(output), read(reference)
        if len(detected) != len(expected):
            raise ConfigError(
                f"Detections: got {len(detected)} images in the output and {len(expected)} in the "
                "reference; expected the same batch"
            )
        rows = [self._of_image(q, f) for q, f in zip(detected, expected, strict=True)]
        return (
            [sum(column) for column in zip(*rows, strict=True)] if rows else [0.0] * 9
        )

    def _of_image(self, quantized: Detected, of_float: Detected) -> list[float]:
        least = self.threshold - self.slack
        q = quantized.above(least)
        f = of_float.above(least)
        pairs = _matches(q, f, self.iou)
        strong_q = q.scores >= self.threshold
        strong_f = f.scores >= self.threshold
        both = [(i, j) for i, j in pairs if strong_q[i] and strong_f[j]]
        change = [float(q.scores[i] - f.scores[j]) for i, j in pairs if strong_f[j]]
        overlaps = []
        if q.masks is not None and f.masks is not None:
            overlaps = [_mask_iou(q.masks[i], f.masks[j]) for i, j in both]
        figures = (
            *(strong_q.sum(), strong_f.sum(), len(both)),
            sum(bool(strong_q[i]) for i, _ in pairs),
            sum(bool(strong_f[j]) for _, j in pairs),
            *(sum(change), len(change), sum(overlaps), len(overlaps)),
        )
        return list(map(float, figures))

    def of_sums(self, sums: Sequence[float]) -> DetectionAgreement:
        """Return the agreement for sums over all batches."""
        detected, expected, both, near_q, near_f, change, changed, overlap, masks = sums
        return DetectionAgreement(
            _share(both, detected, expected),
            _share(both, expected, detected),
            _share(near_q, detected, expected),
            _share(near_f, expected, detected),
            change / changed if changed else 0.0,
            overlap / masks if masks else math.nan,
            int(expected),
        )

    def value(self, sums: Sequence[float]) -> float:
        """Return :attr:`DetectionAgreement.value` for sums over all batches."""
        return self.of_sums(sums).value

    def check_count(self, sums: Sequence[float]) -> None:
        """Warn where the float model detects hardly anything in all batches.

        Raises:
            CalibrationError: it detects nothing, so that there is nothing to compare.
        """
        count = self.of_sums(sums).count
        if not count:
            raise CalibrationError(
                "Detections: the float model detects nothing in these batches; expected "
                f"{_FEW} objects or more. Pass images of the task, scaled as in training, or a "
                "lower threshold"
            )
        if count < _FEW:
            warnings.warn(
                f"Detections: the float model detects {count} objects in these batches; expected "
                f"{_FEW} or more for a figure that says something. Pass images of the task, or a "
                "lower threshold",
                stacklevel=3,
            )

    def check_layout(self, reference: object) -> None:
        """Try the metric on an output and itself, and on one that shows the background alone.

        Args:
            reference: an output of the float model.

        Raises:
            ConfigError: an output does not agree with itself, or objects are found where every
                place has the scores that most have: the layout is another one.
        """
        itself = self.agreement(reference, reference)
        if itself.count and not itself.value > 1 - 1e-6:
            raise ConfigError(
                f"Detections: an output agrees with itself by {itself.value:.3f}; expected 1. Its "
                f"layout is read in a wrong way. {_OWN_LAYOUT}"
            )
        read = self.layout or detections_in
        empty = background_of(reference)
        objects = sum(len(image.above(self.threshold).scores) for image in read(empty))
        if objects and empty is not reference:
            raise ConfigError(
                f"Detections: finds {objects} objects in an output whose places all have the "
                "scores that most of them have; expected none, as that is the background. Its "
                f"layout is read in a wrong way. {_OWN_LAYOUT}"
            )

    def against(
        self, model: nn.Module, batches: Sequence[object]
    ) -> Callable[[nn.Module], float]:
        """Return a metric of quantized models: how far they detect what ``model`` does.

        Args:
            model: the float model; it runs now, on all batches.
            batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.

        Raises:
            CalibrationError: ``model`` detects nothing in them.
        """
        expected = _outputs(network_of(model), batches)
        for output in expected[:1]:
            self.check_layout(output)
        whole = [
            sum(row) for row in zip(*map(self.sums, expected, expected), strict=True)
        ]
        self.check_count(whole)

        def detections(quantized: nn.Module) -> float:
            outputs = _outputs(quantized, batches)
            rows = list(map(self.sums, outputs, expected))
            return self.value([sum(column) for column in zip(*rows, strict=True)])

        return detections

    def agreement(self, output: object, reference: object) -> DetectionAgreement:
        """Compare two outputs for one batch, of a quantized model and of the float one."""
        return self.of_sums(self.sums(output, reference))


def _outputs(model: nn.Module, batches: Sequence[object]) -> list[Any]:
    with untouched(model):
        return [call_model(model, batch, device=device_of(model)) for batch in batches]


def _share(part: float, whole: float, other: float) -> float:
    """Return a share; 1 where neither model detects anything, 0 where only the other one does."""
    return part / whole if whole else float(not other)


def _matches(q: Detected, f: Detected, least: float) -> list[tuple[int, int]]:
    """Return pairs of boxes, each box in one pair at most, the best boxes of ``f`` first."""
    if not len(q.scores) or not len(f.scores):
        return []
    overlap = box_iou(q.boxes, f.boxes)
    overlap[q.labels[:, None] != f.labels[None]] = 0
    pairs = []
    for j in range(overlap.shape[1]):
        best = int(overlap[:, j].argmax())
        if overlap[best, j] >= least:
            pairs.append((best, j))
            overlap[best] = 0
    return pairs


def box_iou(a: Tensor, b: Tensor) -> Tensor:
    """Return the overlap of boxes (n, 4) and (m, 4), corners, over their union: (n, m)."""
    low = torch.maximum(a[:, None, :2], b[None, :, :2])
    high = torch.minimum(a[:, None, 2:], b[None, :, 2:])
    common = (high - low).clamp(min=0).prod(2)
    union = _areas(a)[:, None] + _areas(b)[None] - common
    return common / union.clamp(min=1e-12)


def _areas(boxes: Tensor) -> Tensor:
    """Return the area of each box (n, 4); 0 where its corners are swapped."""
    return (boxes[:, 2:] - boxes[:, :2]).clamp(min=0).prod(1)


def _mask_iou(a: Tensor, b: Tensor) -> float:
    one, other = a > 0.5, b > 0.5
    union = float((one | other).sum())
    return float((one & other).sum()) / union if union else 1.0


def detections_in(output: object) -> list[Detected]:
    """Return what an output of a usual layout detects; see :class:`Detections`."""
    if isinstance(output, Sequence) and output and all(map(_is_image, output)):
        return [_of_dict(image) for image in output]
    tensors = [
        t.detach().float().cpu() for t in tensors_in(output) if t.is_floating_point()
    ]
    threes = [t for t in tensors if t.dim() == 3]
    fours = [t for t in threes if t.shape[-1] == 4]
    if fours:
        # Scores of three classes and the background have four columns too.
        boxes = next((t for t in fours if not _is_softmax(t)), fours[0])
        same = [t for t in threes if t is not boxes and t.shape[:2] == boxes.shape[:2]]
        if same:
            scores = without_background(same[0])
            return [_of_scores(b, s) for b, s in zip(boxes, scores, strict=True)]
    if threes and _are_found(threes[0]):
        return [
            Detected(rows[:, :4], rows[:, 4], rows[:, 5].round()) for rows in threes[0]
        ]
    if threes and min(threes[0].shape[1:]) > 4:
        boxes, scores = _of_heads(threes[0])
        return [_of_scores(b, s) for b, s in zip(boxes, scores, strict=True)]
    raise ConfigError(
        f"Detections: got the output {short_repr(output)} with tensors of shapes "
        f"{[tuple(t.shape) for t in tensors]}; expected dicts with boxes, scores and labels, boxes "
        f"(N, A, 4) with scores (N, A, C), (N, K, 6), or a head of YOLO. {_OWN_LAYOUT}"
    )


def _are_found(rows: Tensor) -> bool:
    """Return True for (N, K, 6) with corners, score and label, perhaps before keypoints and masks.

    The label is a whole number, which a score of (N, A, 6), a YOLO with one class, is not. What
    has more columns is known by its order as well, the largest score first.
    """
    if rows.shape[-1] < 6:
        return False
    scores, labels = rows[..., 4], rows[..., 5]
    if not torch.equal(labels, labels.round()):
        return False
    has_more_rows = rows.shape[2] <= rows.shape[1] <= _MOST
    is_sorted = has_more_rows and bool((scores.diff(dim=1) <= 0).all())
    return rows.shape[-1] == 6 or is_sorted


def _is_softmax(x: Tensor) -> bool:
    """Return True if numbers of (N, A, C) are >= 0 and add up to 1 at each place."""
    if x.shape[-1] < 2 or not x.numel():
        return False
    adds_up = (x.sum(-1) - 1).abs() < _SOFTMAX
    return bool((x >= -_SOFTMAX).all()) and float(adds_up.float().mean()) > 0.99


def without_background(scores: Tensor) -> Tensor:
    """Return scores (N, A, C) without the column of the background that a softmax has.

    Where the scores of each place add up to 1, most places are background, and its column is the
    one with the largest mean: the first of SSD, the last of DETR.
    """
    if not _is_softmax(scores):
        return scores
    background = int(scores.mean((0, 1)).argmax())
    # Labels stay what they are: a score of 0 stands in the place of the background.
    return scores.index_fill(-1, torch.tensor([background]), 0.0)


def background_of(output: object) -> Any:
    """Return an output whose places all have what most of them have; lists of boxes as they are."""
    if isinstance(output, Sequence) and output and all(map(_is_image, output)):
        return output

    def typical(x: Tensor) -> Tensor:
        if x.dim() != 3 or not x.is_floating_point() or max(x.shape[1:]) < _PLACES:
            return x
        if _are_found(x):
            return x  # These are detections already, of which each may be an object.
        places = 1 if x.shape[1] >= x.shape[2] else 2
        middle = x.float().median(places, keepdim=True).values.to(x.dtype)
        return middle.expand_as(x).clone()

    changed = map_tensors(output, typical)
    pairs = zip(tensors_in(output), tensors_in(changed), strict=True)
    return output if all(one is other for one, other in pairs) else changed


def _is_image(value: object) -> bool:
    return isinstance(value, Mapping) and {"boxes", "scores", "labels"} <= set(value)


def _of_dict(image: Mapping[str, Any]) -> Detected:
    boxes, scores, labels = (
        image[name].detach().cpu() for name in ("boxes", "scores", "labels")
    )
    masks = image.get("masks")
    if masks is not None:
        masks = masks.detach().float().cpu().reshape(len(masks), *masks.shape[-2:])
    return Detected(boxes.float(), scores.float(), labels, masks)


def _of_scores(boxes: Tensor, scores: Tensor) -> Detected:
    """Return each box (A, 4) for each label, by scores (A, C), without a better one that covers it.

    A box whose two best labels are nearly equal has both: which one is the best is then chance.
    """
    best, place = scores.flatten().sort(descending=True, stable=True)
    best, place = best[:_MOST], place[:_MOST]
    labels = place % scores.shape[1]
    boxes = boxes[place // scores.shape[1]]
    overlap = box_iou(boxes, boxes)
    covered = (overlap > 0.5) & (labels[:, None] == labels[None])
    # The best come first, so each that stays removes the ones behind it that it covers.
    keep = torch.ones(len(best), dtype=torch.bool)
    for i in range(len(best)):
        if keep[i]:
            keep[i + 1 :] &= ~covered[i, i + 1 :]
    return Detected(boxes[keep], best[keep], labels[keep])


def _of_heads(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return the corners (N, A, 4) and scores (N, A, C) of the head of a YOLO or DETR.

    It is (N, 4 + C, A), where keypoints, an angle or the factors of masks may follow the scores, or
    (N, A, 5 + C) with a score for objects, or (N, A, 4 + C) with boxes as shares of the image.
    """
    if rows.shape[1] < rows.shape[2]:
        rows = rows.transpose(1, 2)
        scores = rows[..., 4 : 4 + _count_scores(rows)]
    elif _are_shares(rows[..., :4]):
        scores = rows[..., 4:]
    else:
        scores = rows[..., 5:] * rows[..., 4:5]
    middle = rows[..., :2]
    half = rows[..., 2:4] / 2
    return torch.cat([middle - half, middle + half], -1), scores


def _count_scores(rows: Tensor) -> int:
    """Return how many columns behind the boxes are scores; all where they are logits.

    Scores are between 0 and 1, and most places detect nothing.
    """
    columns = rows[..., 4:].flatten(0, 1)
    low, high = columns.amin(0), columns.amax(0)
    is_score = (low >= -_SOFTMAX) & (high <= 1 + _SOFTMAX)
    is_score &= columns.median(0).values < _USUAL
    if not is_score[0]:
        return columns.shape[1]
    return int(is_score.long().cumprod(0).sum())


def _are_shares(boxes: Tensor) -> bool:
    """Return True for centres and sizes as shares of the image, not in pixels."""
    return bool(((boxes >= -_SOFTMAX) & (boxes <= 1 + _SOFTMAX)).all())

"""The metric of detections: matched by hand, in all layouts, and damaged."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import simulated
from torchq.analysis.detections import Detected, Detections, detections_in
from torchq.errors import CalibrationError, ConfigError

BOXES = torch.tensor(
    [[0.0, 0, 10, 10], [20, 20, 40, 30], [50, 0, 60, 40], [70, 70, 90, 90]]
)
SCORES = torch.tensor([0.9, 0.6, 0.4, 0.28])
LABELS = torch.tensor([0, 1, 1, 2])


def image(
    boxes: Tensor = BOXES, scores: Tensor = SCORES, labels: Tensor = LABELS
) -> list[dict[str, Tensor]]:
    return [{"boxes": boxes, "scores": scores, "labels": labels}]


def class_scores() -> Tensor:
    return torch.nn.functional.one_hot(LABELS, 3) * SCORES[:, None]


def centres() -> Tensor:
    return torch.cat(
        [(BOXES[:, :2] + BOXES[:, 2:]) / 2, BOXES[:, 2:] - BOXES[:, :2]], 1
    )


def head() -> Tensor:
    """A head of YOLO (1, 4 + C, A); more boxes than channels, those behind without a score."""
    rows = torch.cat([centres(), class_scores()], 1)
    return torch.cat([rows, torch.zeros(8, 7)])[None].transpose(1, 2)


def head_with_objects() -> Tensor:
    rows = torch.cat([centres(), torch.ones(4, 1), class_scores()], 1)
    return torch.cat([rows, torch.zeros(8, 8)])[None]


def head_with(*columns: Tensor) -> Tensor:
    """A head of YOLO with more numbers behind the scores of each box."""
    more = [column.expand(1, 1, head().shape[2]) for column in columns]
    return torch.cat([head(), *more], 1)


def found_with_keypoints() -> Tensor:
    found = torch.cat([LAYOUTS["end to end"], torch.zeros(1, 16, 6)], 1)
    keypoints = torch.rand(1, 20, 9, generator=torch.Generator().manual_seed(3)) * 90
    return torch.cat([found, keypoints], 2)


#: The column of a keypoint, an angle that all boxes have, and a factor of a mask of each box.
ACROSS, ANGLE = torch.tensor(35.0), torch.tensor(0.785)
FACTOR = torch.linspace(-2, 0.9, 12)[None, None]

LAYOUTS: dict[str, Any] = {
    "dicts": image(),
    "boxes and scores": (BOXES[None], class_scores()[None]),
    "scores and boxes": {"scores": class_scores()[None], "boxes": BOXES[None]},
    "end to end": torch.cat([BOXES, SCORES[:, None], LABELS[:, None]], 1)[None],
    "head": (head(), [torch.zeros(1, 8, 2, 2)]),
    "head with objects": head_with_objects(),
    "head with keypoints": head_with(ACROSS, ACROSS, torch.tensor(0.9)),
    "head with angles": head_with(ANGLE),
    "head with masks": head_with(FACTOR, -FACTOR),
}
LAYOUTS["end to end with keypoints"] = found_with_keypoints()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_gives_the_same_detections(layout: str) -> None:
    (actual,) = detections_in(LAYOUTS[layout])
    actual = actual.above(0.1)
    torch.testing.assert_close(actual.boxes, BOXES)
    torch.testing.assert_close(actual.scores, SCORES)
    assert actual.labels.tolist() == LABELS.tolist()
    assert Detections().agreement(LAYOUTS[layout], image()).value == 1


@pytest.mark.parametrize(
    ("second", "agree"),
    [(0.59, True), (0.1, False)],
)
def test_which_of_two_nearly_equal_labels_is_the_best_is_no_error(
    second: float, agree: bool
) -> None:
    scores = class_scores()
    scores[1, 0] = second
    swapped = scores.clone()
    swapped[1, :2] = scores[1, :2].flip(0)
    actual = Detections().agreement(
        (BOXES[None], swapped[None]), (BOXES[None], scores[None])
    )
    assert actual.count == 4 + agree
    assert (actual.value == 1) is agree


def test_a_callable_reads_any_other_layout() -> None:
    def layout(output: Tensor) -> list[Detected]:
        return [Detected(output[:, 1:], output[:, 0], torch.zeros(len(output)))]

    rows = torch.cat([SCORES[:, None], BOXES], 1)
    assert Detections(layout).agreement(rows, rows).count == 4
    with pytest.raises(
        ConfigError, match=r"Pass torchq\.analysis\.Detections\(layout=function\)"
    ):
        detections_in(torch.zeros(2, 10))


def test_figures_are_those_counted_by_hand() -> None:
    # The first score falls, the second box is gone, the third one moved away, the last one fell
    # below the threshold within the slack, and one is new.
    boxes = torch.cat([BOXES[[0, 2, 3]], torch.tensor([[5.0, 80, 25, 95]])])
    boxes[1] += 30
    quantized = image(
        boxes, torch.tensor([0.8, 0.4, 0.22, 0.5]), torch.tensor([0, 1, 2, 0])
    )
    actual = Detections().agreement(quantized, image())
    assert actual.count == 4
    assert (actual.precision, actual.recall) == (
        pytest.approx(1 / 3),
        pytest.approx(1 / 4),
    )
    assert actual.precision_with_slack == pytest.approx(1 / 3)
    assert actual.recall_with_slack == pytest.approx(2 / 4)
    assert actual.score_change == pytest.approx((-0.1 - 0.06) / 2)
    assert actual.value == pytest.approx(2 / (3 + 2))


@pytest.mark.parametrize("damage", ["label", "place", "score", "twice"])
def test_it_says_no_to_each_kind_of_damage(damage: str) -> None:
    boxes = BOXES.clone()
    scores = SCORES.clone()
    labels = LABELS.clone()
    if damage == "label":
        labels[0] = 5
    elif damage == "place":
        boxes[0] += 6
    elif damage == "score":
        scores[1] = 0.15
    else:
        boxes, scores, labels = (torch.cat([t, t[:1]]) for t in (boxes, scores, labels))
    assert Detections().agreement(image(boxes, scores, labels), image()).value < 0.95


def test_masks_count_by_their_overlap() -> None:
    masks = torch.zeros(4, 1, 8, 8)
    masks[:, :, :4] = 1
    shifted = torch.zeros(4, 1, 8, 8)
    shifted[:, :, 2:6] = 1
    actual = Detections().agreement(
        [{**image()[0], "masks": shifted}], [{**image()[0], "masks": masks}]
    )
    assert actual.mask_overlap == pytest.approx(1 / 3)
    assert actual.value == pytest.approx(3 / (1 + 1 + 3))


def test_few_detections_are_a_warning_and_none_at_all_an_error() -> None:
    metric = Detections()
    empty = image(
        BOXES[:0],
        SCORES[:0],
        LABELS[:0],
    )
    assert metric.value(metric.sums(empty, empty)) == 1
    assert metric.value(metric.sums(empty, image())) == 0
    with pytest.warns(
        UserWarning, match="the float model detects 4 objects in these batches"
    ):
        metric.check_count(metric.sums(empty, image()))
    metric.check_count(metric.sums(6 * empty, 6 * image()))
    with pytest.raises(
        CalibrationError, match="the float model detects nothing in these batches"
    ):
        metric.check_count(metric.sums(image(), empty))


class Fixed(nn.Module):
    """A layer whose result is a head of YOLO: twelve boxes, four with a score."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(7, 7)
        nn.init.eye_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, rows: Tensor) -> Tensor:
        return self.layer(rows).transpose(1, 2)


def test_sensitivity_and_tune_take_it_by_name() -> None:
    rows = head().transpose(1, 2).expand(6, -1, -1)
    model = simulated(
        Fixed().eval(),
        [rows],
        torchq.recipes.int8(),
        correct=False,
    )
    report = torchq.sensitivity(model, [rows], "detections", progress=False)
    assert report.metric == "detections"
    assert report.reference == 1
    assert (
        report.baseline
        == Detections().agreement(model(rows), head().expand(6, -1, -1)).value
    )
    with pytest.warns(UserWarning, match="detects 4 objects"):
        torchq.sensitivity(
            model,
            [rows[:1]],
            Detections(),
            progress=False,
        )
    result = torchq.tune(
        Fixed().eval(), [rows], "detections", max_drop=0.2, progress=False
    )
    assert result.float_metric == 1
    assert result.kept
    assert result.metric > 0.8
    wrong = "tune: got metric 'sqn'; expected a function metric"
    with pytest.raises(ConfigError, match=wrong):
        torchq.tune(
            Fixed(),
            [rows],
            "sqn",
            max_drop=0.2,
            progress=False,
        )  # type: ignore[arg-type]


def test_wrong_arguments_and_other_batches_are_errors() -> None:
    with pytest.raises(
        ConfigError, match=r"Detections: got threshold=0\.1, slack=0\.2"
    ):
        Detections(threshold=0.1, slack=0.2)
    with pytest.raises(
        ConfigError, match="got 1 images in the output and 2 in the reference"
    ):
        Detections().agreement(image(), 2 * image())


def boxes(count: int = 200) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    corner = torch.rand(2, count, 2, generator=generator) * 600
    return torch.cat(
        [corner, corner + 20 + torch.rand(2, count, 2, generator=generator) * 60], -1
    )


def with_background(column: int, lost: bool = False) -> tuple[Tensor, Tensor]:
    """Scores of a softmax over the background and three classes; five objects in each image."""
    scores = torch.full((2, 200, 4), 0.001)
    scores[..., column] = 0.997
    if not lost:
        row = torch.full((4,), 0.02)
        row[(column + 1) % 4] = 0.94
        scores[:, ::40] = row
    return scores, boxes()


def head_of_one_class() -> Tensor:
    generator = torch.Generator().manual_seed(6)
    rows = torch.rand(2, 300, 6, generator=generator)
    rows[..., :2] *= 600
    rows[..., 2:4] = rows[..., 2:4] * 80 + 20
    rows[..., 4] *= 0.01
    rows[:, ::50, 4:] = 0.9
    return rows


def yolo_of_classes() -> Tensor:
    generator = torch.Generator().manual_seed(7)
    rows = torch.rand(2, 8, 300, generator=generator)
    rows[:, :2] *= 600
    rows[:, 2:4] = rows[:, 2:4] * 80 + 20
    rows[:, 4:] *= 0.01
    rows[:, 5, ::60] = 0.8
    return rows


def queries() -> Tensor:
    """What a DETR returns: boxes as shares of the image, and no score for objects."""
    generator = torch.Generator().manual_seed(8)
    rows = torch.rand(2, 300, 10, generator=generator)
    rows[..., 4:] *= 0.01
    rows[:, ::60, 7] = 0.8
    return rows


def corners_score_label() -> Tensor:
    actual = torch.cat(
        [
            boxes(10),
            torch.full((2, 10, 1), 0.9),
            torch.ones(2, 10, 1),
        ],
        -1,
    )
    actual[..., 5] = torch.arange(10) % 3
    return actual


OUTPUTS: dict[str, tuple[Any, int]] = {
    "background first": (with_background(0), 10),
    "background last": (with_background(3), 10),
    "one class, centres": (head_of_one_class(), 12),
    "classes, centres": (yolo_of_classes(), 10),
    "queries of a DETR": (queries(), 10),
    "corners, score, label": (corners_score_label(), 20),
    "dicts": (
        [
            {
                "boxes": b[:7],
                "scores": torch.full((7,), 0.8),
                "labels": torch.arange(7),
            }
            for b in boxes()
        ],
        14,
    ),
}


@pytest.mark.parametrize("layout", OUTPUTS)
def test_an_output_agrees_with_itself_and_counts_its_objects(layout: str) -> None:
    output, objects = OUTPUTS[layout]
    metric = torchq.analysis.Detections()
    metric.check_layout(output)
    itself = metric.agreement(output, output)
    assert itself.value == 1
    assert itself.count == objects
    assert f"{objects} detections" in str(itself)


@pytest.mark.parametrize("column", [0, 3])
def test_a_model_that_loses_all_objects_is_seen(column: int) -> None:
    """The background counted as objects: precision .986, recall .978."""
    actual = torchq.analysis.Detections().agreement(
        with_background(column, lost=True), with_background(column)
    )
    assert (actual.recall, actual.value) == (0, 0)


def test_a_layout_in_which_the_background_is_an_object_is_refused() -> None:
    """Scores of a sigmoid for the background do not add up to 1."""
    scores, places = with_background(0)
    scores = torch.cat([scores, scores[..., 1:2]], -1) + 0.2
    with pytest.raises(
        ConfigError, match=r"finds .* objects in an output whose places all have"
    ):
        torchq.analysis.Detections().check_layout((scores, places))


def test_a_layout_of_the_user_that_reads_noise_is_refused() -> None:
    generator = torch.Generator().manual_seed(1)

    def layout(output: Any) -> list[Detected]:
        made = boxes(9)[0] + torch.rand(9, 4, generator=generator) * 300
        return [Detected(made, torch.full((9,), 0.9), torch.zeros(9))]

    with pytest.raises(ConfigError, match="agrees with itself by"):
        torchq.analysis.Detections(layout).check_layout(torch.zeros(1))


def test_thresholds_that_are_no_numbers_are_named() -> None:
    with pytest.raises(ConfigError, match="got threshold="):
        torchq.analysis.Detections(threshold="x")  # type: ignore[arg-type]

"""The benchmark of accuracy: what it counts, and what it says of peers that are not there."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("torchvision")

from benchmarks import accuracy, figures, scenes, texts
from torchq.analysis.detections import detections_in


@pytest.mark.parametrize(
    ("error", "missing"),
    [(ImportError("no module"), "not installed"), (KeyError("x"), "failed: KeyError")],
)
def test_a_peer_that_cannot_run_is_a_row(
    error: Exception, missing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(model: Any, batches: Any) -> Any:
        raise error

    monkeypatch.setitem(accuracy.PEERS, "peer", fail)
    network = accuracy.Network(
        torch.nn.Identity(), torch.ones(2, 3), torch.ones(2, 3), lambda *_: {}
    )
    fields, run = accuracy._peer_row(network, "peer", [torch.ones(2, 3)])
    assert (fields["missing"], run) == (missing, None)


def test_cells_are_means_over_draws() -> None:
    row = {"bench": "accuracy", "recipe": "w4a4", "method": "untouched"}
    of_boxes = {"precision": 0.5, "recall": 1.0, "precision_with_slack": 0.75}
    rows = [
        {**row, "network": "a", "drop": 1.0, "same": 90.0, "kl": 0.1, "ratio": 1.2},
        {**row, "network": "a", "drop": 2.0, "same": 94.0, "kl": 0.3, "ratio": 2.2},
        {**row, "network": "b", **of_boxes, "recall_with_slack": 1.0, "ratio": 2.0},
        {
            **row,
            "network": "a",
            "recipe": "peers",
            "method": "c",
            "missing": "not installed",
        },
    ]
    assert figures.accuracy(figures.Measured(rows)).splitlines()[2:] == [
        "| w4a4 | untouched | 1.5 / 92.0 % / 0.2000 | 0.750, 1.000 (0.500, 1.000) |",
        "| peers | c | not installed |  |",
        "| CPU time of `untouched` | over `ranges` | 1.7 | 2.0 |",
    ]
    assert [figures.answers_kept(row) for row in rows[1:3]] == [94.0, 75.0]


def test_a_perfect_detector_finds_the_objects_of_a_scene() -> None:
    """What cells should return is read back as the boxes and kinds that were drawn."""
    generator = torch.Generator().manual_seed(0)
    actual = 0
    for _ in range(20):
        image, boxes, kinds = scenes.scene(generator)
        assert image.shape == (3, scenes.SIDE, scenes.SIDE)
        if len(boxes) == 1:
            actual += 1
            output = torch.cat(scenes._targets(boxes, kinds))[None]
            (detected,) = detections_in(output)
            best = detected.above(0.5)
            torch.testing.assert_close(best.boxes, boxes, rtol=0, atol=1e-4)
            assert best.labels.tolist() == kinds.tolist()
    assert actual


def test_a_reader_does_not_read_what_is_filled_up() -> None:
    torch.manual_seed(0)
    model = texts.Bert(8, 1, 2).eval()
    words = torch.zeros(2, 32, dtype=torch.long)
    words[:, :5] = torch.arange(3, 8)
    with torch.no_grad():
        before = model(words)
        model.words.weight[0, 0] += 9
        model.places.weight[5:, 0] += 9
        assert torch.equal(model(words), before)
        model.places.weight[4, 0] += 9
        assert not torch.equal(model(words), before)


def test_sentences_are_numbers_of_words_with_their_source(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(texts, "SOURCES", ("email", "asyncio"))
    train, test = texts.read_texts()
    assert len(train.words) == len(train.labels)
    assert set(train.labels.tolist()) == set(test.labels.tolist()) == {0, 1}
    for words in (train.words, test.words):
        assert words.shape[1] == 32 and bool((words[:, 0] == 2).all())
        # Nothing follows the first place that is filled up.
        is_filled = words == 0
        assert torch.equal(is_filled.cummax(1).values, is_filled)

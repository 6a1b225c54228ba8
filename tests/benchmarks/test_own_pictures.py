"""The benchmark on pictures of the user: what it leaves out, and what its figures mean."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("torchvision")

from PIL import Image

from benchmarks import own_pictures


def test_a_run_without_weights_or_pictures_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out.jsonl"
    own_pictures.main(["--out", str(out)])
    assert "left out, --weights None is no file" in capsys.readouterr().out
    weights = tmp_path / "weights.pth"
    weights.write_bytes(b"")
    few = ["--weights", str(weights), "--pictures", str(tmp_path)]
    own_pictures.main([*few, "--calibration", "8", "--out", str(out)])
    message = capsys.readouterr().out
    assert "holds 0 pictures; expected more than the 8 that calibrate" in message
    assert not out.exists()


def test_cells_that_a_file_has_are_not_measured_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / f"{number}.png")
    weights = tmp_path / "weights.pth"
    weights.write_bytes(b"")
    out = tmp_path / "out.jsonl"
    arguments = ["--weights", str(weights), "--pictures", str(tmp_path)]
    arguments += ["--peers", "--types"]
    arguments += ["--calibration", "1", "--out", str(out), "--draws", "0", "1"]
    measured: list[tuple[str, ...]] = []

    def measure(task: object, *cell: str) -> dict[str, float]:
        measured.append(cell)
        return {
            "same": 90.0,
            "clear": 95.0,
            "kl": 0.1,
            "decibels": 10.0,
            "seconds": 1.0,
        }

    empty = own_pictures.Task(torch.nn.Identity(), [], torch.empty(2), torch.empty(2))
    monkeypatch.setattr(own_pictures, "task", lambda options, draw: empty)
    monkeypatch.setattr(own_pictures, "measure", measure)
    own_pictures.main(arguments[:-1])  # draw 0 alone
    assert measured == own_pictures.SETTINGS
    own_pictures.main(arguments)
    assert measured == own_pictures.SETTINGS * 2
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    draws = [row["draw"] for row in rows if row["kind"] == "result"]
    assert draws == [0] * len(own_pictures.SETTINGS) + [1] * len(own_pictures.SETTINGS)
    lines = capsys.readouterr().out.strip().splitlines()
    table = lines[-len(own_pictures.SETTINGS) :]
    assert all(
        "| 2 | 90.0 % | 95.0 % | 0.100 | 10.0 dB | 1 |" in line for line in table
    )


def test_a_row_of_bfloat16_is_the_network_in_it() -> None:
    generator = torch.Generator().manual_seed(0)
    model = torch.nn.Linear(16, 4, bias=False)
    judged = torch.randn(64, 16, generator=generator)
    with torch.no_grad():
        model.weight.copy_(torch.randn(4, 16, generator=generator))
        task = own_pictures.Task(model, [], judged, model(judged))
    # Eight bits of a mantissa round by 2**-9 at most, input, weight and result: 45 to 60 dB.
    assert 45 < own_pictures.measure_type(task, "bfloat16")["decibels"] < 60
    assert model.weight.dtype == torch.float32


def test_pictures_are_found_in_folders_and_by_their_endings(tmp_path: Path) -> None:
    (tmp_path / "cats").mkdir()
    names = ["b.PNG", "cats/a.jpeg", "notes.txt", "a.jpg"]
    for name in names:
        (tmp_path / name).write_bytes(b"")
    found = [str(p.relative_to(tmp_path)) for p in own_pictures.pictures(tmp_path)]
    assert found == ["a.jpg", "b.PNG", "cats/a.jpeg"]
    assert own_pictures.pictures(None) == []


def test_nearness_is_what_its_words_say() -> None:
    torch.manual_seed(0)
    expected = torch.randn(6, 4)
    found = expected + 0.5 * torch.randn(6, 4)
    found[0] = expected[0]
    figures = own_pictures.nearness(expected, found)
    total = torch.nn.functional.kl_div(
        found.log_softmax(1), expected.softmax(1), reduction="batchmean"
    )
    assert figures["kl"] == pytest.approx(float(total), abs=1e-4)
    pairs = zip(expected, found, strict=True)
    alike = [int(a.argmax()) == int(b.argmax()) for a, b in pairs]
    assert figures["same"] == pytest.approx(100 * sum(alike) / 6, abs=0.01)
    sorted_rows = [sorted(row) for row in expected.softmax(1).tolist()]
    is_clear = [row[-1] >= 2 * row[-2] for row in sorted_rows]
    assert 0 < sum(is_clear) < 6
    clear = [one for one, counts in zip(alike, is_clear, strict=True) if counts]
    assert figures["clear"] == pytest.approx(100 * sum(clear) / len(clear), abs=0.01)
    assert figures["clear_share"] == pytest.approx(100 * sum(is_clear) / 6, abs=0.1)
    largest = [max(row) for row in expected.softmax(1).tolist()]
    assert figures["confidence"] == pytest.approx(sum(largest) / 6, abs=1e-3)
    assert own_pictures.nearness(expected, expected)["decibels"] == 200.0

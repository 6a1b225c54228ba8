"""Progress bars: what they show, and which functions have one."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

import torchq
from torchq.utils import progress_bar, progress_stages


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, delay: float = 0.0) -> None:
    """Take the captured text for a terminal, with bars that appear after ``delay`` seconds."""
    monkeypatch.setattr("torchq.utils.progress._DELAY", delay)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)


def test_a_bar_needs_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("torchq.utils.progress._DELAY", 0.0)
    assert list(progress_bar([1, 2, 3], description="calibrate")) == [1, 2, 3]
    with progress_stages("export", ("trace", "write")) as next_stage:
        next_stage()
    assert capsys.readouterr() == ("", "")


def test_short_work_shows_no_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, delay=60.0)
    assert list(progress_bar([1, 2, 3], description="calibrate")) == [1, 2, 3]
    assert "calibrate" not in capsys.readouterr().err


def test_a_bar_shows_the_rate_and_the_time_left(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch)
    assert list(progress_bar([1, 2, 3], description="calibrate")) == [1, 2, 3]
    message = capsys.readouterr().err
    assert "calibrate:" in message
    assert "/3" in message
    assert "batch/s" in message
    assert "00:00<" in message
    assert list(progress_bar(iter([1, 2]), description="x", enabled=False)) == [1, 2]
    assert capsys.readouterr().err == ""


def test_stages_are_shown_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch)
    with progress_stages("export", ("trace", "write")) as next_stage:
        next_stage()
        next_stage()
    message = capsys.readouterr().err
    assert "export: trace" in message
    assert "export: write" in message
    assert "2/2" in message
    with progress_stages("export", ("trace", "write"), enabled=False) as next_stage:
        next_stage()
    assert capsys.readouterr().err == ""


def test_the_first_stage_is_shown_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, delay=60.0)
    with progress_stages("export", ("trace", "write")):
        assert "export: trace" in capsys.readouterr().err


class Recorder:
    """Stands in for tqdm, and keeps the description and the total of each bar that is on."""

    shown: ClassVar[list[tuple[str, int | None]]] = []

    def __init__(self, items: Any = None, **options: Any) -> None:
        self._items = items
        self._options = options
        if options["disable"] is None and options.get("desc"):
            self.shown.append((options["desc"], options["total"]))

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def set_description_str(self, text: str, refresh: bool = True) -> None:
        if self._options["disable"] is None:
            self.shown.append((text, self._options["total"]))

    def update(self) -> None:
        pass


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int | None]]:
    monkeypatch.setattr(Recorder, "shown", [])
    monkeypatch.setattr("torchq.utils.progress.tqdm", Recorder)
    return Recorder.shown


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3)
    )


def test_functions_show_a_bar_unless_told_not_to(
    shown: list[tuple[str, int | None]], tmp_path: Path
) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    x = torch.randn(2, 3, 8, 8)
    path = tmp_path / "model.onnx"
    for progress in (False, True):
        model = network().eval()
        options: dict[str, Any] = {"progress": progress}
        torchq.fuse_(model, x, **options)
        torchq.quantize_(model, torchq.recipes.int8(reduce_range=True), **options)
        torchq.calibrate(model, [x], **options)
        torchq.deploy(model, x, **options)
        torchq.export_onnx(model, x, path, dynamo=False, **options)
        torchq.verify_onnx(model, path, [x] * 3, **options)
        assert bool(shown) == progress
    expected = [("fuse: merge", 2), ("quantize: plan", 2), ("quantize: swap", 2)]
    expected += [("calibrate", 1), ("deploy: replace layers", 3)]
    expected += [("export: write", 3), ("verify", 3)]
    assert set(expected) <= set(shown)
    shown.clear()
    torchq.deploy(model, x, target="onnxruntime")
    assert ("deploy: export for onnxruntime quantized", 1) in shown

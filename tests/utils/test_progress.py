"""Progress bars: what they show, and which functions have one."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
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
    text = capsys.readouterr().err
    assert "calibrate:" in text and "/3" in text and "batch/s" in text and "00:00<" in text
    assert list(progress_bar(iter([1, 2]), description="x", enabled=False)) == [1, 2]
    assert capsys.readouterr().err == ""


def test_stages_are_shown_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch)
    with progress_stages("export", ("trace", "write")) as next_stage:
        next_stage()
        next_stage()
    text = capsys.readouterr().err
    assert "export: trace" in text and "export: write" in text and "2/2" in text
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
        self._items, self._options = items, options
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
    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3))


def test_fuse_deploy_export_and_verify_show_a_bar_unless_told_not_to(
    shown: list[tuple[str, int | None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    x, path = torch.randn(2, 3, 8, 8), tmp_path / "model.onnx"
    for progress in (False, True):
        model = network().eval()
        steps: list[Callable[[], object]] = [
            lambda m=model, p=progress: torchq.fuse_(m, x, progress=p),
            lambda m=model, p=progress: torchq.deploy(m, x, progress=p),
            lambda m=model, p=progress: torchq.export_onnx(m, x, path, progress=p),
            lambda m=model, p=progress: torchq.verify_onnx(m, path, [x] * 3, progress=p),
        ]
        steps[0]()
        torchq.quantize_(model, progress=progress)
        torchq.calibrate(model, [x], progress=False)
        for step in steps[1:]:
            step()
        if not progress:
            assert shown == []
    stages = ["fuse: merge", "merge blocks", "trace branches", "fold BatchNorm"]
    found = [text for text, _ in shown[: shown.index(("fuse: compare", 2))]]
    assert list(dict.fromkeys(found)) == stages
    assert ("verify", 3) in shown
    stages = ["replace layers", "fuse", "compare"]
    assert [text for text, _ in shown if text.startswith("deploy")] == [
        f"deploy: {stage}" for stage in stages
    ]
    assert ("export: write", 3) in shown
    shown.clear()
    torchq.deploy(model, x, engine="onnxruntime")
    assert ("deploy: export for onnxruntime quantized", 1) in shown
    monkeypatch.setattr("torchq.engines.torch_engine._WORTH_MEASURING", 0.0)
    monkeypatch.setattr("torchq.engines.torch_engine._WORTH_PARTS", math.inf)
    shown.clear()
    torchq.deploy(model, x)
    assert ("measure", 7) in shown


class Gate(nn.Module):
    """Multiplies by a map that has few values, which a scale for all of it serves badly."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x) * (1e4 * self.gate(x)).exp().clamp(1e-6, 1e6)


def test_quantize_shows_a_bar_unless_told_not_to(shown: list[tuple[str, int | None]]) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    for progress in (False, True):
        torchq.quantize_(Gate().eval(), target="onnxruntime", example=x, progress=progress)
        assert bool(shown) == progress
    names = [text for text, _ in shown]
    assert names[:3] == ["quantize: plan", "quantize: swap", "measure placements"]
    shown.clear()
    torchq.quantize_(Gate().eval())
    assert shown == [("quantize: plan", 2), ("quantize: swap", 2)]

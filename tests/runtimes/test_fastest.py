"""``target="fastest"``: what is measured, what is left out and why, and which one is taken."""

from __future__ import annotations

import math
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.contracts.engine_contract import calibrated_detector, images
from torchq.errors import ExportError
from torchq.runtimes import Engine, FastestReport, OnnxRuntime, Torch, fastest
from torchq.utils.timing import Samples

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

#: Seconds for each call, instead of a clock.
TIMES = {
    "torch quantized": 3.0,
    "torch float": 5.0,
    "onnxruntime quantized": 2.0,
    "onnxruntime float": 4.0,
}


@pytest.fixture(autouse=True)
def without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave OpenVINO out, which takes longest to open: it is a missing extra here."""
    monkeypatch.setitem(sys.modules, "openvino", None)


def timed(monkeypatch: pytest.MonkeyPatch, times: dict[str, Any]) -> None:
    """Let candidates take these seconds: a number, or samples."""

    def time_calls(calls: dict[Engine, Any], **options: Any) -> dict[Engine, Samples]:
        actual = {}
        for engine, call in calls.items():
            call()  # it must run
            time = times[engine.label]
            actual[engine] = Samples(time if isinstance(time, tuple) else (time,), 1)
        return actual

    monkeypatch.setattr(fastest, "time_calls", time_calls)


def deploy() -> Any:
    return torchq.deploy(calibrated_detector(), images(1), target="fastest")


@pytest.mark.sample(1)
@pytest.mark.parametrize("best", TIMES)
def test_the_fastest_is_taken(best: str, monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, {**TIMES, best: 1.0})
    result = deploy()
    assert result.report.chosen == best
    assert result.target == best.split()[0]
    assert result.report.candidates[0].engine.label == best
    assert result.report.candidates[0].seconds == 1.0
    assert result(images(3)).scores.shape == (3, 5)


def test_the_report_has_all_candidates_and_why_some_were_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed(monkeypatch, TIMES)
    report = deploy().report
    assert isinstance(report, FastestReport)
    labels = [candidate.engine.label for candidate in report.candidates]
    assert labels[:-1] == sorted(TIMES, key=TIMES.__getitem__)
    assert "torchq[openvino]" in report.candidates[-1].problem
    assert report.candidates[-1].seconds == math.inf
    message = str(report)
    assert "onnxruntime quantized  2e+03" in message
    assert (
        f"chosen: onnxruntime quantized, on {torch.get_num_threads()} threads"
        in message
    )


@pytest.mark.slow
def test_one_lucky_sample_does_not_win(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, {**TIMES, "onnxruntime float": (4.0, 1.5, 4.0)})
    report = deploy().report
    assert report.chosen == "onnxruntime quantized"
    assert report.candidates[2].seconds == 4.0


@pytest.mark.slow
def test_a_wrong_result_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    timed(monkeypatch, TIMES)
    original = OnnxRuntime.open

    def wrong(self: OnnxRuntime, *args: Any) -> Any:
        run = original(self, *args)
        return lambda feeds: [2 * result for result in run(feeds)]

    monkeypatch.setattr(OnnxRuntime, "open", wrong)
    monkeypatch.setattr(
        torchq.runtimes.onnx_engine, "_file_agrees", lambda *_: (False, False)
    )
    report = deploy().report
    assert report.chosen == "torch quantized"
    problems = [c.problem for c in report.candidates if c.engine.name == "onnxruntime"]
    assert len(problems) == 2
    assert all("has relative error" in problem for problem in problems)


@pytest.mark.slow
def test_an_engine_that_fails_in_its_own_way_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed(monkeypatch, TIMES)

    def fail(self: Engine, task: object) -> nn.Module:
        raise KeyError("no kernel")

    monkeypatch.setattr(Torch, "build", fail)
    report = deploy().report
    assert report.chosen == "onnxruntime quantized"
    assert [c.problem for c in report.candidates if c.engine.name == "torch"] == [
        "'no kernel'"
    ] * 2


def test_an_error_says_why_no_engine_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    monkeypatch.setattr(Torch, "build", lambda *_: 1 / 0)
    message = r"no runtime runs the model \(.*torch quantized: division"
    with pytest.raises(ExportError, match=message):
        deploy()


@pytest.mark.slow
def test_only_the_warnings_of_the_chosen_engine_are_shown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed(monkeypatch, TIMES)
    original = OnnxRuntime.build

    def build(self: OnnxRuntime, task: Any) -> nn.Module:
        warnings.warn(f"about {self.label}", stacklevel=1)
        return original(self, task)

    monkeypatch.setattr(OnnxRuntime, "build", build)
    with pytest.warns(UserWarning, match="about") as seen:
        deploy()
    assert [str(w.message) for w in seen] == ["about onnxruntime quantized"]


@pytest.mark.slow
def test_the_clock_decides_without_a_fake() -> None:
    result = deploy()
    best, *rest = result.report.candidates
    assert result.report.chosen == best.engine.label
    assert 0 < best.seconds < math.inf
    assert {c.engine.label for c in (best, *rest) if not c.problem} == set(TIMES)


class OfADictionary(nn.Module):
    """A model whose argument is a dictionary of tensors, which no graph takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self.layer(features["x"])


def test_torch_runs_what_no_graph_can() -> None:
    model = OfADictionary().eval()
    x = torch.randn(2, 8)
    torchq.quantize_(model)
    torchq.calibrate(model, [({"x": x},)], progress=False)
    deployed = torchq.deploy(model, ({"x": x},), target="fastest")
    assert deployed.target == "torch"
    assert deployed({"x": x}).shape == (2, 4)
    actual = deployed.report.candidates
    problems = [c.problem for c in actual if isinstance(c.engine, OnnxRuntime)]
    assert problems
    assert all("'features' is a dict of tensors" in message for message in problems)

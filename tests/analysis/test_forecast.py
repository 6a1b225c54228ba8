"""Forecasts: what is timed, what is said of it, and that nothing is changed."""

import copy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
import torchq.runtimes.engine
from torchq.analysis import TargetForecast, TimedFile
from torchq.analysis.forecast import FLOAT, INT8, LAYERS
from torchq.errors import ConfigError
from torchq.runtimes import RUNTIMES
from torchq.swap.share import Share
from torchq.utils.timing import Samples


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.block = nn.Conv2d(16, 16, 3, padding=1)
        self.last = nn.Conv2d(16, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        return self.last((x + self.block(x)).relu())


X = torch.rand(1, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def timed(form: str, milliseconds: float, noise: float = 0.01) -> TimedFile:
    """Return a file whose quartiles are ``noise`` beside the median."""
    seconds = [milliseconds * (1 + part * noise) / 1000 for part in (-1, -1, 0, 1, 1)]
    return TimedFile(form, Samples(tuple(seconds), 1), 1000)


def share(quantized: float) -> Share:
    return Share(quantized, 1.0, {"Linear: no kernel": 1 - quantized}, "multiply-adds")


@pytest.mark.parametrize(
    ("float_ms", "int8_ms", "noise", "verdict", "pays"),
    [
        (30.0, 10.0, 0.01, "3x", True),
        (
            11.0,
            10.0,
            0.01,
            "1.10x, hardly worth it: 60% of the multiply-adds stay float",
            False,
        ),
        (10.2, 10.0, 0.05, "1x, within noise: stay in float", False),
        (13.0, 10.0, 0.4, "1.3x, within noise: stay in float", False),
        (
            8.0,
            10.0,
            0.01,
            "0.8x, stay in float: 60% of the multiply-adds stay float",
            False,
        ),
    ],
)
def test_the_verdict_follows_time_and_noise(
    float_ms: float, int8_ms: float, noise: float, verdict: str, pays: bool
) -> None:
    files = timed(FLOAT, float_ms, noise), timed(INT8, int8_ms, noise)
    one = TargetForecast("onnxruntime", files, share(0.4))
    assert one.verdict.startswith(verdict)
    assert one.pays is pays


def test_operators_that_cost_time_are_named() -> None:
    files = timed(FLOAT, 30), timed(INT8, 15), timed(LAYERS, 10)
    one = TargetForecast("openvino", files, share(1.0))
    assert (
        one.verdict
        == "3x; by the layers alone (all that the plan allows takes 1.50 of that)"
    )
    files = timed(FLOAT, 30), timed(INT8, 10), timed(LAYERS, 15)
    assert TargetForecast("openvino", files, share(1.0)).verdict == "3x"


def test_a_runtime_without_a_float_figure_gives_no_gain() -> None:
    failed = TimedFile(FLOAT, None, 0, "an operator is missing")
    one = TargetForecast(
        "torch",
        (failed, timed(INT8, 1)),
        share(1.0),
    )
    assert one.verdict == "not measured: an operator is missing"
    assert not one.pays


def test_the_model_and_the_number_of_threads_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = Residual()
    model.train()
    state = copy.deepcopy(model.state_dict())
    threads = torch.get_num_threads()
    actual = torchq.forecast(model, X, "torch", threads=2, progress=False)
    assert actual.threads == 2
    assert torch.get_num_threads() == threads
    assert model.training
    assert type(model.stem) is nn.Conv2d
    assert all(
        torch.equal(value, state[name]) for name, value in model.state_dict().items()
    )
    assert [file.form for file in actual["torch"].files] == [FLOAT, INT8]
    share = actual["torch"].share
    assert share is not None
    assert share.quantized == 1.0
    assert str(actual).splitlines()[-1].startswith("fastest: torch, ")
    with pytest.raises(KeyError, match="got 'qnn'; expected one of 'torch'"):
        actual["qnn"]


def test_a_file_of_layers_alone_is_the_other_end() -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx_ir")
    # A runtime of a user, which no name finds.
    toy = replace(RUNTIMES["onnxruntime"], name="toy")
    actual = torchq.forecast(Residual(), X, [toy], progress=False)
    files = {file.form: file for file in actual["toy"].files}
    assert list(files) == [FLOAT, INT8, LAYERS]
    assert all(
        file.samples is not None and file.bytes > 1000 for file in files.values()
    )
    assert "of (1, 3, 8, 8) on 1 thread" in str(actual)


def test_files_for_runtimes_elsewhere_are_written_with_their_command(
    tmp_path: Path,
) -> None:
    pytest.importorskip("onnx_ir")
    actual = torchq.forecast(Residual(), X, "tensorrt", folder=tmp_path, progress=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "tensorrt-float.onnx",
        "tensorrt.onnx",
    ]
    assert f"trtexec --onnx={tmp_path / 'tensorrt.onnx'}" in actual["tensorrt"].verdict
    assert actual.fastest is None


def test_nothing_is_written_without_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    actual = torchq.forecast(Residual(), X, "rknn", progress=False)
    assert actual["rknn"].verdict.startswith(
        "not here; 100.0% of the multiply-adds quantized"
    )
    assert list(tmp_path.iterdir()) == []


class KnowsItsShape(nn.Module):
    """Makes a grid anew where the shape is another one, as heads of detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1)
        self.shape: torch.Size | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.shape != x.shape:
            self.shape = x.shape
            self.grid = torch.arange(x.shape[-1]).float()
        return x + self.grid


def test_a_forward_that_reads_lengths_is_exported_the_quick_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A file that is only timed need not hold for other inputs."""
    ways: list[tuple[bool, bool]] = []
    write = torchq.runtimes.engine.export_graph

    def watched(*args: object, **options: object) -> object:
        ways.append((bool(options["dynamo"]), bool(options["for_all_inputs"])))
        return write(*args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(torchq.runtimes.engine, "export_graph", watched)
    example = torch.rand(1, 3, 8, 8)
    found = torchq.forecast(
        KnowsItsShape().eval(), example, ["onnxruntime"], threads=1, progress=False
    )
    assert found.targets[0].gain is not None
    assert set(ways) == {(False, False)}


def test_wrong_arguments_are_named() -> None:
    model = Residual()
    with pytest.raises(ConfigError, match="threads=0; expected a whole number"):
        torchq.forecast(model, X, threads=0)
    with pytest.raises(
        ConfigError, match="folder='nowhere'; expected a folder that is there"
    ):
        torchq.forecast(model, X, folder="nowhere")
    with pytest.raises(ConfigError, match="got no target"):
        torchq.forecast(model, X, [])
    with pytest.raises(ConfigError, match="unknown target 'tensorflow'"):
        torchq.forecast(model, X, "tensorflow")
    torchq.quantize_(model)
    with pytest.raises(ConfigError, match="forecast: stem: is quantized"):
        torchq.forecast(model, X)


def test_a_model_without_layers_has_nothing_to_quantize() -> None:
    actual = torchq.forecast(nn.ReLU(), X, "torch", progress=False)
    assert "nothing to quantize" in actual["torch"].verdict

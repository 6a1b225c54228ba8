"""Models that cannot be exported are refused by name, before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq.errors import ConfigError, ExportError, MissingExtraError

onnx = pytest.importorskip("onnx")


def linear(**changes: object) -> nn.Module:
    """A calibrated linear layer in a Sequential, its input quantizer changed."""
    model = calibrated(nn.Sequential(nn.Linear(4, 4)), torch.randn(4, 4))
    quantizer = model[0].input_quantizer
    for name, value in changes.items():
        if name == "amax":
            quantizer.amax.fill_(value)
        else:
            quantizer.descriptor = quantizer.descriptor.replace(**{name: value})
    return model


def uncalibrated() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    torchq.quantize_(model)
    return model


FAULTS = [
    (
        uncalibrated,
        r"0\.input_quantizer, 0\.weight_quantizer, .*: has no calibrated range; .* torchq\.cal",
    ),
    (lambda: linear(dynamic=True), r"0\.input_quantizer: is dynamic: .* expected a fixed range"),
    (
        lambda: linear(amax=float("nan")),
        r"0\.input_quantizer: has a NaN range; expected finite numbers",
    ),
    (lambda: linear(amax=float("inf")), r"0\.input_quantizer: has an infinite range"),
    (lambda: linear(amax=-1.0), r"0\.input_quantizer: has a negative range"),
    (lambda: linear(fake_quant=False), r"0\.input_quantizer: returns integer codes"),
    (
        lambda: linear(num_bits=(3, 2)),
        r"0\.input_quantizer: format e3m2: ONNX QuantizeLinear has no such type",
    ),
    (
        lambda: linear(axis=(0, 1)),
        r"0\.input_quantizer: axis \(0, 1\): ONNX QuantizeLinear has one axis",
    ),
]


@pytest.mark.parametrize(("make", "message"), FAULTS, ids=range(len(FAULTS)))
def test_unusable_ranges_are_named(tmp_path: Path, make: object, message: str) -> None:
    """Each fault is one error, with the quantizer and the fix."""
    assert callable(make)
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(make(), torch.randn(2, 4), tmp_path / "m.onnx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"opset": 12},
            r"0\.weight_quantizer: opset 12 has no .* for per-channel ranges; expected opset >= 13",
        ),
        ({"opset": 9}, r"got opset 9; expected 10 to 23"),
        ({"opset": 24}, r"got opset 24; expected 10 to 23"),
    ],
)
def test_opsets_are_checked(tmp_path: Path, options: dict[str, int], message: str) -> None:
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(linear(), torch.randn(2, 4), tmp_path / "m.onnx", **options)


def test_types_need_their_opset(tmp_path: Path) -> None:
    with pytest.raises(
        ExportError,
        match=r"0\.input_quantizer: opset 18 has no .* for the type e4m3; expected opset >= 19",
    ):
        torchq.export_onnx(
            linear(num_bits=(4, 3)), torch.randn(2, 4), tmp_path / "m.onnx", opset=18
        )


def test_an_old_opset_cannot_be_forced(tmp_path: Path) -> None:
    wanted = r"dynamo=True with opset 13; expected opset >= 18"
    with pytest.raises(ExportError, match=wanted):
        torchq.export_onnx(linear(), torch.randn(2, 4), tmp_path / "m.onnx", dynamo=True, opset=13)


def test_untraceable_models_are_explained(tmp_path: Path) -> None:
    class Branches(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("no tracing today")

    model = nn.Sequential(nn.Linear(4, 4), Branches(4, 4))
    torchq.quantize_(model, exclude="1")
    torchq.calibrate(model[0], [torch.randn(4, 4)], progress=False)
    with pytest.raises(
        ExportError, match=r"torch could not export the model .*no tracing today.*dynamo="
    ):
        torchq.export_onnx(model, torch.randn(2, 4), tmp_path / "m.onnx", dynamo=False)
    assert not torch.onnx.is_in_onnx_export()


def test_observers_rest_during_an_export(tmp_path: Path) -> None:
    model = linear()
    model[0].input_quantizer.start_calibration()
    torchq.export_onnx(model, 100 * torch.randn(2, 4), tmp_path / "m.onnx", dynamo=False)
    assert model[0].input_quantizer.observing
    assert not model[0].input_quantizer.calibrator.seen


def test_a_missing_package_names_the_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(
        MissingExtraError,
        match=r"export_onnx: onnx is not installed .*pip install torchq\[export\]",
    ):
        torchq.export_onnx(linear(), torch.randn(2, 4), tmp_path / "m.onnx")


def test_unknown_targets_are_listed(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match="unknown target 'tvm'; expected one of: 'onnxruntime', 'openvino', 'qnn', 'tensorrt'",
    ):
        torchq.export_onnx(linear(), torch.randn(2, 4), tmp_path / "m.onnx", target="tvm")


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_deployed_model_has_no_file(tmp_path: Path, dynamo: bool) -> None:
    model, x = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), torch.randn(2, 4)
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    deployed = torchq.deploy(model, x)
    message = r"got a \w+ of a deployed model; expected the simulation.* that deploy was given"
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(deployed, x, tmp_path / "m.onnx", dynamo=dynamo)
    assert not list(tmp_path.iterdir())

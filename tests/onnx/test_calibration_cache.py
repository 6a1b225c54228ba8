"""Calibration caches: what they say, what is damaged, and files from them without data."""

from __future__ import annotations

import math
import struct
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.cli import main
from torchq.errors import CalibrationError, ConfigError, TorchqError
from torchq.onnx import apply_calibration_cache, read_calibration_cache
from torchq.workflow import quantizers

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
HEADER = "TRT-8401-EntropyCalibration2\n"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(16, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.down = nn.Conv2d(16, 16, 1)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x))
        y = x.relu()
        return self.head((self.down(y) + x).mean((2, 3)))


def digits(scale: float) -> str:
    return struct.pack(">f", scale).hex()


@pytest.fixture(scope="module")
def files(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Path, Path, dict[str, float]]:
    """A float ONNX file, its cache, and the scale of each tensor."""
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("cache")
    path = folder / "net.onnx"
    cache = folder / "calib.cache"
    x = torch.randn(1, 16, 8, 8)
    model = Net().eval()
    with torch.no_grad():
        model.norm.running_mean.uniform_(-1, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options: dict[str, Any] = {"dynamo": False, "do_constant_folding": False}
        options["training"] = torch.onnx.TrainingMode.PRESERVE  # keeps the norm
        torch.onnx.export(
            model, (x,), path, input_names=["x"], verbose=False, **options
        )
    file = onnx.load(path)
    names = [node.output[0] for node in file.graph.node if node.op_type != "Constant"]
    file.graph.output.extend(
        onnx.helper.make_tensor_value_info(n, 1, None) for n in names[:-1]
    )
    session = ort.InferenceSession(
        file.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    results = session.run(names, {"x": x.numpy()})
    scales = {n: float(abs(r).max()) / 127 for n, r in zip(names, results, strict=True)}
    scales["x"] = float(x.abs().max()) / 127
    rows = [f"{name}: {digits(scale)}\n" for name, scale in scales.items()]
    cache.write_text(
        HEADER + "".join(rows) + "(Unnamed Layer* 3) [Shuffle]_output: 3c010a14\n"
    )
    return path, cache, read_calibration_cache(cache)


def quantized(path: Path, target: Any) -> Any:
    model = torchq.from_onnx(path)
    x = torch.randn(1, 16, 8, 8)
    torchq.fuse_(model, (x,))
    torchq.quantize_(model, target=target, example=(x,))
    return model


def test_a_cache_is_scales_by_name(tmp_path: Path) -> None:
    path = tmp_path / "calib.cache"
    rows = [
        "a: 3c010204",
        "b:0: 7f800000",
        "",
        "(Unnamed Layer* 3) [Shuffle]_output: 3c010a14",
    ]
    path.write_text(HEADER + "\n".join(rows))
    assert read_calibration_cache(path) == {
        "a": torch.tensor(1 / 127).item(),
        "b:0": math.inf,
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "got the first line ''; expected a first line like"),
        ("a: 3c010204\n", "got the first line 'a: 3c010204'"),
        (HEADER + "a: 3c010204\nb: 3c01\n", r"line 3: got 'b: 3c01'"),
        (HEADER + "b 3c010204\n", r"line 2: got 'b 3c010204'"),
        (HEADER + "b: bc010204\n", r"line 2: got 'b: bc010204'"),
        (HEADER + "b: 7fc00000\n", r"line 2: got 'b: 7fc00000'"),
    ],
)
def test_a_damaged_cache_is_refused_by_line(
    text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "calib.cache").write_text(text)
    with pytest.raises(CalibrationError, match=message):
        read_calibration_cache(tmp_path / "calib.cache")


def test_quantizers_hold_the_scales_of_the_tensors_that_they_read(
    files: tuple[Path, Path, dict[str, float]],
) -> None:
    """The result of a folded norm has the name that it has behind the norm."""
    path, cache, scales = files
    model = quantized(path, torchq.runtimes.TensorRt(precision="float32"))
    actual = apply_calibration_cache(model, cache, (torch.randn(1, 16, 8, 8),))
    kinds = {node.output[0]: node.op_type for node in onnx.load(path).graph.node} | {
        "x": "input"
    }
    assert {kinds[name] for name in actual.values()} == {
        *("input", "Relu", "BatchNormalization", "ReduceMean")
    }
    for name, tensor in actual.items():
        assert float(model.get_submodule(name).scale) == scales[tensor]
    assert all(q.calibrated for q in quantizers(model).values() if q.quantizing)


def test_one_command_makes_a_file_without_data(
    files: tuple[Path, Path, dict[str, float]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, cache, _ = files
    out = tmp_path / "q.onnx"
    arguments = ["quantize", str(path), "--cache", str(cache), "--target", "tensorrt"]
    assert main([*arguments, "--export", str(out)]) == 0
    message = capsys.readouterr().out
    assert f"ranges from {cache}" in message
    assert "--stronglyTyped" in message
    assert "agrees" in message
    assert torchq.runtimes.tensorrt.check_file(out).ok
    assert main([*arguments, "--data", "photos"]) == 2
    assert (
        "got --data too; expected MODEL.onnx and no --data or"
        in capsys.readouterr().err
    )


def test_a_cache_of_another_network_is_one_error(
    files: tuple[Path, Path, dict[str, float]],
) -> None:
    path, _, scales = files
    model = quantized(path, "tensorrt")
    x = (torch.randn(1, 16, 8, 8),)
    with pytest.raises(
        CalibrationError, match=r"matches 0 of 4 quantizers; .* It has a, b, and"
    ):
        apply_calibration_cache(model, {"a": 1.0, "b": 1.0}, x)
    few = {name: scale for name, scale in scales.items() if name != "x"}
    with pytest.raises(
        CalibrationError, match=r"matches 3 of 4 .*stem.* reads x\. Leave"
    ):
        apply_calibration_cache(model, few, x)
    with pytest.raises(CalibrationError, match=r"reads x, whose scale is infinite"):
        apply_calibration_cache(model, {**scales, "x": math.inf}, x)
    assert not any(q.calibrated for q in quantizers(model).values())
    with pytest.raises(
        ConfigError, match=r"got a Net; expected what torchq.from_onnx made"
    ):
        apply_calibration_cache(Net(), scales, x)
    assert issubclass(CalibrationError, TorchqError)


def test_unsigned_codes_get_the_range_of_the_cache(
    files: tuple[Path, Path, Any],
) -> None:
    """A cache holds a 127th of each range; 255 steps of that were twice the range."""
    model = torchq.from_onnx(files[0])
    x = torch.randn(1, 16, 8, 8)
    convolutions = "type:torch.nn.modules.conv.Conv2d"
    descriptors = {
        "input": QuantDescriptor(unsigned=True),
        "weight": QuantDescriptor(axis=0),
    }
    torchq.quantize_(
        model, QuantConfig((Rule(convolutions, **descriptors),)), progress=False
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        apply_calibration_cache(model, dict.fromkeys(files[2], 0.02), x)
    ranges = [
        q.amax.item()
        for n, q in quantizers(model).items()
        if n.endswith("input_quantizer")
    ]
    assert ranges == pytest.approx([2.54] * len(ranges))
    assert ranges

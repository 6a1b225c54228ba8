"""Models of other floating-point types, in files and in comparisons with files."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq.errors import ExportError
from torchq.onnx.targets import onnx_target

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def small(dtype: torch.dtype) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(128, 5))
    return nn.Sequential(*layers).to(dtype).eval()


class HalfInside(nn.Module):
    """A network that is float outside, and half inside."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small(torch.float16)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.inner(x.half()).float()
        return self.head(y), y


@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino", "tensorrt"])
def test_a_right_file_of_a_half_model_agrees(target: str | None, tmp_path: Path) -> None:
    """A code that float16 rounds to the other side is a tie; another bias is an error."""
    model, x = small(torch.float16), torch.randn(16, 3, 8, 8, dtype=torch.float16)
    torchq.quantize_(model, target=target, example=x)
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x, tmp_path / "m.onnx", target=target)
    report = torchq.verify_onnx(model, tmp_path / "m.onnx", [x])
    assert report.ok, str(report)
    assert any(layer.ties for layer in report.layers)
    assert model[0].bias is not None
    with torch.no_grad():
        model[0].bias[3] += 0.1 * model[2].input_quantizer.amax.half()
    changed = torchq.verify_onnx(model, tmp_path / "m.onnx", [x])
    assert not changed.ok
    (wrong,) = [layer for layer in changed.layers if layer.mismatches]
    assert wrong.layers == ("0",)


def test_a_right_file_of_a_model_that_is_half_inside_agrees(tmp_path: Path) -> None:
    x = torch.randn(16, 3, 8, 8)
    model = calibrated(HalfInside(), x)
    torchq.export_onnx(model, x, tmp_path / "m.onnx")
    report = torchq.verify_onnx(model, tmp_path / "m.onnx", [x])
    assert report.ok, str(report)


@pytest.mark.filterwarnings("ignore:export_onnx")  # the layers are no good for the target
@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt", "qnn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_types_that_a_runtime_cannot_compute_in_are_refused(
    dtype: torch.dtype, target: str, tmp_path: Path
) -> None:
    x = torch.randn(4, 3, 8, 8, dtype=dtype)
    model, path = calibrated(small(dtype), x), tmp_path / "m.onnx"
    if dtype in onnx_target(target).float_types:
        torchq.export_onnx(model, x, path, target=target)
        assert onnx.load(path).graph.input[0].type.tensor_type.elem_type == 16
        return
    message = rf"0\.weight: is {str(dtype)[6:]}; expected float32, float16.*\.float\(\)"
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(model, x, path, target=target)
    assert not path.exists()
    single = copy.deepcopy(model).float()
    torchq.export_onnx(single, x.float(), path, target=target)
    assert torchq.verify_onnx(single, path, [x.float()]).ok


class Cast(nn.Sequential):
    """A float model of inputs in another type."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float())


def test_inputs_that_numpy_cannot_hold_are_not_compared(tmp_path: Path) -> None:
    x = torch.randn(4, 6, dtype=torch.bfloat16)
    model = calibrated(Cast(nn.Linear(6, 6)), x)
    torchq.export_onnx(model, x, tmp_path / "m.onnx", target="onnxruntime")
    with pytest.raises(ExportError, match=r"has bfloat16 for the input 'x'; expected a type that"):
        torchq.verify_onnx(model, tmp_path / "m.onnx", [x])

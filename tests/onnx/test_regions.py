"""Parts of networks that ONNX Runtime runs on integers as a whole: gates and pyramids."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

EXPORTERS = [
    False,
    True,
]


def test_modules_that_were_traced_for_a_target_export(tmp_path: Path) -> None:
    """The concatenations of a DenseNet are found by a trace, which torch.export must not repeat."""
    densenet = pytest.importorskip("torchvision.models.densenet")
    x = torch.randn(2, 8, 6, 6)
    net = densenet._DenseBlock(2, 8, bn_size=2, growth_rate=4, drop_rate=0.0).eval()
    torchq.fuse_(net, x)
    calibrated(net, x, target="onnxruntime", example=x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(net, x, tmp_path / "m.onnx", target="onnxruntime", dynamo=True)
    assert torchq.verify_onnx(net, tmp_path / "m.onnx", [x]).ok


class Pyramid(nn.Module):
    """A concatenation of a convolution and of one on a smaller image that is resized."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.near, self.far, self.last, self.mode = (
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(3, 4, 2, stride=2),
            nn.Conv2d(8, 4, 1),
            mode,
        )

    def forward(self, x: Tensor) -> Tensor:
        far = nn.functional.interpolate(self.far(x).relu(), scale_factor=2, mode=self.mode)
        return self.last(torch.cat([self.near(x).relu(), far], 1)).mean((2, 3))


@pytest.mark.parametrize(
    ("mode", "convolutions"), [("nearest", 2), ("bilinear", 2), ("bicubic", 1)]
)
def test_resizing_keeps_tensors_from_being_negative(
    mode: str, convolutions: int, tmp_path: Path
) -> None:
    """Cubic interpolation does not, so the tensors that it is concatenated with get signed codes.

    Their ReLU and convolution then stay in float.
    """
    x = torch.randn(2, 3, 8, 8)
    net = calibrated(Pyramid(mode), x, target="onnxruntime")
    with pytest.warns(
        UserWarning,
        match=r"far: its output is not quantized.* put torchq\.nn\.QuantIdentity\(\) behind it",
    ):
        torchq.export_onnx(net, x, tmp_path / "m.onnx", target="onnxruntime", dynamo=False)
    kinds = [node.kind for node in torchq.inspect_onnx(tmp_path / "m.onnx").integer]
    assert kinds.count("QLinearConv") == convolutions
    assert torchq.verify_onnx(net, tmp_path / "m.onnx", [x]).ok


@pytest.mark.parametrize("mode", ["nearest", "bilinear"])
def test_with_an_example_resized_results_are_codes(mode: str, tmp_path: Path) -> None:
    """The convolution in front of the resizing quantizes its result, behind its ReLU."""
    x = torch.randn(2, 3, 8, 8)
    net = calibrated(Pyramid(mode), x, target="onnxruntime", example=x)
    torchq.export_onnx(net, x, tmp_path / "m.onnx", target="onnxruntime", dynamo=False)
    counts = torchq.inspect_onnx(tmp_path / "m.onnx").counts
    assert counts["QLinearConv"] == 3
    assert torchq.verify_onnx(net, tmp_path / "m.onnx", [x, torch.randn(3, 3, 8, 8)]).ok

"""Fourier transforms and wide windows in files for OpenVINO, as OpenVINO computes them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq.onnx.ir import load_model, nodes_of, replace_stored, save_model, value_of
from torchq.onnx.qdq import weight_nodes

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
pytest.importorskip("openvino")


class Mixed(nn.Module):
    """A linear layer, a transform of its results, and a linear layer that reads what it gives."""

    def __init__(self, transform: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 6)
        self.transform = transform
        features = transform(torch.randn(2, 9, 6)).shape[-1]
        self.last = nn.Linear(features, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.transform(self.first(x)))


def _filtered(x: Tensor) -> Tensor:
    return torch.fft.irfft2(
        0.5 * torch.fft.rfft2(x, dim=(1, 2)), s=x.shape[1:], dim=(1, 2)
    )


TRANSFORMS: dict[str, Callable[[Tensor], Tensor]] = {
    "of two dimensions": lambda x: torch.fft.fftn(x, dim=(1, 2)).real,
    "of the features": lambda x: torch.fft.fft(x, dim=2).real,
    "of the first": lambda x: torch.fft.fft(x, dim=1).imag,
    "inverse": lambda x: torch.fft.ifft(torch.fft.fft(x, dim=2) * 2, dim=2).real,
    "half": lambda x: torch.view_as_real(torch.fft.rfft(x, dim=1)).flatten(2),
    "half of the features": lambda x: torch.fft.rfft(x, dim=2).abs(),
    "back from a half": lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=9, dim=1),
    "shorter than the half": lambda x: torch.fft.irfft(
        torch.fft.rfft(x, dim=1), n=6, dim=1
    ),
    "filtered": _filtered,
}


#: Up to opset 19 the dimension is an attribute, which OpenVINO reads.
OLD = ["half", "back from a half"]


@pytest.mark.parametrize(
    ("name", "opset"),
    [*((name, 20) for name in TRANSFORMS), *((name, 18) for name in OLD)],
)
def test_transforms_are_those_of_the_model(
    tmp_path: Path, name: str, opset: int
) -> None:
    x = torch.randn(2, 9, 8)
    model = calibrated(Mixed(TRANSFORMS[name]), x, target="openvino")
    path = tmp_path / "m.onnx"
    # torch exports the filter with the batch of the example alone.
    torchq.export_onnx(
        model, x, path, opset=opset, dynamic_batch=name != "filtered", progress=False
    )
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert report.ok, str(report)


def test_a_transform_of_an_open_length_is_named(tmp_path: Path) -> None:
    back = lambda x: torch.fft.irfft(torch.fft.rfft(x, dim=1), n=x.shape[1], dim=1)  # noqa: E731
    x = torch.randn(2, 8, 8)
    model = calibrated(Mixed(back), x, target="openvino")
    with pytest.warns(UserWarning, match="another transform than this DFT"):
        torchq.export_onnx(
            model,
            x,
            tmp_path / "m.onnx",
            dynamic_shapes={"x": {1: "length"}},
            progress=False,
        )


WINDOWS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "of 16 channels": (lambda: nn.Conv1d(16, 8, 8, padding=4), (2, 16, 40)),
    "of groups": (
        lambda: nn.Conv1d(32, 32, 16, stride=2, padding=8, groups=2),
        (2, 32, 40),
    ),
    "dilated": (lambda: nn.Conv1d(16, 8, 12, dilation=2), (2, 16, 60)),
    "with long steps": (lambda: nn.Conv1d(32, 8, 4, stride=4), (2, 32, 64)),
    "of patches of 48 channels": (
        lambda: nn.Conv2d(48, 16, 8, stride=4, padding=2),
        (1, 48, 32, 32),
    ),
    "patches": (lambda: nn.Conv2d(8, 16, 16, stride=16), (2, 8, 32, 32)),
    "high": (lambda: nn.Conv2d(16, 8, (8, 1), padding=(2, 0)), (1, 16, 12, 70)),
    "of three dimensions": (lambda: nn.Conv3d(16, 8, (2, 3, 8)), (1, 16, 4, 9, 12)),
}


def _window_file(name: str, path: Path) -> tuple[nn.Module, Tensor]:
    make, shape = WINDOWS[name]
    x = torch.randn(shape)
    model = calibrated(nn.Sequential(make()), x, target="openvino")
    torchq.export_onnx(model, x, path, progress=False)
    return model, x


@pytest.mark.parametrize("name", WINDOWS)
def test_windows_whose_rows_fill_registers_are_wider(tmp_path: Path, name: str) -> None:
    path = tmp_path / "m.onnx"
    model, x = _window_file(name, path)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert report.ok, str(report)
    (weight,) = weight_nodes(load_model(path)).values()
    places = sum(value_of(weight.inputs[0]).shape[2:])
    assert places == sum(WINDOWS[name][0]().kernel_size) + 1


def test_other_windows_stay_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    x = torch.randn(1, 16, 20)
    model = calibrated(nn.Sequential(nn.Conv1d(16, 8, 7)), x, target="openvino")
    torchq.export_onnx(model, x, path, progress=False)
    (conv,) = nodes_of(load_model(path), "Conv")
    assert list(conv.attributes["kernel_shape"].value) == [7]


def test_other_numbers_than_zeros_behind_a_window_are_a_difference(
    tmp_path: Path,
) -> None:
    path = tmp_path / "m.onnx"
    model, x = _window_file("of 16 channels", path)
    graph = load_model(path)
    (weight,) = weight_nodes(graph).values()
    codes = value_of(weight.inputs[0])
    codes[0, 0, -1] = 1
    replace_stored(weight.inputs[0], codes)
    save_model(graph, path)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert not report.ok
    assert "has other numbers than zeros behind its window" in str(report)

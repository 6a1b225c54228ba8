"""Models whose own operators have quantizers are deployed whole, whatever they return."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated, sqnr
from torchq.lowering import Int8Conv


def block(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.SiLU()
    )


class Split(nn.Module):
    """The C2f block of YOLOv8."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.inner, self.last = (
            block(width, width),
            block(width // 2, width // 2),
            block(width // 2 * 3, width),
        )

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.first(x).chunk(2, 1))
        parts.append(parts[-1] + self.inner(parts[-1]))
        return self.last(torch.cat(parts, 1))


class Detector(nn.Module):
    """Two resolutions, fused and returned in a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down = block(3, 16), nn.MaxPool2d(2)
        self.fine, self.coarse, self.mixed = Split(16), Split(16), block(32, 16)
        self.up = nn.Upsample(scale_factor=2)
        self.heads = nn.ModuleList(nn.Conv2d(16, 6, 1) for _ in range(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        fine = self.fine(self.stem(x))
        coarse = self.coarse(self.down(fine))
        fine = self.mixed(torch.cat([self.up(coarse), fine], 1))
        return {
            f"scale{i}": head(y)
            for i, (head, y) in enumerate(zip(self.heads, (fine, coarse), strict=True))
        }


@pytest.fixture
def images() -> Tensor:
    return torch.randn(2, 3, 16, 16)


@pytest.mark.parametrize("target", [None, "tensorrt", "openvino", "onnxruntime"])
def test_a_detector_is_deployed_whole(images: Tensor, target: str | None) -> None:
    model = Detector().eval()
    torchq.fuse_(model, images, verify=False)
    torchq.quantize_(model, target=target)
    torchq.calibrate(model, [images], progress=False)
    int8 = torchq.deploy(model, images)
    assert isinstance(int8, torch.fx.GraphModule)
    assert sum(isinstance(m, Int8Conv) for m in int8.modules()) == sum(
        isinstance(m, nn.Conv2d) for m in model.modules()
    )
    got, expected = int8(images), model(images)
    assert list(got) == list(expected) == ["scale0", "scale1"]
    for name in expected:
        assert (
            sqnr(got[name], expected[name]) > 38
        )  # a code that falls the other way at a tie, through nine layers
        for other in (copy.deepcopy(int8), pickle.loads(pickle.dumps(int8))):
            assert torch.equal(other(images)[name], got[name])
    file = io.BytesIO()
    torch.export.save(torch.export.export(int8, (images,)), file)
    file.seek(0)
    exported = torch.export.load(file).module()(images)
    assert all(sqnr(exported[name], got[name]) > 38 for name in got)


def test_layers_alone_keep_the_bits_of_their_bias(images: Tensor) -> None:
    # Codes shifted by 128 would give sums of the order of 128 * 9 * 16 before the shift is
    # subtracted again, which costs the low bits of a float32 bias.
    conv = nn.Conv2d(16, 8, 3)
    torch.nn.init.uniform_(conv.weight, 0.5, 1.0)
    x = torch.rand(2, 16, 8, 8) * 1e-2
    x[0, 0, 0, 0] = 1.0
    model = calibrated(conv, x)
    int8 = torchq.deploy(model, fuse=False)
    exact = copy.deepcopy(model).double()(x.double())
    assert sqnr(int8(x), exact) > 125
    signed = torch.cat([x, -x])
    assert sqnr(int8(signed), model(signed)) > 90
    assert torch.equal(int8(signed)[:0], int8(signed[:0]))

"""Detectors that take lists of images and choose boxes: whole, or a module around their layers."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision.ops import MultiScaleRoIAlign, nms

import torchq
from tests.onnx.exported import run_file
from torchq.errors import ConfigError, ExportError
from torchq.onnx.verify.report import Output, add_outputs

pytest.importorskip("onnx")
# torch says of a trace what it follows, and onnxruntime of shapes that depend on the data.
pytestmark = pytest.mark.filterwarnings("ignore")


class Detector(nn.Module):
    """A detector in the style of torchvision: a list of images in, a list of boxes out."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.ReLU())
        self.box = nn.Conv2d(8, 4, 1)
        self.score = nn.Conv2d(8, 1, 1)

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        if not isinstance(images, list) or images[0].dim() != 3:
            raise ValueError("images is expected to be a list of images")
        found = []
        features = self.backbone(torch.stack(images))
        for boxes, scores in zip(self.box(features), self.score(features), strict=True):
            corners = boxes.flatten(1).t().sigmoid()
            corners = torch.cat([corners[:, :2], corners[:, 2:] + 1], 1)
            chosen = nms(corners, scores.flatten(), 0.5)
            if chosen.numel() > 3:
                chosen = chosen[:3]
            found.append({"boxes": corners[chosen], "scores": scores.flatten()[chosen]})
        return found


class Layers(nn.Module):
    """What the messages advise: one tensor in, a tuple of tensors out, around the layers."""

    def __init__(self, detector: Detector) -> None:
        super().__init__()
        self.detector = detector

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.detector.backbone(images)
        return self.detector.box(features), self.detector.score(features)


def images() -> list[Tensor]:
    return [torch.randn(3, 17, 17)]


def test_a_detector_goes_into_a_file_whole(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [(images(),) for _ in range(4)]
    detector = Detector().eval()
    torchq.quantize_(detector, target="onnxruntime", example=batches[0], progress=False)
    torchq.calibrate(detector, batches, progress=False)
    path = tmp_path / "net.onnx"
    torchq.export_onnx(detector, batches[0], path, dynamo=False, progress=False)
    for batch in batches:
        expected = detector(*batch)[0]
        found = run_file(path, batch[0][0])
        assert len(found) == 2
        assert found[0].shape == expected["boxes"].shape
    assert torchq.verify_onnx(detector, path, batches, progress=False).ok


@pytest.mark.slow  # torch.export fails first, and then follows the layers
def test_the_advice_of_both_exporters_leads_to_a_file(tmp_path: Path) -> None:
    """The first advises the second, and both a module around the layers."""
    torch.manual_seed(0)
    batch = (images(),)
    detector = Detector().eval()
    torchq.quantize_(detector, target="onnxruntime", example=batch, progress=False)
    torchq.calibrate(detector, [batch], progress=False)
    path = tmp_path / "net.onnx"
    wrapper = (
        "export a torch.nn.Module around its layers, such as backbone and head, whose forward "
        "takes one tensor and returns a tuple of tensors"
    )
    with pytest.raises(ExportError, match=wrapper) as caught:
        torchq.export_onnx(detector, batch, path, progress=False)
    assert "dynamo=False takes the other exporter" in str(caught.value)
    assert "dynamic_batch" not in str(caught.value)  # No batch is open in a list.
    with pytest.raises(ExportError, match=wrapper):
        torchq.export_onnx(
            detector, torch.randn(17), path, dynamo=False, progress=False
        )
    network = Layers(detector)
    x = torch.stack(batch[0])
    torchq.export_onnx(network, x, path, progress=False)
    assert torchq.verify_onnx(network, path, [x], progress=False).ok


def test_a_list_as_the_one_argument_is_advised() -> None:
    with pytest.raises(ConfigError, match=r"put it into a tuple: \(images,\)"):
        torchq.quantize_(Detector().eval(), example=images(), progress=False)


class Regions(nn.Module):
    """Regions of two maps, as many of each as the boxes are large."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, 2, 1)
        self.second = nn.Conv2d(4, 4, 3, 2, 1)
        self.quantized = torchq.nn.QuantIdentity()
        self.pool = MultiScaleRoIAlign(["first", "second"], 3, 2)
        self.head = nn.Linear(36, 2)

    def forward(self, x: Tensor, boxes: Tensor) -> Tensor:
        first = self.first(x)
        second = self.quantized(self.second(first)).relu_()
        maps: Any = {"first": self.quantized(first), "second": second}
        return self.head(self.pool(maps, [boxes], [(512, 512)]).flatten(1))


def boxes(small: int, large: int) -> Tensor:
    corners = torch.rand(small + large, 2) * 8
    sizes = torch.tensor([20.0] * small + [500.0] * large)
    return torch.cat([corners, corners + sizes[:, None]], 1)


def test_the_number_of_regions_of_a_map_is_no_constant(tmp_path: Path) -> None:
    """The older exporter stored how many the example had, where a quantized map is overwritten."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 512, 512)
    example = (x, boxes(5, 2))
    network = Regions().eval()
    torchq.quantize_(network, target="onnxruntime", example=example, progress=False)
    torchq.calibrate(network, [example], progress=False)
    path = tmp_path / "net.onnx"
    options: Any = {"dynamo": False, "dynamic_batch": False, "progress": False}
    torchq.export_onnx(network, example, path, **options)
    batches = [(x, boxes(5, 2)), (x, boxes(3, 4)), (x, boxes(6, 1))]
    assert torchq.verify_onnx(network, path, batches, progress=False).ok


def test_outputs_without_a_row_are_equal() -> None:
    outputs = [Output("boxes"), Output("scores")]
    nothing = [torch.zeros(0, 4), torch.zeros(0)]
    add_outputs(outputs, nothing, nothing)
    assert all(output.result().ok for output in outputs)
    one = [torch.ones(1, 4), torch.ones(1)]
    add_outputs(outputs, one, [torch.zeros(1, 4), torch.zeros(1)])
    assert [output.result().equal for output in outputs] == [0.0, 0.0]


def test_another_number_of_rows_says_where_it_may_come_from() -> None:
    message = re.escape("of which equal ones come in any order: export and verify a")
    with pytest.raises(ExportError, match=message):
        add_outputs([Output("boxes")], [torch.ones(2, 4)], [torch.ones(3, 4)])
    with pytest.raises(ExportError, match=r"expected equal shapes. Export again"):
        add_outputs([Output("boxes")], [torch.ones(2, 4)], [torch.ones(2, 3)])

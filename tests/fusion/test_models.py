"""Whole networks: every BatchNorm that follows a layer goes, and the function stays."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.fusion.common import error, norms, outputs, randomized
from torchq.fusion import fuse_
from torchq.graph import tensors_in

torchvision = pytest.importorskip("torchvision")


class Allocations(TorchDispatchMode):
    """Remembers the largest tensor that any operation returned."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(t.numel() for t in tensors_in(out))])
        return out


# name: (BatchNorms that stay, as they come before an activation; image size); random weights
MODELS = {
    "resnet18": (0, 64),
    "mobilenet_v3_small": (0, 64),
    "shufflenet_v2_x0_5": (0, 64),
}


@pytest.mark.parametrize("name", MODELS)
def test_torchvision_network(name: str) -> None:
    left, size = MODELS[name]
    model = randomized(torchvision.models.get_model(name, weights=None))
    exact, x = copy.deepcopy(model).double(), torch.randn(1, 3, size, size + 3)
    want = outputs(exact, x.double())
    before = outputs(model, x)
    report = fuse_(model, x)
    assert len(report.refused) == left
    assert report.error <= 1e-5
    # The reference is the float64 network: fusing must not be further from it than rounding in
    # float32 is.
    assert error(outputs(model, x), want) <= max(1e-5, 3 * error(before, want))
    assert fuse_(exact, x.double()).error <= 1e-10
    assert error(outputs(exact, x.double()), want) <= 1e-10


def test_a_detector_whose_forward_cannot_be_traced() -> None:
    name, sizes = "fasterrcnn_mobilenet_v3_large_320_fpn", {"min_size": 64, "max_size": 96}
    model = randomized(
        torchvision.models.get_model(
            name, weights=None, weights_backbone=None, num_classes=3, **sizes
        ).double()
    )
    images = [torch.rand(3, 64, 80, dtype=torch.float64)]
    features = outputs(model.backbone, images[0][None])
    report = fuse_(model, (images,)).require_all()
    assert {fusion.found_by for fusion in report.fused} == {"recorder"}
    assert report.error <= 1e-9
    assert norms(model) == []
    assert (
        max(
            error(got, features[key])
            for key, got in outputs(model.backbone, images[0][None]).items()
        )
        <= 1e-10
    )


def test_widely_dilated_convolutions_cost_no_memory() -> None:
    """Written densely, the kernels of an atrous pyramid would take hundreds of megabytes."""

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (
                nn.Conv2d(64, 64, 3, padding=rate, dilation=rate, bias=False) for rate in (90, 150)
            )
            self.norm_a, self.norm_b = nn.BatchNorm2d(64), nn.BatchNorm2d(64)

        def forward(self, x: Tensor) -> Any:
            return torch.relu(self.norm_a(self.a(x)) + self.norm_b(self.b(x)))

    model = randomized(nn.Sequential(Pyramid()))
    with Allocations() as allocations:
        report = fuse_(model)
    assert [fusion.kind for fusion in report.fused] == ["norm after layer"] * 2
    assert (
        allocations.largest <= 64 * 64 * 9 * 2
    )  # nothing larger than a kernel as it is stored, and a little for images

"""Whole networks: every BatchNorm that follows a layer goes, and the function stays."""

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

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        self.largest = max([self.largest, *(t.numel() for t in tensors_in(out))])
        return out


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    "name", ["resnet18", "mobilenet_v3_small", "shufflenet_v2_x0_5"]
)
def test_torchvision_network(name: str) -> None:
    model = randomized(torchvision.models.get_model(name, weights=None))
    exact = copy.deepcopy(model).double()
    x = torch.randn(1, 3, 64, 67)
    want = outputs(exact, x.double())
    before = outputs(model, x)
    assert fuse_(model, x).require_all().error <= 1e-5
    # The reference is the float64 network: fusing must not be further from it than rounding in
    # float32 is.
    assert error(outputs(model, x), want) <= max(1e-5, 3 * error(before, want))
    assert fuse_(exact, x.double()).error <= 1e-10
    assert error(outputs(exact, x.double()), want) <= 1e-10


@pytest.mark.slow
def test_a_detector_whose_forward_cannot_be_traced() -> None:
    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    sizes = {"min_size": 64, "max_size": 96}
    options = {"weights": None, "weights_backbone": None, "num_classes": 3, **sizes}
    model = randomized(torchvision.models.get_model(name, **options).double())
    images = [torch.rand(3, 64, 80, dtype=torch.float64)]
    features = outputs(model.backbone, images[0][None])
    report = fuse_(model, (images,)).require_all()
    assert {fusion.found_by for fusion in report.fused} == {"recorder"}
    assert report.error <= 1e-9
    assert norms(model) == []
    got = outputs(model.backbone, images[0][None])
    assert all(error(got[key], want) <= 1e-10 for key, want in features.items())


def test_widely_dilated_convolutions_cost_no_memory() -> None:
    """Written densely, the kernels of an atrous pyramid would take hundreds of megabytes."""

    class Pyramid(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(64, 64, 3, padding=90, dilation=90, bias=False)
            self.b = nn.Conv2d(64, 64, 3, padding=150, dilation=150, bias=False)
            self.norm_a = nn.BatchNorm2d(64)
            self.norm_b = nn.BatchNorm2d(64)

        def forward(self, x: Tensor) -> Any:
            return torch.relu(self.norm_a(self.a(x)) + self.norm_b(self.b(x)))

    model = randomized(nn.Sequential(Pyramid()))
    with Allocations() as allocations:
        report = fuse_(model)
    assert [fusion.kind for fusion in report.fused] == ["norm after layer"] * 2
    # nothing larger than a kernel as it is stored, and a little for images
    assert allocations.largest <= 64 * 64 * 9 * 2

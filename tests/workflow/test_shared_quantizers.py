"""One quantizer in several slots, in files."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.models import TwoReaders, simulated
from torchq import QuantDescriptor, TensorQuantizer
from torchq.swap import plan_of

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class PooledTwice(nn.Module):
    """A tensor and what a pooling makes of it, twice, are concatenated, as in YOLO's SPP."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.relu(self.first(x)))
        pooled = F.max_pool2d(x, 3, 1, 1)
        return torch.cat([x, pooled, pooled, pooled.relu()], 1)


class TwoPlaces(nn.Module):
    """A network that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = TwoReaders()
        self.again = self.net

    def forward(self, x: Tensor) -> Tensor:
        return self.again(x)


OWNERS: dict[Callable[[], nn.Module], str] = {
    PooledTwice: "quant_cat",
    TwoReaders: "quant_add",
    TwoPlaces: "net.quant_add",
}


def quantized(build: Callable[[], nn.Module]) -> nn.Module:
    model = build().eval()
    if isinstance(model, PooledTwice):
        # Part of the tensor has no negative values, so that the concatenation has several ranges.
        nn.init.constant_(model.second.bias, -0.01)
        torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    else:
        torchq.quantize_(model, target="tensorrt")
        torchq.qat.share_range_(model, "*quant_add.*")
    return model


@pytest.mark.sample(3)
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("build", OWNERS)
def test_a_quantizer_in_two_slots_of_one_module_is_loaded(
    build: Callable[[], nn.Module], calibrated: bool, tmp_path: Path
) -> None:
    model = quantized(build)
    owner = OWNERS[build]
    if calibrated:
        torchq.calibrate(model, [X], progress=False)
    record = plan_of(model).to_dict()
    assert any(sum(p.startswith(f"{owner}.") for p in g) > 1 for g in record["shared"])
    torchq.save(model, tmp_path / "m.pt")
    loaded = torchq.load(build().eval(), tmp_path / "m.pt")
    assert torch.equal(loaded(X), model(X))
    assert plan_of(loaded).to_dict() == record
    assert plan_of(loaded).outcome() == plan_of(model).outcome()


def test_a_quantizer_per_axis_may_stand_in_two_slots_of_its_author(
    tmp_path: Path,
) -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)
            self.before = TensorQuantizer(QuantDescriptor(axis=1))
            self.after = self.before

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.after(self.layer(self.before(x)))
            return found

    model = simulated(Placed().eval(), [X])
    torchq.save(model, tmp_path / "m.pt")
    loaded = torchq.load(Placed().eval(), tmp_path / "m.pt")
    assert loaded.before is loaded.after
    assert torch.equal(loaded(X), model(X))

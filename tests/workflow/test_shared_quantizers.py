"""One quantizer in several slots, in files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq import QuantDescriptor, TensorQuantizer
from torchq.swap import plan_of
from torchq.workflow import embed_record_

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class PooledTwice(nn.Module):
    """A tensor and what a pooling makes of it, twice, are concatenated, as in YOLO's SPP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)
        # Part of the tensor has no negative values, so that the concatenation has several ranges.
        nn.init.constant_(self.second.bias, -0.01)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.relu(self.first(x)))
        pooled = F.max_pool2d(x, 3, 1, 1)
        return torch.cat([x, pooled, pooled, pooled.relu()], 1)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


def pooled_twice() -> nn.Module:
    model = PooledTwice().eval()
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    return model


def one_range_sum() -> nn.Module:
    model = Sum().eval()
    torchq.quantize_(model, target="tensorrt")
    torchq.qat.share_range_(model, "quant_add.*")
    return model


class Inside(nn.Module):
    """A network that stands in two places."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.net = make()
        self.again = self.net

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.again(x)
        return found


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "concatenation": (PooledTwice, pooled_twice, "quant_cat"),
    "addition": (Sum, one_range_sum, "quant_add"),
    "in two places": (lambda: Inside(Sum), lambda: Inside(one_range_sum), "net.quant_add"),
}


def with_ranges(model: nn.Module) -> nn.Module:
    torchq.calibrate(model, [X], progress=False)
    return model


@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_quantizer_in_two_slots_of_one_module_is_loaded(
    name: str, calibrated: bool, tmp_path: Path
) -> None:
    build, make, owner = NETWORKS[name]
    model = with_ranges(make()) if calibrated else make()
    slots = [q for q in model.get_submodule(owner).children() if isinstance(q, TensorQuantizer)]
    record = plan_of(model).to_dict()
    assert any(sum(p.startswith(f"{owner}.") for p in g) > 1 for g in record["shared"]), slots
    torchq.save(model, tmp_path / "m.pt")
    loaded = torchq.load(build().eval(), tmp_path / "m.pt")
    assert torch.equal(loaded(X), model(X))
    assert plan_of(loaded).to_dict() == record
    assert plan_of(loaded).outcome() == plan_of(model).outcome()
    assert plan_of(loaded).modes == plan_of(model).modes


def test_a_folder_of_weights_keeps_the_sharing(tmp_path: Path) -> None:
    """The names have the path of the quantized part in front, and each slot has its own copy."""
    whole = nn.Sequential(with_ranges(one_range_sum()))
    embed_record_(whole[0])
    state = whole.state_dict()
    torch.save(state, tmp_path / "m.bin")
    loaded = torchq.load(nn.Sequential(Sum()).eval(), tmp_path / "m.bin")
    assert loaded[0].quant_add.input_quantizer is loaded[0].quant_add.other_quantizer
    assert torch.equal(loaded(X), whole(X))


def test_a_quantizer_per_axis_may_stand_in_two_slots_of_its_author(tmp_path: Path) -> None:
    class Placed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(3, 3, 1)
            self.before = TensorQuantizer(QuantDescriptor(axis=1))
            self.after = self.before

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.after(self.layer(self.before(x)))
            return found

    model = Placed().eval()
    torchq.quantize_(model)
    torchq.save(with_ranges(model), tmp_path / "m.pt")
    loaded = torchq.load(Placed().eval(), tmp_path / "m.pt")
    assert loaded.before is loaded.after
    assert torch.equal(loaded(X), model(X))

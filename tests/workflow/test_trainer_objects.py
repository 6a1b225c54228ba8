"""Objects that hold a network and train it, as Ultralytics' YOLO, stand for their network."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from tests.models import ConvNet

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Trains(nn.Module):
    """Starts a training where others set the mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.model = ConvNet().eval()

    def train(self, trainer: Any = None, **settings: Any) -> Any:
        raise AssertionError("a training was started")


class SwitchesItself(nn.Module):
    """Sets the mode by a method of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(4, 4)
        self.head = nn.Linear(4, 4)

    def train(self, flag: bool = True) -> "SwitchesItself":
        return super().train(flag)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.model(x))


def test_the_network_goes_to_a_file(tmp_path: Path) -> None:
    holder = Trains()
    assert torchq.fuse_(holder, X, progress=False).applied
    planned = torchq.plan(holder, target="onnxruntime", example=X)
    quantized = torchq.quantize_(
        holder, target="onnxruntime", example=X, progress=False
    )
    assert quantized.decisions == planned.decisions
    torchq.calibrate(holder, [X], progress=False)
    assert torchq.summary(holder).rows == torchq.summary(holder.model).rows
    torchq.save(holder, tmp_path / "net.pt")
    path = tmp_path / "net.onnx"
    torchq.export_onnx(holder, X, path, dynamo=False, progress=False)
    assert torchq.verify_onnx(holder, path, [X], progress=False).ok
    assert torchq.doctor(holder, [X], progress=False).ok
    restored = torchq.restore_(holder)
    assert "head" in restored
    assert not hasattr(holder.model, "quant_add")


def test_modules_with_a_switch_of_their_own_are_quantized_whole() -> None:
    model = SwitchesItself()
    plan = torchq.quantize_(model, progress=False)
    assert [decision.name for decision in plan.replaced] == ["model", "head"]


class PassesOn(nn.Module):
    """A network whose ``train`` takes any arguments, a mode among them, and hands them on."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.head = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.model(x))

    def train(self, *args: Any, **kwargs: Any) -> Any:
        return super().train(*args, **kwargs)


def test_a_network_that_takes_any_arguments_for_its_mode_is_no_trainer() -> None:
    assert [d.name for d in torchq.plan(PassesOn()).replaced] == ["model", "head"]


def test_a_forecast_starts_no_training() -> None:
    class Trains(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = nn.Sequential(nn.Linear(4, 4))

        def forward(self, x: torch.Tensor) -> Any:
            return self.model(x)

        def train(self, trainer: Any = None, **settings: Any) -> Any:
            raise AssertionError("a training began")

    found = torchq.forecast(Trains(), torch.randn(1, 4), "torch", progress=False)
    assert found["torch"].share is not None

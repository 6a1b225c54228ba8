"""Models and measures for the tests of torchq.lowering."""

import io
import math
from typing import Any

import torch
from torch import Tensor, nn

import torchq
from torchq.lowering.kernel import saturates

#: The bits of weights that this CPU multiplies without an overflow.
BITS = 7 if saturates() else 8


def weight_codes(*shape: int, generator: torch.Generator) -> Tensor:
    """Return random int8, of 7 bits where 8 would overflow: on CPUs without VNNI."""
    most = 64 if saturates() else 128
    return torch.randint(-most, most, shape, generator=generator).to(torch.int8)


def recipe() -> torchq.QuantConfig:
    """Return the usual recipe, with weights that this CPU multiplies without an overflow."""
    return torchq.recipes.int8(reduce_range=BITS == 7)


def calibrated(
    model: nn.Module, x: Tensor, config: torchq.QuantConfig | None = None
) -> nn.Module:
    """``model`` quantized and calibrated on ``x``, in eval mode."""
    torchq.quantize_(model.eval(), config or recipe())
    torchq.calibrate(model, [x], progress=False)
    return model


def sqnr(got: Tensor, expected: Tensor) -> float:
    """Signal to error in dB, infinite for equality."""
    error = (got.double() - expected.double()).square().sum().item()
    return (
        math.inf
        if error == 0
        else 10 * math.log10(expected.double().square().sum().item() / error)
    )


def stored_state(model: nn.Module) -> dict[str, Any]:
    """Return the state of ``model`` through a file."""
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    state: dict[str, Any] = torch.load(file, weights_only=True)
    return state


class Residual(nn.Module):
    """A small residual network with BatchNorm, pooling, concatenation and a linear head."""

    def __init__(self, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2)
        self.conv1 = nn.Conv2d(16, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 16, 3, padding=1)
        self.left = nn.Conv2d(16, 8, 1)
        self.right = nn.Conv2d(16, 24, 3, padding=1, groups=8)
        self.act = activation()
        self.head = nn.Linear(32, 5)
        with torch.no_grad():
            self.norm.running_mean.normal_()  # type: ignore[union-attr]
            self.norm.running_var.uniform_(0.5, 2)  # type: ignore[union-attr]
            self.norm.weight.normal_()

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.act(self.norm(self.stem(x))))
        x = self.act(self.conv2(self.act(self.conv1(x))) + x)
        x = torch.cat([self.act(self.left(x)), self.act(self.right(x))], 1)
        return self.head(x.mean((2, 3)))

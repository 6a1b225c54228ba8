"""The counter of products with weights sees every way to write one, and tells which are float."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from benchmarks.zoo_measures import count, on_grid


class Standardized(nn.Conv2d):
    """A convolution that computes its weight, as weight standardization does."""

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return F.conv2d(x, weight, self.bias)


class Functional(nn.Module):
    """Products with parameters, and one product of two activations, which does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = F.linear(x, self.weight) @ self.weight
        x = torch.addmm(
            x.new_zeros(4),
            x,
            2 * self.weight,
        )
        return x @ x.t()


@pytest.mark.parametrize(
    ("model", "shape", "products"),
    [
        (nn.Conv2d(3, 4, 3), (2, 3, 8, 8), 1),
        (nn.ConvTranspose2d(3, 4, 3), (2, 3, 8, 8), 1),
        (nn.Linear(3, 4), (2, 5, 3), 1),
        (Standardized(3, 4, 3), (2, 3, 8, 8), 1),
        (Functional(), (2, 4), 3),
        (nn.ReLU(), (2, 4), 0),
    ],
    ids=lambda value: type(value).__name__,
)
def test_float_products_are_counted(
    model: nn.Module, shape: tuple[int, ...], products: int
) -> None:
    x = torch.randn(shape)
    actual = count(model, lambda: model(x))
    assert (actual.total, len(actual.floating)) == (products, products)


def test_quantized_products_are_told_apart() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    )
    x = torch.randn(2, 3, 8, 8)
    torchq.quantize_(model, exclude=["3"])
    torchq.calibrate(model, [x], progress=False)
    actual = count(model, lambda: model(x))
    assert actual.total == 2
    assert len(actual.floating) == 1


def test_grids() -> None:
    codes = torch.randint(-127, 128, (8, 16)).float()
    codes[:, 0] = 127
    assert on_grid(codes * torch.rand(8, 1))
    assert on_grid(codes.t() * torch.rand(1, 8))
    assert on_grid(0.3 * codes)
    assert not on_grid(torch.randn(8, 16))

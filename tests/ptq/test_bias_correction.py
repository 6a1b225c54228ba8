"""Bias correction against the equations of Nagel et al. (2019), section 4.2."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.ptq import correct_bias_

W3 = torchq.recipes.integer(3, 4)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4, stride=2),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
        nn.Flatten(),
        nn.Linear(4 * 6 * 6, 5),
    ).eval()


def batches(count: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(8, 3, 8, 8, generator=generator) for _ in range(count)]


def calibrated(model: nn.Module | None = None, config: Any = W3) -> Any:
    model = model or net()
    torchq.quantize_(model, config)
    torchq.calibrate(model, batches(), progress=False)
    return model


def channel_means(model: nn.Module, index: int) -> Tensor:
    """Return the mean output of each channel of one layer over all batches."""
    with torch.no_grad():
        out = model[: index + 1](torch.cat(batches())).double()  # type: ignore[index]
    return out.movedim(-1 if out.dim() == 2 else 1, 0).flatten(1).mean(1)


LAYERS = (0, 2, 4, 6)


def test_the_mean_of_every_channel_becomes_that_of_the_float_model() -> None:
    """E[y] = E[quantized y] holds for each layer on the corrected layers before it."""
    floats, model = net(), calibrated()
    before = [(channel_means(model, i) - channel_means(floats, i)).abs().max() for i in LAYERS]
    report = correct_bias_(model, batches(), progress=False)
    assert list(report.corrections) == ["0", "2", "4", "6"] and report.skipped == {}
    assert report.batches == 3
    for i, shift in zip(LAYERS, before, strict=True):
        expected = channel_means(floats, i)
        # The bias is float32, so a mean is exact to a few units in its last place.
        torch.testing.assert_close(channel_means(model, i), expected, rtol=0, atol=1e-6)
        assert shift > 1e-3
    assert all(change > 0 for change in report.corrections.values())
    assert "4 biases from 3 batches" in str(report)


@pytest.mark.parametrize("index", [0, 2])
def test_analytic_takes_back_the_weight_error_times_the_mean_input(index: int) -> None:
    """Equation 17 of the paper: the shift is (quantized weight - weight) * E[x]."""
    model, floats = calibrated(), net()
    before = model[index].bias.detach().clone()
    layer = model[index]
    error = (layer.weight_quantizer(layer.weight) - layer.weight).detach().double()
    with torch.no_grad():
        x = floats[:index](torch.cat(batches())).double()
    # What a constant image of the mean adds; one pixel of it shows all taps of the kernel.
    mean = x.mean((0, 2, 3)).view(1, -1, 1, 1).expand(1, -1, 3, 3)
    shift = nn.functional.conv2d(mean, error, groups=layer.groups).flatten()
    report = correct_bias_(model, batches(), method="analytic", progress=False)
    torch.testing.assert_close(layer.bias.detach().double(), before - shift, rtol=0, atol=1e-6)
    assert list(report.corrections) == ["0", "2", "6"]
    assert report.skipped == {"4": "the analytic method leaves transposed convolutions alone"}


def test_layers_that_are_left_alone_are_named() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bare, self.used, self.unused = (
                nn.Linear(4, 4, bias=False),
                nn.Linear(4, 4),
                nn.Linear(4, 4),
            )
            self.pair = nn.Bilinear(4, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            x = self.used(self.bare(x))
            return self.pair(x, x)

    model, data = Net(), [torch.rand(8, 4)]
    torchq.quantize_(model, W3)
    torchq.calibrate(model, data, on_unseen="disable", progress=False)
    report = correct_bias_(model, data, progress=False)
    assert list(report.corrections) == ["used"]
    assert report.skipped == {
        "bare": "it has no bias; fuse BatchNorm first, or build it with one",
        "unused": "no batch reached it",
        "pair": "QuantBilinear is no convolution or linear layer",
    }


class Shared(nn.Module):
    """A layer that runs twice in each pass, on inputs of different size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.middle(torch.relu(self.first(x))))
        return self.last(torch.relu(self.middle(x)))


def test_all_calls_of_a_layer_count() -> None:
    """The mean of a layer that runs twice is that over both calls, in float and quantized."""
    torch.manual_seed(0)
    model = Shared().eval()
    data = [torch.randn(64, 6) for _ in range(3)]
    torchq.quantize_(model, torchq.recipes.int8())
    torchq.calibrate(model, data, progress=False)
    report = correct_bias_(model, data, progress=False)
    # Codes of 8 bits shift a mean by a percent or two. The mean of the first call alone differs
    # from that of both by a third.
    assert report.corrections["middle"] < 0.03 and report.corrections["last"] < 0.03

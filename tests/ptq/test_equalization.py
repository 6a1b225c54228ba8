"""Cross-layer equalization against the equations of Nagel et al. (2019), section 4.1."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError, QuantizationError
from torchq.ptq import equalize_


def unequal(layer: Any, generator: torch.Generator) -> Any:
    """Give the output channels of a layer very different ranges."""
    with torch.no_grad():
        size = layer.weight.shape[0]
        factor = torch.logspace(-2, 2, size)[torch.randperm(size, generator=generator)]
        layer.weight.mul_(factor.view(-1, *[1] * (layer.weight.dim() - 1)))
        if layer.bias is not None and len(layer.bias) == size:
            layer.bias.mul_(factor)
    return layer


def mobile(generator: torch.Generator) -> nn.Sequential:
    """Return a net with pointwise, depthwise, grouped and transposed layers."""
    torch.manual_seed(0)
    return nn.Sequential(
        unequal(nn.Conv2d(3, 8, 1), generator),
        nn.Dropout2d(),
        unequal(nn.Conv2d(8, 8, 3, groups=8, bias=False), generator),
        nn.LeakyReLU(0.1),
        unequal(nn.Conv2d(8, 8, 1, groups=2), generator),
        nn.PReLU(8),
        unequal(nn.ConvTranspose2d(8, 6, 2, groups=2), generator),
        nn.MaxPool2d(2),
        unequal(nn.Conv2d(6, 4, 1), generator),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4, 3),
    ).eval()


class Clipping(nn.Module):
    """Clips by a function and by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))
        self.clip = nn.ReLU6()

    def forward(self, x: Tensor) -> Tensor:
        x = self.clip(self.first(x))
        return self.third(nn.functional.hardtanh(self.second(x), 0.0, 6.0))


def test_what_clips_is_refused_with_what_would_help() -> None:
    report = equalize_(
        Clipping().eval(),
        torch.rand(3, 4),
    )
    rest = (
        "does not keep factors of channels, because it clips; a ReLU in its place would"
    )
    assert report.pairs == ()
    assert report.skipped["first"] == f"clip {rest}"
    assert report.skipped["second"] == f"hardtanh {rest}"


PAIRS = [("0", "2"), ("2", "4"), ("4", "6"), ("6", "8"), ("8", "11")]


def test_equation_11_for_two_linear_layers(generator: torch.Generator) -> None:
    model = nn.Sequential(
        nn.Linear(5, 6),
        nn.ReLU(),
        nn.Linear(6, 4),
    )
    unequal(model[0], generator)
    w1, b1, w2 = (
        t.detach().double()
        for t in (
            model[0].weight,
            model[0].bias,
            model[2].weight,
        )
    )
    r1 = w1.abs().amax(1)
    r2 = w2.abs().amax(0)
    s = (r1 * r2).sqrt() / r2
    report = equalize_(model, torch.rand(7, 5))
    torch.testing.assert_close(
        model[0].weight.double(), w1 / s[:, None], rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        model[0].bias.double(),
        b1 / s,
        rtol=1e-6,
        atol=0,
    )
    torch.testing.assert_close(
        model[2].weight.double(),
        w2 * s,
        rtol=1e-6,
        atol=0,
    )
    assert [(p.first, p.second) for p in report.pairs] == [("0", "2")]
    assert report.skipped == {"2": "its output is an output of the model"}
    assert report.pairs[0].spread_before == pytest.approx(
        (r1.max() / r1.median()).item()
    )


def test_every_kind_of_layer_keeps_its_function(generator: torch.Generator) -> None:
    model = mobile(generator)
    x = torch.randn(4, 3, 9, 9, generator=generator)
    expected = model(x)
    report = equalize_(model, x[:1])
    assert [(p.first, p.second) for p in report.pairs] == PAIRS
    assert report.error < 1e-5
    # The weights are float32 and changed by factors: a few units in the last place a layer.
    assert (model(x) - expected).norm() < 1e-5 * expected.norm()
    # A pair may become worse for the sake of its neighbours, but all of them together do not.
    before, after = (
        sum(math.log(getattr(pair, f"spread_{when}")) for pair in report.pairs)
        for when in ("before", "after")
    )
    assert after < 0.8 * before
    assert "5 pairs, output changed by" in str(report)


def test_a_quantized_model_becomes_more_accurate(generator: torch.Generator) -> None:
    x = torch.randn(64, 3, 9, 9, generator=generator)
    errors = []
    for equalized in (False, True):
        model = mobile(generator.manual_seed(3))
        expected = model(x)
        torchq.quantize_(model, torchq.recipes.int8_per_tensor())
        if equalized:
            equalize_(model, x)
            assert all(
                q.mode == "quantize" for q in torchq.workflow.quantizers(model).values()
            )
        torchq.calibrate(model, [x], progress=False)
        errors.append((model(x) - expected).norm() / expected.norm())
    assert errors[1] < 0.3 * errors[0]


class Branches(nn.Module):
    """Every reason why the output of a layer is left alone."""

    def __init__(self) -> None:
        super().__init__()
        for name in (
            "twice",
            "fanned",
            "other",
            "gelu",
            "read",
            "narrow",
            "wide",
            "tied_a",
        ):
            self.add_module(name, nn.Linear(4, 4))
        self.tied_b = nn.Linear(4, 4)
        self.tied_b.weight = self.tied_a.weight
        self.computed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(x))
        x = self.fanned(x)
        x = self.other(x.relu()) + x
        x = nn.functional.gelu(self.gelu(x))
        x = nn.functional.linear(x, self.read.weight.abs())
        x = self.tied_b(self.tied_a(self.computed(x)))
        return self.last(self.wide(self.narrow(x).relu()).relu())


def test_other_layers_are_named_with_the_reason() -> None:
    torch.manual_seed(0)
    model = Branches().eval()
    x = torch.rand(3, 4)
    model.unused = nn.Linear(4, 4)
    expected = model(x)
    report = equalize_(model, x)
    assert [(p.first, p.second) for p in report.pairs] == [
        ("narrow", "wide"),
        ("wide", "last"),
    ]
    assert report.skipped == {
        "twice": "it runs several times",
        "fanned": "2 operators read its output",
        "other": "add does not keep factors of channels",
        "gelu": "gelu does not keep factors of channels",
        "computed": "its weight is computed by a parametrization",
        "tied_a": "it shares a parameter with another module",
        "tied_b": "it shares a parameter with another module",
        "last": "its output is an output of the model",
        "read": "its weight is read by a function",
        "unused": "the example did not reach it",
    }
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)


def test_flattened_images_and_pooled_features_are_left_alone() -> None:
    model = nn.Sequential(
        nn.Conv2d(2, 3, 1), nn.Flatten(), nn.Linear(12, 4), nn.MaxPool1d(2)
    )
    model.append(nn.Linear(2, 2))
    report = equalize_(
        model.eval(),
        torch.rand(1, 2, 2, 2),
    )
    assert report.pairs == ()
    assert report.skipped["0"] == "2 reads other channels"
    assert report.skipped["2"] == "3 does not keep factors of channels"


def test_channels_of_zeros_stay(generator: torch.Generator) -> None:
    model = nn.Sequential(
        nn.Linear(3, 4),
        nn.ReLU(),
        nn.Linear(4, 2),
    )
    with torch.no_grad():
        model[0].weight[1] = 0.0
        model[2].weight[:, 2] = 0.0
    before = model[0].weight[2].clone()
    equalize_(model, torch.rand(5, 3))
    assert torch.equal(
        model[0].weight[1],
        torch.zeros(3),
    )
    assert torch.equal(model[0].weight[2], before)


def test_bad_input_changes_nothing(generator: torch.Generator) -> None:
    model = mobile(generator)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    x = torch.randn(1, 3, 9, 9)
    with pytest.raises(
        QuantizationError, match=r"equalize_: the float output changed by .*e-"
    ):
        equalize_(model, x, tolerance=1e-12)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    with pytest.raises(
        ConfigError, match=r"equalize_: got a calibrated model \(0.input_quantizer"
    ):
        equalize_(model, x)


class Residual(nn.Module):
    """Adds what it reads, which targets quantize."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 1)
        self.second = nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(self.first(x).relu())


def test_layers_inside_of_a_block_with_a_quantized_sum_are_found() -> None:
    model = nn.Sequential(Residual(), nn.Conv2d(3, 2, 1)).eval()
    x = torch.rand(2, 3, 4, 4)
    torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    assert hasattr(model[0], "quant_add")
    report = equalize_(model, x)
    assert [(pair.first, pair.second) for pair in report.pairs] == [
        ("0.first", "0.second")
    ]

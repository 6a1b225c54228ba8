"""disabled, freeze_, the choice of quantizers, and the summary."""

from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.models import simulated
from torchq import QuantConfig, QuantDescriptor, Rule, TensorQuantizer
from torchq.errors import ConfigError
from torchq.workflow import quantizers, select_quantizers


@pytest.fixture
def model() -> nn.Sequential:
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    torchq.quantize_(net)
    return net


ALL = [
    "0.input_quantizer",
    "0.weight_quantizer",
    "1.1.input_quantizer",
    "1.1.weight_quantizer",
]


@pytest.mark.parametrize(
    ("patterns", "expected"),
    [
        ("*", ALL),
        ("0", ALL[:2]),
        ("0.*", ALL[:2]),
        ("1.*", ALL[2:]),
        ("*.weight_quantizer", ALL[1::2]),
        (["0.input_quantizer", "1.1"], [ALL[0], *ALL[2:]]),
        ("re:weight", ALL[1::2]),
        ("type:Linear", ALL),
        (nn.Linear, ALL),
        (TensorQuantizer, ALL),
        (lambda name, module: name == "0", ALL[:2]),
    ],
)
def test_selection(model: nn.Module, patterns: Any, expected: list[str]) -> None:
    assert sorted(select_quantizers(model, patterns)) == expected
    with torchq.disabled(model, patterns):
        assert [n for n, q in quantizers(model).items() if q.mode == "off"] == expected
    assert {q.mode for q in quantizers(model).values()} == {"quantize"}


@pytest.mark.parametrize("pattern", ["nope", ["0", "nope*"], "1", nn.Conv2d])
def test_a_pattern_that_selects_nothing(model: nn.Module, pattern: Any) -> None:
    text = r"pattern .* selects no quantizer; expected one of 0.input_quantizer, 0.weight_quantizer"
    with pytest.raises(ConfigError, match=text), torchq.disabled(model, pattern):
        raise AssertionError("never reached")
    assert {q.mode for q in quantizers(model).values()} == {"quantize"}


def test_disabled_is_reentrant_and_gives_every_mode_back(
    model: nn.Module, generator: torch.Generator
) -> None:
    x = torch.randn(3, 4, generator=generator)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU(), nn.Linear(4, 2)))
    plain.load_state_dict(model.state_dict(), strict=False)
    quantizers(model)["0.input_quantizer"].mode = "observe+quantize"
    quantizers(model)["0.weight_quantizer"].mode = "off"
    before = {n: q.mode for n, q in quantizers(model).items()}
    with torchq.disabled(model):
        with torchq.disabled(model, "0"):
            pass
        assert {q.mode for q in quantizers(model).values()} == {"off"}
        assert torch.equal(model(x), plain(x))
    assert {n: q.mode for n, q in quantizers(model).items()} == before
    with pytest.raises(ZeroDivisionError), torchq.disabled(model):
        model(x / (1 // 0))
    assert {n: q.mode for n, q in quantizers(model).items()} == before


def test_freezing_lasts(generator: torch.Generator) -> None:
    """Learned ranges stop, observing stops, and ``model.train()`` changes nothing about it."""
    x = torch.randn(8, 4, generator=generator)
    model = nn.Sequential(nn.Linear(4, 2))
    simulated(model, [x], torchq.recipes.w4a4())
    model[0].input_quantizer.observing = True
    assert torchq.workflow.freeze_(model) == ("0.input_quantizer", "0.weight_quantizer")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = {n: q.amax.clone() for n, q in quantizers(model).items()}
    model.train()
    model(x).square().sum().backward()
    optimizer.step()
    assert all(
        torch.equal(q.amax, before[n]) and q.mode == "quantize"
        for n, q in quantizers(model).items()
    )
    assert model[0].weight.grad is not None


def test_summary(model: nn.Sequential, generator: torch.Generator) -> None:
    model.append(nn.Bilinear(2, 2, 2))
    model[0].input_quantizer.mode = "off"
    torchq.calibrate(model[1], [torch.randn(3, 4, generator=generator)], progress=False)
    text = str(torchq.summary(model))
    rows = torchq.summary(model).rows
    assert [r.name for r in rows] == ALL and {r.owner for r in rows} == {"QuantLinear"}
    assert [r.mode for r in rows] == ["off", "quantize", "quantize", "quantize"]
    assert rows[0].amax == "of each call (not calibrated)"
    assert rows[2].amax == f"{model[1][1].input_quantizer.amax.item():.4g}"
    assert rows[3].amax.endswith("(2)") and " .. " in rows[3].amax
    assert rows[3].descriptor == "int8 axis=0 max"
    assert (
        "float: 2" in text
        and "simulated" in text
        and text.splitlines()[0].split()
        == ["quantizer", "in", "format", "amax", "mode"]
    )


def test_summary_of_other_models() -> None:
    assert torchq.summary(nn.Linear(2, 2)).rows == () and torchq.summary(
        nn.Linear(2, 2)
    ).float_modules == ("(root)",)
    dynamic = nn.Linear(32, 2)
    torchq.quantize_(dynamic, torchq.recipes.mxfp8())
    assert {r.amax for r in torchq.summary(dynamic).rows} == {"of each call"}
    assert "no layer with weights is left in float" in str(torchq.summary(dynamic))
    meta = nn.Linear(2, 2, device="meta")
    torchq.quantize_(meta, QuantConfig((Rule("*", weight=QuantDescriptor(amax=1.0)),)))
    assert torchq.summary(meta).rows[0].amax == "meta"

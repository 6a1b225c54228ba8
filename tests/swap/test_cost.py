"""What a target adds is left out where it costs more than it may, and named."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.swap.cost import costs_of_placements
from torchq.workflow import quantizers

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Tokens(nn.Module):
    """One range for a class token and image tokens a thousand times as large: CoaT."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.other, self.head = (
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(3, 4, 1),
            nn.Conv2d(4, 4, 1),
        )
        self.size = 1e4

    def forward(self, x: Tensor) -> Tensor:
        joined = torch.cat([self.conv(x), self.other(x) * self.size], 2)
        token = joined[:, :, :8]
        return self.head(token) + self.conv(x)


def test_a_placement_that_ruins_the_output_is_left_out_and_named() -> None:
    model = Tokens().eval()
    report = torchq.quantize_(model, target="openvino", example=X)
    reasons = {d.name: d.reason for d in report.skipped}
    assert set(reasons) == {"quant_cat"}
    found = re.match(
        r"its quantizers cost ([0-9.]+) dB at the output on the example; name it",
        reasons["quant_cat"],
    )
    assert found and float(found[1]) > 3
    assert not hasattr(model, "quant_cat") and hasattr(model, "quant_add")
    assert "SKIPPED: its quantizers cost" in " ".join(str(report).split())
    torchq.calibrate(model, [X], progress=False)
    got = model(X)
    with torchq.disabled(model):
        noise = (got - model(X)).norm() / model(X).norm()
    assert noise < 0.1


def test_a_placement_that_costs_nothing_stays() -> None:
    model = Tokens().eval()
    model.size = 1.0
    report = torchq.quantize_(model, target="openvino", example=X)
    assert not report.skipped


def test_what_a_rule_names_is_quantized_whatever_it_costs() -> None:
    model = Tokens().eval()
    config = torchq.recipes.int8()
    asked = Rule("quant_cat", input=config.rules[0].input)
    config = QuantConfig((*config.rules, asked))
    assert not torchq.quantize_(model, config, target="openvino", example=X).skipped
    assert hasattr(model, "quant_cat")


def test_without_an_example_nothing_is_measured() -> None:
    assert not torchq.quantize_(Tokens(), target="openvino").skipped


@pytest.mark.parametrize("result", ["nan", "no tensor", "integers"])
def test_an_output_that_says_nothing_leaves_out_nothing(result: str) -> None:
    class Odd(Tokens):
        def forward(self, x: Tensor) -> object:
            y = super().forward(x)
            return {"nan": y * float("nan"), "no tensor": "text", "integers": y.argmax(1)}[result]

    report = torchq.quantize_(Odd().eval(), target="openvino", example=X)
    assert not report.skipped


def test_measuring_changes_no_mode_and_no_range() -> None:
    model = Tokens().eval()
    torchq.quantize_(model, target="openvino")
    before = {n: (q.mode, q.calibrated) for n, q in quantizers(model).items()}
    added = {"quant_cat": [model.quant_cat.input_quantizer]}
    assert set(costs_of_placements(model, added, X).costly) == {"quant_cat"}
    assert {n: (q.mode, q.calibrated) for n, q in quantizers(model).items()} == before


def test_one_of_two_places_of_a_module_without_parameters_is_saved_as_such(tmp_path: Path) -> None:
    """The other place of the same object stays float."""

    def build() -> nn.Sequential:
        act = nn.SiLU()
        return nn.Sequential(nn.Conv2d(3, 3, 1), act, nn.Conv2d(3, 3, 1), act).eval()

    model = build()
    torchq.quantize_(model, target="onnxruntime", exclude="3")
    torchq.calibrate(model, [X], progress=False)
    torchq.save(model, tmp_path / "m.pt")
    loaded = torchq.load(build(), tmp_path / "m.pt")
    assert [type(m).__name__ for m in loaded][1::2] == ["QuantSiLU", "SiLU"]


def test_layers_operators_and_containers_are_counted_apart() -> None:
    report = torchq.plan(Tokens(), target="openvino")
    assert str(report).splitlines()[-1] == (
        "3 quantized, 2 operators for openvino, 0 skipped, recipe int8; "
        "100.0% of the weights of layers quantized"
    )


def test_an_input_that_a_target_leaves_float_is_named() -> None:
    model = nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.Conv2d(4, 4, 5))
    decision = torchq.plan(model, target="onnxruntime").replaced[0]
    assert decision.note == "its input stays float, as onnxruntime has no integer kernel for it"


class Branches(nn.Module):
    """Sixteen branches side by side, each ending in a place where a target might quantize."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 4, 1) for _ in range(16))
        self.taps = nn.ModuleList(torchq.nn.Tap() for _ in range(16))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([tap(conv(x)) for conv, tap in zip(self.convs, self.taps, strict=True)], 1)


def test_what_costs_little_alone_and_much_together_is_left_out_in_part() -> None:
    model = Branches().eval()
    torchq.quantize_(
        model, torchq.recipes.int8().with_rules(Rule("taps.*", input=QuantDescriptor()))
    )
    torchq.calibrate(model, [X], progress=False)
    placements = {name: [q] for name, q in quantizers(model).items() if "taps" in name}
    for (quantizer,) in placements.values():
        quantizer.set_amax(8 * quantizer.amax)
    costs = costs_of_placements(model, placements, X)
    assert 0 < len(costs.costly) < len(placements)


class Sizes(nn.Module):
    """Computes with sizes that a trace cannot tell from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor, size: tuple[int, int]) -> Tensor:
        height, width = size
        return self.conv(x).flatten(2)[:, :, : height * width]


class CallsSizes(nn.Module):
    """Passes them on, as CoaT does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Sizes()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, (x.shape[2], x.shape[3]))


def test_operators_on_numbers_get_no_quantizer() -> None:
    model = CallsSizes().eval()
    report = torchq.quantize_(model, target="openvino", example=X)
    assert {d.name: d.reason for d in report.skipped} == {
        "inner.quant_mul": "its operands are no tensors in the run on the example, or it does not "
        "run"
    }
    torchq.calibrate(model, [X], progress=False)
    assert model(X).shape == (4, 4, 64)

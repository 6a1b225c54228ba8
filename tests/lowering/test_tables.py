"""Activations between two quantizers become tables of 256 codes."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated, sqnr
from torchq.lowering import QParams
from torchq.lowering.modules.lookup_table import LookupTable
from torchq.lowering.modules.qdq import Dequantize
from torchq.lowering.ops import lookup

SHAPES = [(2, 3, 5, 6), (4, 7), (11,), (0, 3), (2, 3, 4, 5, 6)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("channels_last", [False, True])
@pytest.mark.parametrize("many", [0, 2**16])  # pairs of codes, and single ones
def test_a_table_is_the_function_on_codes(
    shape: tuple[int, ...], channels_last: bool, many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lookup, "MIN_PAIRED_CODES", many)
    before, after = QParams(0.05, 128, 0, 255), QParams(0.011, 0, 0, 255)
    codes = torch.randint(0, 256, shape).to(torch.uint8)
    if channels_last and len(shape) == 4:
        codes = codes.contiguous(memory_format=torch.channels_last)
    got = LookupTable(torch.sigmoid, before, after, torch.float32)(codes)
    assert torch.equal(got, after.quantize(torch.sigmoid(before.dequantize(codes))))
    assert got.stride() == codes.stride()


def test_pairs_of_codes_follow_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lookup, "MIN_PAIRED_CODES", 0)
    qparams, codes = QParams(0.05, 128, 0, 255), torch.arange(256).to(torch.uint8)
    first, second = (
        LookupTable(function, qparams, qparams, torch.float32)
        for function in (torch.tanh, torch.sigmoid)
    )
    expected = first(codes)
    assert torch.equal(first(codes[1:]), expected[1:]) and torch.equal(
        first(codes[1:255]), expected[1:255]
    )  # an odd number, an odd start
    assert not torch.equal(second(codes), expected)
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(codes), expected)
    second.table = 255 - first.table
    assert torch.equal(second(codes), 255 - expected)
    assert len(pickle.dumps(second)) < 2**14  # without the pairs


class Gates(nn.Module):
    """Every second activation is between two quantizers; the others are clamps."""

    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.third = (
            nn.Conv2d(3, 8, 3),
            nn.Conv2d(8, 8, 3),
            nn.Conv2d(16, 4, 1),
        )
        self.before, self.after = torchq.TensorQuantizer(), torchq.TensorQuantizer()
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(torch.relu(self.before(self.first(x))))
        y = self.activation(self.before(x))
        return self.third(torch.cat([y, torch.sigmoid(self.after(x))], 1))


@pytest.mark.parametrize(
    "activation",
    [nn.SiLU(), nn.Sigmoid(), nn.LeakyReLU(0.1), nn.GELU(approximate="tanh"), nn.ELU(0.5)],
    ids=repr,
)
def test_chains_stay_integer_around_an_activation(activation: nn.Module) -> None:
    x = torch.randn(2, 3, 9, 9)
    model = calibrated(Gates(activation), x)
    int8 = torchq.deploy(model, x)
    assert (
        sum(isinstance(m, LookupTable) for m in int8.modules()) == 3
    )  # and one from qparams to qparams
    assert not any(isinstance(m, Dequantize) for m in int8.modules())
    assert sqnr(int8(x), model(x)) > 40
    assert "table uint8 -> uint8" in str(torchq.summary(int8))
    assert torch.equal(copy.deepcopy(int8)(x), int8(x))


def test_another_state_brings_its_tables() -> None:
    x = torch.randn(2, 3, 9, 9)
    first, second = (torchq.deploy(calibrated(Gates(nn.SiLU()), scale * x)) for scale in (1.0, 3.0))
    second.load_state_dict(first.state_dict())
    assert torch.equal(second(x), first(x))


def test_activations_of_a_recipe_become_tables() -> None:
    x = torch.randn(2, 3, 9, 9)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 1))
    model = calibrated(
        model,
        x,
        torchq.recipes.int8().with_rules(torchq.Rule(nn.SiLU, input=torchq.QuantDescriptor())),
    )
    int8 = torchq.deploy(model, x)
    assert [row.kernel.split()[0] for row in torchq.summary(int8).layers].count("table") == 1
    assert "simulated" not in {row.kernel for row in torchq.summary(int8).layers}
    assert math.isinf(sqnr(int8(x), model(x))) or sqnr(int8(x), model(x)) > 40


@pytest.mark.parametrize("gate", [False, True])
def test_the_gate_of_a_silu_is_in_its_table(gate: bool) -> None:
    x = torch.randn(2, 3, 9, 9)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 4, 1)).eval()
    torchq.quantize_(model, target="onnxruntime")
    gated = model[1]
    assert isinstance(gated, torchq.nn.QuantSiLU)
    gated.quantize_gate(gate)
    gated.gate_quantizer.set_amax(0.25)  # coarse enough to be seen
    torchq.calibrate(model, [x], progress=False)
    int8 = torchq.deploy(model, x)
    assert sum(isinstance(m, LookupTable) for m in int8.modules()) == 1
    assert sqnr(int8(x), model(x)) > 40


def test_a_table_reads_the_codes_that_it_gets() -> None:
    # The clamp before the first quantizer moves its zero from 128 to 0.
    x = torch.randn(2, 3, 9, 9)
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), torchq.TensorQuantizer(), nn.Tanh(), nn.Conv2d(8, 4, 1)
    model = calibrated(nn.Sequential(*layers), x)
    int8 = torchq.deploy(model)
    assert sum(isinstance(m, LookupTable) for m in int8.modules()) == 1
    assert sqnr(int8(x), model(x)) > 40

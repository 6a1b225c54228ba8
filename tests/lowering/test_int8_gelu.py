"""GELU on codes: exact against the simulation, where the polynomial of I-BERT is not."""

from __future__ import annotations

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.lowering.common import calibrated, stored_state
from torchq.lowering import QParams
from torchq.lowering.modules.int8_gelu import Int8GELU
from torchq.lowering.modules.qdq import Dequantize, Quantize

CODES = torch.arange(256).to(torch.uint8)


def quantizer(amax: float, unsigned: bool = False) -> torchq.TensorQuantizer:
    result = torchq.TensorQuantizer(torchq.QuantDescriptor(8, unsigned=unsigned))
    result.set_amax(amax)
    return result


def qparams_of(quantizer: torchq.TensorQuantizer) -> QParams:
    result = QParams.of(quantizer)
    assert isinstance(result, QParams)
    return result


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("amax", [0.7, 3.1, 40.0])
@pytest.mark.parametrize("unsigned", [False, True])
def test_every_code_is_that_of_the_simulation(
    approximate: str, amax: float, unsigned: bool
) -> None:
    before, after = quantizer(amax, unsigned), quantizer(0.9 * amax)
    layer = Int8GELU(qparams_of(before), qparams_of(after), torch.float32, approximate)
    # The narrow range of signed codes leaves code 0 out.
    codes = CODES if unsigned else CODES[1:]
    simulated = after(F.gelu(layer.input_qparams.dequantize(codes), approximate=approximate))
    assert torch.equal(layer.output_qparams.dequantize(layer(codes)), simulated)


def i_gelu(codes: Tensor, before: QParams, after: QParams) -> Tensor:
    """Return the codes of I-BERT's integer GELU: Kim et al., 2021, equations 6 to 8."""
    a, b = -0.2888, -1.769
    x = codes.double() - before.zero_point
    scale = before.scale / math.sqrt(2)
    q = x.abs().clamp(max=math.floor(-b / scale))
    erf = x.sign() * (a * ((q * scale + b) ** 2) + 1)
    y = x * before.scale * 0.5 * (1 + erf)
    limits = after.quant_min, after.quant_max
    return torch.round(y / after.scale + after.zero_point).clamp(*limits).to(torch.uint8)


def test_the_polynomial_of_ibert_gives_other_codes() -> None:
    before, after = qparams_of(quantizer(3.1)), qparams_of(quantizer(3.0))
    exact = Int8GELU(before, after, torch.float32)(CODES[1:])
    wrong = (i_gelu(CODES[1:], before, after).int() - exact.int()).abs()
    assert int((wrong > 0).sum()) == 84 and int(wrong.max()) == 1


def network(*middle: nn.Module) -> tuple[nn.Module, Tensor]:
    x = torch.randn(2, 3, 9, 9)
    layers = [nn.Conv2d(3, 8, 3), *middle, nn.Conv2d(8, 4, 1)]
    return calibrated(nn.Sequential(*layers), x), x


@pytest.mark.parametrize("gelu", [nn.GELU(), nn.GELU("tanh")], ids=repr)
def test_a_network_stays_on_integers(gelu: nn.Module) -> None:
    model, x = network(torchq.TensorQuantizer(), gelu)
    int8 = torchq.deploy(model, x)
    kinds = [type(m) for m in int8.modules()]
    assert kinds.count(Int8GELU) == 1 and kinds.count(Quantize) == 1 and Dequantize not in kinds
    torch.testing.assert_close(int8(x), model(x), rtol=1e-5, atol=1e-5)
    assert "int8 gelu" in str(torchq.summary(int8))
    for again in (copy.deepcopy(int8), pickle.loads(pickle.dumps(int8))):
        assert torch.equal(again(x), int8(x))


def test_codes_whose_zero_point_moves_are_read_rightly() -> None:
    model, x = network(nn.ReLU(), torchq.TensorQuantizer(), nn.GELU())
    int8 = torchq.deploy(model, x)
    (layer,) = (m for m in int8.modules() if isinstance(m, Int8GELU))
    assert layer.input_qparams.zero_point == 0
    torch.testing.assert_close(int8(x), model(x), rtol=1e-5, atol=1e-5)


def test_another_state_brings_its_table() -> None:
    (first, x), (second, _) = (
        network(torchq.TensorQuantizer(), nn.GELU()),
        network(torchq.TensorQuantizer(), nn.GELU()),
    )
    one, other = torchq.deploy(first), torchq.deploy(second)
    other.load_state_dict(stored_state(one))
    assert torch.equal(other(x), one(x))


@pytest.mark.parametrize(
    "middle",
    [(nn.GELU(),), (torchq.TensorQuantizer(), nn.GELU(), nn.LayerNorm(7))],
    ids=["input is float", "output is float"],
)
def test_gelu_that_is_not_between_quantizers_stays(middle: tuple[nn.Module, ...]) -> None:
    model, x = network(*copy.deepcopy(middle))
    int8 = torchq.deploy(model, x)
    assert not any(isinstance(m, Int8GELU) for m in int8.modules())

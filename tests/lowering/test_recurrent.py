"""Deployed recurrent layers and cells against their simulation."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence

import torchq
from tests.lowering.common import sqnr, stored_state
from torchq.errors import InputError, QuantizationError
from torchq.lowering import DeployedRecurrent, DeployedRecurrentCell, DynamicInt8Linear, Int8Linear

LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
OPTIONS: list[dict[str, Any]] = [
    {},
    {"num_layers": 2, "bidirectional": True, "batch_first": True},
    {"bias": False, "num_layers": 2},
]
CASES = [(cls, options) for cls in LAYERS for options in OPTIONS]
CASES += [(nn.LSTM, {"proj_size": 6, "bidirectional": True}), (nn.RNN, {"nonlinearity": "relu"})]
#: Where no code falls the other way at a tie the two agree to 120 dB; one such code is 60 dB.
CLOSE = 45
RECIPES = {"static": torchq.recipes.int8(recurrent=True), "dynamic": torchq.recipes.int8_dynamic()}


def x() -> Tensor:
    return torch.randn(7, 5, 12, generator=torch.Generator().manual_seed(1))


def simulated(layer: nn.Module, kind: str, *batch: Any) -> nn.Module:
    model = nn.Sequential(layer).eval()
    torchq.quantize_(model, RECIPES[kind])
    if kind == "static":
        torchq.calibrate(model, [batch], progress=False)
    return model[0]


def pair(cls: Any, options: dict[str, Any], kind: str = "static") -> tuple[Any, Any]:
    torch.manual_seed(0)
    layer = simulated(cls(12, 16, **options), kind, x())
    deployed = torchq.deploy(layer)
    assert isinstance(deployed, DeployedRecurrent)
    product = {"static": Int8Linear, "dynamic": DynamicInt8Linear}[kind]
    assert all(type(p) is product for p in deployed.products.values())
    return layer, deployed


def assert_close(got: Any, expected: Any) -> None:
    """Compare outputs and states, in the structure that torch's layers return."""
    if isinstance(expected, Tensor):
        assert got.shape == expected.shape and got.dtype == expected.dtype
        assert sqnr(got, expected) > CLOSE
        return
    assert type(got) is type(expected)
    for one, other in zip(got, expected, strict=True):
        if one is not None or other is not None:
            assert_close(one, other)


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize(("cls", "options"), CASES)
def test_layers_compute_what_the_simulation_computes(
    cls: Any, options: dict[str, Any], kind: str
) -> None:
    layer, deployed = pair(cls, options, kind)
    expected = layer(x())
    assert_close(deployed(x()), expected)
    assert_close(deployed(x(), expected[1]), layer(x(), expected[1]))


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("cls", LAYERS)
def test_packed_and_unbatched_sequences(cls: Any, kind: str) -> None:
    layer, deployed = pair(cls, {"num_layers": 2, "bidirectional": True}, kind)
    unsorted = pack_padded_sequence(x(), torch.tensor([3, 7, 1, 5, 2]), enforce_sorted=False)
    for sequence in (unsorted, pack_sequence([x()[:, 0], x()[:4, 1]])):
        assert_close(deployed(sequence), layer(sequence))
    assert_close(deployed(x()[:, 0]), layer(x()[:, 0]))


@pytest.mark.parametrize("kind", RECIPES)
@pytest.mark.parametrize("cls", CELLS)
@pytest.mark.parametrize("bias", [True, False])
def test_cells(cls: Any, bias: bool, kind: str) -> None:
    torch.manual_seed(0)
    cell = simulated(cls(12, 16, bias=bias), kind, x()[0])
    deployed = torchq.deploy(cell)
    assert isinstance(deployed, DeployedRecurrentCell)
    state = cell(x()[0])
    assert_close(deployed(x()[0]), state)
    assert_close(deployed(x()[1], state), cell(x()[1], state))


class Tagger(nn.Module):
    """An embedding, a recurrent layer and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 12)
        self.lstm = nn.LSTM(12, 16, batch_first=True)
        self.head = nn.Linear(16, 5)

    def forward(self, codes: Tensor) -> Tensor:
        return self.head(self.lstm(self.table(codes))[0])


@pytest.mark.parametrize("kind", RECIPES)
def test_a_model_around_one_is_deployed_as_a_whole(kind: str) -> None:
    torch.manual_seed(0)
    model, codes = Tagger().eval(), torch.arange(60).view(3, 20) % 20
    torchq.quantize_(model, RECIPES[kind])
    torchq.calibrate(model, [codes], progress=False)
    deployed = torchq.deploy(model, codes)
    assert sum(isinstance(m, DeployedRecurrent) for m in deployed.modules()) == 1
    assert_close(deployed(codes), model(codes))
    assert "products.weight_hh_l0" in str(torchq.summary(deployed))


def test_files_copies_and_compilation() -> None:
    torch.manual_seed(0)
    _, deployed = pair(nn.LSTM, {})
    _, other = pair(nn.LSTM, {})
    expected = deployed(x())[0]
    with torch.no_grad():
        for buffer in other.buffers():
            buffer.zero_()
    other.load_state_dict(stored_state(deployed))
    assert torch.equal(other(x())[0], expected)
    assert torch.equal(copy.deepcopy(deployed)(x())[0], expected)
    file = io.BytesIO()
    torch.save(deployed, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x())[0], expected)
    compiled = torch.compile(deployed, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert sqnr(compiled(x())[0], expected) > CLOSE


def test_other_dtypes() -> None:
    layer, deployed = pair(nn.GRU, {})
    deployed.to(torch.bfloat16)
    got, _ = deployed(x().bfloat16())
    # bfloat16 has 8 bits, and the errors of seven steps add up.
    assert got.dtype is torch.bfloat16 and sqnr(got, layer(x())[0]) > 25
    with pytest.raises(TypeError, match=r"got a tensor of torch.float32; expected torch.bfloat16"):
        deployed(x())


@pytest.mark.parametrize("slot", ["hidden_l0", "input_l0", "weight_hh_l0"])
def test_a_layer_with_a_float_operand_keeps_simulating(slot: str) -> None:
    torch.manual_seed(0)
    layer = simulated(nn.LSTM(12, 16), "static", x())
    layer.quantizer(slot).mode = "off"  # type: ignore[operator]
    model = nn.Sequential(layer)
    deployed = torchq.deploy(model)
    assert type(deployed[0]) is type(layer)  # type: ignore[index]
    assert slot in deployed[0].deploy_note  # type: ignore[index]
    assert_close(deployed(x()), model(x()))


def test_a_range_for_each_row_keeps_simulating() -> None:
    rows = torchq.QuantDescriptor(8, dynamic=True, axis=0)
    rule = torchq.Rule(nn.RNN, input=rows, weight=torchq.QuantDescriptor(8, axis=0))
    model = nn.Sequential(nn.RNN(12, 16)).eval()
    torchq.quantize_(model, torchq.QuantConfig((rule,)))
    torchq.workflow.calibrate_weights(model)
    deployed = torchq.deploy(model)
    assert "more than one range" in deployed[0].deploy_note  # type: ignore[index]


def test_shapes_and_numbers_that_the_simulation_refuses() -> None:
    _, deployed = pair(nn.LSTM, {})
    with pytest.raises(InputError, match=r"LSTM: got an input of shape \(7, 5, 11\); expected 3"):
        deployed(x()[..., :11])
    short = (torch.zeros(1, 4, 16), torch.zeros(1, 5, 16))
    with pytest.raises(InputError, match=r"got a state of shapes \[\(1, 4, 16\), \(1, 5, 16\)\]"):
        deployed(x(), short)
    with pytest.raises(QuantizationError, match="got NaN"):
        deployed(x() * torch.nan)
    with pytest.raises(QuantizationError, match="LSTM: got NaN"):
        deployed(x(), (torch.full((1, 5, 16), torch.nan), torch.zeros(1, 5, 16)))

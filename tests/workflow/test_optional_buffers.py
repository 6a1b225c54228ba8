"""Buffers that modules have only where something was done to them, on every way of a state."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import (
    AveragedModel,
    get_ema_avg_fn,
    get_ema_multi_avg_fn,
)

import torchq
from tests.models import simulated
from torchq import QuantConfig, QuantDescriptor, Rule, TensorQuantizer
from torchq.errors import ConfigError, ExportError
from torchq.nn.optional_buffers import OPTIONAL

#: Ranges with two ends, whose held scale has a zero point.
CONFIG = QuantConfig(
    (
        Rule(
            "*",
            input=QuantDescriptor(unsigned=True, symmetric=False),
            weight=QuantDescriptor(axis=0),
        ),
    )
)


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


def batch() -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def quantized() -> Any:
    model = net()
    torchq.quantize_(model, CONFIG, progress=False)
    return model


def full() -> Any:
    """A model that has every optional buffer."""
    model = simulated(net(), [batch()], CONFIG, correct=False)
    model[0].input_quantizer.pre_quant_scale = torch.rand(8) + 0.5
    model[0].input_quantizer.set_qparams(0.0123, 7)
    model[2].correct_output_(torch.rand(4) + 0.5, torch.randn(4))
    return model


def by_state_dict(model: Any, folder: Path) -> Any:
    fresh = quantized()
    fresh.load_state_dict(model.state_dict())
    return fresh


def by_assigning(model: Any, folder: Path) -> Any:
    fresh = quantized()
    fresh.load_state_dict(model.state_dict(), assign=True)
    # What was assigned is loaded into and set again as any other.
    fresh.load_state_dict(model.state_dict())
    return fresh


def by_saving(model: Any, folder: Path) -> Any:
    torchq.save(model, folder / "m.pt")
    return torchq.load(net(), folder / "m.pt")


def by_saving_with_a_record(model: Any, folder: Path) -> Any:
    torchq.workflow.embed_record_(model)
    return by_saving(model, folder)


def by_a_record(model: Any, folder: Path) -> Any:
    torchq.workflow.embed_record_(model)
    torch.save(model.state_dict(), folder / "weights.pt")
    return torchq.load(net(), folder / "weights.pt")


def by_averaging(model: Any, folder: Path) -> Any:
    average = AveragedModel(model, use_buffers=True)
    average.update_parameters(model)
    average.update_parameters(model)
    return average.module


def by_copying(model: Any, folder: Path) -> Any:
    return copy.deepcopy(model)


WAYS = [
    by_state_dict,
    by_assigning,
    by_saving,
    by_saving_with_a_record,
    by_a_record,
    by_averaging,
    by_copying,
]


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_every_buffer_goes_every_way(
    way: Callable[[Any, Path], Any], tmp_path: Path
) -> None:
    model = full()
    names = {name.rpartition(".")[2] for name, _ in model.named_buffers()}
    assert set(OPTIONAL) <= names
    state = {key: value.clone() for key, value in model.state_dict().items()}
    expected = model(batch())
    other = way(model, tmp_path)
    assert torch.equal(other(batch()), expected)
    found = {key: value for key, value in other.state_dict().items() if key in state}
    assert found.keys() == state.keys()
    assert all(torch.equal(found[key], value) for key, value in state.items())
    assert all(found[key].dtype is value.dtype for key, value in state.items())


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS[:5], ids=lambda way: way.__name__)
def test_a_state_without_them_takes_them_away(way: Any, tmp_path: Path) -> None:
    plain = simulated(net(), [batch()], CONFIG, correct=False)
    expected = plain(batch())
    target = full()
    if way is by_state_dict:
        target.load_state_dict(plain.state_dict())
    elif way is by_assigning:
        target.load_state_dict(plain.state_dict(), assign=True)
    else:
        way(plain, tmp_path)
        torchq.load(target, next(tmp_path.iterdir()))
    assert torch.equal(target(batch()), expected)
    target[0].input_quantizer.set_qparams(0.5, 3)
    assert "0.input_quantizer.held_scale" in target.state_dict()


@pytest.mark.parametrize(
    "name", ["held_scale", "held_zero_point", "output_gain", "output_shift"]
)
def test_one_of_a_pair_alone_is_incomplete(name: str, tmp_path: Path) -> None:
    state = full().state_dict()
    (key,) = (key for key in state if key.endswith(name) and state[key].numel())
    del state[key]
    fresh = quantized()
    with pytest.raises(RuntimeError, match=f'Missing key.*"{key}"'):
        fresh.load_state_dict(state)
    torchq.save(full(), tmp_path / "m.pt")
    content = torch.load(tmp_path / "m.pt")
    del content["state_dict"][key]
    torch.save(content, tmp_path / "m.pt")
    with pytest.raises(
        (ConfigError, torchq.errors.QuantizationError), match=r"missing|alone"
    ):
        torchq.load(net(), tmp_path / "m.pt")


@pytest.mark.parametrize("name", ["output_gain", "output_shift"])
def test_a_pair_without_elements_loads_from_one_of_them(name: str) -> None:
    """accelerate saves one of the tensors without elements, which share their memory."""
    model = quantized()
    state = model.state_dict()
    dropped = [key for key in state if key.endswith(name)]
    for key in dropped:
        assert not state.pop(key).numel()
    quantized().load_state_dict(state)


def test_restoring_leaves_none_of_them() -> None:
    model = full()
    torchq.restore_(model)
    assert model.state_dict().keys() == net().state_dict().keys()
    assert not set(OPTIONAL) & {
        name.rpartition(".")[2] for name, _ in model.named_buffers()
    }
    assert torch.equal(model(batch()), net()(batch()))


@torch.no_grad()
def test_disabled_layers_are_not_corrected() -> None:
    model = full()
    model[0].input_quantizer.pre_quant_scale = None
    with torchq.disabled(model):
        assert torch.equal(model(batch()), net()(batch()))


def test_other_float_weights_end_a_correction_and_the_same_keep_it() -> None:
    model = full()
    model.load_state_dict(net().state_dict(), strict=False)
    assert model[2].is_corrected
    other = {key: value + 0.1 for key, value in net().state_dict().items()}
    model.load_state_dict(other, strict=False)
    assert not model[2].is_corrected


@pytest.mark.parametrize("way", [by_saving, by_saving_with_a_record, by_a_record])
def test_a_quantizer_in_two_places_goes_with_its_held_scale(
    way: Any, tmp_path: Path
) -> None:
    model = full()
    model[2].input_quantizer = model[0].input_quantizer
    expected = model(batch())
    assert torch.equal(way(model, tmp_path)(batch()), expected)


def test_a_record_of_a_part_is_no_tensor_of_the_whole(tmp_path: Path) -> None:
    """A part that has its own record lies in a model that is saved."""
    whole = nn.Sequential(quantized())
    torchq.calibrate(whole, [batch()], progress=False)
    torchq.workflow.embed_record_(whole[0])
    torchq.save(whole, tmp_path / "m.pt")
    loaded = torchq.load(nn.Sequential(net()), tmp_path / "m.pt")
    assert torch.equal(loaded(batch()), whole(batch()))


def test_old_files_that_hold_a_record_are_read(tmp_path: Path) -> None:
    model = full()
    torchq.save(model, tmp_path / "m.pt")
    content = torch.load(tmp_path / "m.pt")
    content["state_dict"]["torchq_record"] = torch.zeros(3, dtype=torch.uint8)
    torch.save(content, tmp_path / "m.pt")
    assert torch.equal(torchq.load(net(), tmp_path / "m.pt")(batch()), model(batch()))


@pytest.mark.parametrize("kind", ["float16", "bfloat16"])
def test_zero_points_of_rounded_scales_are_codes(kind: str) -> None:
    """A scale that was rounded down put the zero point at 4096 of 0..4095."""
    bits = QuantDescriptor(12, unsigned=True, symmetric=False, scale_format=kind)
    for low, high in ((-1.0, 0.0), (0.0, 1.0), (-3.0, 1e-4), (-0.7, 0.1)):
        quantizer = TensorQuantizer(bits)
        quantizer.set_range(low, high)
        point = int(quantizer.calculate_qparams()[1])
        assert 0 <= point <= 4095
        assert quantizer(torch.zeros(1)).item() == 0


def test_a_range_whose_length_does_not_fit_is_refused() -> None:
    quantizer = TensorQuantizer(QuantDescriptor(symmetric=False))
    with pytest.raises(
        ConfigError, match="from -3e\\+38 to 3e\\+38; expected ends whose distance"
    ):
        quantizer.set_range(-3e38, 3e38)
    assert not quantizer.calibrated


AVERAGES: dict[str, dict[str, Any]] = {
    "copied buffers": {},
    "averaged buffers": {"use_buffers": True},
    "a function of one tensor": {"avg_fn": get_ema_avg_fn(0.9)},
    "a function of all tensors": {
        "multi_avg_fn": get_ema_multi_avg_fn(0.9),
        "use_buffers": True,
    },
}
WEIGHTS = {
    "per tensor": QuantDescriptor(),
    "per channel": QuantDescriptor(axis=0),
    "blocks": QuantDescriptor(num_bits=4, block_size=2),
}


@torch.no_grad()
@pytest.mark.parametrize("weight", WEIGHTS.values(), ids=WEIGHTS)
@pytest.mark.parametrize("options", AVERAGES.values(), ids=AVERAGES)
def test_an_average_made_before_calibration_has_no_ranges_until_it_gets_some(
    options: dict[str, Any], weight: QuantDescriptor
) -> None:
    """Torch copies numbers into tensors without elements: nothing happens, nothing is raised."""
    model = net()
    config = torchq.QuantConfig((torchq.Rule("*", weight=weight),))
    torchq.quantize_(model, config, progress=False)
    average = AveragedModel(model, **options)
    average.update_parameters(model)
    torchq.calibrate(model, [batch()], progress=False)
    for _ in range(2):
        average.update_parameters(model)
    names = torchq.workflow.quantizers(average.module)
    assert not any(quantizer.calibrated for quantizer in names.values())
    average.module.load_state_dict(model.state_dict())
    assert torch.equal(average(batch()), model(batch()))
    average.update_parameters(model)


class OwnCalls(nn.Module):
    """Calls functions with weights of its own, two in one forward."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 4))
        self.back = nn.Parameter(torch.randn(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.linear(x, self.weight)
        return nn.functional.linear(hidden, self.back)


class OtherLayers(nn.Module):
    """Weights whose channels have another axis, and several weights in a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(4, 8, 3)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.lstm(self.up(x).transpose(1, 2))[0]
        return self.attention(hidden, hidden, hidden)[0]


OTHERS = {"own calls": (OwnCalls, (3, 4)), "other layers": (OtherLayers, (2, 4, 6))}


@torch.no_grad()
@pytest.mark.parametrize(("build", "shape"), OTHERS.values(), ids=OTHERS)
def test_averages_of_other_layers_made_before_calibration_raise_nothing(
    build: type[nn.Module], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    model = build().eval()
    x = torch.randn(shape)
    torchq.quantize_(model, example=x, progress=False)
    average = AveragedModel(model)
    torchq.calibrate(model, [x], progress=False)
    average.update_parameters(model)
    average.module.load_state_dict(model.state_dict())
    assert torch.equal(average(x), model(x))


@torch.no_grad()
def test_an_average_made_before_calibration_can_be_calibrated_itself() -> None:
    model = quantized()
    average = AveragedModel(model)
    torchq.calibrate(model, [batch()], progress=False)
    average.update_parameters(model)
    with pytest.raises(ExportError, match="no range is known for module"):
        torchq.deploy(average, batch(), progress=False)
    torchq.calibrate(average, [batch()], progress=False)
    assert torch.equal(average(batch()), model(batch()))


@torch.no_grad()
def test_a_range_that_is_forgotten_can_still_be_averaged() -> None:
    model = quantized()
    torchq.calibrate(model, [batch()], progress=False)
    average = AveragedModel(model)
    for quantizer in torchq.workflow.quantizers(average.module).values():
        quantizer.forget_amax()
    average.update_parameters(model)
    names = torchq.workflow.quantizers(average.module)
    assert not any(quantizer.calibrated for quantizer in names.values())


def test_a_restored_model_says_nothing_in_its_state() -> None:
    model = quantized()
    torchq.workflow.embed_record_(model)
    assert "torchq_record" in model.state_dict()
    torchq.restore_(model)
    net().load_state_dict(model.state_dict())

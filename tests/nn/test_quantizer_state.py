"""The state of a TensorQuantizer: checkpoints, copies, dtypes, devices, averages."""

import copy
import io
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from torchq import QuantDescriptor, TensorQuantizer
from torchq.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
DESCRIPTORS = [
    QuantDescriptor(),
    QuantDescriptor(4, axis=0),
    QuantDescriptor(4, axis=(0, 1)),
    QuantDescriptor(block_size=2),
    QuantDescriptor(learn_amax=True),
    QuantDescriptor(axis=0, learn_amax=True),
    QuantDescriptor(amax=2.0),
    QuantDescriptor(unsigned=True, symmetric=False),
]


@pytest.fixture
def x(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(4, 6, generator=generator)


def calibrated(d: QuantDescriptor, x: torch.Tensor) -> TensorQuantizer:
    q = TensorQuantizer(d)
    q.calibrate_on(x)
    return q


def same_range(one: TensorQuantizer, other: TensorQuantizer) -> bool:
    pairs = zip(one.range.ends(), other.range.ends(), strict=True)
    return all(torch.equal(a, b) for (_, a), (_, b) in pairs)


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("d", DESCRIPTORS, ids=str)
def test_strict_load_into_an_uncalibrated_twin(
    d: QuantDescriptor, assign: bool, x: torch.Tensor
) -> None:
    q, twin = calibrated(d, x), TensorQuantizer(d)
    names = ["amax"] if d.symmetric else ["amin", "amax"]
    assert list(twin.state_dict()) == names == list(q.state_dict())
    buffer = io.BytesIO()
    torch.save(q.state_dict(), buffer)
    buffer.seek(0)
    twin.load_state_dict(torch.load(buffer, weights_only=True), strict=True, assign=assign)
    assert twin.calibrated and same_range(twin, q)
    assert isinstance(twin.amax, nn.Parameter) == d.learn_amax
    assert torch.equal(twin(x), q(x))
    twin.load_state_dict(
        TensorQuantizer(d.replace(amax=None)).state_dict(), strict=True, assign=assign
    )
    assert not twin.calibrated  # an uncalibrated checkpoint is one too


@pytest.mark.parametrize("shape", [(), (1,), (4,), (4, 1), (1, 1)], ids=str)
@pytest.mark.parametrize("key", ["_amax", "amax"])
def test_legacy_keys_and_shapes(key: str, shape: tuple[int, ...], x: torch.Tensor) -> None:
    q = TensorQuantizer(QuantDescriptor(axis=0))
    values = torch.rand(shape) + 0.5
    q.load_state_dict({key: values}, strict=True)
    assert q.amax.shape == shape
    by_row = values.reshape(-1, 1).expand(4, 1)
    assert torch.equal(
        q(x), torchq.functional.fake_quantize(x, by_row, granularity=q.descriptor.granularity)
    )


def test_legacy_pre_quant_scale() -> None:
    q = TensorQuantizer()
    q.load_state_dict({"_amax": torch.tensor(1.0), "_pre_quant_scale": torch.full((3,), 2.0)})
    assert q.pre_quant_scale is not None and q.pre_quant_scale.tolist() == [2.0] * 3


def test_loading_other_dtypes_keeps_float32(low_dtype: torch.dtype) -> None:
    q = TensorQuantizer()
    q.load_state_dict({"amax": torch.tensor(1.5, dtype=low_dtype)}, assign=True)
    assert q.amax.dtype is torch.float32 and q.amax.item() == 1.5


@pytest.mark.parametrize("d", DESCRIPTORS, ids=str)
def test_deepcopy_and_pickle(d: QuantDescriptor, x: torch.Tensor) -> None:
    """Uncalibrated, observing, calibrated, and after forward and backward."""
    q = TensorQuantizer(d)
    for prepare in (
        lambda: None,
        lambda: (q.start_calibration(), q(x)),
        q.finish_calibration,
        lambda: q(x.requires_grad_()).sum().backward(),
    ):
        prepare()
        for twin in (copy.deepcopy(q), pickle.loads(pickle.dumps(q))):
            assert (twin.mode, twin.descriptor, twin.name) == (q.mode, q.descriptor, q.name)
            assert same_range(twin, q) and twin.amax is not q.amax
            assert isinstance(twin.amax, nn.Parameter) == d.learn_amax
            assert torch.equal(twin(x), q(x))


@pytest.mark.parametrize("convert", ["half", "bfloat16", "double", "to_half"])
@pytest.mark.parametrize("d", DESCRIPTORS, ids=str)
def test_amax_keeps_float32_to_the_bit(d: QuantDescriptor, convert: str, x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(6, 2), calibrated(d, x))
    q = model[1]
    before, parameter = copy.deepcopy(q), q.amax
    model.to(torch.half) if convert == "to_half" else getattr(model, convert)()
    assert model[0].weight.dtype is not torch.float32
    assert q.amax.dtype is torch.float32 and same_range(q, before)
    assert isinstance(q.amax, nn.Parameter) == d.learn_amax
    if d.learn_amax:
        assert q.amax is parameter
    y = q(x.to(model[0].weight.dtype))
    assert y.dtype is model[0].weight.dtype and bool(y.isfinite().all())


@pytest.mark.parametrize(
    "d", [DESCRIPTORS[0], QuantDescriptor(axis=0, learn_amax=True), DESCRIPTORS[-1]], ids=str
)
def test_meta_to_empty_and_load(d: QuantDescriptor, x: torch.Tensor) -> None:
    """A model built on the meta device, given memory and loaded has its range where it is."""
    q = calibrated(d, x)
    with torch.device("meta"):
        built = TensorQuantizer(d)
    assert built.amax.is_meta
    for meta in (built, copy.deepcopy(q).to("meta")):
        real = meta.to_empty(device="cpu")
        real.load_state_dict(q.state_dict(), strict=True)
        assert real.amax.device.type == "cpu" and same_range(real, q)
        assert torch.equal(real(x), q(x))
    with torch.device("meta"):
        built = TensorQuantizer(d)
    built.load_state_dict(q.state_dict(), assign=True)
    assert torch.equal(built(x), q(x))


@pytest.mark.parametrize("switch", ["observing", "quantizing"])
@pytest.mark.parametrize("value", [None, "yes", 1, torch.tensor(True)])
def test_a_switch_is_true_or_false(switch: str, value: Any) -> None:
    q = TensorQuantizer()
    before = q.mode
    with pytest.raises(ConfigError, match=rf"TensorQuantizer: got {switch}=.*; expected True or F"):
        setattr(q, switch, value)
    assert q.mode == before


def test_an_assigned_range_is_checked_and_stays_float32() -> None:
    q = TensorQuantizer(QuantDescriptor(amax=1.0))
    for bad in (-1.0, float("nan"), float("inf"), 1j):
        with pytest.raises(ConfigError, match=r"got amax .*; expected finite numbers >= 0"):
            q.amax = torch.tensor(bad)
    assert q.amax == 1
    for dtype in (torch.float16, torch.float64, torch.int64):
        q.amax = torch.tensor(2, dtype=dtype)
        assert q.amax.dtype is torch.float32 and q.amax == 2
    q.amax = torch.empty(0)
    assert not q.calibrated
    both = TensorQuantizer(QuantDescriptor(symmetric=False, unsigned=True, amin=-1.0, amax=1.0))
    with pytest.raises(ConfigError, match=r"got amin .*; expected finite numbers <= 0"):
        both.amin = torch.tensor(1.0)


@pytest.mark.parametrize("lost", ["input_quantizer", "weight_quantizer"])
def test_a_checkpoint_of_a_quantized_layer_without_a_range_does_not_load_strictly(
    lost: str, x: torch.Tensor
) -> None:
    def build() -> nn.Module:
        model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
        torchq.quantize_(model)
        return model

    model = build()
    torchq.calibrate(model, [x], progress=False)
    part = {key: value for key, value in model.state_dict().items() if f"2.{lost}" not in key}
    with pytest.raises(RuntimeError, match=rf'Missing key.*: "2\.{lost}\.amax"'):
        build().load_state_dict(part, strict=True)
    found = build().load_state_dict(part, strict=False)
    assert (found.missing_keys, found.unexpected_keys) == ([f"2.{lost}.amax"], [])


def test_a_float_layer_of_a_checkpoint_leaves_the_ranges_as_they_are(x: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 2))
    plain = {key: value.clone() for key, value in model.state_dict().items()}
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    expected = model(x)
    model.load_state_dict(plain, strict=True)
    assert torch.equal(model(x), expected)


def test_a_range_of_a_shared_quantizer_may_be_in_a_checkpoint_once(x: torch.Tensor) -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(1, 1, 1), nn.Conv2d(1, 1, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.a(x) + self.b(x)

    model, image = Sum(), x.reshape(1, 1, -1, 6)
    torchq.quantize_(model, target="tensorrt")
    torchq.qat.share_range_(model, "quant_add.*")
    torchq.calibrate(model, [image], progress=False)
    state = model.state_dict()
    del state["quant_add.other_quantizer.amax"]
    twin = copy.deepcopy(model)
    twin.quant_add.input_quantizer.set_amax(9.0)
    twin.load_state_dict(state, strict=True)
    assert torch.equal(twin(image), model(image))

"""Depthwise layers read channels of one size, also behind ReLU6, with the same float outputs."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torchq
from torchq.errors import CalibrationError, ConfigError
from torchq.ptq import equalize_depthwise_
from torchq.utils import watching

CHANNELS = 6
# What the channels of the first layer are multiplied by, so that they differ a hundredfold.
SIZES = (0.02, 0.1, 0.3, 0.5, 1.0, 2.0)


def uneven(activation: nn.Module, sizes: tuple[float, ...] = SIZES) -> nn.Sequential:
    """Return a layer with channels of these sizes, and a depthwise one behind an activation."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, CHANNELS, 1),
        activation,
        nn.Conv2d(CHANNELS, CHANNELS, 3, groups=CHANNELS),
        nn.Conv2d(CHANNELS, 4, 1),
    )
    first: Any = model[0]
    depthwise: Any = model[2]
    with torch.no_grad():
        factors = torch.tensor(sizes)
        # Positive weights and pixels let every channel reach its size.
        first.weight.abs_().mul_(factors.view(-1, 1, 1, 1))
        first.bias.zero_()
        depthwise.weight.div_(factors.view(-1, 1, 1, 1))
    return model.eval()


def pictures(count: int = 3) -> list[Tensor]:
    """Return batches of random pixels."""
    generator = torch.Generator().manual_seed(1)
    return [torch.rand(4, 3, 8, 8, generator=generator) for _ in range(count)]


def sizes_read(model: Any, batches: list[Tensor]) -> Tensor:
    """Return the largest magnitude of each channel that the depthwise layer reads."""
    seen: list[Tensor] = []

    def note(args: Any, kwargs: Any, _: object) -> None:
        seen.append(args[0].abs().amax((0, 2, 3)))

    with torch.no_grad(), watching([(model[2], note)], before=True):
        for batch in batches:
            model(batch)
    return torch.stack(seen).amax(0)


class Functional(nn.Sequential):
    """ReLU6 as a function."""

    def forward(self, x: Tensor) -> Tensor:
        """Clip between the layers."""
        first, _, depthwise, last = self
        out: Tensor = last(depthwise(F.relu6(first(x))))
        return out


@pytest.mark.parametrize(
    "model",
    [
        uneven(nn.ReLU()),
        uneven(nn.ReLU6()),
        uneven(nn.Hardtanh(0.0, 9.0)),
        Functional(*uneven(nn.Identity())).eval(),
    ],
    ids=["ReLU", "ReLU6", "Hardtanh", "function"],
)
def test_all_channels_become_as_large(model: nn.Module) -> None:
    batches = pictures()
    assert float(sizes_read(model, batches).max()) < 6  # nothing is clipped
    before = [model(batch) for batch in batches]
    report = equalize_depthwise_(model, batches, progress=False)
    after = sizes_read(model, batches)
    # Float32 weights times a factor, and the sum of three products: units in the last place.
    torch.testing.assert_close(after, after.max().expand(CHANNELS), rtol=1e-5, atol=0)
    for batch, expected in zip(batches, before, strict=True):
        torch.testing.assert_close(model(batch), expected, rtol=1e-5, atol=1e-5)
    (pair,) = report.pairs
    assert (pair.first, pair.second) == ("0", "2")
    assert pair.spread_before > 4
    assert pair.spread_after == pytest.approx(1, rel=1e-5)
    assert report.skipped == {}


def test_unclipped_channels_keep_room_for_larger_values() -> None:
    sizes = (0.1, 0.3, 1.0, 2.0, 4.0, 8.0)
    model = uneven(nn.ReLU6(), sizes)
    batches = pictures()
    assert 1.5 < float(sizes_read(model, batches).max()) < 6
    equalize_depthwise_(model, batches, progress=False)
    assert float(sizes_read(model, batches).max()) == pytest.approx(6 / 4, rel=1e-5)
    larger = [3 * batch for batch in batches]
    expected = uneven(nn.ReLU(), sizes)
    for batch in larger:
        torch.testing.assert_close(model(batch), expected(batch), rtol=1e-4, atol=1e-4)


def test_what_is_clipped_stays_and_others_grow_beside_it() -> None:
    model = uneven(nn.ReLU6(), (0.1, 0.2, 0.3, 0.5, 1.0, 20.0))
    batches = pictures()
    first: Any = model[0]
    row = first.weight[-1].clone()
    before = [model(batch) for batch in batches]
    assert float(sizes_read(model, batches)[-1]) == 6
    equalize_depthwise_(model, batches, progress=False)
    assert torch.equal(first.weight[-1], row)
    sizes = sizes_read(model, batches)
    expected = torch.tensor([6 / 1.25] * (CHANNELS - 1))
    torch.testing.assert_close(sizes[:-1], expected, rtol=1e-5, atol=0)
    for batch, out in zip(batches, before, strict=True):
        torch.testing.assert_close(model(batch), out, rtol=1e-5, atol=1e-5)


def test_clips_before_a_pool_count() -> None:
    """The mean of sparse pixels is far smaller than what is clipped in front of it."""
    model = uneven(nn.Sequential(nn.ReLU6(), nn.AvgPool2d(4)))
    first: Any = model[0]
    depthwise: Any = model[2]
    depthwise.padding = (1, 1)
    with torch.no_grad():
        # The last channel reads the second color, the others the first one.
        first.weight.zero_()
        first.weight[:-1, 0] = 1.0
        first.weight[-1, 1] = 2.0
    batches = pictures()
    for batch in batches:
        batch[:, 0] = 0.0
        batch[:, 0, ::4, ::4] = 2.0
    before = [model(batch) for batch in batches]
    report = equalize_depthwise_(model, batches, progress=False)
    assert len(report.pairs) == 1
    for batch, out in zip(batches, before, strict=True):
        torch.testing.assert_close(model(batch), out, rtol=1e-5, atol=1e-5)


def test_a_faint_channel_grows_by_256_and_one_of_zeros_not_at_all() -> None:
    sizes = (0.0, 1e-6, 0.3, 0.5, 1.0, 2.0)
    model = uneven(nn.ReLU(), (1.0,) * CHANNELS)
    first: Any = model[0]
    with torch.no_grad():
        first.weight.mul_(torch.tensor(sizes).view(-1, 1, 1, 1))
        first.bias[0] = -1.0
    batches = pictures()
    before = sizes_read(model, batches)
    equalize_depthwise_(model, batches, progress=False)
    factors = sizes_read(model, batches) / before
    assert first.bias[0].item() == -1
    assert float(factors[1]) == pytest.approx(256, rel=1e-4)


def test_8_bits_for_the_tensor_are_nearer_to_float() -> None:
    batches = pictures()
    errors = []
    for evens in (False, True):
        model = uneven(nn.ReLU6())
        expected = model(batches[0])
        torchq.quantize_(
            model, torchq.recipes.int8(), example=batches[0], progress=False
        )
        if evens:
            assert len(equalize_depthwise_(model, batches, progress=False).pairs) == 1
        torchq.calibrate(model, batches, correct=False, progress=False)
        errors.append((model(batches[0]) - expected).norm().item())
    assert errors[1] < 0.5 * errors[0]


class Block(nn.Module):
    """Adds what it reads, as MobileNetV2 does; targets quantize its sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = uneven(nn.ReLU6())
        self.conv[3] = nn.Conv2d(CHANNELS, 3, 1)
        self.conv[2].padding = (1, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Add."""
        return x + self.conv(x)


def test_layers_inside_of_a_block_with_a_quantized_sum_are_found() -> None:
    model = nn.Sequential(Block(), nn.Conv2d(3, 2, 1)).eval()
    batches = pictures()
    torchq.quantize_(model, target="onnxruntime", example=batches[0], progress=False)
    assert hasattr(model[0], "quant_add")
    report = equalize_depthwise_(model, batches, progress=False)
    assert [pair.second for pair in report.pairs] == ["0.conv.2"]


def test_where_it_would_gain_nothing_is_said() -> None:
    batches = pictures()
    example = batches[0]

    def reason(model: nn.Module) -> str:
        report = equalize_depthwise_(model, batches, progress=False)
        assert report.pairs == ()
        return report.skipped["2"]

    for_channels = uneven(nn.ReLU6())
    torchq.quantize_(for_channels, target="openvino", example=example, progress=False)
    assert reason(for_channels) == "its input has ranges of its own for channels"
    one_range = uneven(nn.ReLU6())
    rule = torchq.Rule("0", weight=torchq.QuantDescriptor())
    config = torchq.recipes.int8().with_rules(rule)
    torchq.quantize_(one_range, config, example=example, progress=False)
    assert reason(one_range) == "the weight of 0 has one range for all channels"
    assert reason(uneven(nn.Hardtanh(-1.0, 6.0))).startswith(
        "behind 0: 1 does not keep factors of channels, because it clips"
    )
    assert "SiLU" not in reason(uneven(nn.SiLU()))
    no_layer = nn.Sequential(nn.Identity(), nn.ReLU(), nn.Conv2d(3, 3, 3, groups=3))
    assert reason(no_layer.eval()) == "no layer alone makes its input"


def test_bad_input_changes_nothing() -> None:
    model = uneven(nn.ReLU6())
    before = {name: t.clone() for name, t in model.state_dict().items()}
    bad = pictures()
    bad[1][0, 0, 0, 0] = float("nan")
    with pytest.raises(CalibrationError, match=r"equalize_depthwise_: 2: got NaN"):
        equalize_depthwise_(model, bad, progress=False)
    with pytest.raises(CalibrationError, match="got batches without values"):
        equalize_depthwise_(model, [torch.rand(0, 3, 8, 8)], progress=False)
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    torchq.quantize_(model, example=pictures()[0], progress=False)
    torchq.calibrate(model, pictures(), progress=False)
    with pytest.raises(ConfigError, match="equalize_depthwise_: got a calibrated"):
        equalize_depthwise_(model, pictures(), progress=False)

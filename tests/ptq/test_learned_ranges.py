"""Ranges and factors of channels that are learned for the output of the float model."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError
from torchq.formats import UINT4
from torchq.graph import record
from torchq.ptq import LazyWeights, RunOptions, gptq_, learn_ranges_
from torchq.ptq.learned_ranges.channel_classes import (
    ChannelClasses,
    LayerChannels,
    find_classes,
)
from torchq.ptq.learned_ranges.channel_factors import ChannelFactors, FactoredRange


class Block(nn.Module):
    """Two convolutions, and a shortcut that may halve the image and pad its channels."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.stride = 1 if inputs == outputs else 2
        self.conv1 = nn.Conv2d(inputs, outputs, 3, self.stride, 1)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1)
        self.extra = (outputs - inputs) // 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv2(F.relu(self.conv1(x)))
        if self.extra:
            x = F.pad(x[:, :, ::2, ::2], (0, 0, 0, 0, self.extra, self.extra))
        return F.relu(y + x)


class Residual(nn.Module):
    """A stem, two blocks of 4 and 8 channels, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, 1, 1)
        self.first, self.second = Block(4, 4), Block(4, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(F.relu(self.stem(x))))
        return self.head(x.mean((2, 3)))


def net() -> Any:
    """Return the network; one channel inside each block is 64 times larger than the others."""
    torch.manual_seed(0)
    model = Residual().eval()
    with torch.no_grad():
        for block in (model.first, model.second):
            block.conv1.weight[0] *= 64
            block.conv1.bias[0] *= 64
            block.conv2.weight[:, 0] /= 64
    return model


BATCHES = [torch.rand(16, 3, 8, 8, generator=torch.Generator().manual_seed(n)) for n in range(2)]


def ready() -> Any:
    model = net()
    torchq.quantize_(model, torchq.recipes.integer(8, 4, weight_method="max"))
    torchq.calibrate(model, BATCHES, progress=False)
    return model


def error(model: nn.Module, expected: Tensor) -> float:
    return (model(torch.cat(BATCHES)) - expected).square().mean().item()


def test_layers_that_add_to_a_stream_share_its_channels() -> None:
    model = net()
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    classes = find_classes(model, record(model, BATCHES[0]), layers)
    found = classes.layers
    stream, wide = found["stem"].makes, found["head"].reads
    assert len({*stream}) == 4 and found["first.conv2"].makes == stream
    assert found["first.conv1"].reads == found["second.conv1"].reads == stream
    assert wide[2:6] == stream and found["second.conv2"].makes == wide  # padded by 2 and 2
    assert found["first.conv1"].makes == found["first.conv2"].reads
    assert {*found["stem"].reads} == {*found["head"].makes} == {-1}
    assert classes.count == len({*wide, *found["first.conv1"].makes, *found["second.conv1"].makes})


def test_factors_leave_the_output_as_it_is() -> None:
    model, floats = net(), net()
    layers = [m for m in model.modules() if isinstance(m, (nn.Conv2d, nn.Linear))]
    factors = ChannelFactors(find_classes(model, record(model, BATCHES[0]), layers))
    with torch.no_grad():
        factors.log.copy_(torch.linspace(-1, 1, len(factors.log)))
    factors.fold_()
    # Sums in another order; the factors reach from 1/e to e.
    torch.testing.assert_close(model(BATCHES[0]), floats(BATCHES[0]), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(model.first.conv1.weight, floats.first.conv1.weight, rtol=0.1)


class Through(nn.Module):
    """Two convolutions with some function between them."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.a, self.b, self.function = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 2, 1), function

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.function(self.a(x)))


@pytest.mark.parametrize(
    "function",
    [
        torch.sigmoid,
        lambda x: x + 1,
        lambda x: x[:, [1, 0, 2, 3]],
        lambda x: x + x.mean(1, keepdim=True),
        lambda x: x.flip(1),
        lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)),
        lambda x: x * x,
    ],
)
def test_channels_that_other_functions_read_keep_their_size(function: Any) -> None:
    model = Through(function).eval()
    classes = find_classes(model, record(model, BATCHES[0]), [model.b])
    assert classes.count == 0
    assert {*classes.layers["a"].makes} == {*classes.layers["b"].reads} == {-1}


def test_fixed_layers_keep_their_channels() -> None:
    model = Through(F.relu).eval()
    flow = record(model, BATCHES[0])
    assert find_classes(model, flow, [model.b]).count == 4
    assert find_classes(model, flow, [model.b], fixed=[model.a]).count == 0
    assert find_classes(model, flow, []).count == 0


def test_a_range_with_factors_divides_rounds_and_multiplies() -> None:
    model = ready()
    layer = model.first.conv2
    channels = LayerChannels(layer, (0, 1, 2, 3), (-1,) * 4)
    factors = ChannelFactors(ChannelClasses(4, {"first.conv2": channels}))
    factors.log = torch.tensor([-1.0, 0.0, 0.5, 1.0])
    found = FactoredRange(channels, layer.input_quantizer, factors)
    x = torch.rand(2, 4, 3, 3)
    factor = factors.log.exp().view(1, 4, 1, 1)
    amax = layer.input_quantizer.amax
    expected = torchq.functional.fake_quantize(x / factor, amax, UINT4) * factor
    torch.testing.assert_close(found.forward(x), expected)


def test_learning_reduces_the_error_and_keeps_the_float_output() -> None:
    floats = net()
    expected = floats(torch.cat(BATCHES)).detach()
    plain, some, all_ = ready(), ready(), ready()
    alone = learn_ranges_(some, BATCHES, steps=40, factors=False, progress=False)
    report = learn_ranges_(all_, BATCHES, steps=40, progress=False)
    assert report.error[1] < alone.error[1] < alone.error[0] == report.error[0]
    # Without factors the outlier channels leave other channels of their tensor almost no codes.
    gptq_(plain, BATCHES, progress=False)
    gptq_(all_, BATCHES, progress=False)
    assert error(all_, expected) < error(plain, expected)
    assert alone.channels == 0 and report.channels == 8 + 4 + 8 and report.batches == 2
    assert torch.equal(some.first.conv1.weight, floats.first.conv1.weight)
    assert torch.equal(some.first.conv1.bias, floats.first.conv1.bias)
    assert "20 channels with factors" in str(report) and "first.conv2.input" in str(report)


def test_the_float_model_stays_the_same() -> None:
    model, floats = ready(), net()
    learn_ranges_(model, BATCHES, steps=5, progress=False)
    assert not torch.allclose(model.first.conv1.weight, floats.first.conv1.weight, rtol=0.1)
    for quantizer in torchq.workflow.quantizers(model).values():
        quantizer.mode = "off"
    # Sums in another order; factors reach up to 64.
    torch.testing.assert_close(model(BATCHES[0]), floats(BATCHES[0]), rtol=1e-4, atol=1e-5)


def test_factors_may_round_the_weights_of_16_bits(low_dtype: torch.dtype) -> None:
    """Learning pays here in every dtype, so the factors are folded and the output is verified."""
    model = net().to(low_dtype)
    batches = [batch.to(low_dtype) for batch in BATCHES]
    torchq.quantize_(model, torchq.recipes.integer(8, 4, weight_method="max"))
    torchq.calibrate(model, batches, progress=False)
    report = learn_ranges_(model, batches, steps=5, progress=False)
    assert report.error[1] < report.error[0] and report.channels == 20
    assert {parameter.dtype for parameter in model.parameters()} == {low_dtype}


def test_weight_ranges_fit_the_factors() -> None:
    model = ready()
    learn_ranges_(model, BATCHES, steps=5, progress=False)
    for layer in (model.stem, model.first.conv1, model.first.conv2, model.head):
        largest = layer.weight.abs().flatten(1).amax(1)
        torch.testing.assert_close(layer.weight_quantizer.amax.flatten(), largest)


def test_the_result_depends_on_the_seed_alone() -> None:
    models = [ready() for _ in range(3)]
    for model, seed in zip(models, (0, 0, 1), strict=True):
        torch.manual_seed(seed + id(model) % 7)
        before = torch.get_rng_state()
        learn_ranges_(model, [torch.cat(BATCHES * 3)], steps=8, seed=seed, progress=False)
        assert torch.equal(before, torch.get_rng_state())
    one, two, other = (model.first.conv1.weight for model in models)
    assert torch.equal(one, two) and not torch.equal(one, other)


def test_a_call_that_finds_nothing_better_changes_nothing() -> None:
    model: Any = nn.Sequential(nn.Linear(4, 4))
    torchq.quantize_(model, torchq.recipes.integer(8, 4, weight_method="max", input_method="max"))
    codes = [torch.arange(16.0).repeat(4).view(16, 4)]  # the range of 15 holds them exactly
    torchq.calibrate(model, codes, progress=False)
    before = copy.deepcopy(model.state_dict())
    report = learn_ranges_(model, codes, steps=2, progress=False)
    assert report.error == (0, 0) and report.ranges == {"0.input_quantizer": (15, 15)}
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_a_model_without_ranges_is_named() -> None:
    model = net()
    torchq.quantize_(model, torchq.recipes.int4_weight())
    torchq.calibrate(model, BATCHES, progress=False)
    with pytest.raises(ConfigError, match="got no range that can be learned"):
        learn_ranges_(model, BATCHES, steps=2, progress=False)


def test_invalid_arguments_are_named(tmp_path: Any) -> None:
    model = ready()
    with pytest.raises(ConfigError, match=r"got steps=0; expected at least 1"):
        learn_ranges_(model, BATCHES, steps=0, progress=False)
    chain = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with LazyWeights(chain, tmp_path) as weights, pytest.raises(ConfigError, match=r"run\.weights"):
        learn_ranges_(chain, BATCHES, run=RunOptions(weights=weights), progress=False)


class Varying(nn.Module):
    """A model that returns the rows that begin with a positive number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y[y[:, 0] > 0]


def test_outputs_of_another_shape_are_named() -> None:
    torch.manual_seed(0)
    model = Varying().eval()
    torchq.quantize_(model, torchq.recipes.integer(8, 2, weight_method="max"))
    data = [torch.randn(256, 4)]
    torchq.calibrate(model, data, progress=False)
    with pytest.raises(ConfigError, match="cannot be compared"):
        learn_ranges_(model, data, steps=2, progress=False)

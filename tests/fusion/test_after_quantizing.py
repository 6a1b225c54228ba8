"""Folding into calibrated layers: codes keep their magnitude, and ranges grow by the scale."""

import copy
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.common import copied, error, outputs, randomized, same_state
from torchq.descriptor import QuantDescriptor
from torchq.functional import quantize
from torchq.fusion import fuse_
from torchq.nn import QuantConv2d, convert_
from torchq.swap import quantize_
from torchq.workflow import calibrate

PER_CHANNEL = QuantDescriptor(axis=0)
PER_TENSOR = QuantDescriptor()


def quantized(
    layer: Any, norm: Any, weight: Any, x: Tensor, method: str = "max"
) -> nn.Sequential:
    model = randomized(nn.Sequential(layer, norm))
    convert_(model[0], input=PER_TENSOR, weight=weight)
    calibrate(model, [x], method=method, progress=False)
    return model


def codes(layer: Any) -> Tensor:
    q = layer.weight_quantizer
    return quantize(layer.weight, q.amax, q.descriptor.format, q.descriptor.granularity)


CASES = {
    "conv2d": (lambda: nn.Conv2d(3, 64, 3), PER_CHANNEL, (4, 3, 8, 8)),
    "groups": (
        lambda: nn.Conv2d(4, 64, 3, groups=2, bias=False),
        PER_CHANNEL,
        (4, 4, 8, 8),
    ),
    "conv1d": (lambda: nn.Conv1d(3, 64, 3), PER_CHANNEL, (4, 3, 8)),
    "linear": (lambda: nn.Linear(32, 64), PER_CHANNEL, (8, 32)),
    "transposed": (
        lambda: nn.ConvTranspose2d(3, 64, 3),
        QuantDescriptor(axis=1),
        (4, 3, 8, 8),
    ),
    "rows and columns": (
        lambda: nn.Conv2d(3, 64, 3),
        QuantDescriptor(axis=(0, 1)),
        (4, 3, 8, 8),
    ),
    "transposed by depth": (
        lambda: nn.ConvTranspose2d(64, 64, 3, groups=64),
        PER_CHANNEL,
        (4, 64, 8, 8),
    ),
    "int4": (
        lambda: nn.Conv2d(3, 64, 3),
        QuantDescriptor(num_bits=4, axis=0),
        (4, 3, 8, 8),
    ),
}


@pytest.mark.sample(8)
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("zero_gamma", [False, True])
def test_codes_keep_their_magnitude_and_take_the_sign(
    name: str, zero_gamma: bool
) -> None:
    make, weight, shape = CASES[name]
    x = torch.randn(shape)
    norm = nn.BatchNorm2d(64) if len(shape) == 4 else nn.BatchNorm1d(64)
    model = quantized(make(), norm, weight, x)
    if zero_gamma:
        model[1].weight.data[1] = 0.0
    layer = model[0]
    bn = model[1]
    sides = [1] * layer.weight.dim()
    sides[name == "transposed"] = -1
    scale = bn.weight.detach().double() / (bn.running_var.double() + bn.eps).sqrt()
    assert bool((scale < 0).any())
    before = codes(layer)
    amax = layer.weight_quantizer.amax.clone()
    want = outputs(model, x)
    report = fuse_(model, x)
    assert report.applied
    assert model[0] is layer
    assert type(model[1]) is nn.Identity
    expected = before * scale.sign().float().view(sides)
    if zero_gamma:
        expected.movedim(int(name == "transposed"), 0)[1] = 0
    assert torch.equal(codes(layer), expected)
    # one rounding to float32
    wanted = amax.double() * scale.abs().view(sides)
    assert torch.allclose(
        layer.weight_quantizer.amax.double(), wanted, rtol=1e-6, atol=0
    )
    # codes of the same magnitude compute the same up to rounding in float32
    assert error(outputs(model, x), want) <= 1e-5


def test_learned_range_keeps_its_parameter() -> None:
    x = torch.randn(4, 3, 8, 8)
    model = randomized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    model[1].weight.data.fill_(-0.5)
    model[1].running_var.fill_(1.0)
    convert_(
        model[0], input=PER_TENSOR, weight=QuantDescriptor(learn_amax=True, amax=0.2)
    )
    calibrate(model, [x], progress=False)
    parameter = model[0].weight_quantizer.amax
    amax = model[0].weight_quantizer.amax.item()
    assert fuse_(model, x).applied  # one range for all channels, but also one scale
    assert model[0].weight_quantizer.amax is parameter
    assert parameter.item() == pytest.approx(amax * 0.5, rel=1e-4)


BY_INPUT = nn.ConvTranspose2d(3, 8, 3)
GROUPED = nn.ConvTranspose2d(4, 4, 3, groups=2)
ACROSS = QuantDescriptor(block_size=4, block_axis=0)
POWERS = QuantDescriptor(axis=0, power_of_two=True)
MX = QuantDescriptor((4, 3), block_size=16, block_axis=1, scale_format="e8m0")
FROM_ZERO = QuantDescriptor(axis=0, unsigned=True)
CODES = QuantDescriptor(axis=0, fake_quant=False)
REFUSED = {
    "by input channel": (nn.Conv2d(3, 8, 3), QuantDescriptor(axis=1), "along axis 0"),
    "transposed by input channel": (BY_INPUT, PER_CHANNEL, "along axis 1"),
    "transposed with groups": (
        GROUPED,
        QuantDescriptor(axis=1),
        "is a grouped transposed conv",
    ),
    "blocks across channels": (
        nn.Conv2d(3, 8, 3),
        ACROSS,
        "several output channels share",
    ),
    "one dynamic range": (
        nn.Conv2d(3, 8, 3),
        QuantDescriptor(dynamic=True),
        "at each call",
    ),
    "powers of two": (nn.Conv2d(3, 8, 3), POWERS, "of a fixed form"),
    "e8m0": (nn.Linear(32, 8), MX, "of a fixed form"),
    "codes from 0": (nn.Conv2d(3, 8, 3), FROM_ZERO, "begin at 0"),
    "codes": (nn.Conv2d(3, 8, 3), CODES, "returns the codes of its weight"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:.*got negative values")
def test_what_would_change_codes_is_refused_with_the_order(name: str) -> None:
    given, weight, reason = REFUSED[name]
    layer: Any = copy.deepcopy(given)
    linear = isinstance(layer, nn.Linear)
    x = torch.randn(4, 32) if linear else torch.randn(4, layer.in_channels, 8, 8)
    norm = nn.BatchNorm1d(8) if linear else nn.BatchNorm2d(layer.out_channels)
    model = quantized(layer, norm, weight, x)
    state = copied(model)
    report = fuse_(model, x)
    assert report.fused == ()
    assert re.search(reason, report.reason("1"))
    assert report.reason("1").endswith("fuse before quantizing")
    assert same_state(model, state)


def test_a_running_calibration_is_not_disturbed() -> None:
    model = randomized(nn.Sequential(QuantConv2d(3, 8, 3), nn.BatchNorm2d(8)))
    model[0].input_quantizer.start_calibration()
    assert "is being calibrated; finish the calibration first" in fuse_(model).reason(
        "1"
    )
    assert not model[0].input_quantizer.calibrator.seen


def test_before_calibration_there_is_nothing_to_rescale() -> None:
    x = torch.randn(4, 3, 8, 8)
    model = randomized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    convert_(model[0], input=PER_TENSOR, weight=PER_TENSOR)
    assert fuse_(model).applied
    calibrate(model, [x], progress=False)
    amax = model[0].weight_quantizer.amax
    assert amax.item() == pytest.approx(model[0].weight.abs().max().item())


def test_an_unquantized_weight_needs_no_range() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    convert_(
        model[0],
        input=QuantDescriptor(amax=3.0),
        weight=None,
    )
    x = torch.randn(2, 3, 6, 6)
    want = outputs(model, x)
    assert fuse_(model, x).applied
    assert error(outputs(model, x), want) <= 1e-5


def test_batchnorm_before_a_quantized_layer_is_refused() -> None:
    model = randomized(nn.Sequential(nn.BatchNorm2d(3), QuantConv2d(3, 8, 3)))
    assert "1 after it is quantized per output channel; fuse before" in fuse_(
        model
    ).reason("0")


def test_a_trained_net_keeps_its_accuracy_in_the_right_order_only() -> None:
    """Merged, then quantized to 8 bits, a trained RepVGG loses next to nothing."""
    blocks = RepVGGBlock(1, 8, 2), RepVGGBlock(8, 8), RepVGGBlock(8, 8)
    model = nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)
    )
    images = torch.randn(512, 1, 12, 12)
    labels = torch.arange(512) % 4
    for label in range(4):  # a bar at one of four places
        images[labels == label, :, 3 * label : 3 * label + 2, 4:] += 2.0
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in range(60):
        index = torch.arange(64) + 64 * (step % 6)
        loss = nn.functional.cross_entropy(
            model(images[index]),
            labels[index],
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    test = images[384:]
    expected = labels[384:]

    def accuracy(net: Any) -> float:
        return (outputs(net, test).argmax(1) == expected).float().mean().item()

    before = accuracy(model)
    wrong = copy.deepcopy(model)
    assert before >= 0.9
    fuse_(model, test)
    for net in (model, wrong):
        quantize_(net)
        calibrate(net, [images[:384]], progress=False)
    assert accuracy(model) >= before - 0.02
    report = fuse_(wrong)
    assert all(
        "repvgg block; holds quantizers" in report.reason(str(i)) for i in range(3)
    )

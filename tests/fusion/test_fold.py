"""Folding BatchNorm into a layer is exact for every kind, and the layer stays the same object."""

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights

import torchq
from tests.fusion.blocks.layers import BatchNormAct
from tests.fusion.common import (
    Net,
    copied,
    error,
    fused_exactly,
    image,
    norms,
    outputs,
    randomized,
    same_state,
)
from torchq.errors import FuseError
from torchq.fusion import ConstantPad, fuse_
from torchq.nn.modules.frozen_batchnorm import freeze_norm_

TOL64 = 1e-10
TOL32 = 1e-5


class FrozenBatchNorm(nn.Module):
    """Four buffers and no parameters, as in torchvision and detectron2."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.eps = 1e-4
        for name in ("weight", "bias", "running_mean", "running_var"):
            self.register_buffer(
                name, torch.full((c,), float(name in ("weight", "running_var")))
            )

    def forward(self, x: Tensor) -> Any:
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


def frozen(layers: list[nn.Module]) -> list[nn.Module]:
    assert freeze_norm_(layers[-1])
    return layers


def conv(*sizes: Any, **options: Any) -> nn.Conv2d:
    return nn.Conv2d(4, *sizes, **options)


AFTER = {
    "conv1d": lambda: [nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6)],
    "conv2d": lambda: [conv(6, 3, padding=1), nn.BatchNorm2d(6)],
    "conv2d-no-bias": lambda: [
        conv(6, 3, 2, 1, bias=False),
        nn.BatchNorm2d(6, eps=0.1),
    ],
    "conv2d-groups": lambda: [conv(8, 3, groups=2, dilation=2), nn.BatchNorm2d(8)],
    "conv2d-depthwise": lambda: [
        conv(8, 3, groups=4, bias=False),
        nn.BatchNorm2d(8, affine=False),
    ],
    "conv2d-reflect": lambda: [
        conv(6, 3, padding=2, padding_mode="reflect"),
        nn.BatchNorm2d(6),
    ],
    "conv2d-same": lambda: [conv(6, (3, 5), padding="same"), nn.BatchNorm2d(6)],
    "conv3d": lambda: [nn.Conv3d(4, 6, (1, 3, 2)), nn.BatchNorm3d(6)],
    "transposed1d": lambda: [nn.ConvTranspose1d(4, 6, 3, 2), nn.BatchNorm1d(6)],
    "transposed2d-groups": lambda: [
        nn.ConvTranspose2d(4, 6, 3, 2, 1, 1, 2, False),
        nn.BatchNorm2d(6),
    ],
    "transposed3d-depthwise": lambda: [
        nn.ConvTranspose3d(4, 4, 2, groups=4),
        nn.BatchNorm3d(4),
    ],
    "linear": lambda: [nn.Linear(4, 6), nn.BatchNorm1d(6)],
    "sync": lambda: [conv(6, 3), nn.SyncBatchNorm(6)],
    "frozen": lambda: [conv(6, 3), FrozenBatchNorm(6)],
    "frozen-in-place": lambda: frozen([conv(6, 3), nn.BatchNorm2d(6)]),
    "with-activation": lambda: [conv(6, 3), BatchNormAct(6)],
    "through-dropout": lambda: [
        conv(6, 3),
        nn.Dropout2d(),
        nn.Identity(),
        nn.BatchNorm2d(6),
    ],
}
BEFORE = {
    "unpadded": lambda: [nn.BatchNorm2d(4), conv(6, 3, groups=2)],
    "reflect": lambda: [
        nn.BatchNorm2d(4),
        conv(6, 3, 1, 1, padding_mode="circular", bias=False),
    ],
    "pointwise-transposed": lambda: [
        nn.BatchNorm2d(4),
        nn.ConvTranspose2d(4, 6, 1, groups=2),
    ],
    "linear": lambda: [nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 6)],
    "conv1d": lambda: [nn.BatchNorm1d(4), nn.Conv1d(4, 6, 3, dilation=2)],
}


def input_of(layers: nn.Sequential) -> Tensor:
    """Return an input of the dimensions that the layers ask for."""
    message = repr(layers)
    if "Linear" in message:
        return image(5, 4)
    dims = 1 if "1d(" in message else 3 if "3d(" in message else 2
    return image(2, 4, *(9, 8, 7)[:dims])


def build(make: Callable[[], Any]) -> Any:
    torch.manual_seed(0)
    layers = make()
    return randomized(nn.Sequential(*layers).double())


@pytest.mark.sample(6)
@pytest.mark.parametrize(
    "make",
    [*AFTER.values(), *BEFORE.values()],
    ids=[*AFTER, *("before-" + name for name in BEFORE)],
)
def test_fold_is_exact(make: Callable[[], Any]) -> None:
    model = build(make)
    x = input_of(model)
    want = outputs(model, x)
    single = copy.deepcopy(model).float()
    layers = [
        m for m in model if hasattr(m, "weight") and not hasattr(m, "running_mean")
    ]
    report = fused_exactly(model, x, x)
    assert report.applied
    assert report.error <= TOL64
    assert (len(report.fused), report.refused) == (1, ())
    assert norms(model) == []
    assert all(any(layer is m for m in model) for layer in layers)
    again = fuse_(model, x)
    assert (again.fused, again.applied) == ((), False)
    assert fuse_(single, x.float()).applied
    assert error(outputs(single, x.float()), want) <= TOL32


def test_activation_of_a_batchnorm_survives() -> None:
    model = build(AFTER["with-activation"])
    act = model[1].act
    fuse_(model)
    assert model[1] is act
    frozen = build(AFTER["frozen"])
    fuse_(frozen)
    assert type(frozen[1]) is nn.Identity


@pytest.mark.parametrize("quantized", [False, True])
def test_networks_may_fold_their_own_batchnorms_afterwards(quantized: bool) -> None:
    """Ultralytics does at each ``val``: it reads the BatchNorm, and scales ranges of weights."""
    torch.manual_seed(0)
    model = randomized(nn.Sequential(conv(6, 3), nn.BatchNorm2d(6), nn.ReLU()))
    x = image(2, 4, 9, 8).float()
    fuse_(model, x)
    if quantized:
        torchq.quantize_(model)
        torchq.calibrate(model, [x], progress=False)
        torchq.qat.learn_ranges_(model)
    want = model(x).detach()
    before = dict(model.state_dict())
    layer: Any = model[0]
    norm: Any = model[1]
    numbers = (norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias)
    layer.weight, layer.bias = fuse_conv_bn_weights(layer.weight, layer.bias, *numbers)
    if quantized:
        range_of_weight = layer.weight_quantizer.amax
        factor = (norm.weight / torch.sqrt(norm.running_var + norm.eps)).abs()
        layer.weight_quantizer.amax = range_of_weight * factor.view_as(range_of_weight)
        assert layer.weight_quantizer.amax is range_of_weight
    assert torch.equal(model(x), want)
    assert model.state_dict().keys() == before.keys()
    assert all(
        torch.equal(model.state_dict()[name], value) for name, value in before.items()
    )


def test_batchnorm_before_a_padded_convolution_is_refused_unless_padded_explicitly() -> (
    None
):
    model = build(lambda: [nn.BatchNorm2d(4), conv(6, 3, padding=1), nn.ReLU()])
    x = image(2, 4, 7, 8)
    layer = model[1]
    report = fuse_(model)
    assert not report.applied
    assert "would change at the border; constant_pad=True" in report.reason("0")
    assert fused_exactly(model, x, x, constant_pad=True).applied
    assert type(model[0]) is ConstantPad
    assert "padding=(1, 1)" in repr(model[0])
    assert model[1] is layer


def test_batchnorm_without_shift_passes_zero_padding() -> None:
    model = build(lambda: [nn.BatchNorm2d(4), conv(6, 3, padding=1)])
    model[0].running_mean.zero_()
    model[0].bias.data.zero_()
    x = image(2, 4, 7, 8)
    assert fused_exactly(model, x, x).applied


def test_batchnorm_between_two_layers_and_around_one() -> None:
    model = build(
        lambda: [nn.BatchNorm2d(4), conv(6, 1), nn.BatchNorm2d(6), nn.BatchNorm2d(6)]
    )
    x = image(2, 4, 7, 8)
    report = fused_exactly(model, x, x)
    kinds = sorted(fusion.kind for fusion in report.fused)
    assert kinds == ["norm after layer", "norm after layer", "norm before layer"]
    assert norms(model) == []


def test_batchnorm_that_feeds_several_layers() -> None:
    def fan(m: Any, x: Tensor) -> Any:
        x = m.bn(x)
        return m.other(x), m.conv(x)

    model, padded = (randomized(Net(fan).double()) for _ in range(2))
    model.conv.padding = (0, 0)
    assert fused_exactly(model, image()).fused[0].parts == ("bn", "conv")
    assert "conv after it pads with zeros" in fuse_(padded).reason("bn")
    assert type(padded.bn) is nn.BatchNorm2d


def test_layer_stays_the_same_object_with_its_hooks_and_attributes() -> None:
    model = build(AFTER["conv2d-no-bias"]).float().to(memory_format=torch.channels_last)
    layer = model[0]
    seen = []
    layer.note, layer.weight.tag = "mine", 7
    layer.weight.requires_grad_(False)
    layer.register_forward_pre_hook(lambda module, args: seen.append(module))
    old = layer.weight
    values = old.clone()
    fuse_(model)
    assert model[0] is layer
    assert (layer.note, layer.weight.tag) == ("mine", 7)
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    assert not layer.weight.requires_grad
    assert seen == []  # checking a fold does not run hooks
    outputs(model, torch.randn(1, 4, 6, 6))
    assert seen == [layer]
    # Whoever holds the old parameter still has its values.
    assert torch.equal(old, values)
    assert set(model.state_dict()) == {"0.weight", "0.bias"}


def test_tied_weights_are_not_corrupted() -> None:
    model = Net(lambda m, x: m.bn(m.conv(x)) + m.other(x)).double()
    model.other = copy.deepcopy(model.conv)
    tied = model.other.weight = model.conv.weight
    x = image()
    assert fused_exactly(randomized(model), x, x).applied
    assert model.other.weight is tied
    assert model.conv.weight is not tied


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision_is_folded_in_float64(dtype: torch.dtype) -> None:
    model = build(AFTER["conv2d"]).to(dtype)
    exact = copy.deepcopy(model).double()
    fuse_(exact)
    fuse_(model)
    assert model[0].weight.dtype is dtype
    # one rounding to the storage type, and none before it
    assert torch.equal(
        model[0].weight,
        exact[0].weight.to(dtype),
    )
    assert torch.equal(
        model[0].bias,
        exact[0].bias.to(dtype),
    )


def test_overflow_of_half_precision_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2)).half().eval()
    model[1].running_var.zero_()
    model[1].weight.data.fill_(30000.0)
    model[0].weight.data.fill_(10.0)
    assert "overflows torch.float16" in fuse_(model).reason("1")


def test_dry_run_changes_nothing() -> None:
    model = build(AFTER["conv2d"])
    state = copied(model)
    report = fuse_(model, image(), dry_run=True)
    assert len(report.fused) == 1
    assert not report.applied
    assert "1 fused, 0 refused, model unchanged (dry run), whole model off by" in str(
        report
    )
    assert type(model[1]) is nn.BatchNorm2d
    assert same_state(model, state)
    assert report.error <= TOL64


def test_report_reads_as_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    layers = nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4)
    model = nn.Sequential(*layers).eval()
    model[1].weight.data[1] = 8.0
    report = fuse_(model)
    assert "1 fused, 1 refused, applied" in str(report)
    assert "0  <- 1  [norm after layer, fx" in str(report)
    assert (
        "3  refused: its input comes from 2, not from a convolution or linear"
        in str(report)
    )
    assert report.fused[0].scale == pytest.approx(8.0, rel=1e-4)
    message = r"refused 1; expected to merge everything. 3: its input comes from 2"
    with pytest.raises(FuseError, match=message):
        report.require_all()


def test_random_numbers_of_python_are_the_same_on_both_sides_of_the_comparison() -> (
    None
):
    def forward(net: Any, x: Tensor) -> Any:
        return net.bn(net.conv(x)) * random.random()

    model = randomized(Net(forward)).double()
    state = random.getstate()
    report = fuse_(model, image())
    assert not norms(model)
    assert report.error is not None
    assert report.error <= TOL64
    assert random.getstate() == state

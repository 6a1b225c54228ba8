"""Folds on the grid of a quantized layer: what a grid cannot hold is counted, or refused by name.

The layers have float weights with many ties, half of their scales of BatchNorm are negative.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.common import copied, error, outputs, randomized, same_state
from torchq.descriptor import QuantDescriptor
from torchq.fusion import FuseReport, fuse_
from torchq.fusion.modules import norm_affine
from torchq.nn import QuantConv2d, convert_, freeze_norm_
from torchq.nn.weight_grid import GridComparison
from torchq.workflow import calibrate

#: Folds in float32, without rounding of biases: folds of conv layers were off by 1e-6 at most.
ROUNDING = 1e-5
INPUT = QuantDescriptor()


def net(
    weight: QuantDescriptor, layer: Any = None, x: Tensor | None = None
) -> nn.Sequential:
    """A calibrated layer with a BatchNorm of mixed signs behind it."""
    layer = nn.Conv2d(3, 8, 3, bias=False) if layer is None else layer
    model = randomized(nn.Sequential(layer, nn.BatchNorm2d(layer.out_channels)))
    convert_(model[0], input=INPUT, weight=weight)
    calibrate(model, [image(layer.in_channels) if x is None else x], progress=False)
    return model


def image(channels: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, channels, 8, 8, generator=generator)


def counted_codes(before: Any, after: Any, norm: nn.Module) -> int:
    """The codes that a fold changed, seen from outside."""
    scale = norm_affine(norm)[0]
    factor = scale.reshape(-1, 1, 1, 1).expand(after.weight.shape)
    old, new = (layer.weight.detach() for layer in (before, after))
    quantizers = (before.weight_quantizer, after.weight_quantizer)
    compared = GridComparison.of(
        quantizers[0],
        old,
        quantizers[1],
        new,
        factor,
    )
    return int(compared.other_codes.sum())


def folded(
    model: nn.Sequential, x: Tensor | None = None
) -> tuple[FuseReport, Any, nn.Module]:
    """Fuse a model; return the report, and the layer and the norm of before."""
    layer = copy.deepcopy(model[0])
    norm = copy.deepcopy(model[1])
    report = fuse_(
        model, image(model[0].in_channels) if x is None else x, progress=False
    )
    return report, layer, norm


EXACT = {
    "int8": QuantDescriptor(axis=0),
    "int4": QuantDescriptor(4, axis=0),
    "int16": QuantDescriptor(16, axis=0),
    "narrow": QuantDescriptor(axis=0, narrow_range=True),
    "e4m3": QuantDescriptor((4, 3), axis=0),
    "e2m1": QuantDescriptor((2, 1), axis=0),
    "asymmetric": QuantDescriptor(axis=0, symmetric=False),
    "asymmetric from 0": QuantDescriptor(axis=0, symmetric=False, unsigned=True),
    "asymmetric, 4 bits": QuantDescriptor(4, axis=0, symmetric=False),
    "blocks along the inputs": QuantDescriptor(4, block_size=2, block_axis=1),
    "rows and columns": QuantDescriptor(axis=(0, 1)),
    "scaled range": QuantDescriptor(axis=0, scale_amax=1.25),
    "learned": QuantDescriptor(4, axis=0, learn_amax=True, scale_range_grad=True),
    "learned ends": QuantDescriptor(4, axis=0, learn_amax=True, symmetric=False),
    "dynamic": QuantDescriptor(axis=0, dynamic=True),
    "per tensor": QuantDescriptor(),
    "per tensor, asymmetric": QuantDescriptor(symmetric=False),
    "per tensor, learned": QuantDescriptor(4, learn_amax=True),
}


@pytest.mark.sample(10)
@pytest.mark.parametrize("name", EXACT)
def test_no_code_changes_whatever_the_form(name: str) -> None:
    model = net(EXACT[name])
    with torch.no_grad():  # half of the weights lie on ties between two codes
        q = model[0].weight_quantizer
        scale = (
            q.qparams(model[0].weight.detach()).aligned(q.scale, model[0].weight)
            if q.calibrated
            else 1.0
        )
        ties = (model[0].weight / scale).floor() + 0.5
        inside = ties.abs() < model[0].weight.abs() / scale
        model[0].weight.copy_(torch.where(inside, ties * scale, model[0].weight))
    want = outputs(model, image())
    report, layer, norm = folded(model)
    assert report.applied
    assert report.refused == ()
    assert report.fused[0].changed == counted_codes(layer, model[0], norm) == 0
    assert error(outputs(model, image()), want) <= ROUNDING
    assert "none of 216 weight codes changed" in str(report)


@pytest.mark.parametrize("damage", ["range", "code", "sign"])
def test_the_comparison_of_codes_says_no(
    damage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = QuantConv2d.fold_output_

    def damaged(self: Any, scale: Tensor, shift: Tensor) -> Any:
        outcome = original(self, scale.abs() if damage == "sign" else scale, shift)
        with torch.no_grad():
            if damage == "range":
                self.weight_quantizer.set_amax(self.weight_quantizer.amax * 1.01)
            if damage == "code":
                self.weight[5, 1, 2, 0] += self.weight_quantizer.scale[5].item()
        return outcome

    monkeypatch.setattr(QuantConv2d, "fold_output_", damaged)
    model = net(QuantDescriptor(axis=0))
    state = copied(model)
    report = fuse_(model, image(), progress=False)
    assert not report.applied
    assert (
        "would change 1 of 216 " if damage == "code" else "of 216 weight codes"
    ) in (report.reason("1") or "")
    assert same_state(model, state)


@pytest.mark.parametrize("example", [None, image()])
def test_the_comparison_of_results_says_no(
    example: Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bias is no code, so results alone show it."""
    original = QuantConv2d.fold_output_

    def damaged(self: Any, scale: Tensor, shift: Tensor) -> Any:
        return original(self, scale, shift + 1e-3)

    monkeypatch.setattr(QuantConv2d, "fold_output_", damaged)
    report = fuse_(net(QuantDescriptor(axis=0)), example, progress=False)
    assert "times what rounding explains" in (report.reason("1") or "")
    without = fuse_(net(QuantDescriptor(axis=0)), example, verify=False, progress=False)
    assert without.applied


@pytest.mark.parametrize(
    ("bits", "outermost"), [(8, "-128 became 127"), (4, "-8 became 7")]
)
def test_the_outermost_code_saturates_and_is_counted(bits: int, outermost: str) -> None:
    model = net(QuantDescriptor(bits, axis=0))
    model[0].weight_quantizer.set_amax(model[0].weight_quantizer.amax * 0.5)
    report, layer, norm = folded(model)
    lost = report.fused[0].changed
    assert report.applied
    assert lost == counted_codes(layer, model[0], norm) > 0
    assert f"{lost} of 216 weight codes {outermost}" in str(report)
    narrow = net(QuantDescriptor(bits, axis=0, narrow_range=True))
    narrow[0].weight_quantizer.set_amax(narrow[0].weight_quantizer.amax * 0.5)
    assert folded(narrow)[0].fused[0].changed == 0


@pytest.mark.parametrize("gamma", [0.0, 1e-36, -1e-38])
def test_dead_channels_have_codes_of_zero(gamma: float) -> None:
    model = net(QuantDescriptor(axis=0))
    model[1].weight.data[2] = gamma
    want = outputs(model, image())
    report = folded(model)[0]
    assert report.applied
    assert report.fused[0].changed == 0
    assert "1 dead channels" in str(report)
    assert error(outputs(model, image()), want) <= ROUNDING
    assert not bool(model[0].weight[2].any())


def test_a_tiny_factor_beside_a_large_one_is_no_shared_range() -> None:
    model = net(QuantDescriptor(axis=0))
    model[1].weight.data[2] = 1e-9
    report = folded(model)[0]
    assert report.applied
    assert report.fused[0].changed == 0


def test_one_range_becomes_one_per_channel_unless_the_target_has_none() -> None:
    model = net(QuantDescriptor())
    parameters = model[0].weight_quantizer.descriptor
    assert parameters.axis is None
    assert "a weight range per output channel in place of one" in str(folded(model)[0])
    assert model[0].weight_quantizer.descriptor.axis == (0,)
    assert model[0].weight_quantizer.amax.shape == (8, 1, 1, 1)
    alone = net(QuantDescriptor())
    alone[0].one_weight_scale = True
    assert "as its target takes no more" in folded(alone)[0].reason("1")
    alone[1].weight.data = (alone[1].running_var + alone[1].eps).sqrt() * 0.5
    assert folded(alone)[0].applied  # one factor for all channels
    assert alone[0].weight_quantizer.descriptor.axis is None


@pytest.mark.parametrize(
    ("groups", "axis", "becomes"),
    [
        (1, 1, (1,)),
        (1, None, (1,)),
        (4, None, (0,)),
        (4, 1, (0,)),
    ],
)
def test_transposed_convolutions(
    groups: int, axis: int | None, becomes: tuple[int, ...]
) -> None:
    layer = nn.ConvTranspose2d(4, 4, 3, groups=groups, bias=False)
    model = net(QuantDescriptor(axis=axis), layer)
    want = outputs(model, image(4))
    report = folded(model)[0]
    assert report.applied
    assert report.fused[0].changed == 0
    assert model[0].weight_quantizer.descriptor.axis == becomes
    assert error(outputs(model, image(4)), want) <= ROUNDING


def test_grouped_transposed_convolutions_fold_with_a_range_for_each_row_and_column() -> (
    None
):
    layer = nn.ConvTranspose2d(4, 4, 3, groups=2, bias=False)
    model = net(QuantDescriptor(axis=(0, 1)), layer)
    want = outputs(model, image(4))
    assert folded(model)[0].applied
    assert error(outputs(model, image(4)), want) <= ROUNDING


class Two(nn.Module):
    """Two layers, a norm behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 3, 3)
        self.b = nn.Conv2d(3, 3, 3)
        self.norm_a = nn.BatchNorm2d(3)
        self.norm_b = nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm_b(self.b(self.norm_a(self.a(x))))


def two(weight: QuantDescriptor) -> Two:
    model = randomized(Two())
    for layer in (model.a, model.b):
        convert_(layer, input=INPUT, weight=weight)
    calibrate(model, [image()], progress=False)
    return model


@pytest.mark.parametrize("form", [QuantDescriptor(axis=0), QuantDescriptor()])
def test_a_quantizer_of_two_weights_becomes_the_layers_own(
    form: QuantDescriptor,
) -> None:
    model = two(form)
    model.b.weight_quantizer = model.a.weight_quantizer
    want = outputs(model, image())
    report = fuse_(model, image(), progress=False)
    assert report.applied
    assert report.refused == ()
    assert model.a.weight_quantizer is not model.b.weight_quantizer
    assert "has a quantizer of its weight of its own now, beside b" in str(report)
    # A tie may move the second layer's input.
    assert error(outputs(model, image()), want) <= 2e-2


def test_a_weight_of_two_layers_becomes_the_layers_own() -> None:
    model = two(QuantDescriptor(axis=0))
    model.b.weight = model.a.weight
    model.norm_b = nn.Identity()
    other = model.b.weight.detach().clone()
    report = fuse_(model, image(), progress=False)
    assert "has a weight of its own now, beside b" in str(report)
    assert torch.equal(model.b.weight, other)


REFUSED: dict[str, tuple[Any, str]] = {
    "output": (
        lambda m: m[0].quantize_output_(INPUT),
        "quantizes its result in front of",
    ),
    "smoothing": (
        lambda m: m[0].weight_quantizer.register_buffer(
            "pre_quant_scale", torch.ones(3, 1, 1)
        ),
        "has a pre_quant_scale on its weight",
    ),
    "delegate": (
        lambda m: setattr(m[0].weight_quantizer, "delegate", lambda x, q: x),
        "has a delegate in its weight quantizer",
    ),
    "not loaded": (
        lambda m: (
            m[0].weight_quantizer.start_calibration(),
            m[0].weight_quantizer(m[0].weight),
            setattr(m[0].weight_quantizer, "mode", "quantize"),
        ),
        "has a calibrator that has seen its weight",
    ),
    "observing": (
        lambda m: setattr(m[0].weight_quantizer, "observing", True),
        "being calibrated",
    ),
    "training": (lambda m: m[1].train(), "in training mode"),
    "nan": (
        lambda m: m[1].running_mean[0].fill_(torch.nan),
        "running_mean that is not finite",
    ),
    "no variance": (
        lambda m: (m[1].running_var[0].zero_(), setattr(m[1], "eps", 0.0)),
        "no finite number above 0",
    ),
    "half": (
        lambda m: (m.half(), m[1].weight.data.fill_(1e-5)),
        "stored as float16); expected none. Fuse before quantizing",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_refused_alone_and_by_name(name: str) -> None:
    change, reason = REFUSED[name]
    good = net(QuantDescriptor(axis=0))
    bad = net(QuantDescriptor(axis=0))
    change(bad)
    model = nn.Sequential(
        bad,
        good[0].float(),
        good[1],
    )
    model[1].in_channels = 3
    state = {name: t.clone() for name, t in bad.state_dict().items()}
    report = fuse_(model, progress=False)
    assert reason in (report.reason("0.1") or "")
    assert [fusion.name for fusion in report.fused] == ["1"]
    assert report.applied
    assert all(
        torch.equal(t.nan_to_num(), state[n].nan_to_num())
        for n, t in bad.state_dict().items()
    )


def test_ranges_in_the_shape_of_old_checkpoints() -> None:
    model = net(QuantDescriptor(axis=0))
    model[0].weight_quantizer.amax = model[0].weight_quantizer.amax.flatten()
    report, layer, norm = folded(model)
    assert report.applied
    assert counted_codes(layer, model[0], norm) == 0
    assert model[0].weight_quantizer.amax.shape == (8,)


def test_a_correction_of_results_folds_along() -> None:
    model = net(
        QuantDescriptor(axis=0),
        nn.Conv2d(3, 8, 3),
    )
    generator = torch.Generator().manual_seed(0)
    gain = torch.rand(8, generator=generator) + 0.5
    model[0].correct_output_(gain, torch.randn(8, generator=generator))
    want = outputs(model, image())
    report, layer, norm = folded(model)
    assert report.applied
    assert counted_codes(layer, model[0], norm) == 0
    assert error(outputs(model, image()), want) <= ROUNDING
    before = model[0].weight_quantizer.codes(model[0].weight.detach())
    model[0].fold_correction_()
    assert torch.equal(
        model[0].weight_quantizer.codes(model[0].weight.detach()), before
    )
    assert error(outputs(model, image()), want) <= ROUNDING


@pytest.mark.parametrize("axis", [0, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_held_scales_stay_held(symmetric: bool, axis: int | None) -> None:
    model = net(QuantDescriptor(axis=axis, symmetric=symmetric))
    q = model[0].weight_quantizer
    q.set_qparams(*(q.calculate_qparams() if not symmetric else (q.scale * 1.003,)))
    model[1].weight.data[1] = 0.0
    want = outputs(model, image())
    report = folded(model)[0]
    assert report.applied
    assert report.fused[0].changed == 0
    assert "held_scale" in model[0].weight_quantizer.state_dict()
    assert error(outputs(model, image()), want) <= ROUNDING


def test_a_learned_range_stays_the_parameter_and_says_that_its_optimizer_is_stale() -> (
    None
):
    for form in (EXACT["learned"], EXACT["per tensor, learned"]):
        model = net(form)
        parameter = model[0].weight_quantizer.amax
        outputs_before = model(image()).sum()
        outputs_before.backward()
        report = folded(model)[0]
        assert model[0].weight_quantizer.amax is parameter
        assert "an optimizer's state of it is out of date" in str(report)
        model(image()).sum().backward()  # trains on


@pytest.mark.parametrize(
    ("scales", "rounding"), [("float16", 2.0**-11), ("bfloat16", 2.0**-9)]
)
def test_typed_scales_keep_the_codes_but_where_they_are_clamped(
    scales: str, rounding: float
) -> None:
    form = QuantDescriptor(axis=0, scale_format=scales)
    model = net(form)
    want = outputs(model, image())
    report, layer, norm = folded(model)
    assert report.applied
    assert report.fused[0].changed == 0 == counted_codes(layer, model[0], norm)
    # one rounding of each scale, relative to the products, which the mean may have made larger
    assert error(outputs(model, image()), want) <= 2 * rounding
    small = net(form)
    small[1].weight.data[1] = 1e-3 if scales == "float16" else 1e-32
    report, layer, norm = folded(small)
    changed = report.fused[0].changed
    assert report.applied
    assert changed == counted_codes(layer, small[0], norm)
    assert changed > 0 or scales == "bfloat16"
    if scales == "float16":
        assert f"{changed} of 216 weight codes, in 1 channels, rounded anew" in str(
            report
        )


@pytest.mark.parametrize("bits", [8, 4, (4, 3)])
@pytest.mark.parametrize("below", [0.97, 0.3])
def test_small_codes_stay_where_a_scale_is_clamped(bits: Any, below: float) -> None:
    """Their values are those of the clamped scale, half a step off at most, which is no error."""
    model = net(QuantDescriptor(bits, axis=0, scale_format="float16"))
    layer, norm = model
    factor = below * 2.0**-14 / layer.weight_quantizer.scale.flatten()[1]
    norm.weight.data[1] = factor * (norm.running_var[1] + norm.eps).sqrt()
    report, layer, norm = folded(model)
    assert report.refused == ()
    changed = report.fused[0].changed
    assert changed == counted_codes(layer, model[0], norm)
    assert changed < 27 if below == 0.97 else changed > 0  # of the 27 of the channel


def test_a_bias_too_large_for_its_scale_is_counted() -> None:
    model = net(QuantDescriptor(axis=0))
    model[0].bias_format = "int32"
    model[1].weight.data[4], model[1].bias.data[4] = 1e-9, 1.0
    want = outputs(model, image())
    report = folded(model)[0]
    assert "1 channels with a bias too large for their scale in int32" in str(report)
    # Half a step of int32, 2e-5 seen.
    assert error(outputs(model, image()), want) <= 1e-4


@pytest.mark.parametrize("when", ["off", "uncalibrated"])
def test_what_rounds_nothing_is_folded_in_float(when: str) -> None:
    model = net(QuantDescriptor(axis=0))
    on = copy.deepcopy(model)
    q = model[0].weight_quantizer
    if when == "off":
        q.mode = "off"
    else:
        q.forget_amax()
    weight = model[0].weight.detach().clone()
    norm = copy.deepcopy(model[1])
    report = folded(model)[0]
    assert report.applied
    factor = norm_affine(norm)[0].reshape(-1, 1, 1, 1)
    assert torch.equal(
        model[0].weight,
        (weight.double() * factor).float(),
    )
    if when == "off":  # on again, its codes are those that it had
        model[0].weight_quantizer.mode = "quantize"
        assert counted_codes(on[0], model[0], norm) == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("bits", [4, 8])
def test_low_precision_keeps_the_codes(dtype: torch.dtype, bits: int) -> None:
    model = net(QuantDescriptor(bits, axis=0)).to(dtype)
    want = outputs(model, image().to(dtype))
    report, layer, norm = folded(model, image().to(dtype))
    assert report.applied
    assert report.refused == ()
    assert counted_codes(layer, model[0], norm) == 0
    # Activations, the bias and each product have the precision of the dtype.
    assert error(outputs(model, image().to(dtype)), want) <= 2 * torch.finfo(dtype).eps


def test_a_checkpoint_in_half_precision_changes_nothing() -> None:
    model = net(QuantDescriptor(axis=0))
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.copy_(tensor.half().float())
    report, layer, norm = folded(model)
    assert report.applied
    assert counted_codes(layer, model[0], norm) == 0


def test_random_inputs_are_compared_in_the_precision_of_the_layer() -> None:
    """In float64 the weights, which lie on ties, have other codes."""
    model = net(QuantDescriptor(axis=0))
    with torch.no_grad():
        scale = model[0].weight_quantizer.scale
        model[0].weight.copy_(((model[0].weight / scale).floor() + 0.5) * scale)
    assert fuse_(model, progress=False).applied


def test_after_the_fold_half_precision_keeps_the_codes() -> None:
    model = net(QuantDescriptor(axis=0))
    folded(model)
    q = model[0].weight_quantizer
    before = q.codes(model[0].weight.detach())
    model.half()
    assert torch.equal(q.codes(model[0].weight.detach()), before)


def test_branches_fold_each_for_itself_after_training() -> None:
    """A block of branches with codes of their own stays a block; norms behind layers fold."""
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 1), RepVGGBlock(4, 4)))
    for layer in (model[1].rbr_dense.conv, model[1].rbr_1x1.conv):
        convert_(layer, input=INPUT, weight=QuantDescriptor(axis=0))
    calibrate(model, [image()], progress=False)
    want = outputs(model, image())
    report = fuse_(model, image(), progress=False)
    assert {fusion.name for fusion in report.fused} == {
        "1.rbr_dense.conv",
        "1.rbr_1x1.conv",
    }
    assert report.reason("1.rbr_identity")
    assert "holds quantizers" in report.reason("1")
    assert sum(fusion.changed for fusion in report.fused) == 0
    assert error(outputs(model, image()), want) <= ROUNDING


def test_norms_that_were_frozen_fold_in_training_mode() -> None:
    model = net(QuantDescriptor(axis=0))
    freeze_norm_(model[1])
    model.train()
    assert folded(model)[0].applied
    assert type(model[1]) is nn.Identity


def test_linear_layers_with_a_norm_of_features() -> None:
    x = image().reshape(-1, 32)
    model = randomized(nn.Sequential(nn.Linear(32, 16), nn.BatchNorm1d(16)))
    convert_(
        model[0],
        input=INPUT,
        weight=QuantDescriptor(axis=0),
    )
    calibrate(model, [x], progress=False)
    want = outputs(model, x)
    report = fuse_(model, x, progress=False)
    assert report.applied
    assert "none of 512 weight codes" in str(report)
    assert error(outputs(model, x), want) <= ROUNDING


def test_one_fold_that_is_refused_drops_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The whole model is no judge: it is shown, and refuses nothing."""
    model = two(QuantDescriptor(axis=0))
    model.a.quantize_output_(INPUT)
    calibrate(model, [image()], progress=False, force=True)
    report = fuse_(model, image(), progress=False)
    assert [f.name for f in report.fused] == ["b"]
    assert report.applied
    assert report.tolerance is None
    assert report.error is not None
    assert "whole model differs by" in str(report)


def test_a_long_report_fits_a_screen() -> None:
    model = nn.Sequential(
        *(net(QuantDescriptor(axis=0), nn.Conv2d(3, 3, 1)) for _ in range(20))
    )
    for pair in model[:9]:
        pair[1].train()
    report = fuse_(model, progress=False)
    shown = str(report).splitlines()
    assert len(report.fused) == 11
    assert len(report.refused) == 9
    assert len(shown) <= 4
    assert "0.1, 1.1, 2.1, 3.1, 4.1, 5.1 and 3 more  refused: in training mode" in str(
        report
    )
    assert len(report.table().splitlines()) >= 21

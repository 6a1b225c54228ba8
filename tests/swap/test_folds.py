"""Unfolded models are planned as the models that folding makes of them."""

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.fusion.common import randomized
from torchq.fusion.unfolded import keeps_norm
from torchq.nn import TensorQuantizer
from torchq.swap import Plan, plan_of
from torchq.swap.folds import folding_pairs, narrow_weights_, norms_behind_layers


class Net(nn.Module):
    """Norms behind layers, of all that follows them: ReLU and GELU, joins, additions, resizing."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm0 = nn.BatchNorm2d(8)
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.norm3 = nn.BatchNorm2d(8)
        self.conv4 = nn.Conv2d(8, 8, 1)
        self.norm4 = nn.BatchNorm2d(8)
        self.fc = nn.Linear(8, 8)
        self.norm5 = nn.BatchNorm1d(8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm0(self.stem(x)).relu()
        y = self.norm1(self.conv1(x))
        x = self.norm2(self.conv2(F.interpolate(F.gelu(y), scale_factor=1.0))) + x
        x = self.norm3(self.up(torch.cat([x, y], 1))).relu()
        x = self.norm4(self.conv4(F.interpolate(x, scale_factor=0.5))).relu()
        x = F.interpolate(x, scale_factor=2.0).mean((2, 3))
        return self.last(self.norm5(self.fc(x)).relu())


class BehindCat(nn.Module):
    """A norm that reads a concatenation, and one of a layer that something else reads too."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)
        self.b = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(16)
        self.beside = nn.BatchNorm2d(8)
        self.last = nn.Conv2d(24, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        b = self.b(x)
        joined = self.norm(torch.cat([a, b], 1)).relu()
        return self.last(torch.cat([joined, self.beside(a)], 1))


class WithActivation(nn.BatchNorm2d):
    """A norm with its activation, as timm has them."""

    def __init__(self, channels: int, act: nn.Module) -> None:
        super().__init__(channels)
        self.drop = nn.Identity()
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        tensors = (self.running_mean, self.running_var, self.weight, self.bias)
        x = F.batch_norm(input, *tensors, self.training, 0.1, self.eps)
        return self.act(self.drop(x))


def activated() -> nn.Sequential:
    layers = [
        nn.Conv2d(3, 8, 3),
        WithActivation(8, nn.SiLU()),
        nn.Conv2d(8, 8, 3),
    ]
    return nn.Sequential(*layers, WithActivation(8, nn.ReLU()), nn.Conv2d(8, 4, 1))


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TARGETS = ["onnxruntime", "openvino", "tensorrt", "qnn", "executorch"]


def outcome(model: nn.Module) -> Plan:
    """What is quantized in a model and how, whatever was fused in which order."""
    return replace(plan_of(model).outcome(), fusions=())


@pytest.mark.sample(8)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("make", [Net, BehindCat, activated])
def test_train_and_fold_is_fold_and_quantize(make: Any, target: str) -> None:
    """Whether norms train at the moment does not matter either."""
    unfolded = randomized(make())
    folded = copy.deepcopy(unfolded)
    torchq.fuse_(folded, X, progress=False)
    torchq.quantize_(folded, target=target, example=X, progress=False)
    unfolded.train()
    planned = torchq.plan(unfolded, target=target, example=X)
    report = torchq.quantize_(unfolded, target=target, example=X, progress=False)
    assert planned == report == plan_of(unfolded)
    assert Plan.from_dict(planned.to_dict()) == planned
    torchq.fuse_(unfolded.eval(), X, progress=False)
    assert outcome(unfolded) == outcome(folded)


def test_the_quantizer_of_a_result_stands_behind_the_norm_until_the_fold() -> None:
    model = randomized(Net())
    plan = torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    layer = plan.decision("conv1")
    assert plan.decision("norm1").output is not None
    assert layer.output is None
    assert plan.decision("norm0") is None  # the addition and the next layer quantize it
    assert "until it is folded into conv1" in str(plan.decision("norm1"))
    assert layer.awaits_fold
    assert layer.rounded_by == "norm1.output_quantizer"
    assert model.conv1.bias_format == ""
    assert "results behind BatchNorm" in plan.verdict()
    assert "bias int32 once folded" in str(layer)
    torchq.calibrate(model, [X], correct=False, progress=False)
    quantizer = model.norm1.output_quantizer
    amax = quantizer.amax.clone()
    report = torchq.fuse_(model, X, progress=False)
    assert report.refused == ()
    assert model.conv1.output_quantizer is quantizer
    assert torch.equal(quantizer.amax, amax)
    assert quantizer.name == "conv1.output_quantizer"
    assert type(model.norm1) is nn.Identity
    assert (model.conv1.bias_format, model.conv1.rounded_by) == (
        "int32",
        quantizer.name,
    )
    after = plan_of(model).decision("conv1")
    assert after.by == layer.by
    assert after.output is not None


def test_training_trains_with_that_quantizer() -> None:
    model = randomized(Net())
    torchq.qat.prepare(model, [X], target="onnxruntime", progress=False)
    results: list[Tensor] = []
    model.train().norm1.register_forward_hook(
        lambda norm, args, out: results.append(out)
    )
    model(X).square().sum().backward()
    model.norm1.output_quantizer.mode = "off"
    model(X)
    counts = [len(result.unique()) for result in results]
    assert counts[0] <= 256 < counts[1]
    assert model.conv1.weight.grad is not None


def test_a_relu_that_codes_include_comes_with_the_norm() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Upsample(scale_factor=2)
    )
    model = randomized(model.append(nn.GroupNorm(2, 8)).append(nn.Conv2d(8, 4, 1)))
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    torchq.calibrate(model, [X], correct=False, progress=False)
    assert model[1].output_quantizer.descriptor.unsigned
    with torch.no_grad():
        x = model[0](X)
        result = model[1](x)
        quantizer = model[1].output_quantizer
        norm = F.batch_norm(
            x,
            model[1].running_mean,
            model[1].running_var,
            model[1].weight,
            model[1].bias,
        )
        assert torch.equal(result, quantizer(norm.relu()))


@pytest.mark.parametrize(
    ("form", "folds"),
    [
        (torchq.QuantDescriptor(axis=0), True),
        (torchq.QuantDescriptor(axis=0, power_of_two=True), False),
        (torchq.QuantDescriptor(axis=1), False),
    ],
)
def test_a_norm_that_cannot_fold_is_planned_as_what_it_is(
    form: torchq.QuantDescriptor, folds: bool
) -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GELU()))
    rule = torchq.Rule("*", input=torchq.QuantDescriptor(), weight=form)
    config = torchq.QuantConfig((rule,))
    model.append(nn.Conv2d(8, 4, 1))
    plan = torchq.plan(model, config, target="onnxruntime", example=X)
    assert (plan.decision("1") is not None) is folds
    # The norm computes in float, so the layer returns codes to it.
    assert (plan.decision("0").output is not None) is not folds


def test_norms_with_a_forward_of_their_own_hold_no_quantizer() -> None:
    plain = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    (norm,) = norms_behind_layers(plain, folding_pairs(plain, X)).values()
    assert norm.names == ("1",) and norm.may_quantize_output
    model = activated().eval()
    norms = norms_behind_layers(model, folding_pairs(model, X))
    assert [norm.names for norm in norms.values()] == [("1",), ("3",)]
    assert not any(norm.may_quantize_output for norm in norms.values())


@pytest.mark.parametrize(
    ("weight", "is_narrowed"),
    [
        (torchq.QuantDescriptor(axis=0), True),
        (torchq.QuantDescriptor(axis=0, unsigned=True), False),
        (torchq.QuantDescriptor(axis=0, symmetric=False), False),
        (torchq.QuantDescriptor((4, 3), axis=0), False),
    ],
    ids=str,
)
def test_codes_without_a_counterpart_are_left_out_of_signed_integers(
    weight: torchq.QuantDescriptor, is_narrowed: bool
) -> None:
    model: Any = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).eval()
    rule = torchq.Rule("0", input=torchq.QuantDescriptor(), weight=weight)
    torchq.quantize_(model, torchq.QuantConfig((rule,)), progress=False)
    expected = weight.replace(narrow_range=True) if is_narrowed else weight
    assert narrow_weights_(model, X) == ({"0": expected} if is_narrowed else {})
    quantizer = model[0].weight_quantizer
    assert quantizer.descriptor.narrow_range == is_narrowed


def test_weights_with_one_scale_for_good_refuse_a_norm_and_say_so() -> None:
    model = randomized(
        nn.Sequential(nn.ConvTranspose2d(3, 4, 2), nn.BatchNorm2d(4), nn.ReLU())
    )
    model.append(nn.Conv2d(4, 4, 1))
    plan = torchq.quantize_(model, target="tensorrt", example=X, progress=False)
    assert plan.decision("0").one_scale
    assert not plan.decision("3").one_scale
    torchq.calibrate(model, [X], correct=False, progress=False)
    assert "as its target takes no more" in torchq.fuse_(
        model, X, progress=False
    ).reason("1")


def test_a_weight_that_got_a_scale_per_channel_says_so_in_the_plan() -> None:
    model = randomized(nn.Sequential(nn.Conv2d(3, 4, 2), nn.BatchNorm2d(4)))
    torchq.quantize_(model, torchq.recipes.int8_per_tensor(), progress=False)
    torchq.calibrate(model, [X], correct=False, progress=False)
    torchq.fuse_(model, X, progress=False)
    row = plan_of(model).decision("0")
    assert row.weight.axis == (0,)
    assert "its one weight scale became one per output channel" in str(row)


@pytest.mark.parametrize("when", ["before", "after"])
def test_saved_before_or_after_the_fold(when: str, tmp_path: Path) -> None:
    model = randomized(Net())
    fresh = Net().eval()
    torchq.quantize_(
        model,
        torchq.recipes.int8_per_tensor(),
        target="openvino",
        example=X,
        progress=False,
    )
    torchq.calibrate(model, [X], correct=False, progress=False)
    if when == "after":
        torchq.fuse_(model, X, progress=False)
    torchq.save(model, tmp_path / "m.pt")
    loaded = torchq.load(fresh, tmp_path / "m.pt")
    with torch.no_grad():
        assert torch.equal(loaded(X), model(X))
    if when == "before":
        torchq.fuse_(model, X, progress=False)
        torchq.fuse_(loaded, X, progress=False)
        with torch.no_grad():
            assert torch.equal(loaded(X), model(X))
    assert outcome(loaded) == outcome(model)


def test_the_state_of_a_folded_model_loads_into_an_unfolded_one_that_has_its_record() -> (
    None
):
    model = randomized(Net())
    fresh = copy.deepcopy(model)
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    torchq.calibrate(model, [X], correct=False, progress=False)
    torchq.fuse_(model, X, progress=False)
    torchq.quantize_(fresh, target="onnxruntime", example=X, progress=False)
    with torch.no_grad():
        for parameter in fresh.parameters():
            parameter.zero_()
    torchq.fusion.apply_fusion_record_(fresh, torchq.fusion.fusion_record(model))
    fresh.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(fresh(X), model(X))
    assert outcome(fresh) == outcome(model)


def test_embedded_records_load_into_an_unfolded_model(tmp_path: Path) -> None:
    model = randomized(Net())
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    torchq.calibrate(model, [X], correct=False, progress=False)
    torchq.fuse_(model, X, progress=False)
    torchq.workflow.embed_record_(model)
    torch.save({"state_dict": model.state_dict()}, tmp_path / "lightning.ckpt")
    loaded = torchq.load(Net().eval(), tmp_path / "lightning.ckpt")
    with torch.no_grad():
        assert torch.equal(loaded(X), model(X))


def test_averaged_models_fold_as_well() -> None:
    model = randomized(Net())
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    torchq.calibrate(model, [X], correct=False, progress=False)
    average = torch.optim.swa_utils.AveragedModel(model, use_buffers=True)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.01
    average.update_parameters(model)
    report = torchq.fuse_(average.module.eval(), X, progress=False)
    assert report.applied
    assert len(report.fused) == 6
    assert report.refused == ()
    assert sum(fusion.changed for fusion in report.fused) == 0


def test_restoring_leaves_the_weights_on_their_grid() -> None:
    model = randomized(Net())
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    torchq.calibrate(model, [X], correct=False, progress=False)
    torchq.fuse_(model, X, progress=False)
    scale = model.conv1.weight_quantizer.scale
    torchq.restore_(model)
    codes = model.conv1.weight.detach() / scale
    # Quotients of float32 up to 127.
    assert torch.allclose(codes, codes.round(), atol=1e-4)
    assert not any(isinstance(module, TensorQuantizer) for module in model.modules())


def test_restoring_before_the_fold_gives_plain_norms_back() -> None:
    model = randomized(Net())
    types = [type(module) for module in model.modules()]
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    torchq.restore_(model)
    assert [type(module) for module in model.modules()] == types
    assert "after_fold" not in vars(model.conv1)


def test_norms_that_were_frozen_first_are_planned_and_fold() -> None:
    model = randomized(Net())
    torchq.qat.freeze_bn_(model)
    plan = torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    assert plan.decision("norm1").output is not None
    assert not model.train().norm1.training
    torchq.calibrate(model, [X], correct=False, progress=False)
    assert len(torchq.fuse_(model, X, progress=False).fused) == 6


def test_frozen_norms_keep_their_quantizer() -> None:
    model = randomized(Net())
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    torchq.calibrate(model, [X], correct=False, progress=False)
    frozen = torchq.qat.freeze_bn_(model)
    assert len(frozen) == 6
    assert not model.train().norm1.training
    copied = copy.deepcopy(model)
    assert copied.norm1.quantizes_output
    assert not copied.train().norm1.training
    assert (
        plan_of(model).decision("norm1").cls == "torch.nn.modules.batchnorm.BatchNorm2d"
    )
    assert len(torchq.qat.unfreeze_bn_(copied)) == 6
    assert copied.norm1.training
    assert len(torchq.fuse_(model, X, progress=False).fused) == 6


def test_kernels_wait_for_the_fold() -> None:
    """A kernel rounds the result of the folded layer, which the unfolded layer does not have."""
    model = randomized(Net())
    torchq.quantize_(model, target="onnxruntime", example=X, progress=False)
    torchq.calibrate(model, [X], correct=False, progress=False)
    plain = model(X)
    with torch.no_grad():
        exact = model(X)
    # A code may fall to the other side of a tie; rounding in front of the norm would be a step
    # of each element.
    assert (exact - plain).abs().max() <= 0.02 * plain.abs().max()


class ReadTwice(nn.Module):
    """A convolution that two norms read, so that nothing folds, and one with its own norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.left = nn.BatchNorm2d(16)
        self.right = nn.BatchNorm2d(16)
        self.second = nn.Conv2d(16, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.last = nn.Conv2d(16, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.left(x).relu() + self.right(x).relu()
        return self.last(self.norm(self.second(x)).relu())


def of_norms(kind: str) -> nn.Module:
    """Return a net whose norms fold, or one with a norm that has no finite root: in its middle."""
    if kind == "structure":
        return randomized(ReadTwice()).eval()
    parts = [nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()]
    parts += [nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 4, 3)]
    return randomized(nn.Sequential(*parts)).eval()


def refuse_middle_fold(model: nn.Module, example: Tensor) -> None:
    """Fold the norms of a Sequential while the numbers of the middle one forbid its fold."""
    variance = model[4].running_var.clone()  # type: ignore[operator]
    model[4].running_var[0] = -1.0  # type: ignore[operator]
    report = torchq.fuse_(model, example, progress=False)
    assert [refusal.name for refusal in report.refused] == ["4"]
    model[4].running_var.copy_(variance)  # type: ignore[operator]


@pytest.mark.parametrize("kind", ["structure", "numbers, before", "numbers, after"])
@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino", "tensorrt"])
def test_what_keeps_its_norm_is_planned_as_the_file_has_it(
    kind: str, target: str | None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 24, 24)
    model = of_norms(kind)
    if kind == "numbers, before":
        refuse_middle_fold(model, x)
    with warnings.catch_warnings():
        # Little is on integers, and so it is said.
        warnings.simplefilter("ignore")
        torchq.quantize_(model, target=target, example=x, progress=False)
        torchq.calibrate(model, [x], progress=False)
        if kind == "numbers, after":
            refuse_middle_fold(model, x)
        elif kind == "structure":
            torchq.fuse_(model, x, progress=False)
        report = torchq.export_onnx(model, x, tmp_path / "net.onnx", progress=False)
    share = plan_of(model).share
    assert share is not None
    assert report.coverage.share is not None
    assert share.quantized == pytest.approx(report.coverage.share, abs=1e-6)
    has_float_kernels = target is None or kind == "numbers, after"
    if has_float_kernels and target in (None, "onnxruntime"):
        assert "a BatchNorm that is not folded follows" in str(plan_of(model))
        assert share.quantized < 0.9


def test_a_refused_fold_is_forgotten_once_it_succeeds_and_survives_files(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 24, 24)
    model = of_norms("numbers")
    torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    torchq.calibrate(model, [x], progress=False)
    whole = plan_of(model).share
    refuse_middle_fold(model, x)
    refused = plan_of(model).share
    assert whole is not None
    assert refused is not None
    assert refused.quantized < 0.5 < whole.quantized
    assert plan_of(copy.deepcopy(model)).share == refused
    torchq.save(model, tmp_path / "net.pt")
    again = of_norms("numbers")
    torchq.load(again, tmp_path / "net.pt")
    assert plan_of(again).share == refused

    # A dry run that would fold it changes nothing.
    torchq.fuse_(model, x, dry_run=True, progress=False)
    assert plan_of(model).share == refused
    for one in (model, again):
        report = torchq.fuse_(one, x, progress=False)
        assert report.refused == ()
        assert plan_of(one).share == whole


def test_a_call_that_fails_notes_no_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    model = of_norms("numbers")
    model[4].running_var[0] = -1.0  # type: ignore[operator]

    def fails(*_: object) -> None:
        raise RuntimeError("interrupted")

    monkeypatch.setattr("torchq.fusion.api.recording", fails)
    with pytest.raises(RuntimeError, match="interrupted"):
        torchq.fuse_(model, torch.randn(2, 3, 24, 24), progress=False)
    assert not any(map(keeps_norm, model.modules()))
    monkeypatch.undo()
    torchq.fuse_(model, torch.randn(2, 3, 24, 24), progress=False)
    assert keeps_norm(model[3])

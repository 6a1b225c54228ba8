"""One call before training: what it does, says, and leaves alone; parameter groups."""

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.models import ConvNet, image_batches
from torchq.errors import CalibrationError, ConfigError, InputError
from torchq.nn import QuantConv2d
from torchq.qat import param_groups, prepare
from torchq.swap.folds import narrow_weights_


def labelled() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, torch.zeros(len(x))) for x in image_batches(4)]


def test_it_equals_the_single_calls() -> None:
    model = ConvNet()
    by_hand = copy.deepcopy(model)
    recipe = torchq.recipes.w4a4()
    torchq.quantize_(by_hand, recipe)
    narrow_weights_(by_hand, None)
    torchq.calibrate(by_hand, labelled(), num_batches=3, correct=False, progress=False)
    batches = iter(labelled())
    prepared = prepare(model, batches, recipe, lr=0.1, num_batches=3, progress=False)
    assert prepared.model is model
    assert model.training
    actual = model.state_dict()
    expected = by_hand.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in actual)
    groups = param_groups(model, lr=0.1, weight_decay=1e-4)
    assert [g["name"] for g in prepared.param_groups] == [g["name"] for g in groups]
    assert prepared.batchnorms == ("stem.1", "left.1", "right.1")
    assert prepared.calibrated.batches == 3


class StartsAtZero(nn.Module):
    """A residual block as networks begin with: its last norm gives zeros."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        nn.init.constant_(self.norm.weight, start)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.norm(self.conv(x))


@pytest.mark.parametrize("learned", [False, True])
def test_a_branch_that_training_cannot_wake_is_named(learned: bool) -> None:
    block = StartsAtZero(0.0)
    recipe = torchq.recipes.integer(8, 8, learn_ranges=learned)
    options: dict[str, Any] = {"target": "onnxruntime", "progress": False}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        prepared = prepare(block, labelled(), recipe, **options)
    messages = [str(w.message) for w in caught]
    found = [m for m in messages if "nothing but zeros reached" in m]
    assert len(found) == (not learned), messages
    optimizer = torch.optim.SGD(prepared.param_groups)
    for x, _ in labelled():
        (block.train()(x) - 2 * x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    (empty,) = prepared.calibrated.empty
    quantizer = block.get_submodule(empty)
    passed: list[torch.Tensor] = []
    with quantizer.register_forward_hook(lambda *call: passed.append(call[-1])):
        block(labelled()[0][0])
    assert bool(passed[0].any()) == learned
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not prepare(StartsAtZero(0.5), labelled(), **options).calibrated.empty


def test_str_says_what_was_calibrated_of_many_ranges_too() -> None:
    layers = [nn.Linear(4, 4) for _ in range(20)]
    prepared = prepare(nn.Sequential(*layers), [torch.randn(2, 4)], progress=False)
    assert "calibrated: 40 ranges from 1 batch" in str(prepared)


def test_str_says_what_was_done() -> None:
    message = str(
        prepare(ConvNet().eval(), labelled(), torchq.recipes.w4a4(), progress=False)
    )
    assert "4 quantized, 0 skipped, recipe w4a4" in message
    assert "8 ranges from 4 batches" in message
    assert "ranges (lr 0.01, decay 0)" in message
    assert "BatchNorm: 3 layers train along" in message
    assert "no target: a file will lack the quantizers between layers" in message
    told = prepare(
        ConvNet().eval(),
        labelled(),
        target="onnxruntime",
        progress=False,
    )
    assert "no target" not in str(told)


def test_a_forward_of_the_users_own_reads_the_batches() -> None:
    model = ConvNet()
    batches: list[Any] = [{"pixels": x} for x in image_batches()]
    recipe = torchq.recipes.integer(4, 4, learn_ranges=True)
    settings: dict[str, Any] = {"lr": 0.1, "range_lr": 0.2, "input_range_lr": 0.3}
    settings["forward"] = lambda m, batch: m(batch["pixels"])
    groups = prepare(model, batches, recipe, progress=False, **settings).param_groups
    assert isinstance(model.head, torchq.nn.QuantLinear)
    rates = {group["name"]: group["lr"] for group in groups}
    assert rates["ranges"] == 0.2
    assert rates["input_ranges"] == 0.3


def test_a_call_that_fails_changes_nothing() -> None:
    model = ConvNet().train()
    before = copy.deepcopy(model)
    bad = [torch.full((2, 3, 8, 8), float("nan"))]
    batches = [image_batches()[0], *bad]
    with pytest.raises(CalibrationError):
        prepare(model, batches, progress=False)
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    actual = model.state_dict()
    expected = before.state_dict()
    assert actual.keys() == expected.keys()
    assert all(torch.equal(actual[key], expected[key]) for key in actual)
    assert not isinstance(model.stem[0], QuantConv2d)
    assert model.training


def test_errors() -> None:
    with pytest.raises(ConfigError, match="prepare: got no batch"):
        prepare(ConvNet(), iter([]))
    with pytest.raises(
        InputError, match=r"config: got 'w4a4'; expected a QuantConfig. Call a"
    ):
        prepare(ConvNet(), labelled(), "w4a4")  # type: ignore[arg-type]


def _model() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2)
    )
    torchq.quantize_(model, torchq.recipes.w4a4(first_last=None))
    return model


def test_groups_hold_every_trainable_parameter_once() -> None:
    model = _model()
    model[0].bias.requires_grad_(False)
    groups = param_groups(model, lr=0.1, weight_decay=0.01, range_lr=0.001)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(
        id(p) for p in model.parameters() if p.requires_grad
    )
    assert {g["name"]: (g["lr"], g["weight_decay"]) for g in groups} == {
        "weights": (0.1, 0.01),
        "biases_and_norms": (0.1, 0.0),
        "ranges": (0.001, 0.0),
    }
    assert len(groups[2]["params"]) == 4
    groups = param_groups(model, lr=0.1, range_lr=0.2, input_range_lr=6.4)
    assert [(g["name"], g["lr"], len(g["params"])) for g in groups[2:]] == [
        ("ranges", 0.2, 2),
        ("input_ranges", 6.4, 2),
    ]
    inputs = {id(model[i].input_quantizer.amax) for i in (0, 3)}
    assert {id(p) for p in groups[3]["params"]} == inputs


def test_groups_train_ranges_that_were_calibrated_after_the_optimizer_was_built() -> (
    None
):
    model = _model()
    optimizer = torch.optim.SGD(param_groups(model, lr=0.1))
    x = torch.randn(4, 1, 4, 4)
    torchq.calibrate(model, [x], progress=False)
    before = model[0].input_quantizer.amax.detach().clone()
    model(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(model[0].input_quantizer.amax, before)


def test_scaled_range_gradient_makes_the_relative_step_of_lsq() -> None:
    """One SGD step with ``scale_range_grad`` changes amax as LSQ changes its step (section 2.2)."""
    x = torch.randn(64, 16)
    plain = torchq.TensorQuantizer(torchq.QuantDescriptor(3, amax=1.0, learn_amax=True))
    scaled = torchq.TensorQuantizer(
        torchq.QuantDescriptor(3, amax=1.0, learn_amax=True, scale_range_grad=True)
    )
    grads = []
    for quantizer in (plain, scaled):
        y = quantizer(x)
        y.square().sum().backward()
        grads.append(quantizer.amax.grad)
    qmax = 3.0
    n = 64 * 16
    step_grad = grads[0] * qmax  # d loss / d step, from d loss / d amax
    lsq_relative = step_grad / (n * qmax) ** 0.5 / (1.0 / qmax)
    torch.testing.assert_close(grads[1] / 1.0, lsq_relative)
    assert torch.equal(plain(x), scaled(x))


@pytest.mark.parametrize(
    "recipe", [torchq.recipes.int8(), torchq.recipes.w4a4(first_last=None)]
)
def test_weights_in_front_of_a_norm_lack_the_code_without_counterpart(
    recipe: Any,
) -> None:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)]
    model = nn.Sequential(*layers)
    nn.init.uniform_(model[1].weight, -1.0, 1.0)
    batch = (torch.randn(4, 3, 8, 8), torch.zeros(4))
    prepared = torchq.qat.prepare(model, [batch], recipe, progress=False)
    assert model[0].weight_quantizer.descriptor.narrow_range
    assert not model[3].weight_quantizer.descriptor.narrow_range
    assert prepared.quantized == torchq.swap.plan_of(model)
    with torch.no_grad():  # as far as training may go
        model[0].weight.mul_(3.0)
    report = torchq.fuse_(
        model.eval(),
        batch[0],
        progress=False,
    )
    assert report.applied
    assert report.fused[0].changed == 0


def test_a_checkpoint_is_resumed_in_a_model_that_was_prepared_too() -> None:
    """Weights beyond their range clip at the same code, which a norm's sign may turn around."""
    batches = [torch.rand(4, 3, 8, 8) - 0.5 for _ in range(2)]

    def prepared() -> nn.Module:
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 2, 1))
        torchq.qat.prepare(model, batches, target="onnxruntime", progress=False)
        return model

    trained, resumed = prepared(), prepared()
    with torch.no_grad():
        trained[0].weight *= -1.5  # As far as training may take some of them.
        trained[1].weight[::2] = -1.0
    resumed.load_state_dict(trained.state_dict())
    with torch.no_grad():
        assert torch.equal(resumed.eval()(batches[0]), trained.eval()(batches[0]))
    assert not torchq.fuse_(resumed, batches[0], progress=False).refused

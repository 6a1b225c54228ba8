"""Parameter groups of QAT."""

from __future__ import annotations

import torch
from torch import nn

import torchq
from torchq.qat import param_groups


def _model() -> nn.Module:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 2))
    torchq.quantize_(model, torchq.recipes.w4a4(first_last=None))
    return model


def test_groups_hold_every_trainable_parameter_once() -> None:
    model = _model()
    model[0].bias.requires_grad_(False)
    groups = param_groups(model, lr=0.1, weight_decay=0.01, range_lr=0.001)
    grouped = [id(p) for group in groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters() if p.requires_grad)
    assert {g["name"]: (g["lr"], g["weight_decay"]) for g in groups} == {
        "weights": (0.1, 0.01),
        "biases_and_norms": (0.1, 0.0),
        "ranges": (0.001, 0.0),
    }
    assert len(groups[2]["params"]) == 4


def test_ranges_of_inputs_have_a_rate_of_their_own_where_it_is_given() -> None:
    model = _model()
    groups = {g["name"]: g for g in param_groups(model, lr=0.1, range_lr=0.2, input_range_lr=6.4)}
    assert list(groups) == ["weights", "biases_and_norms", "ranges", "input_ranges"]
    for name, rate, slot in (("ranges", 0.2, "weight"), ("input_ranges", 6.4, "input")):
        ends = [getattr(model[i], f"{slot}_quantizer").amax for i in (0, 3)]
        assert {id(p) for p in groups[name]["params"]} == {id(end) for end in ends}
        assert (groups[name]["lr"], groups[name]["weight_decay"]) == (rate, 0.0)


def test_float_model_has_no_range_group() -> None:
    assert [g["name"] for g in param_groups(nn.Linear(2, 2), lr=0.1)] == [
        "weights",
        "biases_and_norms",
    ]


def test_groups_train_ranges_that_were_calibrated_after_the_optimizer_was_built() -> None:
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
    qmax, n = 3.0, 64 * 16
    step_grad = grads[0] * qmax  # d loss / d step, from d loss / d amax
    lsq_relative = step_grad / (n * qmax) ** 0.5 / (1.0 / qmax)
    torch.testing.assert_close(grads[1] / 1.0, lsq_relative)
    assert torch.equal(plain(x), scaled(x))


def test_plain_sgd_trains_the_w4a4_recipe() -> None:
    """Ranges diverge without the scale: the gradient of a range sums over all its elements."""
    model = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1)
    )
    torchq.quantize_(model, torchq.recipes.w4a4(first_last=None))
    x, target = torch.randn(16, 3, 12, 12), torch.randn(16, 16, 12, 12)
    torchq.calibrate(model, [x], progress=False)
    optimizer = torch.optim.SGD(param_groups(model, lr=0.01), momentum=0.9)
    losses = []
    for _ in range(20):
        loss = (model(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(q.amax.min() > 0 for q in torchq.workflow.quantizers(model).values())

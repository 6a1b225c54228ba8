"""One call before training: what it does, says, and leaves alone when it fails."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.models import ConvNet, image_batches
from torchq.errors import CalibrationError, ConfigError, InputError
from torchq.nn import QuantConv2d
from torchq.qat import param_groups, prepare


def labelled() -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(x, torch.zeros(len(x))) for x in image_batches(4)]


def test_it_equals_the_single_calls() -> None:
    model = ConvNet()
    by_hand = copy.deepcopy(model)
    recipe = torchq.recipes.w4a4()
    torchq.quantize_(by_hand, recipe)
    torchq.calibrate(by_hand, labelled(), num_batches=3, progress=False)
    prepared = prepare(model, labelled(), recipe, lr=0.1, num_batches=3, progress=False)
    assert prepared.model is model and model.training
    found = model.state_dict()
    expected = by_hand.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    groups = param_groups(model, lr=0.1, weight_decay=1e-4)
    assert [g["name"] for g in prepared.param_groups] == [g["name"] for g in groups]
    assert prepared.batchnorms == ("stem.1", "left.1", "right.1")
    assert prepared.calibrated.batches == 3 and prepared.fused is None


def test_str_says_what_was_done() -> None:
    text = str(prepare(ConvNet().eval(), labelled(), torchq.recipes.w4a4(), progress=False))
    assert "4 quantized, 0 skipped, recipe w4a4" in text
    assert "8 ranges from 4 batches" in text
    assert "ranges (lr 0.01, decay 0)" in text
    assert "BatchNorm: 3 layers train along" in text


def test_a_generator_is_enough_and_no_batch_is_lost() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    batches = (torch.full((1, 2), float(value)) for value in (5, 1))
    report = prepare(model, batches, progress=False).calibrated
    assert report.batches == 2
    assert model[0].input_quantizer.amax.item() == 5.0


def test_fusing_first_takes_a_small_learning_rate() -> None:
    model = ConvNet().train()
    prepared = prepare(model, labelled(), batchnorm="fuse", progress=False)
    assert prepared.fused is not None and len(prepared.fused.fused) == 3
    assert prepared.batchnorms == () and model.training
    assert {g["lr"] for g in prepared.param_groups} == {1e-4}
    assert str(prepared).startswith("fused: 3 fused, 0 refused, applied")
    with pytest.warns(UserWarning, match=r"got lr=0\.01 for a network whose BatchNorms are folded"):
        prepare(ConvNet(), labelled(), batchnorm="fuse", lr=1e-2, progress=False)


def test_a_target_sees_the_first_batch() -> None:
    model = ConvNet()
    prepared = prepare(model, labelled(), target="tensorrt", progress=False)
    assert "operators for" in str(prepared.quantized)


def test_a_forward_of_the_users_own_reads_the_batches() -> None:
    model = ConvNet()
    batches: list[Any] = [{"pixels": x} for x in image_batches()]
    prepare(model, batches, forward=lambda m, batch: m(batch["pixels"]), progress=False)
    assert isinstance(model.head, torchq.nn.QuantLinear)


@pytest.mark.parametrize("batchnorm", ["keep", "fuse"])
def test_a_call_that_fails_changes_nothing(batchnorm: Any) -> None:
    model = ConvNet().train()
    before = copy.deepcopy(model)
    bad = [torch.full((2, 3, 8, 8), float("nan"))]
    batches = [image_batches()[0], *bad]
    with pytest.raises(CalibrationError):
        prepare(model, batches, batchnorm=batchnorm, progress=False)
    assert [type(m) for m in model.modules()] == [type(m) for m in before.modules()]
    found, expected = model.state_dict(), before.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[key], expected[key]) for key in found)
    assert not isinstance(model.stem[0], QuantConv2d) and model.training


def test_errors() -> None:
    with pytest.raises(ConfigError, match="prepare: got no batch"):
        prepare(ConvNet(), iter([]))
    with pytest.raises(ConfigError, match="batchnorm='fold'; expected 'keep' or 'fuse'"):
        prepare(ConvNet(), labelled(), batchnorm="fold")  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"config: got 'w4a4'; expected a QuantConfig. Call a"):
        prepare(ConvNet(), labelled(), "w4a4")  # type: ignore[arg-type]


def test_ranges_of_inputs_have_a_rate_of_their_own() -> None:
    recipe = torchq.recipes.integer(4, 4, learn_ranges=True)
    settings: dict[str, Any] = {
        "range_lr": 0.2,
        "input_range_lr": 0.3,
        "num_batches": 1,
        "progress": False,
    }
    groups = prepare(ConvNet(), labelled(), recipe, lr=0.1, **settings).param_groups
    rates = {group["name"]: group["lr"] for group in groups}
    assert rates["ranges"] == 0.2 and rates["input_ranges"] == 0.3

"""Each family of blocks: same function, deployed attribute, nothing left of the branches."""

import copy
import re
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

from tests.fusion.blocks import all_cases
from tests.fusion.blocks.kernels import VanillaNet
from tests.fusion.blocks.layers import conv_bn
from tests.fusion.blocks.mobile import Classifier
from tests.fusion.blocks.repvgg import CustomL2Block, ImplicitHead
from tests.fusion.common import (
    copied,
    error,
    fused_exactly,
    image,
    norms,
    outputs,
    randomized,
    same_state,
)
from torchq.fusion import FAMILIES, fuse_, linear_map
from torchq.fusion.linear_map import NotAffine

# What the project promises; rounding alone gives about 1e-14 and 1e-6.
TOL64 = 1e-10
TOL32 = 1e-5

CASES = all_cases()


def build(case: str) -> Any:
    torch.manual_seed(0)
    return randomized(nn.Sequential(CASES[case].make()).double())


@pytest.mark.sample(10)
@pytest.mark.parametrize("case", CASES)
def test_family_is_merged_exactly(case: str) -> None:
    model = build(case)
    expected = CASES[case]
    inputs = [image(2, expected.in_channels, size, size + 2) for size in (12, 13)]
    wanted = [outputs(model, x) for x in inputs]
    single = copy.deepcopy(model).float()
    block = model[0]
    report = fuse_(model)
    assert report.applied
    assert report.refused == ()
    assert expected.family in {fusion.kind for fusion in report.fused}
    assert error([outputs(model, x) for x in inputs], wanted) <= TOL64
    assert max(fusion.error for fusion in report.fused) <= TOL64
    assert norms(model) == []
    if expected.attribute is None:
        assert type(model[0]) in (nn.Conv2d, nn.Sequential)
    else:
        assert model[0] is block
        merged = getattr(block, expected.attribute)
        assert merged is not None
        left = [m for m in block.children() if isinstance(m, nn.Conv2d)]
        assert not isinstance(merged, nn.Conv2d) or left == [merged]
    fuse_(single)
    assert next(single.parameters()).dtype is torch.float32
    assert error([outputs(single, x.float()) for x in inputs], wanted) <= TOL32
    state = copied(model)
    assert fuse_(model).fused == ()
    assert same_state(model, state)


@pytest.mark.parametrize("slope", [1.0, 0.5])
def test_all_of_a_vanillanet_is_merged_once_its_slope_is_one(slope: float) -> None:
    model = randomized(VanillaNet().double())
    model.act_learn = slope
    report = fused_exactly(model, image(2, 3, 16, 20))
    assert report.refused == ()
    assert norms(model) == []
    assert len([m for m in model.modules() if isinstance(m, nn.Conv2d)]) == (
        3 if slope == 1 else 5
    )
    assert model.deploy is (slope == 1)


def no_gradients(*args: Any) -> NoReturn:
    raise NotAffine("kernels may not be read from gradients")


@pytest.mark.sample(12)
@pytest.mark.parametrize(
    "case", [case for case in CASES if CASES[case].family != "dbb"]
)
def test_all_but_forwards_with_item_assignment_are_followed_symbolically(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading a kernel from gradients takes longer, and rounds differently."""
    monkeypatch.setattr(linear_map, "extract", no_gradients)
    report = fuse_(build(case)).require_all()
    assert CASES[case].family in {fusion.kind for fusion in report.fused}


def test_conv_of_deployed_repvgg_has_upstream_keys() -> None:
    model = build("repvgg-groups")
    fuse_(model)
    shapes = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    assert shapes == {"0.rbr_reparam.weight": (8, 2, 3, 3), "0.rbr_reparam.bias": (8,)}
    assert model[0].deploy is True


def test_merged_layers_take_dtype_mode_and_gradient_of_the_block() -> None:
    model = build("repvgg")
    fuse_(model.bfloat16().to(memory_format=torch.channels_last).requires_grad_(False))
    layer = model[0].rbr_reparam
    assert layer.weight.dtype is torch.bfloat16
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    assert not layer.training
    assert not layer.weight.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", ["dbb", "repvgg"])
def test_merging_under_no_grad(case: str, mode: Any) -> None:
    model = build(case)
    x = image(1, 8, 12, 12)
    with mode():
        assert [fusion.kind for fusion in fused_exactly(model, x, x).fused] == [case]
    assert getattr(model[0], str(CASES[case].attribute)).weight.requires_grad


@pytest.mark.parametrize("bias", [True, False])
def test_implicit_head(bias: bool) -> None:
    model = nn.ModuleDict({"head": ImplicitHead((4, 6), 5, bias)}).double().eval()
    head = model["head"]
    xs = [image(2, c, 7, 7) for c in (4, 6)]
    want = outputs(head, xs)
    layers = list(head.m)
    for kinds in ({"yolov7-implicit"}, set()):
        assert {fusion.kind for fusion in fuse_(model).fused} == kinds
        assert all(a is b for a, b in zip(layers, head.m, strict=True))
        assert error(outputs(head, xs), want) <= TOL64


def test_custom_l2_block_that_takes_two_arguments() -> None:
    model = randomized(nn.ModuleDict({"block": CustomL2Block(8, 8)}).double())
    x = image(2, 8, 9, 9)
    want, _ = outputs(model["block"], x, 1.0)
    assert fuse_(model).fused[0].kind == "repvgg-custom-l2"
    got, penalty = outputs(model["block"], x, 1.0)
    assert error(got, want) <= TOL64
    assert penalty == 1.0


@pytest.mark.parametrize(
    ("name", "family"),
    [("classifier", "repvit-classifier"), ("head", "timm-distilled-classifier")],
)
def test_averaging_classifier_becomes_one_linear_layer(name: str, family: str) -> None:
    model = randomized(nn.Sequential(nn.Flatten(), Classifier(6, 5, name)).double())
    assert fused_exactly(model, image(4, 6)).fused[0].kind == family
    assert type(model[1]) is nn.Linear


def test_blocks_inside_a_network_with_its_own_forward_methods_stay_copyable() -> None:
    model = build("ultralytics-repconv")
    x = image(1, 8, 8, 8)
    fuse_(model)
    twin = copy.deepcopy(model)
    assert twin[0].forward.__self__ is twin[0]
    assert torch.equal(outputs(twin, x), outputs(model, x))


class Residual(nn.Module):
    """As TResNet's block: parts with the names of PP-YOLOE's branches, one behind the other."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = (conv_bn(4, 4, 3, padding=1) for _ in range(2))
        self.act = nn.ReLU()

    def forward(self, x: torch.Tensor) -> Any:
        return self.act(self.conv2(self.conv1(x).relu()) + x)


def test_a_residual_block_with_the_names_of_branches_stays_and_its_norms_are_folded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before training its last BatchNorm is zero, which makes the block look linear.

    Solving such a block for a kernel takes minutes in a wide network.
    """
    monkeypatch.delattr("torchq.fusion.blocks.linear_map")
    torch.manual_seed(0)
    model: Any = randomized(nn.Sequential(Residual()).double())
    nn.init.zeros_(model[0].conv2.bn.weight)
    fused_exactly(model, image())
    assert not norms(model)


def test_every_family_has_a_row_and_no_row_is_left_over() -> None:
    message = (Path(__file__).parents[2] / "docs" / "fuse.md").read_text(
        encoding="utf-8"
    )
    rows = [line.split("|") for line in message.splitlines() if line.startswith("|")]
    table = [row for row in rows if len(row) == 6 and "`" in row[2]]
    listed = [name for row in table for name in re.findall(r"`([^`]+)`", row[2])]
    assert sorted(listed) == sorted(rule.name for rule in FAMILIES)


def test_every_family_is_merged_by_a_test() -> None:
    """The others have tests of their own: their blocks are no maps of one feature map."""
    tested = {case.family for case in CASES.values()}
    classifiers = {"repvit-classifier", "timm-distilled-classifier"}
    others = {rule.name for rule in FAMILIES} - tested
    assert others == {"repvgg-custom-l2", "yolov7-implicit", *classifiers}

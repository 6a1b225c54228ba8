"""Each family of re-parameterisable blocks: same function, deployed attribute, nothing left of the branches."""

import copy

import pytest
import torch
from torch import nn

from tests.fusion import zoo, zoo_more, zoo_rest
from tests.fusion.common import error, norms, outputs, randomized
from torchq.fusion import fuse_

TOL64, TOL32 = 1e-10, 1e-5  # what the project promises; rounding alone gives about 1e-14 and 1e-6

# id: (block, channels in, family, deployed attribute or None where the block's place is taken)
CASES = {
    "repvgg": (lambda: zoo.RepVGGBlock(8, 8), 8, "repvgg", "rbr_reparam"),
    "repvgg-stride": (lambda: zoo.RepVGGBlock(8, 12, stride=2), 8, "repvgg", "rbr_reparam"),
    "repvgg-groups": (lambda: zoo.RepVGGBlock(8, 8, groups=4), 8, "repvgg", "rbr_reparam"),
    "repvgg-depthwise": (lambda: zoo.RepVGGBlock(8, 8, groups=8), 8, "repvgg", "rbr_reparam"),
    "repvgg-se": (lambda: zoo.RepVGGBlock(8, 8, se=True), 8, "repvgg", "rbr_reparam"),
    "repvggplus": (lambda: zoo.RepVGGBlock(8, 8, post_se=True), 8, "repvgg", "rbr_reparam"),
    "yolov7": (lambda: zoo.Yolov7RepConv(8, 8), 8, "repvgg", "rbr_reparam"),
    "yolov7-groups": (lambda: zoo.Yolov7RepConv(8, 8, groups=2), 8, "repvgg", "rbr_reparam"),
    "yolov7-depthwise": (lambda: zoo.Yolov7RepConv(8, 8, groups=8), 8, "repvgg", "rbr_reparam"),
    "qarepvgg": (lambda: zoo.QARepVGG(8, 8), 8, "qarepvgg", "rbr_reparam"),
    "qarepvgg-stride": (lambda: zoo.QARepVGG(8, 16, stride=2), 8, "qarepvgg", "rbr_reparam"),
    "qarepvgg-v2": (lambda: zoo.QARepVGG(8, 8, groups=2, avg=True), 8, "qarepvgg", "rbr_reparam"),
    "csla": (lambda: zoo.LinearAddBlock(8), 8, "unknown block", "merged"),
    "ppyoloe": (lambda: zoo.PPYoloeBlock(8, 12), 8, "ppyoloe", "conv"),
    "ppyoloe-alpha": (lambda: zoo.PPYoloeBlock(8, 8, alpha=-0.3), 8, "ppyoloe", "conv"),
    "ppyoloe-alpha-zero": (lambda: zoo.PPYoloeBlock(8, 8, alpha=0), 8, "ppyoloe", "conv"),
    "ppyoloe-truthy-alpha-zero": (
        lambda: zoo.TruthyAlphaBlock(8, 8, alpha=0),
        8,
        "ppyoloe",
        "conv",
    ),
    "rtdetr": (lambda: zoo.PPYoloeBlock(8, 8, norm="norm"), 8, "ppyoloe", "conv"),
    "ultralytics-repconv": (lambda: zoo.UltraRepConv(8, 8), 8, "ultralytics-repconv", "conv"),
    "ultralytics-repconv-stride": (
        lambda: zoo.UltraRepConv(8, 8, 2, 2),
        8,
        "ultralytics-repconv",
        "conv",
    ),
    "ultralytics-conv2": (lambda: zoo.UltraConv2(8, 12), 8, "ultralytics-conv2", "conv"),
    "super-gradients": (
        lambda: zoo.SuperGradientsBlock(8, 8),
        8,
        "super-gradients-qarepvgg",
        "rbr_reparam",
    ),
    "super-gradients-stride": (
        lambda: zoo.SuperGradientsBlock(8, 12, 2, 2),
        8,
        "super-gradients-qarepvgg",
        "rbr_reparam",
    ),
    "mmpretrain": (
        lambda: zoo.MMPretrainBlock(8, 8, groups=2),
        8,
        "mmpretrain-repvgg",
        "branch_reparam",
    ),
    "mmpretrain-stride": (
        lambda: zoo.MMPretrainBlock(8, 12, 2),
        8,
        "mmpretrain-repvgg",
        "branch_reparam",
    ),
    "mmpretrain-mobileone": (
        lambda: zoo_more.MMMobileOne(8, 8, 8),
        8,
        "mmpretrain-mobileone",
        "branch_reparam",
    ),
    "mobileone": (lambda: zoo_more.MobileOne(8, 8, branches=3), 8, "mobileone", "reparam_conv"),
    "mobileone-depthwise": (
        lambda: zoo_more.MobileOne(8, 8, stride=2, groups=8),
        8,
        "mobileone",
        "reparam_conv",
    ),
    "mobileone-pointwise": (lambda: zoo_more.MobileOne(8, 12, k=1), 8, "mobileone", "reparam_conv"),
    "fastvit-mobileone-skip": (
        lambda: zoo_more.MobileOne(8, 8, branches=0, scale=False),
        8,
        "mobileone",
        "reparam_conv",
    ),
    "replknet": (lambda: zoo_more.LargeKernel(8, 13, 5), 8, "large-kernel", "lkb_reparam"),
    "fastvit-large-kernel": (
        lambda: zoo_more.LargeKernel(8, discard=True),
        8,
        "large-kernel",
        "lkb_reparam",
    ),
    "timm-repvgg": (lambda: zoo_more.TimmRepVgg(8, 8), 8, "timm", "reparam_conv"),
    "timm-repvgg-groups": (lambda: zoo_more.TimmRepVgg(8, 16, 2, 4), 8, "timm", "reparam_conv"),
    "timm-mobileone": (lambda: zoo_more.TimmMobileOne(8, 8, groups=8), 8, "timm", "reparam_conv"),
    "timm-mobileone-se": (
        lambda: zoo_more.TimmMobileOne(8, 8, se=zoo.SE(8)),
        8,
        "timm",
        "reparam_conv",
    ),
    "timm-large-kernel": (
        lambda: zoo_more.TimmLargeKernel(8),
        8,
        "timm-large-kernel",
        "reparam_conv",
    ),
    "repmixer": (lambda: zoo_more.RepMixer(8), 8, "repmixer", "reparam_conv"),
    "repcpe": (lambda: zoo_more.RepCPE(8), 8, "repcpe", "reparam_conv"),
    "timm-repcpe": (lambda: zoo_more.TimmRepCPE(8), 8, "timm-repcpe", "reparam_conv"),
    "ghostnetv3": (lambda: zoo_more.GhostV3(8, 6), 8, "ghostnetv3", "primary_conv"),
    "ghostnetv3-bottleneck": (
        lambda: zoo_more.GhostV3Bottleneck(8, 6),
        8,
        "ghostnetv3-bottleneck",
        "conv_dw",
    ),
    "repghost": (lambda: zoo_more.RepGhost(8, 6), 8, "repghost", "cheap_operation"),
    "dbb": (lambda: zoo_rest.DBB(8, 8), 8, "dbb", "dbb_reparam"),
    "dbb-groups": (lambda: zoo_rest.DBB(8, 8, groups=4), 8, "dbb", "dbb_reparam"),
    "dbb-depthwise": (lambda: zoo_rest.DBB(8, 8, groups=8), 8, "dbb", "dbb_reparam"),
    "dbb-stride": (lambda: zoo_rest.DBB(8, 12, 5, stride=2, groups=2), 8, "dbb", "dbb_reparam"),
    "acnet": (lambda: zoo_rest.ACBlock(8, 12), 8, "acnet", "fused_conv"),
    "acnet-crop": (
        lambda: zoo_rest.ACBlock(8, 8, k=5, padding=0, groups=2),
        8,
        "acnet",
        "fused_conv",
    ),
    "acnet-wide": (
        lambda: zoo_rest.ACBlock(8, 8, padding=3, stride=2, affine=False),
        8,
        "acnet",
        "fused_conv",
    ),
    "unireplknet": (lambda: zoo_rest.DilatedReparam(8), 8, "unireplknet", "lk_origin"),
    "vanillanet-activation": (
        lambda: zoo_rest.VanillaActivation(8),
        8,
        "vanillanet-activation",
        "weight",
    ),
    "vanillanet": (lambda: zoo_rest.VanillaBlock(8, 12), 8, "vanillanet-block", "conv"),
    "repvit-dw": (lambda: zoo_rest.RepVGGDW(8), 8, "unknown block", None),
    "repvit-residual": (
        lambda: zoo_rest.Residual(zoo.conv_bn(8, 8, 3, 1, 1, 8)),
        8,
        "unknown block",
        None,
    ),
    "repvit-nested": (lambda: zoo_rest.Residual(zoo_rest.RepVGGDW(8)), 8, "unknown block", None),
    "unknown": (lambda: zoo_rest.PlainSum(8, 8), 8, "unknown block", "merged"),
    "unknown-stride-groups": (lambda: zoo_rest.PlainSum(8, 12, 2, 4), 8, "unknown block", "merged"),
}


def build(case):
    torch.manual_seed(0)
    make, channels, family, attribute = CASES[case]
    return randomized(nn.Sequential(make()).double()), channels, family, attribute


@pytest.mark.parametrize("case", CASES)
def test_family_is_merged_exactly(case):
    model, channels, family, attribute = build(case)
    inputs = [torch.randn(2, channels, size, size + 2, dtype=torch.float64) for size in (12, 13)]
    wanted = [outputs(model, x) for x in inputs]
    single = copy.deepcopy(model).float()
    block = model[0]
    report = fuse_(model)
    assert report.applied
    assert report.refused == ()
    assert family in {fusion.kind for fusion in report.fused}
    assert error([outputs(model, x) for x in inputs], wanted) <= TOL64
    assert report.max_error <= TOL64
    assert norms(model) == []
    if attribute is None:
        assert type(model[0]) is nn.Conv2d
    elif family != "unknown block":
        assert model[0] is block
        assert getattr(block, attribute) is not None
    if isinstance(getattr(model[0], attribute or "", None), nn.Conv2d):
        assert (
            len([m for m in model[0].children() if isinstance(m, (nn.Conv2d, nn.BatchNorm2d))]) == 1
        )
    fuse_(single)
    assert next(single.parameters()).dtype is torch.float32
    assert error([outputs(single, x.float()) for x in inputs], wanted) <= TOL32
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    again = fuse_(model)
    assert again.fused == ()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())
    assert len(state) == len(model.state_dict())


def test_conv_of_deployed_repvgg_has_upstream_keys():
    model, *_ = build("repvgg-groups")
    fuse_(model)
    assert {name: tuple(t.shape) for name, t in model.state_dict().items()} == {
        "0.rbr_reparam.weight": (8, 2, 3, 3),
        "0.rbr_reparam.bias": (8,),
    }
    assert model[0].deploy is True


def test_merged_layers_take_dtype_mode_and_gradient_of_the_block():
    model, *_ = build("repvgg")
    fuse_(model.bfloat16().to(memory_format=torch.channels_last).requires_grad_(False))
    layer = model[0].rbr_reparam
    assert layer.weight.dtype is torch.bfloat16
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    assert not layer.training
    assert not layer.weight.requires_grad


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("case", ["dbb", "repvgg"])
def test_merging_under_no_grad(case, mode):
    model, channels, family, attribute = build(case)
    x = torch.randn(1, channels, 12, 12, dtype=torch.float64)
    want = outputs(model, x)
    with mode():
        assert [fusion.kind for fusion in fuse_(model, x).fused] == [family]
    assert error(outputs(model, x), want) <= TOL64
    assert getattr(model[0], attribute).weight.requires_grad


@pytest.mark.parametrize("bias", [True, False])
def test_implicit_head(bias):
    torch.manual_seed(0)
    model = nn.ModuleDict({"head": zoo.ImplicitHead((4, 6), 5, bias)}).double().eval()
    head = model["head"]
    xs = [torch.randn(2, c, 7, 7, dtype=torch.float64) for c in (4, 6)]
    want = outputs(head, xs)
    layers = list(head.m)
    report = fuse_(model)
    assert {fusion.kind for fusion in report.fused} == {"yolov7-implicit"}
    assert all(a is b for a, b in zip(layers, head.m, strict=True))
    assert error(outputs(head, xs), want) <= TOL64
    fuse_(model)
    assert error(outputs(head, xs), want) <= TOL64


def test_custom_l2_block_that_takes_two_arguments():
    torch.manual_seed(0)
    model = randomized(nn.ModuleDict({"block": zoo.CustomL2Block(8, 8)}).double())
    x = torch.randn(2, 8, 9, 9, dtype=torch.float64)
    want, _ = outputs(model["block"], x, 1.0)
    report = fuse_(model)
    assert report.fused[0].kind == "repvgg-custom-l2"
    got, penalty = outputs(model["block"], x, 1.0)
    assert error(got, want) <= TOL64
    assert penalty == 1.0


def test_averaging_classifier_becomes_one_linear_layer():
    torch.manual_seed(0)
    model = randomized(nn.Sequential(nn.Flatten(), zoo_rest.Classifier(6, 5)).double())
    x = torch.randn(4, 6, dtype=torch.float64)
    want = outputs(model, x)
    assert fuse_(model).fused[0].kind == "repvit-classifier"
    assert type(model[1]) is nn.Linear
    assert error(outputs(model, x), want) <= TOL64


def test_blocks_inside_a_network_with_its_own_forward_methods_stay_picklable(tmp_path):
    model, channels, *_ = build("ultralytics-repconv")
    fuse_(model)
    x = torch.randn(1, channels, 8, 8, dtype=torch.float64)
    twin = copy.deepcopy(model)
    assert twin[0].forward.__self__ is twin[0]
    assert torch.equal(outputs(twin, x), outputs(model, x))

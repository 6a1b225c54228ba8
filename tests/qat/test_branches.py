"""Training branches under one quantized kernel: what is trained is what is deployed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.fusion.blocks.acnet import ACBlock
from tests.fusion.blocks.dbb import DBB
from tests.fusion.blocks.ghostnetv3 import GhostV3
from tests.fusion.blocks.large_kernel import LargeKernel
from tests.fusion.blocks.mmpretrain import MMPretrainBlock
from tests.fusion.blocks.mobileone import MobileOne
from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.blocks.super_gradients import SuperGradientsBlock
from tests.fusion.blocks.timm_byobnet import TimmRepVgg
from tests.fusion.blocks.unireplknet import DilatedReparam
from tests.fusion.blocks.yolov6 import QARepVGG
from tests.fusion.blocks.yolov7 import Yolov7RepConv
from tests.fusion.common import error, norms, outputs, randomized
from torchq import recipes
from torchq.config import QuantConfig
from torchq.errors import ConfigError, QuantizationError
from torchq.functional import fake_quantize, quantize
from torchq.fusion import find_blocks, fuse_, fusion_record
from torchq.nn import QuantBranches, QuantConv2d, QuantLinear, TensorQuantizer
from torchq.qat import freeze_bn_, quantize_branches_
from torchq.swap import quantize_, restore_
from torchq.workflow import calibrate


class Net(nn.Module):
    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(x).mean((2, 3)))


def repvgg() -> Any:
    torch.manual_seed(0)
    return randomized(
        Net(
            RepVGGBlock(3, 8, stride=2),
            RepVGGBlock(8, 8, groups=2, se=True),
            RepVGGBlock(8, 8),
        )
    )


def batch() -> Tensor:
    return torch.randn(16, 3, 10, 10, generator=torch.Generator().manual_seed(1))


def prepared(model: nn.Module = None, config: QuantConfig | None = None) -> Any:
    model = model or repvgg()
    report = quantize_branches_(model, config)
    calibrate(model, [batch()], progress=False)
    return model, report


def steps(model: nn.Module, count: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    target = torch.arange(16) % 5
    losses = []
    for _ in range(count):
        loss = F.cross_entropy(model(batch()), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_blocks_take_their_deployed_form_around_the_branches() -> None:
    model = repvgg()
    parameters = {id(p) for p in model.parameters()}
    want = outputs(model, batch())
    report = quantize_branches_(model)
    assert report.blocks == tuple(f"blocks.{i}.rbr_reparam" for i in range(3))
    assert all(isinstance(block.rbr_reparam, QuantBranches) for block in model.blocks)
    assert {
        id(p) for p in model.parameters()
    } == parameters  # the same objects: an optimizer stays valid
    assert type(model.head) is QuantLinear
    assert type(model.blocks[1].se.down) is QuantConv2d
    assert not any(
        isinstance(m, QuantConv2d) for block in model.blocks for m in block.rbr_reparam.modules()
    )
    assert "3 blocks train their branches under one quantized kernel" in str(report)
    assert "kernel_size=(3, 3), stride=(2, 2), padding=(1, 1), groups=1" in repr(
        model.blocks[0].rbr_reparam
    )
    for quantizer in [m for m in model.modules() if isinstance(m, TensorQuantizer)]:
        quantizer.mode = "off"
    # unquantized, the equivalent kernel computes what the branches do, up to rounding in float32
    assert error(outputs(model, batch()), want) <= 1e-5


def test_the_weight_quantizer_sees_the_equivalent_kernel() -> None:
    model, _ = prepared()
    fused = repvgg()
    fuse_(fused)
    for trained, merged in zip(model.blocks, fused.blocks, strict=True):
        kernel, bias = trained.rbr_reparam.equivalent()
        assert torch.equal(kernel, merged.rbr_reparam.weight)
        assert torch.equal(bias, merged.rbr_reparam.bias)
        assert torch.equal(
            trained.rbr_reparam.weight_quantizer.amax.flatten(), kernel.flatten(1).abs().amax(1)
        )


@pytest.mark.parametrize("frozen", [True, False])
def test_fusing_after_training_changes_no_code(frozen: bool) -> None:
    model, _ = prepared()
    model.train()
    if frozen:
        freeze_bn_(model)
    losses = steps(model, 6)
    assert losses[-1] < losses[0]
    model.eval()
    x = batch()
    want = outputs(model, x)
    before = [(b.rbr_reparam.equivalent()[0], b.rbr_reparam.weight_quantizer) for b in model.blocks]
    report = fuse_(model, x)
    assert {fusion.kind for fusion in report.fused} == {"trained-branches"}
    assert norms(model) == []
    for block, (kernel, quantizer) in zip(model.blocks, before, strict=True):
        layer, d = block.rbr_reparam, quantizer.descriptor
        assert type(layer) is QuantConv2d
        assert layer.weight_quantizer is quantizer
        codes = [
            quantize(w, quantizer.amax, d.format, d.granularity) for w in (kernel, layer.weight)
        ]
        assert torch.equal(*codes)
        assert bool(codes[0].any())
    assert torch.equal(outputs(model, x), want)
    assert sorted(k for k in model.state_dict() if k.startswith("blocks.2")) == [
        "blocks.2.rbr_reparam." + k
        for k in ("bias", "input_quantizer.amax", "weight", "weight_quantizer.amax")
    ]


def test_frozen_statistics_make_training_forward_the_deployed_one() -> None:
    model, _ = prepared()
    freeze_bn_(model)
    model.train()
    state = {k: v.clone() for k, v in model.state_dict().items() if "running" in k}
    trained = model(batch()).detach()
    assert torch.equal(trained, outputs(model.eval(), batch()))
    assert all(torch.equal(v, model.state_dict()[k]) for k, v in state.items())


def test_batch_statistics_fold_as_batchnorm_normalises() -> None:
    """Unquantized, a training step is that of the float block: output, statistics, gradients."""
    torch.manual_seed(0)
    reference = randomized(nn.Sequential(RepVGGBlock(6, 6)).double())
    model = copy.deepcopy(reference)
    quantize_branches_(model)
    module = model[0].rbr_reparam
    module.input_quantizer.mode = module.weight_quantizer.mode = "off"
    x = torch.randn(8, 6, 7, 7, dtype=torch.float64)
    results = []
    for net in (reference.train(), model.train()):
        y = net(x)
        (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
        results.append(y.detach())
    assert error(results[1], results[0]) <= 1e-6  # the batch's moments are taken in float32
    branches = module.branches
    for name, parameter in reference[0].named_parameters():
        assert error(branches.get_parameter(name).grad, parameter.grad) <= 1e-5, name
    assert error(branches.rbr_dense.bn.running_var, reference[0].rbr_dense.bn.running_var) <= 1e-12


def test_gradients_reach_every_branch_through_the_quantized_kernel() -> None:
    torch.manual_seed(0)
    model = randomized(nn.Sequential(RepVGGBlock(6, 6)).double())
    quantize_branches_(model)
    freeze_bn_(model)
    calibrate(model, [torch.randn(4, 6, 7, 7, dtype=torch.float64)], progress=False)
    module, x = model[0].rbr_reparam, torch.randn(4, 6, 7, 7, dtype=torch.float64)
    module(x).square().sum().backward()
    kernel = module.equivalent()[0]
    free = kernel.detach().requires_grad_()
    d = module.weight_quantizer.descriptor
    weight = fake_quantize(free, module.weight_quantizer.amax, d.format, d.granularity)
    F.conv2d(
        module.input_quantizer(x), weight, module.equivalent()[1].detach(), padding=1
    ).square().sum().backward()
    dense = module.branches.rbr_dense
    scale = (dense.bn.weight / (dense.bn.running_var + dense.bn.eps).sqrt()).detach()
    assert error(dense.conv.weight.grad, free.grad * scale.view(-1, 1, 1, 1)) <= 1e-10
    assert all(p.grad is not None and bool(p.grad.any()) for p in module.branches.parameters())


BLOCKS = {
    "mobileone": lambda: MobileOne(8, 8, groups=8),
    "mobileone-pointwise": lambda: MobileOne(8, 8, k=1),
    "timm": lambda: TimmRepVgg(8, 8),
    "large-kernel": lambda: LargeKernel(8),
    "super-gradients": lambda: SuperGradientsBlock(8, 8),
    "qarepvgg": lambda: QARepVGG(8, 8, avg=True),
    "yolov7": lambda: Yolov7RepConv(8, 8, groups=2),
    "acnet": lambda: ACBlock(8, 8),
    "unireplknet": lambda: DilatedReparam(8),
    "mmpretrain": lambda: MMPretrainBlock(8, 8),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_families_train_and_deploy(name: str) -> None:
    torch.manual_seed(0)
    model = randomized(Net(nn.Conv2d(3, 8, 1), BLOCKS[name]()))
    plain = copy.deepcopy(model)
    model, report = prepared(model)
    assert len(report.blocks) == 1
    steps(model.train(), 2)
    model.eval()
    want = outputs(model, batch())
    assert fuse_(model, batch()).applied
    # qarepvgg has a BatchNorm after the block, which folds into the calibrated convolution
    assert error(outputs(model, batch()), want) <= 1e-5
    assert not any(isinstance(m, QuantBranches) for m in model.modules())
    assert [path for path, _ in find_blocks(plain)] == ["blocks.1"]
    assert find_blocks(model) == []


def test_excluded_blocks_and_layers_stay_float() -> None:
    model = repvgg()
    want = repvgg()
    report = quantize_branches_(model, exclude=["blocks.0.*", "head"])
    assert report.blocks == ("blocks.1.rbr_reparam", "blocks.2.rbr_reparam")
    assert type(model.head) is nn.Linear
    assert not any(isinstance(m, TensorQuantizer) for m in model.blocks[0].modules())
    x = batch()
    assert error(outputs(model.blocks[0], x), outputs(want.blocks[0], x)) <= 1e-6


def test_recipes_apply_to_the_equivalent_kernel() -> None:
    model, _ = prepared(config=recipes.w4a4())
    quantizer = model.blocks[2].rbr_reparam.weight_quantizer
    assert quantizer.descriptor.num_bits == 4
    assert isinstance(quantizer.amax, nn.Parameter)
    # The first layer is the one that the first block becomes.
    assert model.blocks[0].rbr_reparam.weight_quantizer.descriptor.num_bits == 8
    steps(model.train(), 2)
    assert quantizer.amax.grad is not None


def test_state_copies_and_loads() -> None:
    model, _ = prepared()
    other = repvgg()
    quantize_branches_(other)
    other.load_state_dict(model.state_dict())
    assert torch.equal(outputs(other, batch()), outputs(model, batch()))
    assert torch.equal(outputs(copy.deepcopy(model), batch()), outputs(model, batch()))


def test_restoring_gives_float_branches_that_still_fuse() -> None:
    model, _ = prepared()
    float_model = repvgg()
    restore_(model)
    want = outputs(float_model, batch())
    assert error(outputs(model, batch()), want) <= 1e-6
    assert fuse_(model, batch()).applied
    assert error(outputs(model, batch()), want) <= 1e-5
    assert type(model.blocks[0].rbr_reparam) is nn.Conv2d


def test_the_wrong_order_is_explained() -> None:
    model = repvgg()
    quantize_(model)
    with pytest.raises(
        ConfigError,
        match=r"blocks.0 holds quantizers; expected the order fuse_, quantize_, calibrate",
    ):
        quantize_branches_(model)
    report = fuse_(model)
    assert (
        "is a repvgg block; holds quantizers; expected the order fuse_, quantize_, calibrate"
        in report.reason("blocks.0")
    )


def test_models_without_blocks_and_blocks_that_cannot_be_followed() -> None:
    with pytest.raises(
        ConfigError,
        match=r"Sequential has no block with branches; expected RepVGG or the like. Use quantize_",
    ):
        quantize_branches_(nn.Sequential(nn.Conv2d(3, 4, 1)))
    model = randomized(nn.Sequential(DBB(4, 4)))
    state = list(model.state_dict())
    with pytest.raises(
        QuantizationError, match=r"DBB: .*; expected a sum of linear branches. Merge it with fuse_"
    ):
        quantize_branches_(model)
    assert list(model.state_dict()) == state
    with pytest.raises(
        ConfigError,
        match=r"0 is a ghostnetv3 block; expected one whose branches are one module. Merge it with",
    ):
        quantize_branches_(nn.Sequential(GhostV3(4, 4)))


class Interrupts:
    """Stands in for a function, and is interrupted once it has done its work."""

    def __init__(self, function: Any) -> None:
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.function(*args, **kwargs)
        raise KeyboardInterrupt


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_call_that_does_not_end_changes_nothing(
    interrupted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = repvgg()
    modules = [(path, module, type(module)) for path, module in model.named_modules()]
    want = outputs(model, batch())
    if interrupted:
        monkeypatch.setattr("torchq.qat.reparam.quantize_", Interrupts(quantize_))
        with pytest.raises(KeyboardInterrupt):
            quantize_branches_(model)
    else:
        with pytest.raises(ConfigError, match="no_such_layer"):
            quantize_branches_(model, exclude="no_such_layer")
    assert [(path, module, type(module)) for path, module in model.named_modules()] == modules
    assert fusion_record(model) == []
    assert torch.equal(outputs(model, batch()), want)

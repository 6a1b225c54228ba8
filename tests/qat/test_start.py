"""Training that starts where post-training quantization ended: fusing, backwards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.fusion.common import randomized
from torchq.errors import ConfigError
from torchq.functional import quantize
from torchq.nn import QuantModule
from torchq.qat import prepare, start_from_

RECIPE = torchq.recipes.integer(4, 8, weight_method="mse")


class Branched(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(RepVGGBlock(3, 8, stride=2), RepVGGBlock(8, 8, groups=2))
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.blocks(x).mean((2, 3)))


def plain() -> nn.Module:
    """Return convolutions of every kind that a BatchNorm follows."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=4),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 6, 2),
        nn.BatchNorm2d(6),
        nn.Flatten(),
        nn.Linear(6 * 49, 5),
    )


def batch() -> Tensor:
    return torch.randn(16, 3, 10, 10, generator=torch.Generator().manual_seed(1))


def pair(model: nn.Module, branches: bool) -> tuple[Any, Any]:
    """Return the model prepared for training, and its twin: fused, quantized, rounded by GPTQ."""
    twin = copy.deepcopy(model)
    torchq.fuse_(twin, batch(), progress=False)
    torchq.quantize_(twin, RECIPE)
    torchq.calibrate(twin, [batch()], progress=False)
    torchq.ptq.gptq_(twin, [batch()], progress=False)
    recipe = torchq.recipes.integer(4, 8, weight_method="mse", learn_ranges=True)
    prepare(model, [batch()], recipe, branches=branches, progress=False)
    return model, twin


@pytest.mark.parametrize(("make", "branches"), [(plain, False), (Branched, True)])
def test_the_model_computes_what_the_twin_computes(make: Any, branches: bool) -> None:
    torch.manual_seed(0)
    model, twin = pair(randomized(make()).eval(), branches)
    x, before = batch(), [id(p) for p in model.parameters()]
    assert (model(x) - twin(x)).abs().max() > 0.01 * twin(x).abs().max()
    paths = start_from_(model, twin)
    assert "head" in paths or "9" in paths
    # Codes are equal (below); what remains is float32 rounding in the BatchNorms.
    assert torch.allclose(model(x), twin(x), rtol=1e-4, atol=1e-5)
    assert [id(p) for p in model.parameters()] == before


@pytest.mark.parametrize(("make", "branches"), [(plain, False), (Branched, True)])
def test_fusing_afterwards_gives_the_codes_of_the_twin(make: Any, branches: bool) -> None:
    torch.manual_seed(0)
    model, twin = pair(randomized(make()).eval(), branches)
    start_from_(model, twin)
    torchq.fuse_(model, batch(), progress=False)
    compared = 0
    for path, layer in twin.named_modules():
        if isinstance(layer, QuantModule):
            for (q, w), (r, v) in zip(
                layer.quantized_weights(),
                model.get_submodule(path).quantized_weights(),
                strict=True,
            ):
                d = q.descriptor
                one = quantize(w, q.range_for(w), d.format, d.granularity)
                assert torch.equal(one, quantize(v, r.range_for(v), d.format, d.granularity))
                compared += 1
    assert compared >= 3


def test_the_model_can_be_trained_from_there() -> None:
    torch.manual_seed(0)
    model, twin = pair(randomized(Branched()).eval(), branches=True)
    start_from_(model, twin)
    torchq.qat.freeze_bn_(model)
    model.train()
    # Frozen BatchNorms make the first training forward that of the twin.
    assert torch.allclose(model(batch()), twin(batch()), rtol=1e-4, atol=1e-5)
    model(batch()).square().mean().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


@pytest.mark.parametrize("change", ["format", "path", "range"])
def test_models_that_do_not_belong_together_are_refused(change: str) -> None:
    model, twin = pair(randomized(plain()).eval(), branches=False)
    if change == "format":
        torchq.qat.change_bits_(twin, 3, "0.weight_quantizer")
    elif change == "path":
        twin = nn.Sequential(twin)
    else:
        twin[0].input_quantizer.forget_amax()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match="got models that differ in their quantizers"):
        start_from_(model, twin)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_batchnorm_without_a_bias_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8, affine=False))
    model, twin = pair(randomized(model).eval(), branches=False)
    with pytest.raises(ConfigError, match="0: got a BatchNorm without affine parameters"):
        start_from_(model, twin)


def test_branches_that_cannot_take_a_kernel_are_refused() -> None:
    model, twin = pair(randomized(Branched()).eval(), branches=True)
    for parameter in model.blocks[1].rbr_reparam.branches.parameters():
        parameter.data.zero_()
    with pytest.raises(ConfigError, match=r"blocks.1.rbr_reparam: got branches none of which"):
        start_from_(model, twin)


def test_a_layer_without_a_norm_of_its_own_is_named() -> None:
    model, twin = pair(randomized(plain()).eval(), branches=False)
    model[1].track_running_stats, model[1].running_mean, model[1].running_var = False, None, None
    with pytest.raises(ConfigError, match=r"0: got parameters of other names .*\(1: "):
        start_from_(model, twin)


def test_one_range_for_all_channels_cannot_follow_a_norm() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8))
    twin, recipe = copy.deepcopy(randomized(model).eval()), torchq.recipes.int8_per_tensor()
    torchq.fuse_(twin, batch(), progress=False)
    torchq.quantize_(twin, recipe)
    torchq.calibrate(twin, [batch()], progress=False)
    prepare(model, [batch()], recipe, progress=False)
    with pytest.raises(ConfigError, match="0: has one range for the whole weight"):
        start_from_(model, twin)

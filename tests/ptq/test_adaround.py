"""AdaRound and BRECQ against the equations of their papers, and on small models."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.ptq.test_gptq import Block, batches, calibrated, net
from torchq.ptq import adaround_, gptq_
from torchq.ptq.adaround import SoftWeight, decision_penalty, rectified_sigmoid
from torchq.ptq.layers import grid_of


def test_equations_23_and_24() -> None:
    """h(V) = clip(1.2 sigmoid(V) - 0.1, 0, 1), and f(V) = sum(1 - |2 h(V) - 1|^beta)."""
    for v in (-5.0, -2.0, -0.3, 0.0, 1.0, 2.5):
        expected = min(max(1 / (1 + math.exp(-v)) * 1.2 - 0.1, 0.0), 1.0)
        assert rectified_sigmoid(torch.tensor(v)).item() == pytest.approx(
            expected, abs=1e-6
        )
    h = torch.tensor([0.0, 0.25, 0.5, 1.0])
    assert decision_penalty(h, 3.0).item() == pytest.approx((1 - 0.5**3) + 1)


def test_a_soft_weight_starts_at_the_weight_and_ends_on_the_grid() -> None:
    """Equation 22: W~ = s clip(floor(W / s) + h(V), n, p)."""
    scale = torch.full((7,), 0.5)
    weight = torch.tensor([-9.0, -0.8, -0.3, 0.1, 0.3, 0.6, 9.0])
    soft = SoftWeight(weight, scale, -2, 1)
    value = soft.value().detach()
    # h starts at least 0.02 away from 0 and 1, so this is the most that a value is off.
    torch.testing.assert_close(
        value, weight.clamp(-1, 0.5), rtol=0, atol=0.02 * 0.5 + 1e-6
    )
    assert torch.equal(
        soft.rounded(), torch.tensor([-1.0, -1.0, -0.5, 0.0, 0.5, 0.5, 0.5])
    )
    assert soft.undecided() == 4
    with torch.no_grad():
        soft.v.copy_(torch.tensor([9.0, 9.0, 9.0, 9.0, -9.0, -9.0, -9.0]))
    expected = torch.tensor([-0.5, -0.5, 0.0, 0.5, 0.0, 0.5, 0.5])
    assert torch.equal(soft.rounded(), expected)
    assert torch.equal(soft.value(), expected)
    assert soft.undecided() == 0


def test_a_soft_weight_of_a_rounded_layer_rounds_to_its_weight() -> None:
    """Also where the rounding is several values of the grid away from what was wanted."""
    model = calibrated(bits=(3, 8))
    expected = model[0].weight.detach().flatten(1)[None].double()
    gptq_(model, batches(), progress=False)
    soft = SoftWeight.of(model[0], expected)
    scale = grid_of(model[0]).scale.view(8, 3, 3, 3)
    assert torch.equal(soft.rounded(), model[0].weight)
    far = (soft.value() - model[0].weight).abs() / scale
    assert 0.3 < far.max().item() <= 0.45 + 1e-5


def block_error(model: nn.Module, floats: nn.Module) -> float:
    """Return the error after the last block, on the batches that the model has seen."""
    x = torch.cat(batches())
    with torch.no_grad():
        return (model[:4](x) - floats[:4](x)).square().mean().item()  # type: ignore[index]


@pytest.mark.sample(1)
@pytest.mark.parametrize("arguments", [{}, {"block": ["2", "3"]}])
def test_learning_lowers_the_error_of_blocks(arguments: dict[str, Any]) -> None:
    before = calibrated(bits=(2, 8))
    model = calibrated(bits=(2, 8))
    gptq_(before, batches(), progress=False)
    report = adaround_(model, batches(), steps=200, progress=False, **arguments)
    assert block_error(model, net()) < block_error(before, net())
    blocks = list(report.blocks)
    assert blocks == ["0", "2", "3", "5"]
    assert report.blocks["2"].layers == ("2.conv1", "2.conv2")
    assert all(
        block.error_after <= block.error_before for block in report.blocks.values()
    )
    assert "blocks from 3 batches" in str(report)
    for module in model.modules():
        if isinstance(module, (nn.Conv2d, nn.Linear)):
            assert torch.equal(module.weight_quantizer(module.weight), module.weight)
            assert module.bias.grad is None
            assert module.bias.requires_grad
        assert "forward" not in vars(module)


@pytest.mark.sample(1)
@pytest.mark.parametrize("symmetric", [True, False])
def test_ranges_of_activations_are_learned(symmetric: bool) -> None:
    """Both ends of asymmetric ranges move."""
    model: Any = nn.Sequential(*(m for m in net() if not isinstance(m, nn.ReLU)))
    data = batches()
    torchq.quantize_(
        model, torchq.recipes.integer(4, 2, symmetric=symmetric, weight_method="max")
    )
    torchq.calibrate(model, data, progress=False)
    quantizers = [
        m.input_quantizer for m in model.modules() if hasattr(m, "input_quantizer")
    ]
    before = [quantizer.range.map(torch.clone) for quantizer in quantizers]
    # Few steps learn ranges, but need not bring the outputs nearer to float.
    adaround_(model, data, steps=20, compare=False, progress=False)
    for end in range(1 if symmetric else 2):
        moved = [
            not torch.equal(quantizer.range[end], old[end])
            for quantizer, old in zip(quantizers, before, strict=True)
        ]
        assert any(moved)


def small() -> tuple[Any, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    data = [torch.rand(40, 6)]
    torchq.quantize_(model, torchq.recipes.integer(2, 3))
    torchq.calibrate(model, data, progress=False)
    return model, data


def test_the_seed_decides_the_result() -> None:
    models = []
    for seed in (1, 1, 2):
        model, data = small()
        torch.manual_seed(5)
        state = torch.get_rng_state()
        adaround_(model, data, steps=240, seed=seed, progress=False)
        assert torch.equal(torch.get_rng_state(), state)
        models.append(model.state_dict())
    first, again, other = models
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_formats_without_integer_codes_are_named() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),
        Block(4),
    )
    torchq.quantize_(model, torchq.recipes.integer(4, 8))
    weight = torchq.QuantDescriptor((4, 3), axis=0)
    model[1].conv1.weight_quantizer = torchq.TensorQuantizer(weight)
    torchq.calibrate(model, batches(), progress=False)
    report = adaround_(model, batches(), steps=2, progress=False)
    assert report.skipped == {"1.conv1": "its weight has no integer codes"}
    assert report.blocks["1"].layers == ("1.conv2",)

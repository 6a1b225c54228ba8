"""Evaluation of a model that is planned for "torch" computes what oneDNN's kernels do."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.lowering.kernel import available, saturates
from torchq.lowering.layer import Int8Layer
from torchq.nn.integer_kernel import kernels_off
from torchq.runtimes.torch import OneDnnArithmetic

needs_kernels = pytest.mark.skipif(
    not available() or saturates(), reason="oneDNN's kernels overflow on this processor"
)


class Kinds(nn.Module):
    """Layers in front of ReLUs, sums, pools and concatenations, with work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.point = nn.Conv2d(16, 16, 1, bias=False)
        self.left, self.right = nn.Conv2d(16, 8, 1), nn.Conv2d(16, 8, 3, padding=1)
        self.plain = nn.Conv2d(16, 16, 3, padding=1)
        self.signed = nn.Conv2d(16, 16, 1)
        self.relu = nn.ReLU(inplace=True)
        self.hidden, self.head = nn.Linear(16, 12), nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, 3, 16, 16) to classes."""
        x = self.relu(self.stem(x))
        x = self.relu(self.point(F.relu6(self.depthwise(x))) + x)
        x = F.max_pool2d(x, 2)
        x = torch.cat([self.relu(self.left(x)), self.relu(self.right(x))], 1)
        x = self.relu(self.signed(self.plain(x)))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return self.head(self.relu(self.hidden(x)))


@pytest.fixture(scope="module")
def kinds() -> tuple[Any, nn.Module, Tensor]:
    """The model, deployed, and other images than it was calibrated with."""
    torch.manual_seed(0)
    x = torch.randn(32, 3, 16, 16)
    model = Kinds().eval()
    # Weights of 7 bits overflow nowhere.
    config = torchq.recipes.int8(reduce_range=saturates())
    torchq.quantize_(model, config, target="torch", example=x, progress=False)
    torchq.calibrate(model, [x], progress=False)
    return model, torchq.deploy(model, x, progress=False), torch.randn_like(x)


def evaluated(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        result: Tensor = model(x)
    return result


@needs_kernels
def test_evaluation_returns_the_bits_of_the_engine(
    kinds: tuple[Any, nn.Module, Tensor],
) -> None:
    model, deployed, x = kinds
    assert torch.equal(evaluated(model, x), evaluated(deployed, x))
    with kernels_off(model):
        assert not torch.equal(evaluated(model, x), evaluated(deployed, x))


@needs_kernels
def test_plan_and_engine_store_the_same_codes(
    kinds: tuple[Any, nn.Module, Tensor],
) -> None:
    model, deployed, _ = kinds
    names = [name for name, m in deployed.named_modules() if isinstance(m, Int8Layer)]
    assert len(names) == 9
    for name in names:
        layer: Any = deployed.get_submodule(name)
        planned = model.get_submodule(name)
        assert bool(planned.rounded_by) == (layer.output_qparams is not None), name
        starts = planned.from_zero
        assert ("input" in starts) == (layer.input_qparams.zero_point == 0), name
        if planned.rounded_by:
            assert ("result" in starts) == (layer.output_qparams.zero_point == 0), name


def test_layers_of_a_network_with_work_in_place_hand_codes_on(
    kinds: tuple[Any, nn.Module, Tensor],
) -> None:
    _, deployed, _ = kinds
    layers = [m for m in deployed.modules() if isinstance(m, Int8Layer)]
    assert sum(layer.output_qparams is not None for layer in layers) == 5


def last_bit_of_a_scale(model: Any, _: pytest.MonkeyPatch) -> None:
    amax = model.head.input_quantizer.amax
    before = model.head.input_quantizer.scale.clone()
    while torch.equal(model.head.input_quantizer.scale, before):
        amax.copy_(torch.nextafter(amax, torch.tensor(torch.inf)))


def a_bias_by_one(model: Any, _: pytest.MonkeyPatch) -> None:
    layer = model.head
    layer.bias += layer.input_quantizer.scale * layer.weight_quantizer.scale.flatten()


def factors_in_another_order(model: Any, patch: pytest.MonkeyPatch) -> None:
    """Multiply by both factors of a float result in turn where kernels do so at once."""

    def finishes(self: Any, numbers: Any) -> Callable[[Tensor], Tensor]:
        if numbers.to is not None:
            result: Callable[[Tensor], Tensor] = kept(self, numbers)
            return result
        of_input = numbers.of.scale.reshape(())
        step = of_input * numbers.scale
        bias = numbers.bias if numbers.bias is not None else step * 0
        return lambda sums: (
            sums.mul_(of_input).mul_(_over(numbers.scale, sums)).add_(_over(bias, sums))
        )

    kept = OneDnnArithmetic.finishes
    patch.setattr(OneDnnArithmetic, "finishes", finishes)


def _over(numbers: Tensor, sums: Tensor) -> Tensor:
    return numbers.view(-1, 1, 1) if sums.dim() == 4 else numbers


DAMAGES = [last_bit_of_a_scale, a_bias_by_one, factors_in_another_order]


@needs_kernels
@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_off_by_one_is_another_result(
    damage: Callable[[Any, pytest.MonkeyPatch], None],
    kinds: tuple[Any, nn.Module, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, deployed, x = kinds
    model = copy.deepcopy(model)
    with torch.no_grad():
        damage(model, monkeypatch)
    assert not torch.equal(evaluated(model, x), evaluated(deployed, x))


@needs_kernels
def test_a_saved_model_computes_the_same(
    kinds: tuple[Any, nn.Module, Tensor], tmp_path: Any
) -> None:
    model, _, x = kinds
    file = tmp_path / "model.pt"
    torchq.save(model, file)
    loaded = torchq.load(Kinds().eval(), file)
    assert torch.equal(evaluated(loaded, x), evaluated(model, x))


def test_plans_say_what_evaluation_computes() -> None:
    x = torch.randn(2, 3, 16, 16)
    plan = torchq.plan(Kinds().eval(), target="torch", example=x)
    expected = "simulates" if saturates() else "computes the codes of torch"
    assert f"evaluation {expected}" in str(plan)

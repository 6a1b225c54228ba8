"""Evaluation of a model that is planned for ExecuTorch computes what its file returns.

The formulas are compared with definitions in whole numbers, and where the package is installed with
the kernels of XNNPACK, to the last bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.formats import INT8
from torchq.functional import CodeGrid, QParams
from torchq.functional.windows import Windows
from torchq.nn.integer_kernel import kernels_off
from torchq.runtime import RUNTIMES, Arithmetic
from torchq.runtimes.executorch import arithmetic
from torchq.runtimes.executorch.arithmetic import XnnpackArithmetic


class Kinds(nn.Module):
    """A layer or an operator of each kind that has a kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, stride=2, padding=1)
        self.depthwise = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=2, bias=False)
        self.gate = nn.Conv2d(16, 16, 1)
        self.up = nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.side = nn.Conv2d(16, 8, 1)
        self.join = nn.Conv2d(16, 8, 3)
        self.rows = nn.Linear(8, 12)
        self.hidden = nn.Linear(12, 12)
        self.maps = nn.Conv2d(8, 4, 3, padding=1)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Map (N, 3, 16, 16) to maps and to classes."""
        x = F.relu6(self.stem(x))
        x = self.depthwise(x).relu() + self.grouped(x)
        x = x * self.gate(F.avg_pool2d(x, 2).mean((2, 3), keepdim=True)).relu()
        small = F.avg_pool2d(x, 2)
        x = torch.cat([self.side(x).relu(), self.up(small)], 1)
        x = self.join(x).relu()
        maps = self.maps(x)
        x = self.rows(x.flatten(2).transpose(1, 2)).relu()
        return maps, self.head(self.hidden(x).relu().mean(1))


def calibrated(model: nn.Module, x: Tensor) -> Any:
    torchq.quantize_(model.eval(), target="executorch", example=x, progress=False)
    torchq.calibrate(model, [x, torch.randn_like(x)], progress=False)
    return model


@pytest.fixture(scope="module")
def kinds() -> tuple[Any, nn.Module, Tensor]:
    """The model, its file, and other images than it was calibrated with."""
    pytest.importorskip(
        "executorch", reason="executorch is not installed: make test-targets"
    )
    torch.manual_seed(0)
    x = torch.randn(8, 3, 16, 16)
    model = calibrated(Kinds(), x)
    return model, torchq.deploy(model, x, progress=False), torch.randn_like(x)


def evaluated(model: nn.Module, *inputs: Tensor) -> tuple[Tensor, ...]:
    with torch.no_grad():
        return tuple(model(*inputs))


def are_equal(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_evaluation_returns_the_bits_of_the_file(
    kinds: tuple[Any, nn.Module, Tensor],
) -> None:
    model, file, x = kinds
    assert are_equal(evaluated(model, x), evaluated(file, x))
    with kernels_off(model):
        assert not are_equal(evaluated(model, x), evaluated(file, x))


def test_plan_and_file_have_the_same_layers_on_integers(
    kinds: tuple[Any, nn.Module, Tensor],
) -> None:
    model, file, _ = kinds
    planned = {
        name
        for name, module in model.named_modules()
        if getattr(module, "rounded_by", "") and hasattr(module, "weight_quantizer")
    }
    report: Any = file.report
    assert planned == set(report.integer)
    assert set(report.in_float) == {"maps", "head"}


def last_bit_of_a_scale(model: Any, _: pytest.MonkeyPatch) -> None:
    amax = model.head.input_quantizer.amax
    before = model.head.input_quantizer.scale.clone()
    while torch.equal(model.head.input_quantizer.scale, before):
        amax.copy_(torch.nextafter(amax, torch.tensor(torch.inf)))


def a_bias_by_one(model: Any, _: pytest.MonkeyPatch) -> None:
    layer = model.stem
    step = layer.input_quantizer.scale * layer.weight_quantizer.scale.flatten()
    layer.bias += step


def sums_in_float(model: Any, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(XnnpackArithmetic, "adds", adds_floats)


def adds_floats(
    self: Any, first: QParams, second: QParams, to: QParams
) -> Callable[[Tensor, Tensor], Tensor]:
    """Add values, and round half to even."""
    return lambda x, y: (x * first.scale + y * second.scale).div_(to.scale).round_()


def last_layer_of_torch(model: Any, patch: pytest.MonkeyPatch) -> None:
    def product(
        self: Any, x: Tensor, weight: Tensor, bias: Tensor, multiply: Any
    ) -> Tensor:
        result: Tensor = multiply(x, weight, bias)
        return result

    patch.setattr(XnnpackArithmetic, "values_product", product)


DAMAGES = [last_bit_of_a_scale, a_bias_by_one, sums_in_float, last_layer_of_torch]


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_off_by_one_is_another_result(
    damage: Callable[[Any, pytest.MonkeyPatch], None],
    kinds: tuple[Any, nn.Module, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, file, x = kinds
    model = copy.deepcopy(model)
    with torch.no_grad():
        damage(model, monkeypatch)
    assert not are_equal(evaluated(model, x), evaluated(file, x))


def pairs() -> tuple[Tensor, Tensor]:
    codes = torch.arange(-128, 128).double()
    return codes.repeat_interleave(256), codes.repeat(256)


def qparams(scale: float, zero_point: int = 0) -> QParams:
    return QParams(
        torch.tensor(scale), torch.tensor(zero_point), format=INT8, axis=None
    )


def fixed_point_sum(a: int, b: int, scales: tuple[float, float, float]) -> int:
    """Return the code of a sum, in Python's integers."""
    of_a, of_b, to = (torch.tensor(scale) for scale in scales)
    ratios = float(of_a / to), float(of_b / to)
    shift = 0
    while max(ratios) * 2**shift < 2**20:
        shift += 1
    first, second = (round(ratio * 2**shift) for ratio in ratios)
    return (a * first + b * second + (1 << (shift - 1))) >> shift


def test_sums_are_added_with_factors_of_21_bits() -> None:
    scales = (0.0173, 0.0311, 0.0402)
    add = XnnpackArithmetic().adds(*map(qparams, scales))
    a, b = pairs()
    result = add(a.float(), b.float())
    expected = [
        fixed_point_sum(int(x), int(y), scales) for x, y in zip(a, b, strict=True)
    ]
    assert result.tolist() == expected
    in_float = adds_floats(None, *map(qparams, scales))(a.float(), b.float())
    assert 0 < int((in_float != result).sum()) < len(a) // 50


def test_sums_of_products_are_scaled_in_one_product_and_rounded_half_to_even() -> None:
    step, to = torch.tensor(0.000173), torch.tensor(0.0421)
    sums = torch.arange(-(2**20), 2**20, dtype=torch.float32)
    found = XnnpackArithmetic().rounds_products(step, to)(sums.clone())
    factor = float(step / to)
    # Products of two float32 numbers are exact in float64.
    scaled = (sums.double() * factor).float()
    codes = torch.tensor([round(value) for value in scaled.tolist()])
    assert torch.equal(found, codes * to)
    twice = torch.round(sums * step / to) * to
    assert not torch.equal(found, twice)


def test_a_tie_of_a_sum_goes_up() -> None:
    add = XnnpackArithmetic().adds(qparams(0.5), qparams(0.5), qparams(1.0))
    x = torch.tensor([-3.0, -1.0, 1.0, 3.0])
    assert add(x, torch.zeros(4)).tolist() == [-1.0, 0.0, 1.0, 2.0]


def test_values_become_codes_by_a_product_with_the_reciprocal() -> None:
    grid = CodeGrid.of(qparams(0.0123))
    values = (torch.arange(-120, 120) + 0.5) * torch.tensor(0.0123)
    divided = grid.codes(values)
    multiplied = grid.codes(values, by_reciprocal=True)
    reciprocal = torch.tensor(1.0) / torch.tensor(0.0123)
    assert torch.equal(multiplied, torch.round(values * reciprocal))
    assert not torch.equal(multiplied, divided)
    codes = torch.arange(-128.0, 128.0)
    assert torch.equal(grid.codes(codes * 0.0123, by_reciprocal=True), codes)


def in_order(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Return one fused multiply-add after another, in float64 rounded to float32 each time."""
    total = bias.expand(len(x), -1)
    for column, factors in zip(x.T, weight.T, strict=True):
        exact = column[:, None].double() * factors.double() + total.double()
        total = exact.float()
    return total


def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return (
        F.conv2d(x, weight, bias, padding=1)
        if x.dim() == 4
        else F.linear(x, weight, bias)
    )


@pytest.mark.parametrize("fused", [True, False])
def test_a_last_layer_adds_one_product_after_another(
    fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arithmetic, "_adds_products_in_one_step", lambda: fused)
    torch.manual_seed(0)
    formulas = XnnpackArithmetic()
    x, weight, bias = torch.randn(6, 40), torch.randn(7, 40), torch.randn(7)
    found = formulas.values_product(x, weight, bias, plain)
    assert torch.equal(found, in_order(x, weight, bias))
    assert not torch.equal(found, F.linear(x, weight, bias))
    images, filters = torch.randn(2, 5, 6, 6), torch.randn(7, 5, 3, 3)
    columns = F.unfold(images, 3, padding=1).unflatten(1, (5, 9))
    rows = columns.permute(0, 3, 2, 1).reshape(-1, 45)
    expected = in_order(rows, filters.flatten(2).transpose(1, 2).flatten(1), bias)
    maps = formulas.values_product(images, filters, bias, plain)
    assert torch.equal(maps.permute(0, 2, 3, 1).reshape(-1, 7), expected)


def test_large_and_grouped_layers_in_float_are_torchs() -> None:
    formulas = XnnpackArithmetic()
    weight = torch.randn(4, 1, 3, 3)
    x = torch.randn(2, 4, 6, 6)

    def depthwise(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.conv2d(x, weight, bias, groups=4)

    found = formulas.values_product(x, weight, None, depthwise)
    assert torch.equal(found, depthwise(x, weight, None))


@pytest.mark.parametrize("count", [1, 2, 64])
def test_the_same_image_has_the_same_bits_in_every_batch(count: int) -> None:
    torch.manual_seed(0)
    formulas = XnnpackArithmetic()
    x, weight = torch.randn(64, 2048), torch.randn(16, 2048)
    alone = formulas.values_product(x[:1], weight, None, plain)
    assert torch.equal(
        formulas.values_product(x[:count], weight, None, plain)[:1], alone
    )


def test_small_windows_are_added_in_pairs_of_columns() -> None:
    windows = Windows((2, 2), (2, 2), (0, 0))
    average = XnnpackArithmetic().averages(qparams(0.1), qparams(0.2), windows)
    assert average is not None
    codes = torch.randint(-128, 128, (2, 3, 4, 4)).float()
    x = codes * torch.tensor(0.1)
    left = x[:, :, ::2, ::2] + x[:, :, 1::2, ::2]
    right = x[:, :, ::2, 1::2] + x[:, :, 1::2, 1::2]
    assert torch.equal(average(codes), (left + right) * 0.25)
    padded = Windows((3, 3), (1, 1), (1, 1))
    assert XnnpackArithmetic().averages(qparams(0.1), qparams(0.2), padded) is None


def test_plans_and_reports_say_what_evaluation_computes() -> None:
    x = torch.randn(2, 3, 16, 16)
    plan = torchq.plan(Kinds().eval(), target="executorch", example=x)
    assert "evaluation computes the codes of executorch" in str(plan)
    formulas: Arithmetic | None = RUNTIMES["executorch"].arithmetic
    assert isinstance(formulas, XnnpackArithmetic)
    assert plan.decision("up").rounded_by and plan.decision("rows").rounded_by
    assert not plan.decision("head").rounded_by

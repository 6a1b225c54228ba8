"""The arithmetic of GPTQ against brute force and against the equations of its paper."""

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.ptq.gptq import (
    Elimination,
    damped_,
    descend,
    quadratic_error,
    ridge_regression,
    round_rows_,
    round_with_best_ranges,
)
from torchq.ptq.layers import Grid, grid_of


def problem(seed: int, rows: int = 3, columns: int = 4) -> tuple[Tensor, Tensor, Grid]:
    """Return a weight, the moments of correlated inputs, and a 3-bit grid."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    x = torch.randn(columns, 6, generator=generator, dtype=torch.float64)
    x = torch.cat([x, x.mean(0, keepdim=True).expand(columns, -1)], 1)
    scale = (weight.abs().amax(1, keepdim=True) / 3).float().expand(-1, columns)
    return weight, x @ x.T / 12, Grid(scale, scale, torchq.formats.integer_format(3))


def brute_force(weight: Tensor, h: Tensor, grid: Grid) -> Tensor:
    """Return the least error of each row over all roundings up or down."""
    scale = grid.scale.double()
    down = torch.floor(weight / scale)
    errors = []
    for ups in product((0, 1), repeat=weight.shape[1]):
        codes = (down + torch.tensor(ups)).clamp(-4, 3)
        errors.append(quadratic_error(codes * scale - weight, h))
    return torch.stack(errors).amin(0)


def optimal_brain_quantizer(
    weight: Tensor, h: Tensor, grid: Grid, order: list[int]
) -> Tensor:
    """Round one column after the other by equations 2 and 3 of the paper, in the plainest way.

    ``delta = -(w_q - quant(w_q)) / [H^-1]_qq * (H^-1)_:,q``, and then row and column q of the
    inverse are eliminated by one step of Gaussian elimination.
    """
    w = weight.clone()
    inverse = torch.linalg.inv(h)
    q = torch.zeros_like(w)
    for i in order:
        q[:, i] = grid.nearest(w[:, i], i)
        delta = (w[:, i] - q[:, i]) / inverse[i, i]
        w -= delta.unsqueeze(1) * inverse[i]
        inverse = inverse - inverse[:, i : i + 1] @ inverse[i : i + 1] / inverse[i, i]
    return q


@pytest.mark.parametrize("columns", [4, 300])
def test_rounding_equals_the_equations_of_the_paper(columns: int) -> None:
    """300 columns are more than are updated at once."""
    weight, h, grid = problem(0, columns=columns)
    h = h + 0.1 * torch.eye(columns)
    order = h.diagonal().argsort(descending=True, stable=True).tolist()
    expected = optimal_brain_quantizer(weight, h, grid, order)
    actual = weight.clone()
    round_rows_(actual, Elimination.of(h), grid)
    assert torch.equal(actual, expected)
    assert not torch.equal(expected, grid.nearest(weight))


def layer_of(weight: Tensor, bits: int = 3) -> Any:
    layer = nn.Linear(
        weight.shape[1],
        weight.shape[0],
        bias=False,
    )
    layer.weight.data = weight.float()
    model = nn.Sequential(layer)
    torchq.quantize_(model, torchq.recipes.integer(bits, None))
    torchq.workflow.calibrate_weights(model)
    return layer


def test_rounding_is_close_to_the_best_of_all_roundings() -> None:
    """All 16 roundings of each row of 40 layers; the result may leave these for a better one."""
    total = {"best": 0.0, "gptq": 0.0, "found": 0.0, "nearest": 0.0}
    for seed in range(40):
        weight, h, grid = problem(seed)
        h = h + 0.01 * torch.eye(4)
        gptq = weight.clone()
        round_rows_(gptq, Elimination.of(h), grid)
        actual = descend(gptq, weight, h, grid)
        error = {
            n: quadratic_error(q - weight, h)
            for n, q in [("gptq", gptq), ("found", actual)]
        }
        error["nearest"] = quadratic_error(grid.nearest(weight) - weight, h)
        error["best"] = brute_force(weight, h, grid)
        assert bool((error["found"] <= error["gptq"] + 1e-12).all())
        total = {name: total[name] + error[name].sum().item() for name in total}
    assert total["found"] < 1.15 * total["best"]
    assert total["found"] < total["gptq"] < 0.9 * total["nearest"]


@pytest.mark.parametrize("group_size", [None, 2])
def test_searched_ranges_never_lose_to_nearest_rounding(group_size: int | None) -> None:
    for seed in range(10):
        weight, h, _ = problem(seed)
        h = h + 0.01 * torch.eye(4)
        layer = layer_of(weight)
        if group_size:
            quantizer = layer.weight_quantizer
            quantizer.descriptor = quantizer.descriptor.replace(
                axis=None, block_size=group_size
            )
            quantizer.calibrate_on(layer.weight)
        solved = [Elimination.of(h)]
        actual, amax = round_with_best_ranges(
            layer, weight[None].clone(), h[None], solved
        )
        error = quadratic_error(actual[0] - weight, h)
        with_found = quadratic_error(
            grid_of(layer, amax).nearest(weight)[0] - weight, h
        )
        with_largest = quadratic_error(grid_of(layer).nearest(weight)[0] - weight, h)
        assert bool((error <= with_found + 1e-12).all())
        if group_size is None:
            assert bool((error <= with_largest + 1e-12).all())
        assert torch.equal(grid_of(layer, amax).nearest(actual), actual)


def test_ridge_regression_solves_the_stacked_least_squares_problem() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 50, generator=generator, dtype=torch.float64)
    t = torch.randn(2, 50, generator=generator, dtype=torch.float64)
    start = torch.randn(2, 5, generator=generator, dtype=torch.float64)
    xx = x @ x.T / 50
    tx = t @ x.T / 50
    actual = ridge_regression(start, xx, tx, 0.1)
    root = (0.1 * xx.diagonal().mean() * 50).sqrt()
    rows = torch.cat([x.T, root * torch.eye(5)])
    expected = torch.linalg.lstsq(rows, torch.cat([t.T, root * start.T])).solution.T
    torch.testing.assert_close(actual, expected)
    assert torch.equal(xx, x @ x.T / 50), "the moments are as before"


def test_damping_grows_until_the_matrix_is_positive_definite() -> None:
    x = torch.randn(
        6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    h = x @ x.T
    indefinite = h - 0.05 * torch.eye(6) * h.diagonal().mean()
    damped = indefinite.clone()
    mean = indefinite.diagonal().mean()
    assert damped_(damped, 1e-3, Elimination.of)[1] == pytest.approx(0.1)
    torch.testing.assert_close(damped, indefinite + 0.1 * mean * torch.eye(6))
    damped = torch.zeros(3, 3, dtype=torch.float64)
    assert damped_(damped, 0.5, Elimination.of)[1] == 0.5
    assert torch.equal(damped, 0.5 * torch.eye(3))


@pytest.mark.parametrize("bias", [False, True])
def test_reported_errors_are_those_of_the_outputs(bias: bool) -> None:
    """The inputs have a mean, so constant parts of the error count."""
    torch.manual_seed(0)
    layer = nn.Linear(6, 4, bias=bias)
    x = torch.rand(50, 6) + 1
    expected = layer(x).detach().double()
    model = nn.Sequential(layer)
    torchq.quantize_(model, torchq.recipes.integer(2, None, weight_method="max"))
    torchq.workflow.calibrate_weights(model)
    variance = (expected - expected.mean(0)).square().sum()
    errors = [(model(x).double() - expected).square().sum() / variance]
    report = torchq.ptq.gptq_(model, [x], progress=False).layers["0"]
    errors.append((model(x).double() - expected).square().sum() / variance)
    actual = report.error_before, report.error_after
    assert actual == pytest.approx([error.item() for error in errors], rel=1e-3)

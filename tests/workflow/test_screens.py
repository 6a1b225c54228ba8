"""What is printed of large networks fits a screen; rows are given on request."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq

#: The lines that the largest report may have.
SCREEN = 40
LAYERS = 60


@pytest.fixture
def large() -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential()
    for _ in range(LAYERS):
        model.append(nn.Linear(4, 4))
        model.append(nn.BatchNorm1d(4))
    return model.eval(), [torch.randn(8, 4)]


def lines(report: Any) -> list[str]:
    return str(report).splitlines()


def test_reports_on_large_networks_fit_a_screen(
    large: tuple[nn.Module, list[Tensor]],
) -> None:
    model, batches = large
    folded = torchq.fuse_(model, batches[0], progress=False)
    # Products of 7-bit weights overflow no kernel.
    recipe = torchq.recipes.int8(reduce_range=True)
    planned = torchq.quantize_(model, recipe, example=batches[0], progress=False)
    calibrated = torchq.calibrate(model, batches, progress=False)
    summed = torchq.summary(model)
    errors = torchq.layer_errors(model, batches, progress=False)
    ranks = torchq.sensitivity(model, batches, progress=False)
    deployed = torchq.summary(torchq.deploy(model, batches[0], target="torch"))
    reports = (folded, planned, calibrated, summed, errors, ranks, deployed)
    counts = [len(lines(report)) for report in reports]
    assert max(counts) <= SCREEN, counts
    for report in (folded, planned, calibrated, summed, errors, ranks):
        assert len(report.table().splitlines()) >= LAYERS


def test_the_verdict_comes_first_and_what_stands_out_follows(
    large: tuple[nn.Module, list[Tensor]],
) -> None:
    model, batches = large
    torchq.quantize_(model, progress=False)
    with torch.no_grad():
        model[0].weight.zero_()
        model[0].bias.zero_()
        model[1].running_mean.zero_()
    widest = batches[0] * torch.tensor([1.0, 1.0, 1.0, 1000.0])
    rows = lines(torchq.calibrate(model, [widest], progress=False))
    assert rows[0].startswith(f"{2 * LAYERS} ranges from 1 batch")
    assert rows[1:3] == ["the widest ranges:", rows[2]]
    assert rows[2].startswith("  0.input_quantizer ")
    assert any(
        row.startswith("nothing but zeros reached 2.input_quantizer") for row in rows
    )
    assert rows[-1].startswith("each range: report.table()")


def test_a_summary_counts_what_is_alike(large: tuple[nn.Module, list[Tensor]]) -> None:
    model, batches = large
    torchq.quantize_(model, exclude=["0", "2"], progress=False)
    torchq.calibrate(model, batches, progress=False)
    rows = lines(torchq.summary(model))
    assert rows[0].split() == ["quantizers", "format", "mode", "range"]
    assert all(row.split()[0] == str(LAYERS - 2) for row in rows[1:3])
    assert rows[3] == "2 in float: 0, 2"

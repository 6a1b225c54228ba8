"""Pictures of reports through matplotlib, and what notebooks show."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchq
from tests.models import ConvNet, image_batches
from torchq.analysis import SensitivityReport
from torchq.errors import MissingExtraError


@pytest.fixture
def pyplot() -> Iterator[Any]:
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    found = importlib.import_module("matplotlib.pyplot")
    yield found
    found.close("all")


def quantized(bits: int) -> nn.Module:
    torch.manual_seed(0)
    model = ConvNet().eval()
    torchq.fuse_(model, image_batches()[0], progress=False)
    torchq.quantize_(model, torchq.recipes.integer(bits, bits))
    torchq.calibrate(model, image_batches(), progress=False)
    return model


def heights(ax: Any) -> list[list[float]]:
    return [[bar.get_height() for bar in group] for group in ax.containers]


def test_layer_errors_draw_both_errors_along_the_network(pyplot: Any) -> None:
    report = torchq.layer_errors(quantized(4), image_batches(), progress=False)
    ax = report.plot()
    names = [row.name for row in report.rows]
    assert [label.get_text() for label in ax.get_xticklabels()] == names
    local, accumulated = heights(ax)
    assert local == pytest.approx([10 ** (-row.local_sqnr / 20) for row in report.rows])
    assert accumulated == pytest.approx([10 ** (-row.sqnr / 20) for row in report.rows])
    _, mine = pyplot.subplots()
    assert report.plot(mine) is mine


REPORTS: list[Any] = [
    torchq.analysis.LayerErrors((), 1.0, 1),
    SensitivityReport((), "sqnr", "dB", True, "only", "layer", 1.0),
]


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: type(report).__name__)
def test_the_extra_is_named_without_matplotlib(
    report: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed.*torchq\[report\]"):
        report.plot()


def report_classes() -> dict[str, type]:
    """Return the classes of torchq that print as text and have the name of a report or plan."""
    endings = ("Report", "Errors", "Result", "Config", "Summary", "Precision")
    found: dict[str, type] = {}
    for info in pkgutil.walk_packages(torchq.__path__, "torchq."):
        if "triton" in info.name or "__main__" in info.name or "shim" in info.name:
            continue
        for name, value in vars(importlib.import_module(info.name)).items():
            own = inspect.isclass(value) and value.__module__ == info.name
            if own and name.endswith(endings) and "__str__" in vars(value):
                found[name] = value
    return found


def test_notebooks_show_every_report() -> None:
    classes = report_classes()
    assert {"CalibrationReport", "FuseReport", "SwapReport", "Summary", "TuneResult"} <= set(
        classes
    )
    assert [name for name, value in classes.items() if not hasattr(value, "_repr_html_")] == []


def test_notebooks_show_the_text_of_a_report() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    plan = torchq.plan(model)
    assert plan._repr_html_().startswith("<pre")
    assert "Linear" in plan._repr_html_() and "<Linear" not in plan._repr_html_()

"""The benchmark of the steps of adaround_: one start for all methods, and each cell once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("torchvision")

from benchmarks import rounding
from benchmarks.accuracy import Network


def compare(expected: Sequence[Tensor], found: Sequence[Tensor]) -> dict[str, float]:
    return {"same": 90.0}


def network(name: str, options: object) -> Network:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 4))
    return Network(model.eval(), torch.rand(8, 6), torch.rand(64, 6), compare)


def test_methods_start_from_the_same_ranges_and_cells_are_measured_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = []

    def method(model: nn.Module, batches: list[Tensor]) -> None:
        assert [len(batch) for batch in batches] == [32]
        weights.append(model[0].weight.clone())  # type: ignore[index, operator]
        with torch.no_grad():
            model[0].weight.zero_()  # type: ignore[index, operator]

    monkeypatch.setitem(rounding.NETWORKS, "small", network)
    monkeypatch.setattr(rounding, "METHODS", {"one": method, "other": method})
    out = tmp_path / "out.jsonl"
    arguments = ["--data", "", "--networks", "small", "--calibration", "32"]
    arguments += ["--out", str(out), "--draws", "0"]
    rounding.main(arguments)
    assert len(weights) == 2 and torch.equal(*weights)
    assert bool(weights[0].any())
    assert capsys.readouterr().out.count("| small | o") == 2
    rounding.main([*arguments, "1"])
    assert len(weights) == 4
    assert "| small | other | 2 |" in capsys.readouterr().out

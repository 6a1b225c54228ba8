"""The migration page says the truth: its code runs, and the names it gives exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch import nn

import torchq
from torchq.compat import pytorch_quantization
from torchq.compat import shim as shim

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.splitlines()[0])
def test_code_runs(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = nn.Sequential(nn.Conv2d(3, 4, 3))
    ranges = {
        "0._input_quantizer._amax": torch.tensor(2.0),
        "0._weight_quantizer._amax": torch.ones(4, 1, 1, 1),
    }
    torch.save({**model.state_dict(), **ranges}, "calibrated.pth")
    old_model = nn.Sequential(pytorch_quantization.nn.QuantConv2d(3, 4, 3))
    old_model[0].input_quantizer.amax = 2.0
    names = {"torch": torch, "torchq": torchq, "model": model, "old_model": old_model}
    exec(compile(block, "migration.md", "exec"), names)
    found = names["model"][0].input_quantizer.amax
    assert found is None if "install" in block else found == 2


def test_names_of_torchq_exist() -> None:
    named = set(re.findall(r"`(?:with )?(torchq(?:\.\w+)+)", PAGE))
    assert len(named) > 10
    for name in named:
        found = torchq
        for part in name.split(".")[1:]:
            found = getattr(found, part)
        assert found is not None


def test_limits_of_the_page() -> None:
    """The number of bins, the folder of the search path, and what is said to be missing."""
    calibrator = pytorch_quantization.calib.HistogramCalibrator(8, None, False)
    calibrator.collect(torch.tensor([1e-3]))
    calibrator.collect(torch.tensor([1e5]))
    assert calibrator._calib_hist.numel() <= 16384
    assert (Path(next(iter(shim.__path__))) / "pytorch_quantization.py").exists()
    assert not any(hasattr(pytorch_quantization.nn, name) for name in ("GRU", "QuantGRU", "RNN"))
    with pytest.raises(ValueError, match="17 bits"):
        pytorch_quantization.tensor_quant.fake_tensor_quant(torch.ones(1), 1.0, 17)

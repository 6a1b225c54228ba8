"""The names and limits of docs/migration.md are true; tests/test_docs.py runs its code."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import torchq
from torchq.compat import pytorch_quantization
from torchq.compat import shim as shim

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "migration.md").read_text(encoding="utf-8")


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

"""What a model returns beside tensors has no place in an ONNX file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated, run_file

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Cache:
    """An object that a language model returns beside its result."""


class Caches(nn.Module):
    """Returns a dictionary with such an object in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, object]:
        y = self.layer(x)
        return {"logits": y, "cache": Cache(), "more": (y + 1, None)}


@pytest.mark.parametrize("dynamo", [True, False])
def test_what_onnx_has_no_type_for_is_left_out(tmp_path: Path, dynamo: bool) -> None:
    x = torch.randn(3, 4)
    model = calibrated(Caches(), [x])
    with pytest.warns(
        UserWarning, match=r"returns tests\.onnx\.test_unknown_outputs\.Cache, which ONNX"
    ):
        torchq.export_onnx(model, x, tmp_path / "m.onnx", dynamo=dynamo)
    found, more = run_file(tmp_path / "m.onnx", x)
    result = model(x)
    assert isinstance(result["cache"], Cache)
    # Two float32 orders of the same sums.
    torch.testing.assert_close(torch.as_tensor(found), result["logits"])
    torch.testing.assert_close(torch.as_tensor(more), result["logits"] + 1)

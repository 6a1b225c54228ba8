"""Arithmetic with small numbers stays in exported files, and arithmetic with none goes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq.onnx.torch_exporters import optimize_

ir = pytest.importorskip("onnx_ir")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "logarithm": lambda x: (x.relu() + 1e-10).log(),
    "difference": lambda x: 1 / (x.relu() - 1e-9),
    "of a sum": lambda x: x / (x.relu().sum(1, keepdim=True).mean() * 0 + 1e-12),
    "twice": lambda x: (x.relu() + 1e-10).log() + (x.neg().relu() + 1e-10).log(),
    "factor": lambda x: (x * 1.000004 - x) * 1e6,
}


class After(nn.Module):
    """A quantized layer, and then a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.function = nn.Linear(6, 6), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def _exported(function: Callable[[Tensor], Tensor], path: Path) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = calibrated(After(function), x)
    torchq.export_onnx(model, x, path, dynamo=True, dynamic_batch=False)
    session = onnxruntime.InferenceSession(path.read_bytes())
    assert len(session.get_inputs()) == 1
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(found), model(x).detach()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_small_numbers_stay(name: str, tmp_path: Path) -> None:
    found, expected = _exported(FUNCTIONS[name], tmp_path / "m.onnx")
    assert expected.isfinite().all()
    # The factor leaves single units of float32 in the last place, times 1e6.
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0.5 if name == "factor" else 1e-5)


def test_what_changes_nothing_goes(tmp_path: Path) -> None:
    _exported(lambda x: (x + 0) * 1 - 0, tmp_path / "m.onnx")
    kinds = Counter(node.op_type for node in onnx.load(tmp_path / "m.onnx").graph.node)
    assert not {"Add", "Sub", "Mul", "Div"} & set(kinds), kinds


class Program:
    """What torch's exporter returns, whose optimizer logs as onnxscript's does."""

    def __init__(self, problem: Exception | None = None) -> None:
        self.model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 20}), ir_version=9)
        self.problem = problem

    def optimize(self) -> None:
        log = logging.getLogger("onnxscript.optimizer")
        log.warning("Evaluation failed: cannot reshape array")
        log.error("another")
        if self.problem is not None:
            raise self.problem


@pytest.mark.parametrize("problem", [None, RuntimeError("stopped")])
def test_failed_folding_is_not_logged(
    problem: Exception | None, caplog: pytest.LogCaptureFixture
) -> None:
    before = logging.getLogger("onnxscript").level
    with pytest.raises(RuntimeError, match="stopped") if problem else nullcontext():
        optimize_(Program(problem))
    assert [record.getMessage() for record in caplog.records] == ["another"]
    assert logging.getLogger("onnxscript").level == before

"""The end of each road: a file on integers, as the plan said, with the simulation's metric.

A road is a whole job with another library, as its users would write it. Each test prints a line of
a table, which ``make test-roads`` shows: the share of multiply-adds on integers, and the metric in
float, of the simulation and of the file.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.graph.calling import tensors_in
from torchq.swap import plan_of

#: Frameworks warn of each other and of small data.
ROAD = [pytest.mark.integration, pytest.mark.filterwarnings("ignore")]


def float_twin(model: nn.Module) -> nn.Module:
    """Return a copy that computes in float."""
    twin = copy.deepcopy(model).eval()
    torchq.restore_(twin)
    return twin


def run_file(path: Path, feeds: Mapping[str, Tensor]) -> list[Tensor]:
    """Return what a session with the defaults of ONNX Runtime computes."""
    runtime = pytest.importorskip("onnxruntime")
    options = runtime.SessionOptions()
    # Sums of 8-bit weights overflow the kernels of CPUs without VNNI.
    options.add_session_config_entry("session.x64quantprecision", "1")
    session = runtime.InferenceSession(
        str(path), options, providers=["CPUExecutionProvider"]
    )
    arrays = session.run(None, {name: value.numpy() for name, value in feeds.items()})
    return [torch.as_tensor(array) for array in arrays]


def arrives(
    name: str,
    model: Any,
    example: Any,
    path: Path,
    metric: Callable[[Any], float],
    *,
    within: float,
    **export: Any,
) -> torchq.onnx.ExportReport:
    """Export a trained and folded model, prove the file, and compare its metric.

    Args:
        name: of the road.
        model: in eval mode.
        example: a tensor, or a dictionary of keyword arguments.
        path: the file to write.
        metric: of a function from examples to the first output.
        within: by how much the metric of the file may differ from that of the simulation.
        **export: for ``export_onnx``.
    """
    written = torchq.export_onnx(model, example, path, progress=False, **export)
    report = torchq.verify_onnx(model, path, [example], progress=False)
    assert report.ok, report
    assert torchq.inspect_onnx(path).integer
    share = written.coverage.share
    planned = plan_of(model).share
    # Layers in front of operators that calibrate left in float are named.
    named = written.coverage.float_kernels
    assert not named or any("runs in float" in text for text in written.warnings)
    assert share is not None and share > (0.6 if named else 0.9), written
    if planned is not None and not named:
        assert abs(share - planned.quantized) < 0.05, (written, planned)

    def simulated(batch: Any) -> Tensor:
        with torch.no_grad():
            result = model(**batch) if isinstance(batch, Mapping) else model(batch)
        return next(tensors_in(result))

    def in_file(batch: Any) -> Tensor:
        feeds = dict(batch) if isinstance(batch, Mapping) else {"": batch}
        if not isinstance(batch, Mapping):
            feeds = {input_name(path): batch}
        return run_file(path, feeds)[0]

    in_simulation = metric(simulated)
    of_file = metric(in_file)
    with torchq.disabled(model):
        in_float = metric(simulated)
    metrics = (
        f"{in_float:.4f} float / {in_simulation:.4f} simulation / {of_file:.4f} file"
    )
    print(f"\n{name}: {share:.1%} on integers, metric {metrics}")
    assert abs(in_simulation - of_file) <= within
    return written


def input_name(path: Path) -> str:
    """Return the name of the only input of a file."""
    onnx = pytest.importorskip("onnx")
    (only,) = onnx.load(str(path)).graph.input
    return str(only.name)

"""The integer operators of ONNX Runtime compute by the rules that the simulation relies on.

A failure says that this version computes otherwise: then biases, exact sums and what `verify_onnx`
allows are to be looked at again.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import Residual, calibrated
from tests.onnx.integer_rules import RULES
from torchq.runtimes.session import Session

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


class Mobile(nn.Module):
    """A depthwise convolution with squeeze-and-excitation, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.project = nn.Conv2d(3, 32, 3, stride=2), nn.Conv2d(32, 16, 1)
        self.depthwise = nn.Conv2d(32, 32, 5, padding=2, groups=32)
        self.squeeze, self.excite = nn.Conv2d(32, 8, 1), nn.Conv2d(8, 32, 1)
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu6(self.depthwise(nn.functional.hardswish(self.stem(x))))
        scale = nn.functional.adaptive_avg_pool2d(x, 1)
        x = x * nn.functional.hardsigmoid(self.excite(self.squeeze(scale).relu()))
        return self.last(self.first(self.project(x).mean((2, 3))).relu())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("network", [Residual, Mobile])
def test_integer_operators_follow_the_rules(
    network: type[nn.Module], symmetric: bool, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(16, 3, 24, 24), tmp_path / "m.onnx"
    config = torchq.recipes.int8(symmetric=symmetric)
    model = calibrated(network().eval(), x, config=config, target="onnxruntime", example=x[:1])
    torchq.export_onnx(model, x[:1], path, target="onnxruntime", dynamo=False)
    seen = computed(path, x, tmp_path / "optimized.onnx")
    assert sum(seen.values()) == 0, seen
    wanted = {"QLinearConv", "QuantizeLinear"}
    wanted |= {"QLinearAdd", "QLinearConcat"} if network is Residual else {"QLinearMul"}
    assert wanted <= set(seen)


def computed(path: Path, x: Tensor, optimized: Path) -> Counter[str]:
    """Return by operator how many numbers differ from the rules, given the runtime's own inputs."""
    Session(path, optimize=True, save_optimized=optimized)
    model = onnx.load(optimized)
    nodes = [node for node in model.graph.node if node.op_type in RULES]
    names = {name for node in nodes for name in (*node.input, *node.output)}
    made = {name for node in model.graph.node for name in node.output}
    known = {value.name for value in model.graph.output}
    for name in sorted((names & made) - known):
        model.graph.output.append(onnx.ValueInfoProto(name=name))
    session = onnxruntime.InferenceSession(model.SerializeToString(), plain_options())
    outputs = [value.name for value in session.get_outputs()]
    arrays: dict[str, Any] = {session.get_inputs()[0].name: x.numpy()}
    arrays |= {t.name: onnx.numpy_helper.to_array(t) for t in model.graph.initializer}
    found = session.run(outputs, {session.get_inputs()[0].name: x.numpy()})
    arrays |= dict(zip(outputs, found, strict=True))
    wrong: Counter[str] = Counter()
    for node in nodes:
        attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        rule = RULES[node.op_type](attributes, *(arrays[name] for name in node.input if name))
        wrong[node.op_type] += int(np.sum(rule != arrays[node.output[0]]))
    return wrong


def plain_options() -> Any:
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads = 1
    return options

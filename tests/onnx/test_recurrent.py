"""Recurrent layers in files of the newer exporter: one node a level, whatever starts them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

pytestmark = pytest.mark.filterwarnings(
    "ignore:.* only .* quantized",
    "ignore:export_onnx. .* of its layers read a weight in float",
)


class Listener(nn.Module):
    """A layer over time behind a linear layer, with first states of zeros or of the input."""

    def __init__(self, layer: nn.RNNBase, has_states: bool) -> None:
        super().__init__()
        self.features = nn.Linear(4, layer.input_size)
        self.over_time = layer
        self.has_states = has_states
        if has_states:
            self.state = nn.Linear(4, self._directions * layer.hidden_size)

    @property
    def _directions(self) -> int:
        return self.over_time.num_layers * (2 if self.over_time.bidirectional else 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        states = None
        if self.has_states:
            first = x[:, 0] if self.over_time.batch_first else x[0]
            size = (-1, self._directions, self.over_time.hidden_size)
            # Strides are not those of a new tensor.
            states = self.state(first).reshape(size).transpose(0, 1)
        if isinstance(self.over_time, nn.LSTM):
            pair = None if states is None else (states, states)
            results, (last, _) = self.over_time(self.features(x), pair)
        elif states is None:
            results, last = self.over_time(self.features(x))
        else:
            results, last = self.over_time(self.features(x), hx=states)
        return results, last


LAYERS: dict[str, tuple[type[nn.RNNBase], dict[str, Any]]] = {
    "plain": (nn.RNN, {}),
    "two levels, both ways": (nn.RNN, {"num_layers": 2, "bidirectional": True}),
    "relu, no bias": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
    "steps first": (nn.RNN, {"batch_first": False, "bidirectional": True}),
    "lstm": (nn.LSTM, {"bidirectional": True}),
    "gru": (nn.GRU, {"bidirectional": True}),
}


@pytest.mark.slow
@pytest.mark.parametrize("has_states", [False, True])
@pytest.mark.parametrize("name", LAYERS)
def test_a_level_is_one_node_that_agrees(
    name: str, has_states: bool, tmp_path: Path
) -> None:
    kind, options = LAYERS[name]
    torch.manual_seed(0)
    layer = kind(6, 5, **{"batch_first": True, **options})
    model = Listener(layer, has_states).eval()
    shape = (3, 7, 4) if layer.batch_first else (7, 3, 4)
    x = torch.randn(shape)
    model = calibrated(model, x)
    path = tmp_path / "net.onnx"
    torchq.export_onnx(
        model, x, path, dynamo=True, dynamic_batch=layer.batch_first, progress=False
    )
    kinds = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert kinds[kind.__name__] == layer.num_layers
    assert kinds["Loop"] == kinds["Scan"] == 0
    other = torch.randn(5, 7, 4) if layer.batch_first else torch.randn(shape)
    report = torchq.verify_onnx(model, path, [x, other], progress=False)
    assert report.ok, report

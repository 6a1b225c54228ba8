"""Recurrent layers in ONNX files: steps one by one, or torch's LSTM on quantized weights."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq import QuantDescriptor, Rule
from torchq.errors import ExportError
from torchq.workflow import quantizers

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Tagger(nn.Module):
    """A layer over a sequence, and a linear layer at each step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True, bidirectional=True)
        self.head = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0])


# torch 2.9 warns of sizes and batches in traces; the file is compared on another batch too.
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:Exporting a model to ONNX with a batch_size")
@pytest.mark.parametrize("hidden", [True, False], ids=["quantized hidden", "float hidden"])
def test_the_file_agrees_with_the_simulation(tmp_path: Path, hidden: bool) -> None:
    torch.manual_seed(0)
    model, x = Tagger().eval(), torch.randn(2, 3, 4)
    rule = Rule("*lstm", input=QuantDescriptor(), weight=QuantDescriptor(axis=0))
    torchq.quantize_(model, torchq.recipes.int8().with_rules(rule))
    torchq.calibrate(model, [x], progress=False)
    for name, quantizer in quantizers(model).items():
        if "hidden" in name and not hidden:
            quantizer.mode = "off"
    path = tmp_path / "tagger.onnx"
    torchq.export_onnx(model, x, path)
    report = torchq.verify_onnx(model, path, [x, torch.randn(5, 3, 4)])
    assert "all codes equal" in str(report)
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert ("LSTM" in kinds) is not hidden
    # The input of the layer and of the head, and the hidden state at 2 * 3 steps.
    assert kinds.count("QuantizeLinear") == (8 if hidden else 2)


class Listener(nn.Module):
    """A layer over a sequence of any length, whose result is the result."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.features, self.over_time = nn.Linear(4, 4), kind(4, 6, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.over_time(self.features(x))[0]


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.filterwarnings("ignore:Exporting a model to ONNX with a batch_size")
@pytest.mark.filterwarnings("ignore:.* only .* quantized")
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_an_open_length_is_open_or_refused(tmp_path: Path, kind: type[nn.RNNBase]) -> None:
    """Whether torch can trace it depends on its version; no version freezes it in silence."""
    model, x = Listener(kind).eval(), torch.randn(6, 2, 4)
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    path, shapes = tmp_path / "m.onnx", {"x": {0: "time"}}
    options = {"dynamic_batch": False, "dynamic_shapes": shapes}
    with suppress(ExportError):
        torchq.export_onnx(model, x, path, **options)
    if not path.exists():
        torchq.export_onnx(model, x, path, dynamo=False, **options)
    assert torchq.verify_onnx(model, path, [x, torch.randn(9, 2, 4)]).ok

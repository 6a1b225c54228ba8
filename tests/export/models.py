"""Small models that together have every layer that exports, calibrated on the spot."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import torchq

__all__ = ["Layers", "calibrated", "session"]


class Layers(nn.Module):
    """Convolutions, a transposed one, and two linear layers that read the same tensor."""

    def __init__(self, groups: int = 2) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, stride=2, groups=groups)])
        self.up = nn.ConvTranspose2d(16, 4, 3, stride=2, groups=groups, output_padding=1)
        self.left, self.right = nn.Linear(16, 5), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for conv in self.convs:
            x = conv(x).relu()
        pooled = x.mean((2, 3))
        return self.up(x), self.left(pooled), self.right(pooled)


def calibrated(model: nn.Module, *batches: Tensor, config: torchq.QuantConfig | None = None) -> nn.Module:
    """Swapped, calibrated on ``batches`` and in eval mode."""
    torchq.quantize_(model, config)
    torchq.calibrate(model, list(batches), progress=False)
    return model.eval()


def session(path: object, *, optimize: bool = False) -> object:
    """An ONNX Runtime session on one thread."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    level = onnxruntime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimize else level.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

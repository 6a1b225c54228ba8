"""Layers that pad, their export, and the pads of convolutions in a file."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq.onnx.ir import attribute, load_model, nodes_of

__all__ = ["Mobile", "Pad", "exported", "images", "pads"]


class Pad(nn.Module):
    """``torch.nn.functional.pad``."""

    def __init__(self, *amounts: int, mode: str = "constant", value: float = 0) -> None:
        super().__init__()
        self.amounts, self.mode, self.value = amounts, mode, value

    def forward(self, x: Tensor) -> Tensor:
        return F.pad(x, self.amounts, self.mode, self.value or None)


class Same(nn.Module):
    """A convolution with strides and "same" padding, as TensorFlow and timm have it."""

    def __init__(self, inputs: int, outputs: int, kernel: int = 3) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        left, up = self._added(x.shape[-1]), self._added(x.shape[-2])
        sides = [left // 2, left - left // 2, up // 2, up - up // 2]
        return self.conv(F.pad(x, sides))

    def _added(self, length: Any) -> Any:
        kernel = self.conv.kernel_size[0]
        if isinstance(length, Tensor):  # While TorchScript traces.
            count = (torch.ceil(length / 2) - 1) * 2 + kernel - length
            return torch.clamp(count, min=0).to(torch.int64)
        return max((math.ceil(length / 2) - 1) * 2 + kernel - length, 0)


class Mobile(nn.Module):
    """Two "same" convolutions; a ReLU and a quantizer stand between them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.down, self.head = Same(3, 8), Same(8, 16, 4), nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(self.stem(x).relu()).relu().mean((2, 3)))


def exported(
    model: nn.Module, x: Tensor, path: Path, target: str | None = "onnxruntime", **options: Any
) -> nn.Module:
    """Quantize a model, with weights that overflow on no CPU, and export it."""
    torch.manual_seed(0)
    config = torchq.recipes.int8(reduce_range=True)
    example = None if target is None else x
    model = calibrated(model.eval(), x, config=config, target=target, example=example)
    torchq.export_onnx(model, x, path, target=target, **{"dynamo": False, **options})
    return model


def pads(path: Path) -> list[list[int]]:
    """The pads of the convolutions in a file without Pad nodes."""
    model = load_model(path)
    assert not nodes_of(model, "Pad")
    return [list(attribute(node, "pads", ())) for node in nodes_of(model, "Conv")]


def images(*shape: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(shape)

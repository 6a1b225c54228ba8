"""Channel shuffles in files for ONNX Runtime."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq.onnx.ir import load_model, nodes_of

pytest.importorskip("onnxruntime")


class Shuffled(nn.Module):
    """A unit of ShuffleNetV2, whose halves are concatenated, shuffled and read."""

    def __init__(self, read: Callable[[Tensor], list[Tensor]], groups: int = 2) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 6, 1), nn.Conv2d(3, 6, 1)
        self.near, self.far = nn.LazyConv2d(5, 1), nn.LazyConv2d(5, 1)
        self.read, self.groups = read, groups

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.left(x).relu(), self.right(x).relu()], 1)
        n, c, h, w = x.shape
        x = x.view(n, self.groups, c // self.groups, h, w).transpose(1, 2).reshape(n, c, h, w)
        near, far = self.read(x)
        return self.near(near) + self.far(far)


def halves(x: Tensor) -> list[Tensor]:
    return list(x.chunk(2, 1))


def unequal(x: Tensor) -> list[Tensor]:
    return list(x.split([4, 8], 1))


def whole(x: Tensor) -> list[Tensor]:
    return [x, x]


#: Dimensions whose lengths are only known when the file runs.
OPEN: dict[str, dict[str, Any]] = {
    "none": {"dynamic_batch": False},
    "batch": {},
    "all": {"dynamic_shapes": {"x": {2: "height", 3: "width"}}},
}
#: With all lengths open, the exporter based on torch.export reads those of the input.
EXPORTS = [(name, False) for name in OPEN] + [(name, True) for name in ("none", "batch")]


@pytest.mark.parametrize(("open_lengths", "dynamo"), EXPORTS)
@pytest.mark.parametrize(
    ("read", "groups", "gathers"), [(halves, 2, 2), (unequal, 3, 2), (whole, 4, 1)]
)
def test_a_shuffle_is_a_gather_for_each_part_that_is_read(
    read: Callable[[Tensor], list[Tensor]],
    groups: int,
    gathers: int,
    open_lengths: str,
    dynamo: bool,
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(3, 3, 4, 5), tmp_path / "m.onnx"
    model = Shuffled(read, groups).eval()
    model(x)  # Makes the last layers.
    model = calibrated(model, x, target="onnxruntime", example=x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        options = OPEN[open_lengths]
        torchq.export_onnx(model, x, path, target="onnxruntime", dynamo=dynamo, **options)
    file = load_model(path)
    assert len(nodes_of(file, "Gather")) == gathers
    assert not nodes_of(file, "Transpose", "Reshape", "Slice", "Split")
    more = {"none": x, "batch": torch.randn(5, 3, 4, 5), "all": torch.randn(5, 3, 6, 3)}
    batches = [x, more[open_lengths]]
    assert torchq.verify_onnx(model, path, batches, progress=False).ok


class Unshuffled(nn.Module):
    """The same operators, which do not keep the height and width."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        n, c, h, w = x.shape
        x = x.view(n, 2, 4, h, w).transpose(1, 2).reshape(n, c, w, h)
        return self.last(x)


@pytest.mark.parametrize(("open_lengths", "dynamo"), EXPORTS)
def test_other_transpositions_stay(open_lengths: str, dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    x, path = torch.randn(2, 3, 4, 6), tmp_path / "m.onnx"
    model = calibrated(Unshuffled(), x, target="onnxruntime", example=x)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        options = OPEN[open_lengths]
        torchq.export_onnx(model, x, path, target="onnxruntime", dynamo=dynamo, **options)
    file = load_model(path)
    assert not [node for node in nodes_of(file, "Gather") if node.attributes["axis"].value == 1]
    assert torchq.verify_onnx(model, path, [x], progress=False).ok

"""Files that torchq 0.2.0 itself wrote are read: same quantizers, same ranges, same results.

tests/workflow/files/ holds what ``torchq.save`` of 0.2.0 wrote of the networks below, and in
``expected.pt`` what these computed then. The program that wrote them was run in a checkout of
0.2.0 and did for each network what ``write`` says.
"""

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.models import Conv1D, ConvNet
from torchq.errors import TorchqError
from torchq.workflow import embed_record_

FILES = Path(__file__).parent / "files"
IMAGES = torch.linspace(-2, 3, 2 * 3 * 8 * 8).sin().view(2, 3, 8, 8)
ROWS = torch.linspace(-3, 2, 2 * 5 * 8).cos().view(2, 5, 8)


class PooledTwice(nn.Module):
    """A tensor and what a pooling makes of it, twice, are concatenated, as in YOLO's SPP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(F.relu(self.first(x)))
        pooled = F.max_pool2d(x, 3, 1, 1)
        return torch.cat([x, pooled, pooled, pooled.relu()], 1)


class Sum(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) + self.b(x)


class TwoPlaces(nn.Module):
    """A network that stands in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Sum()
        self.again = self.net

    def forward(self, x: Tensor) -> Tensor:
        return self.again(x)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(x)[0][:, -1])


def calls() -> nn.Module:
    """Products whose weight is no attribute of a layer that torch has."""
    return nn.Sequential(Conv1D(6, 8), nn.GELU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 5))


def encoder() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)


#: Name -> the float network, what to call `quantize_` with beside it, and an input.
NETWORKS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], Tensor]] = {
    "concatenation": (PooledTwice, {"target": "onnxruntime", "example": IMAGES}, IMAGES),
    "addition": (Sum, {"target": "tensorrt"}, IMAGES),
    "two places": (TwoPlaces, {"target": "tensorrt"}, IMAGES),
    "residual": (ConvNet, {"target": "openvino", "example": IMAGES}, IMAGES),
    "calls": (calls, {"target": "onnxruntime", "example": ROWS}, ROWS),
    "encoder": (encoder, {"target": "onnxruntime", "example": ROWS}, ROWS),
    "recurrent": (Recurrent, {"config": torchq.recipes.int8()}, ROWS),
    "asymmetric": (ConvNet, {"config": torchq.recipes.int8(symmetric=False)}, IMAGES),
    "four bits": (ConvNet, {"config": torchq.recipes.w4a4()}, IMAGES),
}


def write(folder: Path) -> None:
    """Write the files, with the names that version 0.2.0 has."""
    expected = {}
    for name, (build, options, inputs) in NETWORKS.items():
        torch.manual_seed(0)
        model = build().eval()
        torchq.quantize_(model, **options, progress=False)
        if name in ("addition", "two places"):
            torchq.qat.share_range_(model, "*quant_add.*")
        torchq.calibrate(model, [inputs], progress=False)
        torchq.save(model, folder / f"{name}.pt")
        with torch.no_grad():
            expected[name] = model(inputs)
        if name == "addition":  # as trainers write it, with the model inside of another
            embed_record_(model)
            torch.save(nn.Sequential(model).state_dict(), folder / "folder.bin")
    torch.save(expected, folder / "expected.pt")


@pytest.mark.parametrize("name", NETWORKS)
def test_a_file_of_0_2_0_computes_what_it_did(name: str, tmp_path: Path) -> None:
    build, _, inputs = NETWORKS[name]
    expected = torch.load(FILES / "expected.pt", weights_only=True)[name]
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        loaded = torchq.load(build().eval(), FILES / f"{name}.pt").eval()
    # Its files had other codes than the model for a target, which it does not name.
    texts = [str(w.message) for w in seen if "its codes are those" in str(w.message)]
    assert bool(texts) is bool(torchq.swap.plan_of(loaded).operators)
    # Sums of floats differ between processors by some units in the last place.
    torch.testing.assert_close(loaded(inputs), expected, rtol=1e-5, atol=1e-6)
    torchq.save(loaded, tmp_path / "again.pt")
    again = torchq.load(build().eval(), tmp_path / "again.pt").eval()
    assert torch.equal(again(inputs), loaded(inputs))


@pytest.mark.filterwarnings("ignore:load. got a model that torchq 0.2.0")
def test_a_folder_of_weights_keeps_the_sharing() -> None:
    """The names have the path of the quantized part in front, and each slot has its own copy."""
    loaded = torchq.load(nn.Sequential(Sum()).eval(), FILES / "folder.bin")
    assert loaded[0].quant_add.input_quantizer is loaded[0].quant_add.other_quantizer
    expected = torch.load(FILES / "expected.pt", weights_only=True)["addition"]
    torch.testing.assert_close(loaded(IMAGES), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:load. got a model that torchq 0.2.0")
def test_slots_with_other_ranges_are_not_taken_for_one_quantizer(tmp_path: Path) -> None:
    data = torch.load(FILES / "addition.pt", weights_only=True)
    data["state_dict"]["quant_add.other_quantizer.amax"] = torch.tensor(7.0)
    torch.save(data, tmp_path / "m.pt")
    with pytest.raises(TorchqError, match=r"quant_add\.other_quantizer: is a quantizer of"):
        torchq.load(Sum().eval(), tmp_path / "m.pt")

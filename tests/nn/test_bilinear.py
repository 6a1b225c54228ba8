"""A module with two quantized inputs through the whole library: ``nn.Bilinear``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.functional import fake_quantize


class Pairing(nn.Module):
    """Two branches of different ranges that meet in a bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(6, 3)
        self.bilinear = nn.Bilinear(4, 3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.bilinear(self.left(x), 10 * self.right(y))
        return out


@pytest.fixture
def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, 5), "y": torch.randn(8, 6)}


@pytest.fixture
def model(batch: dict[str, Tensor]) -> Pairing:
    torch.manual_seed(0)
    model = Pairing().eval()
    torchq.quantize_(model)
    torchq.calibrate(model, [batch], progress=False)
    return model


def test_each_input_has_its_own_range(model: Pairing, batch: dict[str, Tensor]) -> None:
    layer: Any = model.bilinear
    ranges = layer.input1_quantizer.amax, layer.input2_quantizer.amax
    with torchq.disabled(model):
        a, b = model.left(batch["x"]), 10 * model.right(batch["y"])
    assert torch.equal(ranges[0], a.abs().max()) and torch.equal(ranges[1], b.abs().max())
    amax = layer.weight.detach().abs().amax((1, 2), keepdim=True)
    assert torch.equal(layer.weight_quantizer.amax, amax)
    weight = layer.weight_quantizer(layer.weight)
    a, b = fake_quantize(model.left(batch["x"]), ranges[0]), 10 * model.right(batch["y"])
    expected = nn.functional.bilinear(a, fake_quantize(b, ranges[1]), weight, layer.bias)
    assert torch.equal(model(**batch), expected)


@pytest.mark.parametrize("recipe", ["int8", "fp8", "mxfp8", "nvfp4", "w4a4"])
def test_every_recipe_selects_it(recipe: str, batch: dict[str, Tensor]) -> None:
    model = Pairing()
    report = torchq.quantize_(model, torchq.recipes.by_name(recipe))
    assert {d.name for d in report.replaced} == {"left", "right", "bilinear"}
    assert model(**batch).isfinite().all()


def test_a_file_loads_into_a_float_model(
    model: Pairing, batch: dict[str, Tensor], tmp_path: Path
) -> None:
    torchq.save(model, tmp_path / "m.pt")
    twin = torchq.load(Pairing().eval(), tmp_path / "m.pt")
    assert torch.equal(twin(**batch), model(**batch))
    torchq.restore_(model)
    assert type(model.bilinear) is nn.Bilinear
    assert [name for name, _ in model.bilinear.named_children()] == []


def test_deployed_models_simulate_it_and_say_so(model: Pairing, batch: dict[str, Tensor]) -> None:
    deployed = torchq.deploy(model, (batch["x"], batch["y"]))
    rows = {row.name: row for row in torchq.summary(deployed).layers}
    row = next(row for name, row in rows.items() if "bilinear" in name)
    assert row.kernel == "simulated" and row.note == "no integer kernel for QuantBilinear"
    assert torch.allclose(deployed(**batch), model(**batch), rtol=0.05, atol=0.05)


@pytest.mark.eight_bit_products
def test_it_exports_as_composed_operators(
    model: Pairing, batch: dict[str, Tensor], tmp_path: Path
) -> None:
    """Three Q/DQ pairs stand before the products that torch makes of it."""
    session_of = pytest.importorskip("onnxruntime").InferenceSession
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torchq.export_onnx(model, (batch["x"], batch["y"]), path)
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("DequantizeLinear") == 7, "2 for each Linear and 3 for the bilinear layer"
    session = session_of(str(path), providers=["CPUExecutionProvider"])
    names = [value.name for value in session.get_inputs()]
    feed = {name: tensor.numpy() for name, tensor in zip(names, batch.values(), strict=True)}
    got = torch.from_numpy(session.run(None, feed)[0])
    # One code of an input may round the other way: it moves a result by a hundredth of its range.
    assert (got - model(**batch)).abs().max() < 0.02 * model(**batch).abs().max()

"""A module with two quantized inputs through the whole library: ``nn.Bilinear``."""

import warnings
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import simulated
from tests.onnx.exported import run_file


class Pairing(nn.Module):
    """Two branches of different ranges that meet in a bilinear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(5, 4)
        self.right = nn.Linear(6, 3)
        self.bilinear = nn.Bilinear(4, 3, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        out: Tensor = self.bilinear(
            self.left(x),
            10 * self.right(y),
        )
        return out


@pytest.fixture
def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(8, 5), "y": torch.randn(8, 6)}


@pytest.fixture
def model(batch: dict[str, Tensor]) -> Pairing:
    torch.manual_seed(0)
    return simulated(Pairing().eval(), [batch])


@pytest.mark.parametrize("recipe", ["int8", "fp8", "mxfp8", "nvfp4", "w4a4"])
def test_every_recipe_selects_it(recipe: str, batch: dict[str, Tensor]) -> None:
    model = Pairing()
    report = torchq.quantize_(model, torchq.recipes.by_name(recipe))
    assert {d.name for d in report.replaced} == {"left", "right", "bilinear"}
    assert model(**batch).isfinite().all()


@pytest.mark.eight_bit_products
def test_deployed_models_simulate_it_and_say_so(
    model: Pairing, batch: dict[str, Tensor]
) -> None:
    deployed = torchq.deploy(model, (batch["x"], batch["y"]))
    rows = {row.name: row for row in torchq.summary(deployed).layers}
    row = next(row for name, row in rows.items() if "bilinear" in name)
    assert row.kernel == "simulated"
    assert row.note == "no integer kernel for QuantBilinear"
    assert torch.allclose(
        deployed(**batch),
        model(**batch),
        rtol=0.05,
        atol=0.05,
    )


@pytest.mark.slow
def test_it_exports_as_composed_operators(
    model: Pairing, batch: dict[str, Tensor], tmp_path: Path
) -> None:
    """Three Q/DQ pairs stand before the products that torch makes of it."""
    pytest.importorskip("onnxruntime")
    onnx = pytest.importorskip("onnx")
    path = tmp_path / "m.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torchq.export_onnx(model, (batch["x"], batch["y"]), path)
    kinds = [node.op_type for node in onnx.load(path).graph.node]
    assert kinds.count("DequantizeLinear") == 7, (
        "2 for each Linear and 3 for the bilinear layer"
    )
    (got,) = run_file(path, *batch.values(), optimize=True)
    # One code of an input may round the other way: it moves a result by a hundredth of its range.
    assert (got - model(**batch)).abs().max() < 0.02 * model(**batch).abs().max()

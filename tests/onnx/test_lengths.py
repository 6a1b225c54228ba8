"""The number of tokens is open in files of language models, and their outputs have names."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.roads.end import run_file

onnx = pytest.importorskip("onnx")

IDS = torch.randint(
    0,
    10,
    (2, 6),
    generator=torch.Generator().manual_seed(0),
)
EXAMPLE = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


class Tokens(nn.Module):
    """The mean of tokens that a mask keeps, with a table of positions for some numbers alone."""

    def __init__(self, positions: int | None = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.linear = nn.Linear(8, 4)
        self.positions = (
            None if positions is None else nn.Parameter(torch.randn(positions, 8))
        )

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> dict[str, Tensor]:
        embedded = self.embedding(input_ids)
        if self.positions is not None:
            embedded = embedded + self.positions
        kept = self.linear(embedded) * attention_mask[..., None]
        return {
            "states": kept,
            "mean": kept.sum(1) / attention_mask.sum(1, keepdim=True),
        }


def quantized(model: nn.Module) -> nn.Module:
    torchq.quantize_(model, target="onnxruntime", example=EXAMPLE, progress=False)
    torchq.calibrate(model, [EXAMPLE], progress=False)
    return model.eval()


def input_shapes(path: Path) -> list[list[object]]:
    inputs = onnx.load(str(path)).graph.input
    shapes = [value.type.tensor_type.shape.dim for value in inputs]
    return [[dim.dim_param or dim.dim_value for dim in shape] for shape in shapes]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [False, True])
def test_ids_and_masks_may_be_of_any_length(dynamo: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = quantized(Tokens())
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, EXAMPLE, path, dynamo=dynamo, progress=False)
    assert input_shapes(path) == 2 * [["batch", "length"]]
    longer = {name: torch.cat([tensor, tensor], 1) for name, tensor in EXAMPLE.items()}
    with torch.no_grad():
        expected = model(**longer)["mean"]
    results = run_file(path, longer)
    # Float sums in another order.
    torch.testing.assert_close(results[1], expected, rtol=0, atol=1e-6)


def test_outputs_have_the_names_that_the_model_gives_them(tmp_path: Path) -> None:
    model = quantized(Tokens())
    torchq.export_onnx(
        model, EXAMPLE, tmp_path / "net.onnx", dynamo=False, progress=False
    )
    outputs = onnx.load(str(tmp_path / "net.onnx")).graph.output
    assert [value.name for value in outputs] == ["states", "mean"]


def test_lengths_that_the_model_fixes_stay_fixed_with_a_sentence(
    tmp_path: Path,
) -> None:
    model = quantized(Tokens(positions=IDS.shape[1]))
    path = tmp_path / "net.onnx"
    with pytest.warns(
        UserWarning, match="takes no other number of tokens than the example has"
    ):
        torchq.export_onnx(model, EXAMPLE, path, dynamo=False, progress=False)
    assert input_shapes(path) == 2 * [["batch", 6]]
    assert torchq.verify_onnx(model, path, [EXAMPLE], progress=False).ok


def test_no_open_lengths_on_request(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    options = {"dynamic_shapes": {}, "dynamo": False, "progress": False}
    torchq.export_onnx(quantized(Tokens()), EXAMPLE, path, **options)
    assert input_shapes(path) == 2 * [["batch", 6]]


class Attends(nn.Module):
    """Products of two tensors that stay float, beside those of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 8)
        self.linear = nn.Linear(8, 8)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states = self.linear(self.embedding(input_ids)) * attention_mask[..., None]
        return (states @ states.transpose(1, 2)).softmax(-1)


@pytest.mark.parametrize("dynamo", [False, True])
def test_the_share_on_integers_is_that_of_the_plan(
    dynamo: bool, tmp_path: Path
) -> None:
    model = Attends()
    plan = torchq.quantize_(model, example=EXAMPLE, progress=False)
    torchq.calibrate(model, [EXAMPLE], progress=False)
    path = tmp_path / "net.onnx"
    written = torchq.export_onnx(
        model.eval(), EXAMPLE, path, dynamo=dynamo, progress=False
    )
    assert plan.share is not None
    assert written.coverage is not None
    assert written.coverage.share == pytest.approx(plan.share.quantized)
    assert torchq.inspect_onnx(path).coverage == written.coverage

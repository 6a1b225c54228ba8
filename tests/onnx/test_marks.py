"""What marks the quantizers of a graph: copies and buffers, which leave nothing behind."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import simulated
from torchq.onnx import marks
from torchq.workflow import quantizers

pytest.importorskip("onnxscript")
pytestmark = (
    pytest.mark.slow
)  # torch's exporter takes a second for the smallest network
X = torch.rand(2, 4, generator=torch.Generator().manual_seed(0))


class Twice(nn.Module):
    """A layer that is called twice; where ``drops``, nothing reads its first result."""

    def __init__(self, drops: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.drops = drops

    def forward(self, x: Tensor) -> Tensor:
        first: Tensor = self.layer(x)
        second: Tensor = self.layer(x + 1)
        return second if self.drops else first + second


def quantizer_names(path: Path) -> set[str]:
    onnx = pytest.importorskip("onnx")
    names = {node.name.rpartition("/")[0] for node in onnx.load(str(path)).graph.node}
    return {name for name in names if "quantizer" in name}


def exported(model: nn.Module, path: Path) -> set[str]:
    torchq.export_onnx(model, X, path, dynamo=True, progress=False)
    return quantizer_names(path)


def test_an_export_leaves_a_model_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = simulated(Twice(False).eval(), [X])
    keys = list(model.state_dict())
    attributes = {name: set(vars(q)) for name, q in quantizers(model).items()}
    path = tmp_path / "copies.onnx"
    names = exported(model, path)
    assert torchq.verify_onnx(model, path, [X], progress=False).ok
    assert names == {
        "layer.weight_quantizer",
        "layer.input_quantizer",
        "layer.input_quantizer#2",
    }
    assert list(model.state_dict()) == keys
    assert {n: set(vars(q)) for n, q in quantizers(model).items()} == attributes
    # A version of torch that notes no modules: then each mark is an operator of its own.
    monkeypatch.setattr(marks, "_SCOPES", "no such key")
    assert exported(model, tmp_path / "operators.onnx") == names


def test_a_call_whose_result_nothing_reads_takes_no_name_of_another(
    tmp_path: Path,
) -> None:
    model = simulated(Twice(True).eval(), [X])
    names = exported(model, tmp_path / "dropped.onnx")
    assert "layer.input_quantizer#2" in names
    assert "layer.input_quantizer" not in names


def test_a_weight_that_is_computed_is_marked_where_it_is_computed(
    tmp_path: Path,
) -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    model = simulated(
        nn.Sequential(layer, nn.ReLU(), nn.Linear(3, 2)).eval(),
        [X],
    )
    names = exported(model, tmp_path / "computed.onnx")
    assert {"0.weight_quantizer", "2.weight_quantizer"} <= names


class BatchAsNumber(nn.Module):
    """Attention of stored queries that asks for the batch by ``len``, and a layer called twice.

    torch's exporter then falls back to tracing bytecode, which names modules in a way of its own.
    """

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, 3, 8))
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        queries = self.queries.expand(len(x), -1, -1)
        attended, _ = self.attention(queries, x, x, need_weights=False)
        once: Tensor = self.head(self.norm(attended))
        twice: Tensor = self.head(once)
        return twice


def test_a_forward_that_asks_for_the_batch_by_len_keeps_it_open(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batches = [torch.randn(2, 5, 8), torch.randn(4, 5, 8)]
    model = simulated(BatchAsNumber().eval(), batches)
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, batches[0], path, dynamo=True, progress=False)
    names = quantizer_names(path)
    assert {"head.input_quantizer", "head.input_quantizer#2"} <= names
    assert torchq.verify_onnx(model, path, batches, progress=False).ok


def test_an_error_of_torch_is_told_in_full(tmp_path: Path) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.layer(row) for row in x])

    model = simulated(Rows().eval(), [X])
    with pytest.warns(UserWarning, match="inferred a static shape of 2 .* open batch"):
        torchq.export_onnx(model, X, tmp_path / "net.onnx", dynamo=True, progress=False)


class Table(nn.Module):
    """A layer that reads a table which is no parameter, and which a trace takes for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.position = nn.Linear(4, 4)
        self.table = torch.randn(3, 4)
        self.register_buffer("buffer", torch.randn(3, 4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        bias = self.position(self.table) + self.position(self.buffer)
        return self.layer(x) + bias.sum(0)


@pytest.mark.parametrize("dynamo", [False, True])
def test_what_reads_a_constant_keeps_its_quantizers(
    dynamo: bool, tmp_path: Path
) -> None:
    model = simulated(Table().eval(), [X])
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, X, path, dynamo=dynamo, progress=False)
    assert torchq.verify_onnx(model, path, [X], progress=False).ok

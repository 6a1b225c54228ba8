"""The rows of operators: each is found by its spellings, and routed wherever a target wants it."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError
from torchq.graph import (
    KINDS,
    OPERATORS,
    Operator,
    effects_of,
    operator_named,
    operator_of,
)
from torchq.graph.operators import add_operator

X = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))


def test_every_spelling_finds_its_row() -> None:
    for row in (OPERATORS[name] for name in OPERATORS):
        assert operator_named(row.name) is row
        for target in (*row.functions, *row.methods):
            assert operator_of(target) is row, (row.name, target)
        assert not row.module or hasattr(torchq.nn, row.module), row.name


def test_names_of_runs_and_of_aten_are_the_same_operator() -> None:
    names = ("add_", "__iadd__", "iadd", "add.Tensor")
    assert {operator_named(name) for name in names} == {OPERATORS["add"]}
    assert operator_of(nn.ReLU6()) is operator_of(F.relu6)
    assert "max" in effects_of("_max_pool2d")
    assert not effects_of("unknown")
    with pytest.raises(ConfigError, match="operator 'add' is registered already"):
        add_operator(Operator("add"))


class Maxout(nn.Module):
    """The larger one of two convolutions, beside a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(4, 4, 1)
        self.second = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.maximum(
            self.first(x),
            self.second(x),
        )
        return y + x.maximum(y)


def quantized(target: str) -> Any:
    torch.manual_seed(0)
    model = Maxout().eval()
    torchq.quantize_(model, target=target, example=X)
    torchq.calibrate(model, [X], progress=False)
    return model


def test_maximum_is_quantized_for_runtimes_that_take_it(tmp_path: Path) -> None:
    model = quantized("qnn")
    names = [n for n, _ in model.named_children() if n.startswith("quant_")]
    assert names == ["quant_maximum", "quant_maximum_1", "quant_add"]
    # Names of places in the code that files hold are not moved by new operators.
    assert model.replacements["@0"] == "quant_add"
    first = model.quant_maximum
    a = model.first(X)
    b = model.second(X)
    expected = torch.maximum(
        first.input_quantizer(a),
        first.other_quantizer(b),
    )
    assert torch.equal(first(a, b), expected)
    torchq.save(model, tmp_path / "m.pt")
    assert torch.equal(
        torchq.load(Maxout().eval(), tmp_path / "m.pt")(X),
        model(X),
    )
    # Its kernel is a float one.
    assert not hasattr(quantized("onnxruntime"), "quant_maximum")


@pytest.mark.eight_bit_products
def test_a_deployed_maximum_computes_what_was_simulated() -> None:
    model = quantized("qnn")
    deployed = torchq.deploy(model, X, progress=False)
    assert (deployed(X) - model(X)).norm() < 0.02 * model(X).norm()  # codes at a tie


@pytest.mark.slow
@pytest.mark.parametrize("dynamo", [False, True])
def test_a_file_holds_the_maximum_between_quantizers(
    dynamo: bool, tmp_path: Path
) -> None:
    onnx = pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    model = quantized("qnn")
    path = tmp_path / "m.onnx"
    torchq.export_onnx(model, X, path, target="qnn", dynamo=dynamo, progress=False)
    nodes = onnx.load(path).graph.node
    made_by = {output: node.op_type for node in nodes for output in node.output}
    inputs = [
        made_by[name] for node in nodes if node.op_type == "Max" for name in node.input
    ]
    assert inputs == ["DequantizeLinear"] * 4
    assert torchq.verify_onnx(model, path, [X]).ok


def test_kinds_are_the_words_of_targets() -> None:
    assert {"add", "pool", "attention", "maximum"} <= set(KINDS)

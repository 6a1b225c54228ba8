"""Activations of 8 and 16 bits in one file for a Snapdragon: each operator has one width."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from tests.swap.test_heads import Ssd
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.formats import integer_format
from torchq.functional import QParams
from torchq.onnx.ir import data_type, load_model
from torchq.runtimes import Qnn

pytest.importorskip("onnx")
pytest.importorskip("onnx_ir")

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
WIDE = QuantDescriptor(num_bits=16, unsigned=True, symmetric=False)


class Net(nn.Module):
    """A sum, a concatenation, a pool and a head: each joins tensors of several layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Conv2d(8, 8, 3, padding=1)
        self.d = nn.Conv2d(16, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        y = self.b(x).relu()
        z = x + self.c(y)
        z = self.pool(torch.cat([z, y], 1))
        return self.head(self.d(z).relu().mean((2, 3)))


def mixed(names: Sequence[str]) -> nn.Module:
    """Return a calibrated network in which some layers read 16 bits."""
    torch.manual_seed(0)
    config = config_of(names)
    return calibrated(Net().eval(), X, config=config, target="qnn", example=X)


def config_of(names: Sequence[str]) -> QuantConfig:
    """Return the recipe of the runtime, by which some layers read 16 bits."""
    rules = [Rule(name, input=WIDE, weight=QuantDescriptor(axis=0)) for name in names]
    return QuantConfig((*Qnn().recipe().rules, *rules), name="mixed")


@pytest.mark.parametrize("wide", [["a"], ["b"], ["c"], ["d", "head"]])
def test_an_operator_has_one_width_and_no_code_changes(
    wide: list[str], tmp_path: Path
) -> None:
    path = tmp_path / "m.onnx"
    model = mixed(wide)
    torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    graph = load_model(path)
    nodes = [node for node in graph.graph if node.op_type == "QuantizeLinear"]
    actual = {str(node.name): operator_widths(node) for node in nodes}
    assert {8, 16} == set().union(*actual.values())
    assert all(len(bits) <= 1 for bits in actual.values()), actual
    assert torchq.verify_onnx(model, path, [X], num_batches=1, progress=False).ok


def operator_widths(quantize: Any) -> set[int]:
    """Return the widths of what stands directly around the operators in front of a quantizer."""
    value = quantize.inputs[0]
    if value.producer() is None or value.producer().op_type == "DequantizeLinear":
        return set()
    bits = {int(data_type(quantize.inputs[2]).bitwidth)}
    pending = [value]
    while pending:
        node = pending.pop().producer()
        if node is None:
            continue
        if node.op_type == "DequantizeLinear":
            if node.inputs[0].producer() is not None:  # no weight
                bits.add(int(data_type(node.inputs[2]).bitwidth))
            continue
        pending += [v for v in node.inputs if v is not None]
    return bits


def test_all_that_reads_a_tensor_has_the_width_of_the_widest() -> None:
    """The layer ``c`` and a concatenation read one tensor; the other operands have 8 bits."""
    plan = torchq.plan(
        Net().eval(),
        config_of(["c"]),
        target="qnn",
        example=X,
    )
    bits = {d.name: d.input.num_bits for d in plan.replaced if d.input is not None}
    assert bits["c"] == bits["quant_cat"] == 16
    assert bits["a"] == bits["b"] == bits["head"] == 8
    # One range, so that one QuantizeLinear reads the tensor.
    shared = [group for group in plan.shared if "c.input_quantizer" in group]
    assert shared
    assert any("quant_cat" in slot for slot in shared[0])


@pytest.mark.parametrize("zero_point", [0, 1, 77, 128, 255])
def test_the_pair_of_16_bits_moves_no_border_between_codes(zero_point: int) -> None:
    """Values as dense as float32 allows around each border, and codes of 8 bits themselves."""
    scale = torch.tensor(2.0**-4)  # exact, so that nothing but the borders rounds
    narrow = QParams(
        scale, torch.tensor(float(zero_point)), integer_format(8, unsigned=True)
    )
    wide = QParams(
        scale / 257,
        torch.tensor(257.0 * zero_point),
        integer_format(16, unsigned=True),
    )
    codes = torch.arange(256.0)
    borders = narrow.dequantize(narrow.centered(codes)) + scale / 2
    x = torch.cat([borders * (1 + sign * 2e-6) for sign in (-1, 1)])
    rounded = wide.dequantize(wide.round(wide.scaled(x)))
    expected = narrow.codes(narrow.scaled(x))
    assert torch.equal(narrow.codes(narrow.scaled(rounded)), expected)
    values = narrow.dequantize(narrow.centered(codes))
    assert torch.equal(
        wide.codes(wide.scaled(values)),
        257 * codes,
    )


def test_the_last_layers_of_a_detector_have_16_bits_where_nothing_is_float() -> None:
    with torch.no_grad():
        model = Ssd().eval()
    x = torch.randn(1, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    plan = torchq.plan(model, target="qnn", example=x)
    bits = {d.name: d.input.num_bits for d in plan.replaced if d.input is not None}
    assert bits["boxes.0"] == bits["scores.2"] == 16
    assert bits["levels.stem.0"] == 8
    rows = {d.name: d for d in plan.replaced}
    assert rows["boxes.0"].output is not None
    assert rows["boxes.0"].output.num_bits == 16
    assert "boxes or scores" in rows["boxes.0"].note
    named = QuantConfig(
        (*Qnn().recipe().rules, Rule("boxes.0", input=QuantDescriptor()))
    )
    chosen = torchq.plan(model, named, target="qnn", example=x)
    (row,) = (d for d in chosen.replaced if d.name == "boxes.0")
    assert row.input is not None
    assert "boxes or scores" not in row.note


def test_mixed_precision_pays_twice_for_inputs_of_16_bits() -> None:
    """Multiplications of 8 and 16 bits cost twice those of 8 and 8; a budget between mixes them."""
    torch.manual_seed(0)
    costs = [
        torchq.mixed_precision(
            Net().eval(),
            [X],
            budget={"bit_operations": 1e12},
            formats=formats,
            progress=False,
        ).costs["bit_operations"]
        for formats in (["w8a8"], ["w8a16"])
    ]
    assert costs[1] == 2 * costs[0]
    chosen = torchq.mixed_precision(
        Net().eval(),
        [X],
        budget={"bit_operations": 1.5 * costs[0]},
        formats=["w8a8", "w8a16"],
        progress=False,
    )
    assert {choice.format for choice in chosen.choices} == {"w8a8", "w8a16"}
    assert chosen.costs["bit_operations"] <= 1.5 * costs[0]


def test_mixed_widths_run_whole_on_the_emulator(tmp_path: Path) -> None:
    if not Qnn().here:
        pytest.skip("onnxruntime-qnn is not here")
    path = tmp_path / "m.onnx"
    for wide in (["a"], ["b"], ["c"], ["d", "head"]):
        model = mixed(wide)
        torchq.export_onnx(model, X, path, dynamo=False, progress=False)
        report = torchq.verify_onnx(model, path, [X], target="qnn", progress=False)
        assert report.ok, str(report)

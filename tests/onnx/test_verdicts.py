"""The verdicts of ``verify_onnx``: the file, the session of a user, open dimensions; and damage."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import simulated
from torchq.formats import UINT8
from torchq.functional import QParams
from torchq.onnx.ir import add_initializer, load_model, nodes_of, save_model, value_of
from torchq.onnx.qdq import qparams_of
from torchq.onnx.verify import exposed
from torchq.onnx.verify.exposed import Behind
from torchq.onnx.verify.report import Codes
from torchq.onnx.verify.verify import at_ties

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


class Moved(nn.Module):
    """A BatchNorm whose input is transposed, which ONNX Runtime folds into the convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3)
        self.b = nn.Conv2d(8, 8, 3)
        self.c = nn.Conv2d(8, 4, 1)
        self.norm_a = norm(8)
        self.norm_b = norm(8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_a(self.a(x)).relu()
        y = (y.permute(0, 2, 3, 1) * 2).permute(0, 3, 1, 2)
        return self.c(self.norm_b(self.b(y)).relu())


def norm(channels: int) -> nn.BatchNorm2d:
    made = nn.BatchNorm2d(channels)
    made.running_mean = torch.randn(channels)
    made.running_var = torch.rand(channels) + 0.3
    made.weight.data.uniform_(0.5, 2)
    return made


def store_floats(path: Path, quantizer: str) -> None:
    """Let a file hold the numbers of a weight in float, into which ONNX Runtime folds constants."""
    file = load_model(path)
    for convolution in nodes_of(file, "Conv"):
        dequantize = convolution.inputs[1].producer()
        if dequantize is not None and dequantize.name.startswith(quantizer):
            qparams = qparams_of(dequantize)
            values = qparams.dequantize(
                qparams.centered(value_of(dequantize.inputs[0]))
            )
            name = f"{quantizer}/float weight"
            convolution.replace_input_with(1, add_initializer(file.graph, name, values))
    save_model(file, path)


def test_a_session_that_computes_something_else_is_no_agreement(tmp_path: Path) -> None:
    """The file was proved, and a user's session was 48 dB off: its optimiser drops a quantizer."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 16, 16)
    model = simulated(
        Moved().eval(),
        [x],
        target="onnxruntime",
        example=x,
    )
    with warnings.catch_warnings():  # The BatchNorms are not fused, as export says.
        warnings.simplefilter("ignore")
        torchq.export_onnx(model, x, tmp_path / "m.onnx", dynamo=False, progress=False)
    report = torchq.verify_onnx(
        model,
        tmp_path / "m.onnx",
        [x],
        progress=False,
    )
    assert report.ok
    for layer in "ab":
        store_floats(tmp_path / "m.onnx", f"{layer}.weight_quantizer")
    report = torchq.verify_onnx(
        model,
        tmp_path / "m.onnx",
        [x],
        progress=False,
    )
    written, session, size = report.verdicts
    assert written.ok
    assert not report.ok
    assert session.ok is False
    assert "it has no codes of " in session.reason
    assert "dB from that of the file as it is written" in session.reason
    assert size.what == "another length of batch (dimension 0 of x)"
    assert f"  {session}" in str(report).splitlines()


def plain_file(tmp_path: Path, batch: Any = None) -> tuple[Any, Path, Tensor]:
    """A model of two layers, its file, and a batch."""
    torch.manual_seed(0)
    x = torch.randn(4, 8) if batch is None else batch
    model = simulated(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval(), [x]
    )
    torchq.export_onnx(model, x, tmp_path / "m.onnx", progress=False)
    return model, tmp_path / "m.onnx", x


def test_a_file_without_integers_is_no_file_of_a_quantized_model(
    tmp_path: Path,
) -> None:
    model, path, x = plain_file(tmp_path)
    floats = copy.deepcopy(model)
    torchq.restore_(floats)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            floats,
            (x,),
            str(path),
            dynamo=False,
            input_names=["input"],
        )
    # Nearly the same numbers, so that outputs alone do not tell.
    report = torchq.verify_onnx(model, path, [x * 1e-3], progress=False)
    assert not report.ok
    assert (
        report.verdicts[0].reason
        == "the model is quantized, and the file has no integers"
    )


class Drawing(nn.Module):
    """A layer in front of which a forward adds noise, in eval mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.last(x + torch.randn(x.shape))


def test_a_model_that_draws_random_numbers_is_said_to_differ_from_itself(
    tmp_path: Path,
) -> None:
    x = torch.randn(4, 8)
    model = simulated(Drawing().eval(), [x])
    path = tmp_path / "m.onnx"
    torchq.export_onnx(model, x, path, progress=False)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert not report.ok
    assert report.hint.startswith(
        "last.input_quantizer reads other values in a second run of the model"
    )


def test_a_file_that_holds_one_length_for_an_open_one_is_named(tmp_path: Path) -> None:
    """A Gather of the four rows of the example stands in front of the output."""
    model, path, x = plain_file(tmp_path)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok
    file = onnx.load(path)
    output = file.graph.output[0].name
    node = next(n for n in file.graph.node if output in n.output)
    node.output[0] = "all"
    rows = onnx.numpy_helper.from_array(torch.arange(4).numpy(), "rows")
    file.graph.initializer.append(rows)
    file.graph.node.append(onnx.helper.make_node("Gather", ["all", "rows"], [output]))
    onnx.save(file, path)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert [verdict.ok for verdict in report.verdicts] == [True, True, False]
    assert not report.ok


def test_a_length_that_the_model_refuses_is_said_to_be_not_run(tmp_path: Path) -> None:
    model, path, x = plain_file(tmp_path)

    def refuse(module: nn.Module, args: tuple[Tensor, ...]) -> None:
        if args[0].shape[0] != 4:
            raise ValueError("four rows")

    model.register_forward_pre_hook(refuse)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert report.ok
    assert report.verdicts[2].ok is None
    assert "not run: the model refuses it (ValueError: four rows)" in str(report)


def test_results_that_are_not_finite_are_differences(tmp_path: Path) -> None:
    """They ended in a math domain error."""
    model, path, x = plain_file(tmp_path)
    file = onnx.load(path)
    output = file.graph.output[0].name
    node = next(n for n in file.graph.node if output in n.output)
    node.output[0] = "finite"
    value = onnx.numpy_helper.from_array(torch.tensor(torch.nan).numpy(), "nan")
    file.graph.initializer.append(value)
    file.graph.node.append(onnx.helper.make_node("Mul", ["finite", "nan"], [output]))
    onnx.save(file, path)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert not report.ok
    assert report.outputs[0].sqnr_db == -math.inf


@pytest.mark.parametrize(
    ("moved", "ok"),
    [((7,), True), ((7, 90), False), ((), True), ((0,), False), ((127,), False)],
    ids=str,
)
@pytest.mark.parametrize("share", [exposed.APPROXIMATE_SHARE, exposed.MERGED_SHARE])
def test_a_function_of_codes_may_have_one_code_at_a_border(
    moved: tuple[int, ...], ok: bool, share: float
) -> None:
    """A small tensor holds the same input code many times, so its result differs as often.

    A product of codes with a function of the same codes is such a function. The first and the last
    code are those of clipped values, which lie at no border.
    """
    expected = torch.arange(128.0).repeat(10)
    actual = expected.clone()
    for code in moved:
        actual[expected == code] += 1
    codes = Codes("gate_quantizer", "", Behind((), share), {})
    codes.add(expected, actual, torch.float32)
    assert codes.result().ok is ok
    behind_a_layer = Codes("gate_quantizer", "", Behind(("conv",), share), {})
    behind_a_layer.add(expected, actual, torch.float32)
    assert behind_a_layer.result().ok is (not moved)


@pytest.mark.parametrize(("by", "ok"), [(1.0, True), (-1.0, True), (2.0, False)])
def test_values_halfway_between_two_codes_may_have_either(by: float, ok: bool) -> None:
    values = torch.arange(0.0, 100.0, 0.25)
    at_tie = at_ties(values * 3, QParams(torch.tensor(3.0), torch.tensor(5), UINT8))
    assert torch.equal(at_tie, values % 1 == 0.5)
    expected = values.round()
    codes = Codes("gate_quantizer", "", Behind((), exposed.AVERAGE_SHARE), {})
    codes.add(expected, expected + by * at_tie, torch.float32, at_tie)
    assert codes.result().ok is ok
    elsewhere = Codes("gate_quantizer", "", Behind((), exposed.AVERAGE_SHARE), {})
    elsewhere.add(expected, expected + by * at_tie, torch.float32, ~at_tie)
    assert not elsewhere.result().ok


class Larger(nn.Module):
    """An image that is made larger between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.codes = torchq.nn.QuantIdentity()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        x = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
        return self.codes(self.last(x))


def test_values_between_neighbours_may_have_either_code_at_ties(tmp_path: Path) -> None:
    """Means of codes lie halfway between two where these have the scale of those."""
    torch.manual_seed(0)
    x = torch.randn(4, 3, 32, 32)
    model = Larger().eval()
    torchq.quantize_(model, target="onnxruntime", example=x)
    torchq.calibrate(model, [x], progress=False)
    model.last.input_quantizer.amax.copy_(model.first.output_quantizer.amax)
    path = tmp_path / "m.onnx"
    torchq.export_onnx(model, x, path, progress=False)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    (row,) = [row for row in report.layers if row.name == "last.input_quantizer"]
    assert row.differ > exposed.APPROXIMATE_SHARE * row.elements + 3
    assert report.ok, str(report)


class Rare(nn.Module):
    """A detector of something rare: its only result is a probability of about e to the -10."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 1, 8)
        nn.init.constant_(self.conv.bias, -10.0)

    def forward(self, x: Tensor) -> Tensor:
        return torch.sigmoid(self.conv(x))


@pytest.mark.parametrize(("added", "ok"), [(0.0, True), (1e-6, False)])
def test_a_small_probability_is_as_right_as_the_functions_of_libraries(
    added: float, ok: bool, tmp_path: Path
) -> None:
    """They are right to a unit in the last place of 1, not of a small result."""
    torch.manual_seed(0)
    x = torch.randn(1, 3, 8, 8)
    model = simulated(Rare().eval(), [x])
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, x, path, progress=False)
    file = onnx.load(path)
    result = file.graph.output[0].name
    producer = next(n for n in file.graph.node if n.output[0] == result)
    producer.output[0] = "probability"
    number = onnx.numpy_helper.from_array(np.float32(5e-8 + added), "number")
    file.graph.initializer.append(number)
    file.graph.node.append(
        onnx.helper.make_node("Add", ["probability", "number"], [result])
    )
    onnx.save(file, path)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok is ok

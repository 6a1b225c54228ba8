"""How much of a file computes on integers, and what is said where that is little."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.onnx.coverage import EXAMPLE_LENGTHS, Coverage
from torchq.onnx.ir import load_model, onnx_ir
from torchq.onnx.qdq import write_record

pytest.importorskip("onnx")
X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def quantized(*layers: nn.Module) -> nn.Sequential:
    """Return layers of which the first one has a third of the multiply-adds of the last one."""
    model = nn.Sequential(*layers).eval()
    torchq.quantize_(model, progress=False)
    torchq.calibrate(model, [X], correct=False, progress=False)
    return model


def exported(model: nn.Module, path: Path) -> Coverage:
    # This exporter writes the shapes of all values.
    report = torchq.export_onnx(model, X, path, dynamo=True, progress=False)
    assert report.coverage == Coverage.of(load_model(path))
    assert str(report).splitlines()[0].endswith(str(report.coverage))
    return report.coverage


def test_all_products_of_codes_count(tmp_path: Path) -> None:
    model = quantized(
        nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 9, 3, padding=1)
    )
    actual = exported(model, tmp_path / "net.onnx")
    assert (actual.share, actual.layers, actual.on_integers, actual.reason) == (
        1.0,
        2,
        2,
        "",
    )


def test_products_are_weighed_by_their_number(tmp_path: Path) -> None:
    model = quantized(
        nn.Conv2d(3, 3, 3, padding=1), nn.ReLU(), nn.Conv2d(3, 9, 3, padding=1)
    )
    with torchq.disabled(model, "0.*"):
        actual = exported(model, tmp_path / "net.onnx")
    assert actual.share == 0.75
    assert len(actual.float_weights) == 1
    assert actual.reason.startswith("1 of its layers read a weight in float (")


def test_a_batchnorm_that_was_not_folded_keeps_its_layer_in_float(
    tmp_path: Path,
) -> None:
    model = quantized(
        nn.Conv2d(3, 3, 3),
        nn.BatchNorm2d(3),
    )
    with torch.no_grad():
        model[1].running_var.fill_(2.0)
    pattern = (
        r"stand in front of a BatchNorm that was not folded .* so net\.onnx computes in float: "
        r".*torchq\.fuse_"
    )
    with pytest.warns(UserWarning, match=pattern):
        report = torchq.export_onnx(
            model, X, tmp_path / "net.onnx", dynamo=True, progress=False
        )
    assert report.coverage is not None
    assert report.coverage.share == 0.0


@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt"])
def test_batchnorms_are_said_once_where_the_runtime_says_it(
    target: str, tmp_path: Path
) -> None:
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.ReLU()).eval()
    torchq.quantize_(model, target=target, example=X, progress=False)
    torchq.calibrate(model, [X], correct=False, progress=False)
    path = tmp_path / "net.onnx"
    with pytest.warns(UserWarning, match="BatchNorm") as caught:
        written = torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    (said,) = [str(one.message) for one in caught if "BatchNorm" in str(one.message)]
    assert said.startswith(f"export_onnx(target={target!r})")
    assert "torchq.fuse_" in said
    assert written.coverage is not None
    assert written.coverage.share == (0.0 if target == "onnxruntime" else 1.0)
    verified = torchq.verify_onnx(model, path, [X], progress=False)
    assert verified.coverage == torchq.inspect_onnx(path).coverage == written.coverage


class Joined(nn.Module):
    """Two branches, whose codes are concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(3, 8, 1), nn.Conv2d(3, 8, 1)
        self.head = nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.cat([self.left(x).relu(), self.right(x).relu()], 1))


def test_a_file_for_another_runtime_is_inspected_where_this_one_cannot_optimise_it(
    tmp_path: Path,
) -> None:
    """ONNX Runtime has no kernel for concatenated codes with scales in float16."""
    model = Joined().eval()
    torchq.quantize_(model, target="tensorrt", example=X)
    torchq.calibrate(model, [X], progress=False)
    for quantizer in torchq.workflow.quantizers(model).values():
        quantizer.mode = "quantize"  # Calibration may leave the concatenation in float.
    path = tmp_path / "net.onnx"
    with pytest.warns(UserWarning, match="8-bit convolutions want >= 16"):
        torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    found = torchq.inspect_onnx(path)
    assert found.nodes == ()
    first, second, *_ = str(found).splitlines()
    assert first.endswith("a file for tensorrt; ONNX Runtime cannot optimise it")
    assert second.startswith("as written, 100.0% of the multiply-adds read integers")
    with pytest.raises(torchq.errors.ExportError, match="cannot run the model"):
        torchq.inspect_onnx(path, target="onnxruntime")


# torch deprecates this exporter.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_runtime_of_a_file_of_another_tool_can_be_said(tmp_path: Path) -> None:
    model = quantized(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1))
    path = tmp_path / "net.onnx"
    torch.onnx.export(model.eval(), X, path, dynamo=False, opset_version=13)
    found = torchq.inspect_onnx(path, target="tensorrt")
    assert found.coverage is not None and found.coverage.share == 1.0
    assert found.is_for_another
    # The first convolution, in front of the norm, has 27 of 35 multiply-adds.
    for target in (None, "onnxruntime"):
        plain = torchq.inspect_onnx(path, target=target).coverage
        assert plain is not None and plain.share == pytest.approx(8 / 35)
    with pytest.raises(torchq.errors.ConfigError, match="unknown target 'tensor'"):
        torchq.inspect_onnx(path, target="tensor")


@pytest.mark.parametrize(
    ("off", "reason"),
    [("*weight_quantizer", "weight in float"), ("*input_quantizer", "")],
)
def test_a_file_in_float_is_said_with_its_reason(
    off: str, reason: str, tmp_path: Path
) -> None:
    model = quantized(nn.Conv2d(3, 3, 3))
    path = tmp_path / "net.onnx"
    with torchq.disabled(model, off):
        if reason:
            with pytest.warns(
                UserWarning, match=f"^export_onnx: .*{reason}.*computes in float: 0"
            ):
                torchq.export_onnx(model, X, path, dynamo=False, progress=False)
        else:  # Weights alone are a choice.
            torchq.export_onnx(model, X, path, dynamo=False, progress=False)
        report = torchq.verify_onnx(model, path, [X], progress=False)
    lines = str(report).splitlines()
    assert "the simulation beside the float model: " in lines[1]
    assert lines[2].startswith(
        "  0.0% of the multiply-adds read integers; its tensors have "
    )
    assert lines[3].startswith("  this file computes in float: 1 of its layers read ")


def test_a_float_file_is_inspected_in_a_few_lines(tmp_path: Path) -> None:
    model = nn.Sequential(*(nn.Conv2d(3, 3, 3, padding=1) for _ in range(9))).eval()
    with pytest.warns(UserWarning, match="no active quantizer"):
        torchq.export_onnx(
            model, X, tmp_path / "net.onnx", dynamo=False, progress=False
        )
    report = torchq.inspect_onnx(tmp_path / "net.onnx")
    assert len(str(report).splitlines()) <= 4
    assert "this file computes in float: 9 of its layers read a weight in float" in str(
        report
    )
    assert len(report.table().splitlines()) > 9


def test_names_that_are_products_of_lengths_tell_how_long_a_value_is() -> None:
    """The rows of all tokens, behind operators through which no shape can be inferred.

    The name of what is masked is one that inference makes up where it does not know.
    """
    helper = pytest.importorskip("onnx.helper")
    numbers = pytest.importorskip("onnx.numpy_helper")
    kind = pytest.importorskip("onnx").TensorProto
    weight = torch.ones(8, 8)
    stored = {
        "weight": weight,
        "codes": weight.to(torch.int8),
        "scale": torch.tensor(0.5),
        "zero": torch.tensor(0, dtype=torch.int8),
    }
    pair = ["scale", "zero"]
    nodes = [
        helper.make_node("QuantizeLinear", ["x", *pair], ["x codes"]),
        helper.make_node("DequantizeLinear", ["x codes", *pair], ["x values"]),
        helper.make_node("DequantizeLinear", ["codes", *pair], ["values"]),
        helper.make_node("MatMul", ["x values", "values"], ["on integers"]),
        helper.make_node("Rows", ["x"], ["rows"], domain="somebody"),
        helper.make_node("Chosen", ["x"], ["chosen"], domain="somebody"),
        helper.make_node("Where", ["chosen", "rows", "scale"], ["masked"]),
        helper.make_node("MatMul", ["masked", "weight"], ["in float"]),
    ]
    shapes = {
        "x": ["batch", "length", 8],
        "on integers": ["batch", "length", 8],
        "rows": ["length*batch", 8],
        "in float": ["unk__9", 8],
    }
    info = {
        name: helper.make_tensor_value_info(name, kind.FLOAT, shape)
        for name, shape in shapes.items()
    }
    info["chosen"] = helper.make_tensor_value_info("chosen", kind.BOOL, ["tokens", 1])
    constants = [numbers.from_array(t.numpy(), name) for name, t in stored.items()]
    results = [info["on integers"], info["in float"]]
    inner = [info[name] for name in ("rows", "chosen")]
    graph = helper.make_graph(
        nodes, "g", [info["x"]], results, constants, value_info=inner
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("somebody", 1)]
    model = onnx_ir.from_proto(helper.make_model(graph, opset_imports=opsets))
    write_record(model, **{EXAMPLE_LENGTHS: {"length": 10, "tokens": 10}})
    assert Coverage.of(model).share == 0.5

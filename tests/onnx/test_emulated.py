"""Files beside the emulator of a chip, layer by layer: ONNX Runtime takes the place of one."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import SumNet
from tests.onnx.exported import calibrated
from torchq.errors import ConfigError
from torchq.nn.correction import corrected_layers
from torchq.onnx.qdq import quantizer_nodes
from torchq.runtime import LayerBound, open_session
from torchq.runtimes import Qnn
from torchq.runtimes.qnn.bounds import BOUNDS, OLD_SHARE, OLD_STEPS, bound_of

np = pytest.importorskip("numpy")
onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")
onnx_ir = pytest.importorskip("onnx_ir")

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
Damage = Callable[[Any, dict[str, Any]], None]


def unchanged(graph: Any, stored: dict[str, Any]) -> None:
    """Leave a file as it is."""


@dataclass(frozen=True, kw_only=True, repr=False)
class Emulated(Qnn):
    """The chip by ONNX Runtime, with a fault in its compiler."""

    damage: Damage = unchanged

    def emulated(self, path: Path) -> Callable[[Mapping[str, Tensor]], list[Tensor]]:
        model = onnx.load(path)
        stored = {tensor.name: tensor for tensor in model.graph.initializer}
        self.damage(model.graph, stored)
        onnx.save(model, path.with_suffix(".damaged"))
        session = open_session(path.with_suffix(".damaged"), optimize=False)
        return session.run  # type: ignore[no-any-return]


def change(tensor: Any, function: Callable[[Any], Any]) -> None:
    """Change a stored tensor in place."""
    array = function(onnx.numpy_helper.to_array(tensor).copy())
    tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model = calibrated(SumNet().eval(), X, target="qnn", example=X)
    path = tmp_path_factory.mktemp("emulated") / "m.onnx"
    torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    return model, path


def verified(exported: tuple[nn.Module, Path], damage: Damage = unchanged) -> Any:
    model, path = exported
    runtime = Emulated(damage=damage)
    return torchq.verify_onnx(model, path, [X], target=runtime, progress=False)


def test_layers_and_the_whole_file_agree(exported: tuple[nn.Module, Path]) -> None:
    report = verified(exported)
    assert report.ok, str(report)
    assert (
        "each layer of the file on SM8550 (emulated), given equal codes: agrees"
        in str(report)
    )
    runs = {run.what: run for run in report.runs}
    simulation = runs["simulation"]
    chip = runs["SM8550 (emulated)"]
    assert list(runs) == ["float model", "simulation", "file on this CPU", chip.what]
    assert chip.same_class is not None
    assert chip.simulation_db > simulation.float_db > 20
    rows = {row.name: row for row in report.layers}
    assert rows["quant_add.other_quantizer"].elements == X[:, :1].numel() * 8
    # Quantized by the CPU: nothing of the chip computes it.
    assert rows["first.input_quantizer"].elements == 0


def test_codes_of_16_bits_may_be_off_where_float32_rounds_a_sum(tmp_path: Path) -> None:
    """Sums of 288 products, of which 2e-3 lie that near to a border of two codes."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 32, 3)).eval()
    x = torch.randn(4, 3, 24, 24)
    config = torchq.recipes.w8a16()
    model = calibrated(net, x, config=config, target="qnn", example=x)
    torchq.export_onnx(model, x, tmp_path / "m.onnx", dynamo=False, progress=False)
    report = torchq.verify_onnx(model, tmp_path / "m.onnx", [x], progress=False)
    assert report.ok, str(report)
    # More than codes of 8 bits may be off.
    assert any(row.differ > 3 + 8e-4 * row.elements for row in report.layers)


def doubled_scale(graph: Any, stored: dict[str, Any]) -> None:
    change(stored["second.weight_quantizer/scale"], lambda scale: 2 * scale)


def moved_bias(graph: Any, stored: dict[str, Any]) -> None:
    change(stored["second.bias"], lambda bias: bias + 0.1)


def swapped_weight(graph: Any, stored: dict[str, Any]) -> None:
    change(stored["second.weight_quantizer/weight"], lambda weight: weight[::-1])


@pytest.mark.parametrize("damage", [doubled_scale, moved_bias, swapped_weight])
def test_the_first_layer_that_computes_something_else_is_named(
    exported: tuple[nn.Module, Path], damage: Damage
) -> None:
    """The head behind it gets the right codes, and agrees."""
    report = verified(exported, damage)
    assert not report.ok
    assert report.first is not None
    assert report.first.name == "quant_add.other_quantizer"
    assert "second" in report.first.layers
    assert [row.name for row in report.layers if not row.ok] == [
        "quant_add.other_quantizer"
    ]


def test_the_float_model_has_no_correction_of_calibration(
    exported: tuple[nn.Module, Path],
) -> None:
    """Corrections of results lie in the parameters of a file, and are no part of float."""
    model, path = exported
    model = copy.deepcopy(model)
    torch.manual_seed(0)
    exact = SumNet().eval()(X)
    assert corrected_layers(model)
    outputs = []
    torchq.verify_onnx(
        model,
        path,
        [X],
        target=Emulated(),
        metric=lambda output, batch: outputs.append(output) or 0,
        progress=False,
    )
    assert torch.equal(outputs[0], exact)
    assert not torch.equal(outputs[1], exact)


def joined(graph: Any, stored: dict[str, Any]) -> None:
    """Damage the file where its layers are not apart."""
    if not any("/given" in value.name for value in graph.input):
        moved_bias(graph, stored)


def test_a_compiler_that_joins_layers_wrongly_is_seen_in_the_whole(
    exported: tuple[nn.Module, Path],
) -> None:
    report = verified(exported, joined)
    assert not report.ok
    assert report.first is None
    wrong = [verdict for verdict in report.verdicts if verdict.ok is False]
    assert [verdict.what for verdict in wrong] == [
        "the whole file on SM8550 (emulated)"
    ]
    assert "If every layer agrees alone" in wrong[0].reason


def test_a_fault_of_the_file_is_no_fault_of_the_chip(
    exported: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    """Layers on the chip are given what the damaged file computes, and the file is blamed."""
    model, path = exported
    damaged = onnx.load(path)
    stored = {tensor.name: tensor for tensor in damaged.graph.initializer}
    moved_bias(damaged.graph, stored)
    onnx.save(damaged, tmp_path / "m.onnx")
    report = torchq.verify_onnx(
        model, tmp_path / "m.onnx", [X], target=Emulated(), progress=False
    )
    assert not report.ok
    assert report.verdicts[0].ok is False
    assert report.hint.startswith("the file holds another state")


def test_the_metric_of_each_run_is_a_mean_over_batches(
    exported: tuple[nn.Module, Path],
) -> None:
    model, path = exported
    batches = [(X, torch.tensor([1, 1])), (X[:1], torch.tensor([4]))]

    def label(output: Tensor, batch: Any) -> Tensor:
        assert output.shape == (len(batch[1]), 5)
        return batch[1].float().mean()

    report = torchq.verify_onnx(
        model, path, batches, target=Emulated(), metric=label, progress=False
    )
    assert [run.score for run in report.runs] == [pytest.approx(2.0)] * 4
    assert "metric" in str(report)


def test_targets_that_cannot_run_the_file_are_refused(
    exported: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    model, path = exported
    with pytest.raises(ConfigError, match=r"target='openvino' for .*, a file for qnn"):
        torchq.verify_onnx(model, path, [X], target="openvino", progress=False)
    torchq.export_onnx(
        calibrated(SumNet().eval(), X),
        X,
        tmp_path / "m.onnx",
        dynamo=False,
        progress=False,
    )
    with pytest.raises(ConfigError, match=r"a file for no target; expected one that"):
        torchq.verify_onnx(
            model, tmp_path / "m.onnx", [X], target="qnn", progress=False
        )
    with pytest.raises(ConfigError, match="target"):
        torchq.verify_onnx(model, path, [X], target="qnm", progress=False)


def codes_of(
    operator: str, *, to: float, dtype: str = "uint8", stored: bool = False
) -> Any:
    """Return the QuantizeLinear of scale ``to`` behind an operator on codes of the scale 0.1."""
    helper = onnx.helper
    numbers = {
        "scale": np.array(0.1, "float32"),
        "other": np.array(0.37, "float32"),
        "to": np.array(to, "float32"),
        "zero": np.array(0, dtype),
        "weight": np.zeros((4, 4), "float32"),
    }
    reads = {"a": "scale", "b": "other"}
    nodes = [
        helper.make_node(
            "DequantizeLinear",
            [f"{name}/codes", scale, "zero"],
            [name],
            name=f"{name}/DequantizeLinear",
        )
        for name, scale in reads.items()
    ]
    operands = ["a"] if operator in ("Softmax", "GRU", "LSTM", "Relu") else ["a", "b"]
    operands = ["a", "weight"] if stored else operands
    nodes += [
        helper.make_node(operator, operands, ["y"]),
        helper.make_node(
            "QuantizeLinear", ["y", "to", "zero"], ["codes"], name="y/QuantizeLinear"
        ),
    ]
    shape = [4, 4]
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    inputs = [
        helper.make_tensor_value_info(f"{name}/codes", kind, shape) for name in reads
    ]
    output = helper.make_tensor_value_info("codes", kind, shape)
    weights = [onnx.numpy_helper.from_array(x, name) for name, x in numbers.items()]
    graph = helper.make_graph(nodes, "graph", inputs, [output], weights)
    model = onnx_ir.from_proto(helper.make_model(graph))
    return quantizer_nodes(model)["y"]


@pytest.mark.parametrize(
    ("quantize", "share", "steps"),
    [
        (codes_of("Relu", to=0.1), 0.05, 1),
        (codes_of("Add", to=0.3), 0.05, 1),
        (codes_of("Add", to=0.2), 0.25, 1),
        (codes_of("Sub", to=0.05), 0.25, 1),
        (codes_of("Mul", to=0.2), 0.05, 1),
        (codes_of("MatMul", to=0.2), 0.13, 1),
        (codes_of("MatMul", to=0.2, stored=True), 0.05, 1),
        (codes_of("Softmax", to=0.1), 0.15, 2),
        (codes_of("GRU", to=0.1), 0.60, 1),
        (codes_of("LSTM", to=0.1), 0.80, 2),
        (codes_of("MatMul", to=0.2, stored=True, dtype="uint16"), 1.0, 28),
        (codes_of("Add", to=0.2, dtype="uint16"), 1.0, 28),
        (codes_of("Mul", to=0.2, dtype="uint16"), 1.0, 64),
        (codes_of("Softmax", to=0.2, dtype="uint16"), 1.0, 192),
        (codes_of("MatMul", to=0.2, dtype="uint16"), 1.0, 400),
    ],
)
def test_the_bounds_of_layers_stand_in_one_table(
    quantize: Any, share: float, steps: int
) -> None:
    assert bound_of(quantize, is_old=False) == LayerBound(share, steps)
    old = bound_of(quantize, is_old=True)
    is_wide = steps > 2
    assert old.share == max(share, OLD_SHARE)
    assert old.steps == (max(steps, OLD_STEPS) if is_wide else steps)


def test_the_page_has_the_table_of_bounds() -> None:
    page = Path(__file__).parents[2] / "docs" / "platforms.md"
    lines = page.read_text("utf-8").splitlines()
    for row in BOUNDS:
        share = "all" if row.share == 1 else f"{100 * row.share:.0f} %"
        start = f"| {row.what} | {share} | {row.steps} |"
        assert any(line.startswith(start) for line in lines), start

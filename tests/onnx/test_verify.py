"""``verify_onnx`` agrees with good files, and names the layer that was changed."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import Layers, Residual, calibrated, run_file
from tests.onnx.exported import exported as write
from torchq.errors import ConfigError, ExportError
from torchq.onnx.ir import (
    load_model,
    replace_stored,
    replace_value,
    save_model,
    value_of,
)
from torchq.runtimes.onnxruntime import Session

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


@pytest.fixture
def exported(tmp_path: Path) -> tuple[nn.Module, Path]:
    model = calibrated(Residual(), torch.randn(8, 3, 16, 16))
    torchq.export_onnx(
        model, torch.randn(1, 3, 16, 16), tmp_path / "m.onnx", dynamo=False
    )
    return model, tmp_path / "m.onnx"


def edit(path: Path, name: str, change: Callable[[Tensor], Tensor]) -> None:
    """Change one stored tensor of a file."""
    file = load_model(path)
    stored = file.graph.initializers[name]
    replace_stored(stored, change(value_of(stored)))
    save_model(file, path)


def test_codes_are_equal_except_ties(exported: tuple[nn.Module, Path]) -> None:
    model, path = exported
    report = torchq.verify_onnx(
        model.train(),
        path,
        [torch.randn(4, 3, 16, 16), (torch.randn(3, 3, 16, 16), torch.zeros(3))],
    )
    assert report.ok, str(report)
    assert model.training
    # one tensor with two readers is quantized once in the file, and compared with both
    names = {name for name, _ in model.named_modules() if name.endswith("_quantizer")}
    names |= {name for name, _ in model.named_parameters() if name.endswith("bias")}
    assert names <= {layer.name for layer in report.layers}
    assert all(layer.differ <= layer.allowed for layer in report.layers)
    assert report.outputs[0].samples == 7
    assert "agrees with its model" in str(report)


def test_figures_are_those_of_the_outputs_of_a_usual_session(
    exported: tuple[nn.Module, Path],
) -> None:
    model, path = exported
    edit(path, "head.bias", lambda bias: bias + torch.eye(10)[0])
    x = torch.randn(6, 3, 16, 16)
    (found,) = torchq.verify_onnx(model, path, [x]).outputs
    want = model(x).double()
    got = run_file(path, x, optimize=True)[0].double()
    assert found.max_diff == pytest.approx((want - got).abs().max().item(), rel=1e-12)
    assert found.sqnr_db == pytest.approx(
        10 * (want.square().sum() / (want - got).square().sum()).log10().item(),
        rel=1e-9,
    )
    assert found.top1 == (want.argmax(1) == got.argmax(1)).double().mean()
    assert (found.equal, found.samples) == (0, 6)


def test_a_changed_layer_is_named_alone(exported: tuple[nn.Module, Path]) -> None:
    """A wrong bias shows at itself, at the quantizer behind it, and nowhere else."""
    model, path = exported
    edit(path, "blocks.0.first.bias", lambda bias: bias + 0.5)
    report = torchq.verify_onnx(model, path, [torch.randn(4, 3, 16, 16)])
    wrong = [layer.name for layer in report.layers if not layer.ok]
    assert wrong == ["blocks.0.first.bias", "blocks.0.second.input_quantizer"]
    assert report.first is not None and report.first.name == wrong[0]
    assert "DIFFERS" in str(
        report
    ) and "first of 2 that differ: blocks.0.first.bias" in str(report)
    assert len(str(report).splitlines()) <= 11


@pytest.mark.parametrize("name", ["scale", "bias"])
def test_the_last_bit_of_a_number_is_seen(
    name: str, exported: tuple[nn.Module, Path]
) -> None:
    model, path = exported
    stored = {
        "scale": "blocks.0.second.input_quantizer/scale",
        "bias": "blocks.0.second.bias",
    }[name]
    edit(path, stored, lambda stored: torch.nextafter(stored, torch.tensor(9.0)))
    report = torchq.verify_onnx(model, path, [torch.randn(4, 3, 16, 16)])
    assert not report.ok
    assert report.first is not None and report.first.name.startswith("blocks.0.second")


def test_no_code_differs_and_outputs_are_equal(path: Path) -> None:
    x = torch.randn(4, 3, 16, 16)
    model = write(Residual(), x, path, config=torchq.recipes.int8())
    report = torchq.verify_onnx(model, path, [x])
    assert report.ok and "the optimised file in onnxruntime" in str(report)
    assert sum(layer.differ for layer in report.layers) == 0
    assert report.outputs[0].equal == 1


def test_another_model_is_refused(
    exported: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    model, path = exported
    other = copy.deepcopy(model)
    other.head = nn.Linear(48, 3)
    with pytest.raises(
        ExportError, match=r"the model returns \[\(2, 3\)\], the file \[\(2, 10\)\]"
    ):
        torchq.verify_onnx(other, path, [torch.randn(2, 3, 16, 16)])
    rows = torch.randn(2, 3, 16, 16)
    for without_rows in ([], [rows[:0]]):
        with pytest.raises(ExportError, match="got no batch"):
            torchq.verify_onnx(model, path, without_rows)
    report = torchq.verify_onnx(model, path, [rows[:0], rows])
    assert report.ok and report.outputs[0].samples == 2
    (tmp_path / "broken.onnx").write_bytes(b"\x00" * 64)
    with pytest.raises(Exception, match=r"."):
        torchq.verify_onnx(model, tmp_path / "broken.onnx", [torch.randn(2, 3, 16, 16)])


class Repeated(nn.Module):
    """One layer called three times, with an activation that works in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.act = nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = self.act(self.linear(x))
        return x


def test_repeated_layers_are_told_apart(path: Path) -> None:
    model = calibrated(Repeated(), torch.randn(16, 6))
    torchq.export_onnx(model, torch.randn(1, 6), path, dynamo=False)
    report = torchq.verify_onnx(model, path, [torch.randn(9, 6), torch.randn(2, 6)])
    names = {layer.name for layer in report.layers if "input" in layer.name}
    assert names == {
        "linear.input_quantizer",
        "linear.input_quantizer#2",
        "linear.input_quantizer#3",
    }
    assert report.ok, str(report)


def test_several_outputs_and_dict_batches(path: Path) -> None:
    model = calibrated(Layers(), torch.randn(8, 3, 9, 9))
    torchq.export_onnx(
        model,
        {"x": torch.randn(1, 3, 9, 9)},
        path,
        dynamo=False,
        output_names=["up", "left", "right"],
    )
    report = torchq.verify_onnx(model, path, [{"x": torch.randn(2, 3, 9, 9)}])
    assert [o.name for o in report.outputs] == ["up", "left", "right"]
    assert report.ok


def test_a_plain_export_is_compared_end_to_end(path: Path) -> None:
    """A file that torch.onnx.export wrote by itself has no names of quantizers."""
    model = calibrated(nn.Sequential(nn.Linear(6, 6)), torch.randn(8, 6))
    torch.onnx.export(
        model, (torch.randn(2, 6),), path, opset_version=21, verbose=False
    )
    report = torchq.verify_onnx(model, path, [torch.randn(2, 6)])
    assert report.layers == ()
    assert report.ok and report.outputs[0].max_diff < 1e-6


def test_float_nodes_are_explained(exported: tuple[nn.Module, Path]) -> None:
    """Quantizers at layer inputs alone: convolutions before a ReLU stay float in ONNX Runtime."""
    report = torchq.inspect_onnx(exported[1])
    reasons = {
        node.name: node.reason for node in report.fallbacks if node.kind == "Conv"
    }
    assert any(
        "export with target='onnxruntime'" in reason for reason in reasons.values()
    )
    assert report.counts.get("QLinearAdd", 0) == 0
    assert f"{len(report.integer)} of {len(report.nodes)} computing nodes" in str(
        report
    )


@pytest.mark.sample(1)
@pytest.mark.parametrize(("reduce_range", "wide"), [(False, 7), (True, 0)])
def test_weights_that_overflow_without_vnni_are_counted(
    reduce_range: bool, wide: int, path: Path
) -> None:
    x = torch.randn(4, 3, 16, 16)
    config = torchq.recipes.int8(reduce_range=reduce_range)
    model = write(Residual(), x, path, config=config)
    stored = [
        t
        for t in onnx.load(str(path)).graph.initializer
        if t.name.endswith(("/weight", "/weight.T"))
    ]
    largest = max(abs(onnx.numpy_helper.to_array(t).astype(int)).max() for t in stored)
    assert largest == (64 if reduce_range else 127) or largest == (
        63 if reduce_range else 128
    )
    report = torchq.inspect_onnx(path)
    assert len(report.wide) >= wide if wide else report.wide == ()
    assert ("recipes.int8(reduce_range=True)" in str(report)) == bool(wide)
    assert torchq.verify_onnx(model, path, [x]).ok


@pytest.mark.sample(4)
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "qnn", "tensorrt"])
def test_activations_of_four_bits_verify_with_every_sign(
    target: str, dynamo: bool, path: Path
) -> None:
    """Files hold them as 8 bits. Signed codes may be moved by 128; those up to 15 fit int8."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 1), nn.ReLU(), nn.Conv2d(8, 4, 1)
    )
    config = torchq.recipes.integer(8, 4, first_last=4)
    write(model, x, path, target, config=config, dynamo=dynamo)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert report.ok, str(report)


@pytest.mark.eight_bit_products("openvino")
@pytest.mark.parametrize("target", ["onnxruntime", "openvino"])
def test_zero_points_in_the_middle_verify_with_every_sign(
    target: str, path: Path
) -> None:
    """Codes with the zero point 128 may be written as signed ones."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1))
    config = torchq.recipes.int8(symmetric=False)
    model = calibrated(model, x, target=target, example=x, config=config)
    model[0].input_quantizer.set_range(-1.28, 1.27)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        torchq.export_onnx(model, x, path, target=target, dynamo=False)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


def fp8_file(path: Path, target: str | None = "onnxruntime") -> nn.Module:
    """Export two FP8 layers and return their model."""
    model = calibrated(
        nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        torch.randn(16, 8),
        config=torchq.recipes.fp8(),
    )
    torchq.export_onnx(model, torch.randn(2, 8), path, target=target, dynamo=False)
    return model


@pytest.mark.filterwarnings("ignore:verify_onnx. onnxruntime .* cannot run the model")
def test_fp8_files_verify_with_every_runtime(path: Path) -> None:
    """ONNX Runtime 1.31 makes an invalid graph of a Gemm of FP8; 1.32 optimises it."""
    model = fp8_file(path)
    report = torchq.verify_onnx(model, path, [torch.randn(5, 8)])
    assert report.ok and len(report.layers) == 7
    # 1.32 removes a ReLU in front of FP8 codes, which costs all but 2 dB.
    assert all(output.sqnr_db > 100 for output in report.outputs)


def test_what_the_runtime_cannot_optimise_is_compared_as_it_is(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_optimisations(path: Path, *, optimize: bool) -> Session:
        if optimize:
            raise ExportError("onnxruntime 1.31.1 cannot run the model")
        return Session(path, optimize=False)

    monkeypatch.setattr("torchq.onnx.verify.verify.open_session", without_optimisations)
    model = fp8_file(path)
    with pytest.warns(
        UserWarning,
        match=r"verify_onnx: onnxruntime .* cannot run the model.* Compared without optimisations",
    ):
        report = torchq.verify_onnx(model, path, [torch.randn(5, 8)])
    assert report.ok and "as it is written" in report.session


def test_batches_that_do_not_fit_the_file_are_refused(path: Path) -> None:
    model = calibrated(nn.Sequential(nn.Linear(8, 8)), torch.randn(16, 8))
    torchq.export_onnx(model, torch.randn(2, 8), path, dynamo=False)
    with pytest.raises(
        ExportError,
        match=r"has torch.float32 of shape \[5, 4, 8\] .* torch.float32 of shape \['batch', 8\]",
    ):
        torchq.verify_onnx(model, path, [torch.randn(5, 4, 8)])


def test_files_above_the_limit_of_protobuf_keep_tensors_beside_them(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is 2 GB; here every file is above it."""
    monkeypatch.setattr("torchq.onnx.ir._EXTERNAL_ABOVE", 0)
    x = torch.randn(4, 3, 16, 16)
    model = calibrated(Residual(), x)
    for _ in range(2):  # writing again replaces the tensors
        report = torchq.export_onnx(model, x[:1], path, dynamo=False)
    assert (
        report.size == path.stat().st_size + (tmp_path / "m.onnx.data").stat().st_size
    )
    weights = onnx.load(str(path), load_external_data=False).graph.initializer
    assert any(t.data_location == onnx.TensorProto.EXTERNAL for t in weights)
    assert torchq.verify_onnx(model, path, [x]).ok
    assert torchq.inspect_onnx(path).nodes


def test_a_float_model_is_no_twin_of_a_quantized_file(
    exported: tuple[nn.Module, Path],
) -> None:
    model, path = exported
    x = torch.randn(2, 3, 16, 16)
    with pytest.raises(
        ExportError, match=r"Residual has no active quantizer, but the file is"
    ):
        torchq.verify_onnx(Residual().eval(), path, [x])
    with (
        torchq.disabled(model),
        pytest.raises(
            ExportError, match=r"Residual has no active quantizer, but the file is"
        ),
    ):
        torchq.verify_onnx(model, path, [x])


def test_quantizers_that_are_in_the_file_alone_are_named(
    exported: tuple[nn.Module, Path],
) -> None:
    model, path = exported
    off = ["head.weight_quantizer", "side.input_quantizer"]
    with torchq.disabled(model, off):
        report = torchq.verify_onnx(model, path, [torch.randn(2, 3, 16, 16)])
    assert not report.ok
    found = {
        layer.name
        for layer in report.layers
        if layer.parameters == "is off in the model"
    }
    assert found == set(off)


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("batches", "options", "message"),
    [
        (
            torch.randn(2, 3, 16, 16),
            {},
            r"verify_onnx: got a Tensor as batches; expected .*\[bat",
        ),
        ({"x": torch.randn(2, 3, 16, 16)}, {}, r"verify_onnx: got a dict as batches"),
        (3, {}, r"verify_onnx: got a int as batches"),
        (
            [torch.randn(2, 3, 16, 16)],
            {"num_batches": 0},
            r"num_batches=0; expected an integer",
        ),
        (
            [torch.randn(2, 3, 16, 16)],
            {"num_batches": "2"},
            r"num_batches='2'; expected an int",
        ),
        (
            [torch.randn(2, 1, 16, 16)],
            {},
            r"of shape \[2, 1, 16, 16\] for the input 'x'; expected",
        ),
        (
            [torch.randn(2, 3, 24, 16)],
            {},
            r"of shape \[2, 3, 24, 16\] .* \['batch', 3, 16, 16\]",
        ),
        (
            [torch.randn(2, 3, 16, 16).half()],
            {},
            r"has torch.float16 .*; expected .*float32",
        ),
        ([torch.randn(3, 16, 16)], {}, r"of shape \[3, 16, 16\]"),
    ],
)
def test_batches_of_another_kind_are_one_named_error(
    exported: tuple[nn.Module, Path],
    batches: Any,
    options: dict[str, Any],
    message: str,
) -> None:
    model, path = exported
    with pytest.raises((ConfigError, ExportError), match=message):
        torchq.verify_onnx(model, path, batches, **options)


def test_a_model_that_fails_on_what_fits_the_file_is_another_one(
    exported: tuple[nn.Module, Path],
) -> None:
    _, path = exported
    other = calibrated(nn.Sequential(nn.Flatten(), nn.Linear(6, 10)), torch.randn(4, 6))
    message = r"Sequential fails on a batch that fits the file \(RuntimeError: .*; expected the mod"
    with pytest.raises(ExportError, match=message):
        torchq.verify_onnx(other, path, [torch.randn(2, 3, 16, 16)])


def test_a_norm_that_was_not_fused_is_named(path: Path) -> None:
    """The file keeps ONNX Runtime from folding it into the weight, so the layer is in float."""
    x = torch.rand(8, 3, 32, 32) * 2 - 1
    layers = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    model = nn.Sequential(*layers, nn.MaxPool2d(3, 2, 1), nn.Conv2d(64, 16, 3))
    write(model, x, path, dynamo=True)
    report = torchq.verify_onnx(model, path, [x])
    assert report.ok, str(report)
    assert report.coverage is not None and len(report.coverage.before_norms) == 1
    assert "BatchNorm that was not folded" in report.coverage.reason


class Dilated(nn.Module):
    """Residual blocks whose sums of skips are the result: nothing reads the last state."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv1d(4, 8, 3, padding=1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skipped = x
        for block in self.blocks:
            values, gates = block(x).chunk(2, 1)
            result = torch.tanh(values) * torch.sigmoid(gates)
            skipped = skipped + result
            x = x + result
        return skipped


@pytest.fixture
def dilated(tmp_path: Path) -> tuple[nn.Module, list[Tensor], Path]:
    torch.manual_seed(0)
    model = Dilated().eval()
    batches = [torch.randn(2, 4, 16), torch.randn(3, 4, 16)]
    torchq.quantize_(model, target="onnxruntime", example=batches[0], progress=False)
    torchq.calibrate(model, batches, progress=False)
    path = tmp_path / "dilated.onnx"
    torchq.export_onnx(model, batches[0], path, dynamo=False, progress=False)
    return model, batches, path


def test_a_quantizer_that_nothing_reads_may_be_missing(
    dilated: tuple[nn.Module, list[Tensor], Path],
) -> None:
    model, batches, path = dilated
    report = torchq.verify_onnx(model, path, batches, progress=False)
    assert report.ok, str(report)
    elements = {layer.name: layer.elements for layer in report.layers}
    assert elements["blocks.0.input_quantizer"] == 5 * 4 * 16


def test_a_quantizer_that_something_reads_may_not(
    dilated: tuple[nn.Module, list[Tensor], Path],
) -> None:
    model, batches, path = dilated
    file = load_model(path)
    lost = "blocks.1.input_quantizer"
    nodes = {node.name: node for node in file.graph}
    before = nodes[f"{lost}/QuantizeLinear"].inputs[0]
    replace_value(nodes[f"{lost}/DequantizeLinear"].outputs[0], before)
    file.graph.remove(
        [nodes[f"{lost}/DequantizeLinear"], nodes[f"{lost}/QuantizeLinear"]], safe=True
    )
    save_model(file, path)
    report = torchq.verify_onnx(model, path, batches, progress=False)
    faults = {layer.name: layer.parameters for layer in report.layers if not layer.ok}
    assert faults[lost] == "is not in the file"

"""Where 8-bit products overflow, on CPUs without VNNI, `deploy` says so and what helps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import torchq
from tests.processes import run_code

SATURATION = """
import warnings, torch, torchq
torch.manual_seed(0)
layers = torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
model = torch.nn.Sequential(*layers).eval()
torch.nn.init.constant_(model[0].weight, 1.0)
x = torch.rand(16, 256) - 0.1
torchq.quantize_(model, torchq.recipes.RECIPE)
torchq.calibrate(model, [x], progress=False)
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    torchq.deploy(model)
    texts = [str(w.message) for w in caught]
assert torchq.lowering.kernel.saturates() == ("ISA" == "AVX2"), "saturates"
assert any("no VNNI" in t for t in texts) == ("EXPECTED" == "yes"), texts
"""

WRONG_RESULT = """
import pytest, torch, torchq
model = torch.nn.Conv2d(16, 16, 3).eval()
torch.nn.init.constant_(model.weight, 1.0)  # all products have one sign, so all pairs overflow
x = torch.rand(1, 16, 8, 8) - 0.1  # codes on both sides of the zero point, up to 255
torchq.quantize_(model)
torchq.calibrate(model, [x], progress=False)
with pytest.warns(match="no VNNI") as warned:
    with pytest.raises(torchq.errors.ExportError) as caught:
        torchq.deploy(model, x)
assert warned[0].filename == "<string>", warned[0].filename  # the line that called deploy
assert "recipes.int8(reduce_range=True)" in str(caught.value), caught.value
assert "fuse=False" not in str(caught.value), caught.value
assert "check=False allows it" in str(caught.value), caught.value
torchq.restore_(model)
torchq.quantize_(model, torchq.recipes.int8(reduce_range=True))
torchq.calibrate(model, [x], progress=False)
torchq.deploy(model, x)
"""

#: The results are within a tenth, and the layer is wrong all the same.
NEAR_RESULT = """
import warnings, pytest, torch, torchq
from torchq.lowering.check import RESULT_TOLERANCE, ReferenceCheck
warnings.simplefilter("ignore")
torch.manual_seed(0)
model = torch.nn.Conv2d(8, 4, 3).eval()
x = torch.randn(2, 8, 12, 12) - 0.3
torchq.quantize_(model)
torchq.calibrate(model, [x], progress=False)
int8 = torchq.deploy(model, x, check=False)
check = ReferenceCheck(model, x)
assert not check.difference(int8, RESULT_TOLERANCE), "the test wants a near result"
assert check.difference(int8, 0.005), "the test wants an overflow"
with pytest.raises(torchq.errors.ExportError, match="reduce_range.*check=False allows it"):
    torchq.deploy(model, x)
"""

WRONG_ENGINE = """
import pytest, torch, torchq
model = torch.nn.Conv2d(16, 16, 3).eval()
torch.nn.init.constant_(model.weight, 1.0)
x = torch.rand(1, 16, 8, 8) - 0.1
torchq.quantize_(model, target="openvino")
torchq.calibrate(model, [x], progress=False)
with pytest.raises(torchq.errors.ExportError, match="recipes.int8.reduce_range=True") as caught:
    torchq.deploy(model, x, target="openvino")
"""


@pytest.mark.filterwarnings("ignore:export_onnx")  # the last layer runs in float
def test_onnxruntime_adds_exactly_on_every_cpu(tmp_path: Path) -> None:
    """All products have one sign, so that all pairs of them would overflow."""
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnx")
    layers = [torch.nn.Conv2d(16, 16, 1) for _ in range(4)]
    for layer in layers:
        torch.nn.init.uniform_(layer.weight, 0.05, 0.1)
    model = torch.nn.Sequential(*layers).eval()
    x = torch.rand(4, 16, 8, 8)
    torchq.quantize_(model, target="onnxruntime", example=x)
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x, tmp_path / "m.onnx", progress=False, dynamo=False)
    report = torchq.verify_onnx(
        model,
        tmp_path / "m.onnx",
        [x],
        progress=False,
    )
    assert report.ok and report.outputs[0].equal == 1, report.table()
    assert ("x64quantprecision" in report.session) is torchq.lowering.kernel.saturates()
    verdict = str(report.verdicts[1])
    assert ("x64quantprecision" in verdict) is torchq.lowering.kernel.saturates()
    deployed = torchq.deploy(model, x, target="onnxruntime")
    simulated = model(x)
    assert (deployed(x) - simulated).abs().max() <= 1e-6 * simulated.abs().max()
    file = torchq.onnx.ir.load_model(tmp_path / "m.onnx")
    points = [n.inputs[2] for n in file.graph if n.op_type == "DequantizeLinear"]
    shared = {p.name for p in points if p.shape == (16,) and len(p.uses()) > 1}
    assert not shared, "that setting refuses weights that share their zero points"


needs_kernels = pytest.mark.skipif(
    not torchq.lowering.kernel.available(), reason="no oneDNN kernels"
)


@needs_kernels
@pytest.mark.parametrize(
    ("isa", "recipe", "expected"),
    [
        ("AVX2", "int8()", "yes"),
        ("AVX2", "int8_dynamic()", "yes"),
        ("AVX2", "int8(reduce_range=True)", "no"),
        ("DEFAULT", "int8()", "no"),
    ],
)
def test_cpus_without_vnni_are_noticed(isa: str, recipe: str, expected: str) -> None:
    if isa == "DEFAULT" and torchq.lowering.kernel.saturates():
        pytest.skip("this CPU has no VNNI")
    program = SATURATION.replace("EXPECTED", expected).replace("RECIPE", recipe)
    run(program.replace("ISA", isa), isa)


@needs_kernels
def test_an_error_names_the_overflow() -> None:
    run(WRONG_RESULT, "AVX2")


@needs_kernels
def test_a_layer_that_overflows_is_refused_though_the_result_is_near() -> None:
    run(NEAR_RESULT, "AVX2")


@pytest.mark.slow
@needs_kernels
def test_an_error_of_another_engine_names_the_overflow() -> None:
    """The kernels of OpenVINO are those of oneDNN too."""
    for package in ("openvino", "onnxruntime", "onnxscript"):
        pytest.importorskip(package)
    run(WRONG_ENGINE, "AVX2")


def run(program: str, isa: str) -> None:
    """Run a program whose oneDNN uses no newer instructions than those of ``isa``."""
    run_code(program, environment={"ONEDNN_MAX_CPU_ISA": isa})

"""What torch's exporters make of small numbers, scales and tables."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated, run_file
from tests.onnx.exported import exported as write
from torchq.errors import ExportError
from torchq.onnx.ir import set_opset
from torchq.onnx.torch_exporters import optimize_

ir = pytest.importorskip("onnx_ir")
onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "logarithm": lambda x: (x.relu() + 1e-10).log(),
    "difference": lambda x: 1 / (x.relu() - 1e-9),
    "of a sum": lambda x: x / (x.relu().sum(1, keepdim=True).mean() * 0 + 1e-12),
    "twice": lambda x: (x.relu() + 1e-10).log() + (x.neg().relu() + 1e-10).log(),
    "factor": lambda x: (x * 1.000004 - x) * 1e6,
}


class After(nn.Module):
    """A quantized layer, and then a function."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.linear(x))


def _exported(
    function: Callable[[Tensor], Tensor], path: Path
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = calibrated(After(function), x)
    torchq.export_onnx(model, x, path, dynamo=True, dynamic_batch=False)
    session = onnxruntime.InferenceSession(path.read_bytes())
    assert len(session.get_inputs()) == 1
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    return torch.from_numpy(found), model(x).detach()


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_small_numbers_stay(name: str, path: Path) -> None:
    found, expected = _exported(FUNCTIONS[name], path)
    assert expected.isfinite().all()
    # The factor leaves single units of float32 in the last place, times 1e6.
    torch.testing.assert_close(
        found, expected, rtol=1e-5, atol=0.5 if name == "factor" else 1e-5
    )


def test_what_changes_nothing_goes(path: Path) -> None:
    _exported(lambda x: (x + 0) * 1 - 0, path)
    kinds = Counter(node.op_type for node in onnx.load(path).graph.node)
    assert not {"Add", "Sub", "Mul", "Div"} & set(kinds), kinds


@pytest.mark.parametrize("opset", [21, 22, 23])
def test_an_opset_has_the_version_of_files_that_onnx_gives_it(opset: int) -> None:
    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 18}), ir_version=8)
    set_opset(model, opset)
    expected = onnx.helper.find_min_ir_version_for(
        [onnx.helper.make_opsetid("", opset)]
    )
    assert model.ir_version == expected


class Program:
    """What torch's exporter returns, whose optimizer logs as onnxscript's does."""

    model = ir.Model(ir.Graph([], [], nodes=[], opset_imports={"": 20}), ir_version=9)

    def optimize(self) -> None:
        log = logging.getLogger("onnxscript.optimizer")
        log.warning("Evaluation failed: cannot reshape array")
        log.error("another")


def test_failed_folding_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    before = logging.getLogger("onnxscript").level
    optimize_(Program())
    assert [record.getMessage() for record in caplog.records] == ["another"]
    assert logging.getLogger("onnxscript").level == before


DESCRIPTORS = {
    "int8": torchq.QuantDescriptor(),
    "per channel": torchq.QuantDescriptor(axis=0),
    "asymmetric": torchq.QuantDescriptor(unsigned=True, symmetric=False),
    "4 bits, asymmetric": torchq.QuantDescriptor(
        4, axis=0, unsigned=True, symmetric=False
    ),
    "scaled": torchq.QuantDescriptor(scale_amax=0.5),
    "learned": torchq.QuantDescriptor(learn_amax=True),
    "4 bits, clipped": torchq.QuantDescriptor(4),
    "blocks": torchq.QuantDescriptor(4, block_size=4),
    "e4m3": torchq.QuantDescriptor((4, 3)),
}


def model_with(*kinds: str) -> nn.Module:
    quantizers = [torchq.TensorQuantizer(DESCRIPTORS[kind]) for kind in kinds]
    model = nn.Sequential(*quantizers, nn.Linear(8, 8))
    torchq.calibrate(model, [torch.randn(8, 8)], progress=False)
    return model


@pytest.mark.sample(5)
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("kind", DESCRIPTORS)
def test_a_file_has_the_numbers_of_the_model(
    kind: str, dynamo: bool, path: Path
) -> None:
    model = model_with(kind)
    x = torch.randn(8, 8)
    before = [name for name, _ in model.named_buffers()]
    torchq.export_onnx(model, x, path, dynamo=dynamo, dynamic_batch=False)
    graph = onnx.load(path).graph
    stored = {
        t.name: onnx.numpy_helper.to_array(t).flatten() for t in graph.initializer
    }
    pair = [node for node in graph.node if node.name.startswith("0/")]
    scale, zero_point = (t.flatten() for t in model[0].calculate_qparams())
    assert [node.op_type for node in pair] == ["QuantizeLinear", "DequantizeLinear"]
    for node in pair:
        assert (stored[node.input[1]] == scale.numpy()).all()
        assert (
            len(node.input) < 3 or (stored[node.input[2]] == zero_point.numpy()).all()
        )
    assert [name for name, _ in model.named_buffers()] == before
    (found,) = run_file(path, x)
    torch.testing.assert_close(found, model(x).detach(), rtol=1e-5, atol=1e-5)


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no tracing today")


def test_a_failed_export_leaves_quantizers_as_they_were(path: Path) -> None:
    model = model_with("int8")
    model.append(Fails())
    quantizer = model[0]
    with pytest.raises(ExportError, match="no tracing today"):
        torchq.export_onnx(
            model, torch.randn(8, 8), path, dynamo=True, dynamic_batch=False
        )
    assert quantizer.delegate is None
    assert [name for name, _ in quantizer.named_buffers()] == ["amax"]


class Positions(nn.Module):
    """Patches of an image, to which projected sines of their places are added."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.project = nn.Conv2d(4, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x)
        places = (
            torch.linspace(-3, 3, x.shape[2])
            .reshape(1, 1, -1, 1)
            .expand(1, 2, -1, x.shape[3])
        )
        table = torch.cat([places.sin(), places.cos()], 1)
        return self.head((x + self.project(table)).mean((2, 3)))


def exported(path: Path, dynamo: bool) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    model = Positions()
    x = torch.randn(4, 3, 32, 32)
    return write(model, x, path, dynamo=dynamo), x


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dynamo", [False, True])
def test_a_table_of_positions_agrees_with_its_model(dynamo: bool, path: Path) -> None:
    model, x = exported(path, dynamo)
    report = torchq.verify_onnx(model, path, [x])
    assert report.ok, str(report)


@pytest.mark.slow
def test_a_changed_table_is_found(path: Path) -> None:
    model, x = exported(path, True)
    assert isinstance(model.project, nn.Conv2d)
    with torch.no_grad():
        model.project.weight.mul_(-1)
    report = torchq.verify_onnx(model, path, [x])
    assert not report.ok


def test_inputs_and_outputs_called_by_numbers_keep_their_names(tmp_path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    model = calibrated(nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)), x)
    names = {"input_names": ["0"], "output_names": ["7"]}
    torchq.export_onnx(model, x, tmp_path / "m.onnx", dynamo=False, **names)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    assert [value.name for value in session.get_inputs()] == ["0"]
    (found,) = session.run(["7"], {"0": x[:2].numpy()})
    # Products of 6 numbers, summed in another order.
    assert torch.allclose(torch.from_numpy(found), model(x[:2]), atol=1e-5)


class Skip(nn.Module):
    """A skip that reads the data of a tensor, past autograd."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.second(x) + x.data


def test_the_data_of_a_tensor_is_no_constant_of_the_example(path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(8, 3, 6, 6)
    model = Skip().eval()
    torchq.quantize_(model, target="onnxruntime", example=x[:2], progress=False)
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x[:2], path, dynamo=False, progress=False)
    with torch.no_grad():
        assert torch.allclose(run_file(path, x)[0], model(x), atol=1e-4)

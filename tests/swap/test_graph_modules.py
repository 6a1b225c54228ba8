"""Models that are graphs of torch.fx: operators are placed in the graph itself."""

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import torchq
from torchq.errors import ConfigError, QuantizationError
from torchq.nn.calls.modules import route_
from torchq.nn.calls.routes import CallSite
from torchq.nn.convert import unchanged_on_error


class Block(nn.Module):
    """Two convolutions with every operator that a target wants quantizers for."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).relu()
        z = self.second(y) * torch.sigmoid(y) + y
        return F.avg_pool2d(self.last(torch.cat([z, y], dim=1)), 2)


def quantized(
    target: str = "onnxruntime", config: torchq.QuantConfig | None = None
) -> tuple[fx.GraphModule, Tensor]:
    model = fx.symbolic_trace(Block().eval())
    x = torch.randn(2, 3, 8, 8)
    torchq.quantize_(model, config, target=target, example=x)
    torchq.calibrate(model, [x], progress=False)
    return model, x


def called(model: fx.GraphModule) -> set[str]:
    return {str(node.target) for node in model.graph.nodes if node.op == "call_module"}


@pytest.mark.parametrize("target", ["onnxruntime", "openvino", "tensorrt", "qnn"])
def test_operators_are_nodes_of_the_graph(target: str) -> None:
    torch.manual_seed(3)
    eager = Block().eval()
    torch.manual_seed(3)
    model, x = quantized(target)
    torchq.quantize_(eager, target=target, example=x)
    torchq.calibrate(eager, [x], progress=False)
    placed = {name for name, _ in model.named_children() if name.startswith("quant_")}
    assert placed
    assert placed <= called(model)
    assert placed == {
        name for name, _ in eager.named_children() if name.startswith("quant_")
    }
    assert torch.equal(model(x), eager(x))


def test_copies_and_pickles_keep_the_operators() -> None:
    model, x = quantized()
    expected = model(x)
    twins = [copy.deepcopy(model)]
    # It cannot pickle annotations that are text.
    if not torch.__version__.startswith("2.9"):
        twins.append(pickle.loads(pickle.dumps(model)))
    for twin in twins:
        assert torch.equal(twin(x), expected)
        twin.quant_add.input_quantizer.set_range(-0.01, 0.01)
        assert not torch.equal(twin(x), expected)
        assert called(twin) == called(model)
        torchq.restore_(twin)
        assert not any(name.startswith("quant_") for name in called(twin))
    assert torch.equal(model(x), expected)


def test_restore_gives_the_float_graph_back() -> None:
    model, x = quantized()
    plain = fx.symbolic_trace(Block().eval())
    plain.load_state_dict(model.state_dict(), strict=False)
    with torchq.disabled(model):
        expected = model(x)
    torchq.restore_(model)
    assert called(model) == {"first", "second", "last"}
    assert type(model).__mro__[1] is fx.GraphModule
    assert not model.meta
    assert torch.equal(model(x), expected)
    assert torch.equal(plain(x), expected)
    torchq.quantize_(model, target="onnxruntime", example=x)
    assert {"quant_add", "quant_mul", "quant_cat"} <= called(model)


def test_files_bring_the_operators_back(tmp_path: Path) -> None:
    model, x = quantized()
    torchq.save(model, tmp_path / "model.pt")
    fresh = fx.symbolic_trace(Block().eval())
    torchq.load(fresh, tmp_path / "model.pt")
    assert torch.equal(fresh(x), model(x))
    assert called(fresh) == called(model)


def test_the_graph_is_unchanged_where_a_node_is_missing() -> None:
    model = fx.symbolic_trace(Block().eval())
    model.add_module("sum", torchq.nn.Add())
    before = model.code
    with pytest.raises(
        QuantizationError, match="its forward has no operator nothing; expected"
    ):
        route_(model, {"add": "sum", "nothing": "sum"})
    assert model.code == before


def test_an_error_gives_the_graph_back() -> None:
    model = fx.symbolic_trace(Block().eval())
    x = torch.randn(2, 3, 8, 8)
    expected = model(x)
    code = model.code

    def interrupted() -> None:
        with unchanged_on_error(model):
            torchq.quantize_(model, target="onnxruntime", example=x)
            assert not torch.equal(model(x), expected)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert model.code == code
    assert torch.equal(model(x), expected)
    assert not model.meta
    assert len(list(model.children())) == 3


class Functional(nn.Module):
    """A convolution by a function, and one by a module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 3, 3, 3))
        self.layer = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(F.conv2d(x, self.weight))


# The call is most of it.
@pytest.mark.filterwarnings("ignore:Functional. only .* quantized")
def test_calls_of_functions_in_a_graph_stay_float_and_are_named() -> None:
    model = fx.symbolic_trace(Functional().eval())
    x = torch.randn(2, 3, 8, 8)
    report = torchq.quantize_(model, example=x)
    assert any("a graph of torch.fx" in str(line) for line in str(report).splitlines())
    torchq.calibrate(model, [x], progress=False)
    assert torch.equal(
        copy.deepcopy(model)(x),
        model(x),
    )
    assert isinstance(model.layer, torchq.nn.QuantConv2d)
    site = CallSite("conv2d", weight="weight", holder="call")
    with pytest.raises(
        QuantizationError, match=r"is a graph of torch\.fx.*before it is traced"
    ):
        route_(model, calls=[site])


@pytest.mark.parametrize("options", [{}, {"example": True}, {"target": "onnxruntime"}])
def test_programs_of_torch_export_are_named(options: dict[str, Any]) -> None:
    x = torch.randn(2, 3, 8, 8)
    program = torch.export.export(Functional().eval(), (x,)).module()
    options = {**options, **({"example": x} if "example" in options else {})}
    with pytest.raises(
        ConfigError, match=r"got a program of torch.export.*Quantize it, then exp"
    ):
        torchq.quantize_(program, **options)


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_programs_of_torch_jit_are_named() -> None:
    x = torch.randn(2, 3, 8, 8)
    program = torch.jit.trace(Functional().eval(), x, check_trace=False)
    for call in (torchq.quantize_, torchq.plan):
        with pytest.raises(
            ConfigError, match=r"program of torch.jit.*before torch.jit"
        ):
            call(program, target="onnxruntime", example=x)


def test_export_and_deploy_see_the_operators(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    # Such weights overflow on no CPU.
    model, x = quantized(config=torchq.recipes.int8(reduce_range=True))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the last convolution returns float
        torchq.export_onnx(
            model, x, tmp_path / "m.onnx", target="onnxruntime", dynamo=False
        )
    report = torchq.verify_onnx(model, tmp_path / "m.onnx", [x])
    assert report.ok, report
    with torch.no_grad():
        difference = torchq.deploy(model, x, target="torch")(x) - model(x)
    assert difference.norm() < 0.05 * model(x).norm()


class Masked(nn.Module):
    """Adds a mask of infinities to scores, and something finite to what they give."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv1d(3, 3, 1), nn.Conv1d(3, 3, 1)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = self.first(x)
        is_read = torch.arange(8) < lengths.reshape(-1, 1, 1)
        mask = torch.where(is_read, 0.0, -torch.inf)
        return self.second(torch.softmax(x + mask, -1) + x)


@pytest.mark.parametrize("is_graph", [False, True])
def test_sums_with_masks_of_infinity_stay_float(is_graph: bool) -> None:
    """Their ranges have no end, so that a calibration would fail."""
    model: nn.Module = Masked().eval()
    model = fx.symbolic_trace(model) if is_graph else model
    x = torch.randn(4, 3, 8, generator=torch.Generator().manual_seed(0))
    batch = {"x": x, "lengths": torch.tensor([8, 3, 5, 1])}
    report = torchq.quantize_(model, target="onnxruntime", example=batch)
    names = [name for name, _ in model.named_children()]
    assert [name for name in names if name.startswith("quant_")] == ["quant_add"]
    assert "an operand holds infinity" in str(report)
    assert "forward" not in vars(model)
    torchq.calibrate(model, [batch], progress=False)

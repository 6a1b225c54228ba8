"""Files of both exporters: arguments, names and results of models, and types of weights."""

from __future__ import annotations

import copy
import dataclasses
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

import torchq
from tests.frontends.onnx_writer import Writer
from tests.onnx.exported import Layers, Residual, calibrated, ends, run_file
from torchq import QuantConfig, QuantDescriptor, Rule
from torchq.errors import ConfigError, ExportError
from torchq.onnx.lost_arguments import check_arguments

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

EXPORTERS = [
    pytest.param(False, 13, id="torchscript-13"),
    pytest.param(False, 21, id="torchscript-21"),
    pytest.param(True, 21, id="dynamo-21"),
]


def weights_of(path: Path) -> dict[str, object]:
    """Stored weights by quantizer."""
    return {
        t.name.rpartition("/")[0]: t
        for t in onnx.load(str(path)).graph.initializer
        if t.name.endswith(("/weight", "/weight.T"))
    }


@pytest.mark.parametrize(("dynamo", "opset"), EXPORTERS)
def test_layers_agree_and_are_standard(path: Path, dynamo: bool, opset: int) -> None:
    """The file has standard operators, integer weights and an open batch; the model stays."""
    model = calibrated(Layers(), torch.randn(8, 3, 9, 9)).train()
    report = torchq.export_onnx(
        model, torch.randn(1, 3, 9, 9), path, dynamo=dynamo, opset=opset
    )
    proto = onnx.load(str(path))
    onnx.checker.check_model(proto, full_check=True)
    assert {node.domain for node in proto.graph.node} <= {"", "ai.onnx"}
    assert {
        o.domain: o.version for o in proto.opset_import if o.domain in ("", "torchq")
    } == {"": opset}
    assert set(report.weights) == {
        f"{name}.weight_quantizer"
        for name in ("convs.0", "convs.1", "up", "left", "right")
    }
    assert all(t.data_type == onnx.TensorProto.INT8 for t in weights_of(path).values())
    assert model.training and all(module.training for module in model.modules())
    model.eval()
    for batch in (1, 5):
        x = torch.randn(batch, 3, 9, 9)
        for found, expected in zip(run_file(path, x), model(x), strict=True):
            # A tie may fall on the other side, as sums are added in another order: seldom, and
            # by one code of the last layer's input at most.
            assert (found - expected).abs().max() <= 0.02 * expected.abs().max()
            assert ((found - expected).abs() > 1e-5).float().mean() < 0.02


def test_scales_do_not_depend_on_the_example(tmp_path: Path) -> None:
    """The TorchScript exporter traces values; the other one takes buffers as they are."""
    model = calibrated(Layers(), torch.randn(8, 3, 9, 9))
    files = []
    for scale in (1.0, 100.0):
        path = tmp_path / f"{scale}.onnx"
        torchq.export_onnx(model, scale * torch.randn(2, 3, 9, 9), path, dynamo=False)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    scale = next(
        t
        for t in onnx.load(str(path)).graph.initializer
        if t.name == "convs.0.input_quantizer/scale"
    )
    assert (
        onnx.numpy_helper.to_array(scale)
        == model.convs[0].input_quantizer.scale.numpy()
    )


def test_no_warning_reaches_the_user(path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torchq.export_onnx(
            calibrated(Layers(), torch.randn(4, 3, 9, 9)),
            torch.randn(1, 3, 9, 9),
            path,
            dynamo=False,
        )
    assert [str(w.message) for w in seen] == []


def test_the_file_is_a_quarter_and_names_no_machine(path: Path) -> None:
    model = calibrated(
        nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256)),
        torch.randn(4, 256),
    )
    report = torchq.export_onnx(model, torch.randn(1, 256), path, dynamo=False)
    assert 0.25 < report.size / report.float_size < 0.29
    assert report.size == (path).stat().st_size
    assert str(Path(torch.__file__).parent).encode() not in (path).read_bytes()
    assert "2 weights stored quantized, 2 activations quantized" in str(report)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [False, True])
def test_one_tensor_is_quantized_once(path: Path, dynamo: bool) -> None:
    model = calibrated(Layers(), torch.randn(4, 3, 9, 9))
    report = torchq.export_onnx(
        model, torch.randn(1, 3, 9, 9), path, dynamo=dynamo, opset=18
    )
    assert report.merged == {"right.input_quantizer": "left.input_quantizer"}
    assert "right.input_quantizer" not in ends(path, "QuantizeLinear")


TYPES = {
    "INT8": QuantDescriptor(axis=0),
    "INT8 per tensor": QuantDescriptor(),
    "INT8 narrow": QuantDescriptor(narrow_range=True, axis=0),
    "INT8 for int6": QuantDescriptor(6, axis=0),
    "INT4": QuantDescriptor(4, axis=0),
    "UINT4": QuantDescriptor(4, unsigned=True, axis=0),
    "UINT8": QuantDescriptor(unsigned=True),
    "FLOAT8E4M3FN": QuantDescriptor((4, 3), axis=0),
    "FLOAT8E5M2": QuantDescriptor((5, 2)),
    "UINT8 affine": QuantDescriptor(unsigned=True, symmetric=False, axis=0),
    "INT8 affine": QuantDescriptor(symmetric=False),
    "INT16": QuantDescriptor(16, axis=0),
    "INT4 blocks": QuantDescriptor(4, block_size=16),
    "INT8 blocks": QuantDescriptor(8, block_size=16),
    "INT4 uneven blocks": QuantDescriptor(4, block_size=24),
    "UINT4 affine": QuantDescriptor(4, unsigned=True, symmetric=False, block_size=16),
}


class Typed(nn.Module):
    """A linear layer for each weight type, all on the same input."""

    def __init__(self, types: dict[str, QuantDescriptor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(48, 5) for _ in types)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers], dim=1)


@pytest.mark.sample(1)
# Unsigned weights are legal.
@pytest.mark.filterwarnings("ignore:.*got negative values")
@pytest.mark.parametrize("dynamo", [False, True])
def test_types_of_weights(path: Path, dynamo: bool) -> None:
    """Every type is stored as itself and gives the simulation's numbers."""
    rules = [
        Rule(f"layers.{i}", weight=descriptor)
        for i, descriptor in enumerate(TYPES.values())
    ]
    model = calibrated(
        Typed(TYPES), torch.randn(4, 48), config=QuantConfig(tuple(rules))
    )
    x = torch.randn(3, 48)
    torchq.export_onnx(model, x, path, dynamo=dynamo)
    kinds = {
        name: onnx.TensorProto.DataType.Name(t.data_type)
        for name, t in weights_of(path).items()
    }
    assert kinds == {
        f"layers.{i}.weight_quantizer": name.split()[0] for i, name in enumerate(TYPES)
    }
    # float32 sums of 48 terms below 3
    torch.testing.assert_close(run_file(path, x)[0], model(x), rtol=0, atol=2e-6)
    found = torchq.verify_onnx(model, path, [x])
    assert found.ok and len(found.layers) >= len(TYPES)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [False, True])
def test_four_bits_are_stored_as_eight_before_opset_21(
    path: Path, dynamo: bool
) -> None:
    config = QuantConfig((Rule("*", weight=TYPES["INT4"]),))
    x = torch.randn(3, 48)
    model = calibrated(nn.Sequential(nn.Linear(48, 5)), x, config=config)
    torchq.export_onnx(model, x, path, dynamo=dynamo, opset=20)
    assert [t.data_type for t in weights_of(path).values()] == [onnx.TensorProto.INT8]
    assert torchq.verify_onnx(model, path, [x]).ok


def test_types_of_activations(path: Path) -> None:
    bits = [8, 16, 4, (4, 3), (5, 2), 6]
    rules = [
        Rule(f"layers.{i}", input=QuantDescriptor(b), weight=QuantDescriptor(axis=0))
        for i, b in enumerate(bits)
    ]
    model = calibrated(
        Typed(dict.fromkeys(map(str, bits))),
        torch.randn(4, 48),
        config=QuantConfig(tuple(rules)),
    )
    x = 2 * torch.randn(30, 48)
    torchq.export_onnx(model, x, path)
    torch.testing.assert_close(run_file(path, x)[0], model(x), rtol=0, atol=2e-6)
    assert torchq.verify_onnx(model, path, [x]).ok


@pytest.mark.sample(2)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dynamo", [False, True])
def test_half_models_keep_float32_scales(
    path: Path, dtype: torch.dtype, dynamo: bool
) -> None:
    model = calibrated(
        nn.Sequential(nn.Linear(64, 8)).to(dtype), torch.randn(4, 64, dtype=dtype)
    )
    torchq.export_onnx(model, torch.randn(2, 64, dtype=dtype), path, dynamo=dynamo)
    graph = onnx.load(str(path)).graph
    assert {t.data_type for t in graph.initializer if t.name.endswith("/scale")} == {
        onnx.TensorProto.FLOAT
    }
    assert {t.data_type for t in weights_of(path).values()} == {onnx.TensorProto.INT8}
    if dtype is torch.float16:  # ONNX Runtime has no bfloat16 Gemm on CPUs
        x = torch.randn(2, 64, dtype=dtype)
        # one float16 rounding of sums around 1
        torch.testing.assert_close(run_file(path, x)[0], model(x), rtol=0, atol=2e-3)


class Keywords(nn.Module):
    """Two tensors of which only one has a batch, and a flag."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, table: Tensor, twice: bool = False) -> Tensor:
        y = self.linear(x) @ table
        return 2 * y if twice else y


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [False, True])
def test_keyword_arguments_and_more_open_dimensions(path: Path, dynamo: bool) -> None:
    model = Keywords()
    torchq.quantize_(model)
    example = {"x": torch.randn(1, 4, 6), "table": torch.randn(6, 3)}
    torchq.calibrate(model, [example], progress=False)
    torchq.export_onnx(
        model,
        example,
        path,
        dynamo=dynamo,
        dynamic_shapes={"x": {1: "length"}},
        output_names=["y"],
    )
    x = torch.randn(5, 9, 6)
    table = torch.randn(6, 3)
    torch.testing.assert_close(
        run_file(path, x, table)[0], model(x, table), rtol=0, atol=1e-5
    )
    shapes = {
        v.name: [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim]
        for v in onnx.load(path).graph.input
    }
    assert shapes == {"x": ["batch", "length", 6], "table": [6, 3]}
    with pytest.raises(
        ExportError,
        match=r"dynamic_shapes names \['z'\]; expected some of .* \['table', 'x'\]",
    ):
        torchq.export_onnx(model, example, path, dynamic_shapes={"z": {0: "n"}})


class Variadic(nn.Module):
    """Arguments without names."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, *tensors: Tensor) -> Tensor:
        return self.linear(tensors[0]) + tensors[-1]


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [False, True])
def test_arguments_without_names(path: Path, dynamo: bool) -> None:
    model = calibrated(Variadic(), torch.randn(4, 6))
    torchq.export_onnx(model, (torch.randn(1, 6),), path, dynamo=dynamo)
    x = torch.randn(5, 6)
    torch.testing.assert_close(run_file(path, x)[0], model(x), rtol=0, atol=1e-6)
    pair = (torch.randn(1, 6), torch.randn(1, 6))
    with pytest.raises(
        ConfigError, match="an optional argument and a label look the same"
    ):
        torchq.export_onnx(model, pair, path, dynamo=dynamo)


def test_wrapped_models_are_unwrapped(path: Path) -> None:
    """DataParallel is unwrapped; a compiled model is refused by name."""
    model = calibrated(nn.Sequential(nn.Linear(6, 6)), torch.randn(4, 6))
    torchq.export_onnx(nn.DataParallel(model), torch.randn(3, 6), path, dynamo=False)
    assert set(ends(path, "QuantizeLinear")) == {"0.input_quantizer"}
    with pytest.raises(
        ExportError, match=r"got a OptimizedModule; expected the model itself"
    ):
        torchq.export_onnx(torch.compile(model), torch.randn(3, 6), path, dynamo=False)


def test_per_tensor_reaches_opset_10(path: Path) -> None:
    model = calibrated(
        nn.Sequential(nn.Linear(4, 4)),
        torch.randn(4, 4),
        config=torchq.recipes.int8_per_tensor(),
    )
    torchq.export_onnx(model, torch.randn(2, 4), path, opset=10)
    x = torch.randn(3, 4)
    torch.testing.assert_close(run_file(path, x)[0], model(x), rtol=0, atol=1e-6)


def test_dead_weights_and_disabled_quantizers_export(path: Path) -> None:
    """A weight of zeros is exact, and a quantizer that is off leaves no trace."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    nn.init.zeros_(model[0].weight)
    calibrated(model, torch.randn(4, 4))
    with torchq.disabled(model, "1.*"):
        report = torchq.export_onnx(model, torch.randn(2, 4), path, dynamo=False)
        x = torch.randn(3, 4)
        torch.testing.assert_close(run_file(path, x)[0], model(x), rtol=0, atol=1e-6)
    assert report.weights == ("0.weight_quantizer",)


class StartsAtZero(nn.Module):
    """A residual branch whose factor is zero until it is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.gain = nn.Parameter(torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) * self.gain


@pytest.mark.filterwarnings("ignore:(?s).*its output is not quantized")
def test_an_activation_that_saw_only_zeros_exports_with_a_warning(path: Path) -> None:
    model = StartsAtZero()
    x = torch.randn(2, 3, 8, 8)
    torchq.quantize_(model, target="onnxruntime", example=x)
    torchq.calibrate(model, [x], progress=False)
    with pytest.warns(UserWarning, match="other_quantizer: calibrated on zeros alone"):
        torchq.export_onnx(model, x, path, dynamo=False)
    assert torchq.verify_onnx(model, path, [x]).ok


def test_float_models_export_with_a_warning(path: Path) -> None:
    with pytest.warns(
        UserWarning,
        match="Linear has no active quantizer; the file will hold a float model",
    ):
        report = torchq.export_onnx(
            nn.Linear(4, 4), torch.randn(2, 4), path, dynamo=False
        )
    assert report.weights == ()


# torch 2.9: dynamo makes an object of every autograd.Function, and torch warns about that.
@pytest.mark.filterwarnings(
    "ignore:.*Function'> should not be instantiated:DeprecationWarning"
)
def test_torch_export_gives_the_same_numbers() -> None:
    model = calibrated(Residual(), torch.randn(4, 3, 16, 16))
    x = torch.randn(2, 3, 16, 16)
    program = torch.export.export(model, (x,))
    assert torch.equal(program.module()(x), model(x))


def test_scripted_modules_take_no_hooks_and_need_none() -> None:
    """An export that torch refuses says so, and not that hooks cannot be registered."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated")
        model = nn.Sequential(torch.jit.script(nn.ReLU()))
    check_arguments(model, torch.randn(2, 3), dynamo=True)


def test_jit_trace_needs_no_flag(tmp_path: Path) -> None:
    """There is no TracerWarning, and the saved program computes the same."""
    model = calibrated(Layers(), torch.randn(4, 3, 9, 9))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*torch.jit.* is deprecated")
        traced = torch.jit.trace(model, torch.randn(2, 3, 9, 9))
        torch.jit.save(traced, tmp_path / "m.pt")
        loaded = torch.jit.load(tmp_path / "m.pt")
    x = torch.randn(2, 3, 9, 9)
    for found, expected in zip(loaded(x), model(x), strict=True):
        assert torch.equal(found, expected)


class Base(nn.Module):
    """One quantized layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)


class OfMapping(Base):
    def forward(self, features: dict[str, Tensor]) -> Tensor:
        return self.linear(features["x"]) + features["y"]


class OfPair(Base):
    def forward(self, pair: tuple[Tensor, Tensor], rest: Tensor) -> Tensor:
        return self.linear(pair[0]) + 2 * pair[1] + 3 * rest


class WithInput(Base):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.linear(x)


class Silent(Base):
    def forward(self, x: Tensor) -> None:
        self.linear(x)


def ready(model: nn.Module, example: Any) -> nn.Module:
    torchq.quantize_(model.eval())
    torchq.calibrate(model, [example], progress=False)
    return model


def of_mapping() -> tuple[Any, ...]:
    return ({"x": torch.randn(4, 6), "y": torch.randn(4, 6)},)


def of_pair() -> tuple[Any, ...]:
    return (torch.randn(4, 6), torch.randn(4, 6)), torch.randn(4, 6)


CONTAINERS = pytest.mark.parametrize(
    ("kind", "example", "names"),
    [(OfMapping, of_mapping, ["features_0", "features_1"]),
     (OfPair, of_pair, ["pair_0", "pair_1", "rest"])],
)  # fmt: skip


@pytest.mark.sample(1)
@CONTAINERS
def test_tensors_in_containers_are_inputs(
    kind: Any, example: Any, names: list[str], path: Path
) -> None:
    model = ready(kind(), example())
    torchq.export_onnx(model, example(), path, dynamic_batch=False)
    assert [value.name for value in onnx.load(path).graph.input] == names
    assert torchq.verify_onnx(model, path, [example()]).ok


@CONTAINERS
def test_the_older_exporter_makes_inputs_of_tensors_in_containers(
    kind: Any, example: Any, names: list[str], path: Path
) -> None:
    model = ready(kind(), example())
    torchq.export_onnx(model, example(), path, dynamo=False)
    assert [value.name for value in onnx.load(path).graph.input] == names
    assert torchq.verify_onnx(model, path, [example()]).ok


class OfMembers(nn.Module):
    """Reads the one tensor of a set."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, members: set[Tensor]) -> Tensor:
        return self.layer(next(iter(members)))


def test_tensors_in_other_containers_are_not_stored_as_constants(
    path: Path, tmp_path: Path
) -> None:
    example = ({torch.randn(2, 4)},)
    model = ready(OfMembers(), example)
    message = r"got the tensors members_0 inside a container that.*dynamo=True"
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(model, example, path, dynamo=False)
    assert not list(tmp_path.iterdir())


class Positions(nn.Module):
    """A layer that reads a row of a table, in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(9, 8))
        self.register_buffer("index", torch.tensor([[3, 1] * 4]))
        self.position = nn.Linear(8, 8)
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.position(torch.gather(self.table, 1, self.index))


def test_what_the_reference_of_onnx_cannot_compute_stays_in_the_file(
    path: Path,
) -> None:
    """It raises an error for a GatherElements with fewer rows of indices than data."""
    x = torch.randn(2, 8)
    net = calibrated(Positions(), x)
    torchq.export_onnx(net, x, path, dynamo=True)
    assert torchq.verify_onnx(net, path, [x]).ok


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [False, True])
def test_an_input_that_is_an_output_keeps_its_name(path: Path, dynamo: bool) -> None:
    x = torch.randn(4, 6)
    model = ready(WithInput(), x)
    torchq.export_onnx(model, x, path, dynamo=dynamo)
    graph = onnx.load(path).graph
    assert [value.name for value in graph.input] == ["x"]
    assert len({value.name for value in (*graph.input, *graph.output)}) == 3
    assert torchq.verify_onnx(model, path, [torch.randn(3, 6)]).ok


@dataclasses.dataclass
class Prediction:
    """What a model may return that its user wrote: no exporter knows the class."""

    logits: Tensor
    hidden: Tensor
    source: object = None


class InClass(nn.Module):
    """A model that returns its results in an object of a class."""

    def __init__(self, kind: Callable[..., object]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.last = nn.Linear(16, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> object:
        hidden = self.first(x).relu()
        return self.kind(logits=self.last(hidden), hidden=hidden)


@pytest.mark.parametrize("dynamo", [False, True])
def test_results_in_a_dataclass_are_outputs_of_its_names(
    dynamo: bool, tmp_path: Path
) -> None:
    model = InClass(Prediction).eval()
    x = torch.randn(3, 8)
    torchq.quantize_(model, torchq.recipes.int8(reduce_range=True), example=x)
    torchq.calibrate(model, [x], progress=False)
    path = tmp_path / "net.onnx"
    torchq.export_onnx(model, x, path, dynamo=dynamo, progress=False)
    assert [o.name for o in onnx.load(str(path)).graph.output] == ["logits", "hidden"]
    assert torchq.verify_onnx(model, path, [x], progress=False).ok
    assert isinstance(model(x), Prediction)
    unknown = ready(InClass(types.SimpleNamespace), x)
    with pytest.raises(ExportError, match=r"no tensor.*dataclasses.*SimpleNamespace"):
        torchq.export_onnx(unknown, x, path, dynamo=dynamo, progress=False)


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_model_without_results_is_refused(path: Path, dynamo: bool) -> None:
    model = ready(Silent(), torch.randn(4, 6))
    with pytest.raises(
        ExportError, match="Silent returns no tensor; expected one at least"
    ):
        torchq.export_onnx(model, torch.randn(4, 6), path, dynamo=dynamo)


BOTH = pytest.mark.parametrize("dynamo", [False, True])


def two_inputs(scores: str = "scores") -> fx.GraphModule:
    """Return what was read of a file whose names are no names of Python, two of them alike."""
    w = Writer(17)
    first = w.input("in.1", [None, 3, None, 8])
    second = w.input("in/1", [None, 4, None, 6])
    h = w.node("Conv", first, w.random(4, 3, 3, 3), w.random(4))
    total = w.node("Add", w.node("Relu", h), second)
    file = w.model(w.node("Conv", total, w.random(5, 4, 3, 3), w.random(5)), total)
    for old, new in zip(
        [v.name for v in file.graph.output], (scores, "sum:0"), strict=True
    ):
        for node in file.graph.node:
            for names in (node.input, node.output):
                names[:] = [new if name == old else name for name in names]
    for value, name in zip(file.graph.output, (scores, "sum:0"), strict=True):
        value.name = name
    return torchq.from_onnx(file)


def batch(count: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 8, 8), torch.randn(count, 4, 6, 6)


class Cache:
    """An object that a language model returns beside its result."""


class Caches(nn.Module):
    """Returns a dictionary with such an object in it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, object]:
        y = self.layer(x)
        return {"logits": y, "cache": Cache(), "more": (y + 1, None)}


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [True, False])
def test_what_onnx_has_no_type_for_is_left_out(path: Path, dynamo: bool) -> None:
    x = torch.randn(3, 4)
    model = calibrated(Caches(), [x])
    with pytest.warns(
        UserWarning, match=r"returns tests\.onnx\.test_export\.Cache, which ONNX"
    ):
        torchq.export_onnx(model, x, path, dynamo=dynamo)
    found, more = run_file(path, x)
    result = model(x)
    assert isinstance(result["cache"], Cache)
    # Two float32 orders of the same sums.
    torch.testing.assert_close(torch.as_tensor(found), result["logits"])
    torch.testing.assert_close(torch.as_tensor(more), result["logits"] + 1)


def interface(path: Path) -> tuple[list[str], list[str]]:
    graph = onnx.load(str(path)).graph
    return [value.name for value in graph.input], [value.name for value in graph.output]


def calibrated_on(model: nn.Module, *examples: Tensor) -> Any:
    torchq.quantize_(model)
    torchq.calibrate(model, [examples], progress=False)
    return model


@pytest.mark.slow
@BOTH
def test_a_model_that_was_read_keeps_the_names_of_its_file(
    path: Path, dynamo: bool
) -> None:
    model = calibrated_on(two_inputs(), *batch())
    for each in (model, copy.deepcopy(model)):
        torchq.export_onnx(each, batch(), path, dynamo=dynamo)
        assert interface(path) == (["in.1", "in/1"], ["scores", "sum:0"])
    assert torchq.verify_onnx(model, path, [batch(3)]).ok
    # Keyword arguments in another order than the inputs of the file.
    arguments = list(torch.fx.symbolic_trace(model).graph.find_nodes(op="placeholder"))
    first, second = batch(3)
    swapped = {arguments[1].name: second, arguments[0].name: first}
    assert torchq.verify_onnx(model, path, [swapped]).ok


@pytest.mark.slow
def test_names_that_are_given_win_over_those_of_the_file(path: Path) -> None:
    model = calibrated_on(two_inputs(), *batch())
    names = {"input_names": ["image"], "output_names": ["out", "side"]}
    torchq.export_onnx(model, batch(), path, **names)
    assert interface(path) == (["image", "in/1"], ["out", "side"])


@pytest.mark.slow
def test_a_changed_model_has_the_names_of_its_exporter(path: Path) -> None:
    """An output that is taken away leaves no name for another one."""
    model = two_inputs()
    (results,) = model.graph.output_node().args
    assert isinstance(results, (tuple, list))
    model.graph.output_node().args = (results[1],)
    model.recompile()
    calibrated_on(model, *batch())
    torchq.export_onnx(model, batch(), path)
    inputs, (output,) = interface(path)
    assert inputs == ["in.1", "in/1"]
    assert output != "scores"


def test_open_dimensions_may_be_named_as_in_the_file(path: Path) -> None:
    model = calibrated_on(two_inputs(), *batch())
    shapes = {"in.1": {2: "height"}, "in/1": {2: "lower"}}
    torchq.export_onnx(model, batch(), path, dynamic_shapes=shapes, dynamo=False)
    taller = torch.randn(2, 3, 9, 8), torch.randn(2, 4, 7, 6)
    assert torchq.verify_onnx(model, path, [taller]).ok


LINEAR = nn.Sequential(nn.Linear(6, 6))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"dynamic_shapes": ({1: "h"},)},
            r"got dynamic_shapes=\(.*; expected a mapping from the",
        ),
        (
            {"dynamic_shapes": {"input": "h"}},
            "expected a mapping from the name of an input",
        ),
        (
            {"dynamic_shapes": {"input": {1: 6}}},
            "expected a mapping from the name of an input",
        ),
        (
            {"dynamic_shapes": {"input": {1: ""}}},
            "expected a mapping from the name of an input",
        ),
        (
            {"dynamic_shapes": {3: {1: "h"}}},
            r"names \['3'\]; expected some of .* \['input'\]",
        ),
        (
            {"dynamic_shapes": {"input": {2: "h"}}},
            "opens dimension 2 of 'input'; expected 0 to 1",
        ),
        (
            {"dynamic_shapes": {"input": {-1: "h"}}},
            "opens dimension -1 .*; expected 0 to 1",
        ),
        ({"input_names": "x"}, r"got input_names='x'; expected a list of names"),
        (
            {"input_names": ["x", "y"]},
            r"got input_names=\['x', 'y'\]; expected at most 1",
        ),
        ({"output_names": [3]}, r"got output_names=\[3\]; expected a list of names"),
        (
            {"output_names": ["y", "y"]},
            r"output_names=\['y', 'y'\]; expected different names",
        ),
        ({"output_names": ["input"]}, "input as the name of an input and of an output"),
        ({"opset": 20.0}, r"got opset 20\.0; expected 10 to 23"),
        ({"opset": "20"}, r"got opset '20'; expected 10 to 23"),
    ],
)
def test_names_and_shapes_that_fit_no_file_are_refused(
    path: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    model = calibrated(copy.deepcopy(LINEAR), torch.randn(4, 6))
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(model, torch.randn(2, 6), path, **options)
    assert not list(tmp_path.iterdir())


class Neutral(nn.Module):
    """Arithmetic that leaves values as they are, and some that nearly does."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.register_buffer("one", torch.ones(1))
        self.register_buffer("ones", torch.ones(2, 1, 1))
        self.register_buffer("zero", torch.zeros(1, 1, 1, 1, 1))

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = self.conv(x)
        same = (self.one * x * 1.0 + 0.0 - 0.0).float() / self.one
        return same.relu(), self.ones * x, x * 2, x + self.zero, 0.0 - x, self.one / x


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [False, True])
def test_nodes_that_return_an_operand_are_removed(path: Path, dynamo: bool) -> None:
    x = torch.randn(2, 3, 4, 4)
    model = calibrated(Neutral(), x)
    torchq.export_onnx(model, x, path, dynamo=dynamo, progress=False)
    operators = [node.op_type for node in onnx.load(path).graph.node]
    kinds = ("Mul", "Add", "Sub", "Div", "Cast")
    assert {kind: operators.count(kind) for kind in kinds} == {
        "Mul": 2,
        "Add": 1,
        "Sub": 1,
        "Div": 1,
        "Cast": 0,
    }
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


class Asking(nn.Module):
    """A layer whose code asks for a value, of which torch's older exporter warns."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) if x.shape[0] > 0 and bool(x.sum() < 1e9) else x


def test_what_the_older_exporter_repeats_is_warned_of_once(tmp_path: Path) -> None:
    model = nn.Sequential(*(Asking() for _ in range(6))).eval()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torchq.export_onnx(
            model, torch.ones(2, 8), tmp_path / "net.onnx", dynamo=False, progress=False
        )
    texts = [
        str(w.message)
        for w in caught
        if issubclass(w.category, torch.jit.TracerWarning)
    ]
    assert texts and len(texts) == len(set(texts))

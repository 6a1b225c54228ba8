"""The conformance suite of engines, run over the registry. A new engine is a row here."""

from __future__ import annotations

import copy
import dataclasses
import gc
import sys
import tracemalloc
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.contracts.engine_contract import (
    BOUND_DB,
    EngineContract,
    calibrated_detector,
    images,
)
from tests.lowering.common import sqnr
from torchq.errors import ConfigError, ExportError, InputError, MissingExtraError
from torchq.runtimes import (
    RUNTIMES,
    Engine,
    EngineModule,
    OnnxRuntime,
    OpenVino,
    TensorRt,
    Torch,
    onnx_engine,
)
from torchq.runtimes.engine import Task
from torchq.runtimes.export import OpenLengths
from torchq.runtimes.interface import Run, Shapes
from torchq.runtimes.onnx_engine import runs_as_written
from torchq.runtimes.onnxruntime import SessionEngine

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

#: Products of weights of 8 bits overflow on CPUs without VNNI.
SEVEN_BITS = torchq.recipes.int8(reduce_range=True)
#: Engines by name, with the settings that the suite runs.
ROWS: dict[str, tuple[Engine, ...]] = {
    "torch": (Torch(), Torch(quantized=False)),
    "onnxruntime": (OnnxRuntime(), OnnxRuntime(quantized=False)),
    "openvino": (OpenVino(), OpenVino(quantized=False)),
    "executorch": (),  # test_executorch.py: its files take no other shape than the example's
}
SETTINGS = [engine for row in ROWS.values() for engine in row]


def available(engine: Engine) -> None:
    """Skip a test where the package of an engine is missing."""
    try:
        engine.check()
    except MissingExtraError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module", params=SETTINGS, ids=lambda engine: engine.label)
def engine(request: pytest.FixtureRequest) -> Engine:
    available(request.param)
    return request.param


@pytest.fixture(scope="module")
def simulated(engine: Engine) -> nn.Module:
    return calibrated_detector(engine.name)


@pytest.fixture(scope="module")
def deployed(engine: Engine, simulated: nn.Module) -> nn.Module:
    """Deploy the detector, which must stay as it was."""
    before = {name: value.clone() for name, value in simulated.state_dict().items()}
    result = torchq.deploy(simulated, images(1), target=engine)
    after = simulated.state_dict()
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    return result


class TestEngines(EngineContract):
    """The contract, for every row."""


def test_every_engine_has_a_row() -> None:
    here = {r.name for r in RUNTIMES.values() if isinstance(r, Engine) and r.measured}
    assert set(ROWS) == here
    for name, row in ROWS.items():
        assert all(engine.name == name for engine in row)


def test_engines_are_immutable() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        OnnxRuntime().quantized = False  # type: ignore[misc]


@pytest.fixture(
    scope="module", params=[OnnxRuntime(), OpenVino()], ids=lambda e: e.name
)
def graph(request: pytest.FixtureRequest) -> tuple[EngineModule, nn.Module]:
    """Deploy the detector as one graph, on the runtime that it is quantized for."""
    available(request.param)
    model = calibrated_detector(request.param.name)
    result = torchq.deploy(model, images(1))
    assert isinstance(result, EngineModule)
    assert result.target == request.param.name
    return result, model


@pytest.fixture
def graph_module(graph: tuple[EngineModule, nn.Module]) -> EngineModule:
    return graph[0]


class TestGraphEngines:
    """What holds beyond the contract where the model is one graph: its inputs are checked."""

    def test_errors_name_the_argument(self, graph_module: EngineModule) -> None:
        x = images(1)
        for args, kwargs, message in (
            (
                (x.double(),),
                {},
                "argument 'image': got torch.float64; expected torch.float32",
            ),
            (
                (x[:, :2],),
                {},
                r"argument 'image': got shape \(1, 2, 12, 12\); expected \(any, 3",
            ),
            ((x[0],), {}, r"argument 'image': got shape \(3, 12, 12\)"),
            ((x.numpy(),), {}, "argument 'image': got a ndarray; expected a tensor"),
            ((x.to("meta"),), {}, "got a tensor on meta; expected one on cpu"),
            ((), {}, "missing a required argument: 'image'"),
            ((x,), {"picture": x}, "unexpected keyword argument 'picture'"),
            ((x, 1.0, None), {}, "too many positional arguments"),
            ((x, 2.0), {}, "argument 'factor': got 2.0; expected 1.0"),
            ((x,), {"mask": x}, "argument 'mask': got a Tensor; expected None"),
        ):
            with pytest.raises(InputError, match=f"Detector: .*{message}"):
                graph_module(*args, **kwargs)

    def test_arguments_of_the_example_are_built_in(
        self, graph: tuple[EngineModule, nn.Module]
    ) -> None:
        graph_module, simulated = graph
        x = images(1)
        example = {"image": x, "factor": 2.0}
        deployed = torchq.deploy(simulated, example, target=graph_module.target)
        assert sqnr(deployed(x, 2.0).scores, simulated(x, 2.0).scores) > BOUND_DB
        with pytest.raises(InputError, match=r"'factor': got 1\.0; expected 2\.0"):
            deployed(x, 1.0)
        with pytest.raises(InputError, match=r"'factor': got 1\.0; expected 2\.0"):
            deployed(x)

    def test_state_dicts_hold_the_graph(
        self, graph: tuple[EngineModule, nn.Module]
    ) -> None:
        graph_module, simulated = graph
        x = images(2)
        example = {"image": x, "factor": 2.0}
        other = torchq.deploy(simulated, example, target=graph_module.target)
        twin = copy.deepcopy(graph_module)
        twin.load_state_dict(other.state_dict())
        assert torch.equal(
            twin(x).scores,
            other(x, 2.0).scores,
        )
        assert not torch.equal(twin(x).scores, graph_module(x).scores)

    def test_the_summary_counts_integer_nodes(self, graph_module: EngineModule) -> None:
        (row,) = torchq.summary(graph_module).layers
        assert row.kernel == f"{graph_module.target} quantized"
        assert row.bytes == graph_module.graph.numel()
        count, total = (int(word) for word in row.note.split()[:3:2])
        assert 2 <= count <= total  # the two convolutions


def test_engines_need_an_example() -> None:
    with pytest.raises(
        ConfigError, match="target 'onnxruntime' without an example; expected one"
    ):
        torchq.deploy(calibrated_detector(), target="onnxruntime")


def test_an_unknown_engine_is_an_error() -> None:
    with pytest.raises(
        ConfigError, match="unknown target 'tvm'; expected one of: 'ascend'"
    ):
        torchq.deploy(calibrated_detector(), images(1), target="tvm")


class Casting(nn.Module):
    """A model that begins with a cast of its input, as vision towers of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 3)

    def forward(self, pixels: Tensor) -> Tensor:
        return self.layer(pixels.to(dtype=self.layer.weight.dtype))


def test_openvino_finds_an_input_behind_an_idle_cast() -> None:
    available(OpenVino())
    model = Casting().eval()
    torchq.quantize_(model, SEVEN_BITS)
    torchq.calibrate(model, [images(2)], progress=False)
    deployed = torchq.deploy(model, images(1), target="openvino")
    assert sqnr(deployed(images(2)), model(images(2))) > BOUND_DB


def test_openvino_compiles_usual_shapes_for_themselves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    available(OpenVino())
    compiled: list[Shapes | None] = []
    original = OpenVino._compile

    def compile(
        self: OpenVino, graph: bytes, threads: int, shapes: Shapes | None
    ) -> object:
        compiled.append(shapes)
        return original(self, graph, threads, shapes)

    monkeypatch.setattr(OpenVino, "_compile", compile)
    model = calibrated_detector("openvino")
    deployed = torchq.deploy(model, images(1))
    one = (("image", (1, 3, 12, 12)),)
    # All after the first were for comparing other inputs and lengths, and are not kept.
    assert compiled[0] == one
    assert None in compiled
    twin = copy.deepcopy(deployed)
    for module, expected in ((deployed, [None]), (twin, [None, one])):
        compiled.clear()
        for count in (2, 1, 3, 1):
            assert module(images(count)).scores.shape == (count, 5)
        assert compiled == expected


@pytest.mark.parametrize(
    "engine", [OnnxRuntime(provider="cuda"), TensorRt()], ids=lambda e: e.name
)
def test_providers_that_are_not_there_are_named(engine: SessionEngine) -> None:
    runtime = pytest.importorskip("onnxruntime")
    if len(runtime.get_available_providers()) > 2:
        pytest.skip("there are providers for GPUs")
    with pytest.raises(ExportError, match=f"expected it for '{engine.label}'"):
        torchq.deploy(
            calibrated_detector(engine.name),
            images(1),
            target=engine,
        )


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="got provider 'npu'; expected one of 'cpu'"):
        OnnxRuntime(provider="npu")
    with pytest.raises(
        ConfigError, match="got precision 'int3'; expected one of 'f32'"
    ):
        OpenVino(precision="int3")


@pytest.mark.parametrize(
    ("name", "extra"), [("onnxruntime", "export"), ("openvino", "openvino")]
)
def test_a_missing_package_is_named(
    name: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"target='{name}'.*torchq\[{extra}\]"):
        torchq.deploy(calibrated_detector(name), images(1), target=name)


def test_the_number_of_threads_follows_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    original = OnnxRuntime.open

    def opened(
        self: OnnxRuntime, read: Any, threads: int, usual: tuple[Shapes, ...]
    ) -> Run:
        seen.append(threads)
        return original(self, read, threads, usual)

    monkeypatch.setattr(OnnxRuntime, "open", opened)
    deployed = torchq.deploy(calibrated_detector(), images(1), target="onnxruntime")
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        deployed(images(1))
        deployed(images(2))
    finally:
        torch.set_num_threads(before)
    deployed(images(1))
    # Those between were for comparing other lengths.
    assert seen[:2] == [before, before]
    assert seen[-1] == 2
    assert seen.count(2) == 1


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])
def test_opened_modules_keep_no_copy_of_their_file(engine: str) -> None:
    pytest.importorskip(engine)
    torch.manual_seed(0)
    x = torch.randn(1, 512)
    model = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 8)).eval()
    torchq.quantize_(model, SEVEN_BITS)
    torchq.calibrate(model, [x], progress=False)
    deployed = torchq.deploy(model, x, target=engine)
    deployed._reset()
    gc.collect()
    tracemalloc.start()
    try:
        deployed(x)
        gc.collect()
        kept, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < deployed.graph.numel() / 4
    assert most > deployed.graph.numel()


@pytest.mark.slow
def test_a_wrong_result_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    original = OnnxRuntime.open

    def wrong(
        self: OnnxRuntime, graph: bytes, threads: int, usual: tuple[Shapes, ...]
    ) -> Run:
        run = original(self, graph, threads, usual)
        return lambda feeds: [2 * result for result in run(feeds)]

    monkeypatch.setattr(OnnxRuntime, "open", wrong)
    monkeypatch.setattr(onnx_engine, "_file_agrees", lambda *_: (False, False))
    with pytest.raises(
        ExportError, match="target 'onnxruntime quantized': result 0 has relative"
    ):
        torchq.deploy(calibrated_detector(), images(1), target="onnxruntime")


@pytest.mark.slow
def test_an_engine_that_computes_something_else_than_its_file_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        OnnxRuntime, "open", spoiled(lambda run, feeds: [2 * y for y in run(feeds)])
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3)).eval()
    torchq.quantize_(model, SEVEN_BITS)
    torchq.calibrate(model, [images(2)], progress=False)
    with pytest.raises(ExportError, match="computes something else than its file says"):
        torchq.deploy(model, images(1), target="onnxruntime")


def spoiled(
    change: Callable[[Run, Mapping[str, Tensor]], list[Tensor]],
) -> Callable[..., Run]:
    """Return ``OnnxRuntime.open`` with a run that is changed."""
    original = OnnxRuntime.open

    def opened(self: OnnxRuntime, *args: Any) -> Run:
        run = original(self, *args)
        return lambda feeds: change(run, feeds)

    return opened


class Amplifying(nn.Module):
    """A model whose result depends on the last digits of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(1e5 * x)


@pytest.mark.parametrize(
    ("model", "expected"), [(Amplifying(), True), (nn.Identity(), False)]
)
def test_what_a_model_amplifies_is_no_fault_of_an_engine(
    model: nn.Module, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    layers = nn.Sequential(model, nn.Linear(16, 4)).eval()
    torchq.quantize_(layers, SEVEN_BITS)
    torchq.calibrate(layers, [x], progress=False)
    module = OnnxRuntime().build(Task(layers, x, compares=False))
    assert runs_as_written(module, x)
    shifted = spoiled(lambda run, feeds: run({n: x + 0.5 for n, x in feeds.items()}))
    monkeypatch.setattr(OnnxRuntime, "open", shifted)
    assert runs_as_written(copy.deepcopy(module), x) is expected


@pytest.mark.parametrize(("offset", "at_ties"), [(0.5, True), (0.25, False)])
def test_ties_of_a_model_that_reads_indices_are_no_fault_of_an_engine(
    offset: float, at_ties: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Indices cannot be changed a little, as other inputs are; what quantizers read can."""
    generator = torch.Generator().manual_seed(0)
    words = torch.randint(-2, 2, (20, 16), generator=generator) + offset
    words[0] = 127  # So the scale is 1.
    model = nn.Sequential(nn.Embedding.from_pretrained(words), nn.Linear(16, 4)).eval()
    ids = torch.randint(1, 20, (2, 5), generator=generator)
    torchq.quantize_(model, SEVEN_BITS)
    torchq.calibrate(model, [torch.arange(20)[None]], correct=False, progress=False)
    off = spoiled(lambda run, feeds: [y * 1.2 for y in run(feeds)])
    monkeypatch.setattr(OnnxRuntime, "open", off)
    if at_ties:
        with pytest.warns(UserWarning, match="amplifies values that are rounded"):
            torchq.deploy(model, ids, target="onnxruntime")
    else:
        with pytest.raises(ExportError, match="something else than its file says"):
            torchq.deploy(model, ids, target="onnxruntime")


class Tagger(nn.Module):
    """Takes sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(8, 16, batch_first=True)
        self.last = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.recurrent(x)[0])


def test_steps_of_recurrent_layers_are_followed_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The default exporter fixes their number, so it is not asked to leave it open."""
    tried: list[tuple[bool, bool]] = []
    original = Task.graph

    def graph(self: Task, runtime: Any, dynamo: bool, lengths: OpenLengths) -> Any:
        tried.append((dynamo, bool(lengths.others)))
        return original(self, runtime, dynamo, lengths)

    monkeypatch.setattr(Task, "graph", graph)
    model = Tagger().eval()
    x = torch.randn(4, 12, 8)
    torchq.quantize_(model, torchq.recipes.int8(recurrent=True, reduce_range=True))
    torchq.calibrate(model, [x], progress=False)
    deployed = torchq.deploy(model, x, target="onnxruntime")
    torch.testing.assert_close(deployed(x[:2]), model(x[:2]), rtol=1e-3, atol=1e-3)
    assert tried == [(True, False)]


class Counting(nn.Module):
    """A model that returns the number of its rows beside a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return self.layer(x), x.shape[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("quantized", [True, False])
def test_numbers_that_depend_on_the_batch_keep_it_closed(quantized: bool) -> None:
    pytest.importorskip("onnxruntime")
    model = Counting().eval()
    x = torch.randn(2, 8)
    torchq.quantize_(model, SEVEN_BITS)
    torchq.calibrate(model, [x], progress=False)
    deployed = torchq.deploy(model, x, target=OnnxRuntime(quantized=quantized))
    assert deployed(x)[1] == 2
    with pytest.raises(torchq.errors.InputError, match=r"'x': got shape \(3, 8\)"):
        deployed(torch.randn(3, 8))


class RowByRow(nn.Module):
    """A model that loops over its rows, so that torch takes their number for a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([self.layer(row) for row in x])


@pytest.mark.slow
def test_a_batch_that_torch_fixes_without_a_word_keeps_it_closed() -> None:
    pytest.importorskip("onnxruntime")
    x = torch.randn(2, 8)
    model = RowByRow().eval()
    torchq.quantize_(model, SEVEN_BITS)
    torchq.calibrate(model, [x], progress=False)
    deployed = torchq.deploy(model, x, target="onnxruntime")
    torch.testing.assert_close(deployed(x), model(x), rtol=0, atol=1e-6)
    with pytest.raises(torchq.errors.InputError, match=r"'x': got shape \(3, 8\)"):
        deployed(torch.randn(3, 8))


@pytest.mark.slow
def test_an_export_that_torch_gives_up_prints_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    # TorchScript cannot export this pooling with an open length of the image.
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.AdaptiveAvgPool2d(5), nn.Flatten(), nn.Linear(200, 4)
    )
    x = torch.randn(2, 3, 12, 12)
    torchq.quantize_(model.eval(), SEVEN_BITS)
    torchq.calibrate(model, [x], progress=False)
    capfd.readouterr()
    torchq.deploy(model, x, target="onnxruntime")
    assert capfd.readouterr().out == ""


GRAPH_ENGINES = pytest.mark.parametrize("engine", ["onnxruntime", "openvino"])


def on_engine(model: nn.Module, x: Tensor, engine: str) -> tuple[nn.Module, nn.Module]:
    """Return the simulation, and the model on the engine."""
    pytest.importorskip(engine)
    torchq.quantize_(model.eval(), SEVEN_BITS)
    torchq.calibrate(model, [x], progress=False)
    return model, torchq.deploy(model, x, target=engine, progress=False)


@pytest.mark.sample(2)
@GRAPH_ENGINES
@pytest.mark.parametrize("size", [(2, 2), (1, 9), (0, 0)], ids=str)
def test_images_that_are_smaller_than_a_kernel(
    engine: str, size: tuple[int, int]
) -> None:
    layers = (
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 4),
    )
    x = torch.randn(2, 3, 9, 9)
    simulated, model = on_engine(nn.Sequential(*layers), x, engine)
    model(x)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="Kernel size can't be greater"):
            simulated(torch.randn(2, 3, *size))
        with pytest.raises(
            ExportError, match=rf"{engine}: cannot run the model on inputs of sh"
        ):
            model(torch.randn(2, 3, *size))
    other = torch.randn(3, 3, 4, 7)
    torch.testing.assert_close(
        model(other),
        simulated(other),
        rtol=0.1,
        atol=0.1,
    )


@pytest.mark.sample(2)
@GRAPH_ENGINES
@pytest.mark.parametrize("shape", [(2, 0, 8), (0, 5, 8), (0, 0, 8)], ids=str)
def test_sequences_without_elements(engine: str, shape: tuple[int, ...]) -> None:
    model = nn.Sequential(
        nn.Linear(8, 8),
        nn.ReLU(),
        nn.Linear(8, 4),
    )
    simulated, model = on_engine(model, torch.randn(2, 5, 8), engine)
    x = torch.randn(shape)
    assert model(x).shape == simulated(x).shape

"""Models and files that are refused by name, and files that a failed call leaves as they were."""

from __future__ import annotations

import os
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.onnx.exported import Residual, calibrated
from torchq.errors import ConfigError, ExportError, MissingExtraError
from torchq.onnx.ir import save_model

onnx = pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")


def linear(**changes: object) -> nn.Module:
    """A calibrated linear layer in a Sequential, its input quantizer changed."""
    model = calibrated(
        nn.Sequential(nn.Linear(4, 4)),
        torch.randn(4, 4),
    )
    quantizer = model[0].input_quantizer
    for name, value in changes.items():
        if name == "amax":
            quantizer.amax.fill_(value)
        else:
            quantizer.descriptor = quantizer.descriptor.replace(**{name: value})
    return model


def uncalibrated() -> nn.Module:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.Linear(4, 4),
    )
    torchq.quantize_(model)
    return model


FAULTS = [
    (
        uncalibrated,
        r"0\.input_quantizer, 0\.weight_quantizer, .*: has no calibrated range; .* torchq\.cal",
    ),
    (
        lambda: linear(dynamic=True),
        r"0\.input_quantizer: is dynamic: .* expected a fixed range",
    ),
    (
        lambda: linear(amax=float("nan")),
        r"0\.input_quantizer: has a NaN range; expected finite numbers",
    ),
    (lambda: linear(amax=float("inf")), r"0\.input_quantizer: has an infinite range"),
    (lambda: linear(amax=-1.0), r"0\.input_quantizer: has a negative range"),
    (lambda: linear(fake_quant=False), r"0\.input_quantizer: returns integer codes"),
    (
        lambda: linear(num_bits=(3, 2)),
        r"0\.input_quantizer: format e3m2: ONNX QuantizeLinear has no such type",
    ),
    (
        lambda: linear(axis=(0, 1)),
        r"0\.input_quantizer: axis \(0, 1\): ONNX QuantizeLinear has one axis",
    ),
]


@pytest.mark.parametrize(
    ("make", "message"),
    FAULTS,
    ids=range(len(FAULTS)),
)
def test_unusable_ranges_are_named(path: Path, make: object, message: str) -> None:
    """Each fault is one error, with the quantizer and the fix."""
    assert callable(make)
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(make(), torch.randn(2, 4), path)


OPTIONS = [
    (
        {},
        {"opset": 12},
        r"0\.weight_quantizer: opset 12 has no .* per-channel .* opset >= 13",
    ),
    ({}, {"opset": 9}, r"got opset 9; expected 10 to 23"),
    ({}, {"opset": 24}, r"got opset 24; expected 10 to 23"),
    (
        {"num_bits": (4, 3)},
        {"opset": 18},
        r"0\.input_quantizer: opset 18 has no .* for the type e4m3; expected opset >= 19",
    ),
    (
        {},
        {"dynamo": True, "opset": 13},
        r"dynamo=True with opset 13; expected opset >= 18",
    ),
]


@pytest.mark.parametrize(("changes", "options", "message"), OPTIONS)
def test_opsets_are_checked(
    path: Path, changes: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(
            linear(**changes),
            torch.randn(2, 4),
            path,
            **options,
        )


def test_observers_rest_during_an_export(path: Path) -> None:
    model = linear()
    model[0].input_quantizer.start_calibration()
    torchq.export_onnx(model, 100 * torch.randn(2, 4), path, dynamo=False)
    assert model[0].input_quantizer.observing
    assert not model[0].input_quantizer.calibrator.seen


#: What torch's exporters leave out without a word, and which of them.
LOST: dict[str, tuple[Callable[[Tensor], Tensor], tuple[bool, ...]]] = {
    "divisor_override=3": (
        lambda x: F.avg_pool2d(x, 2, 2, 0, False, True, 3),
        (True, False),
    ),
    "divisor_override=5": (
        lambda x: F.avg_pool3d(x, 2, divisor_override=5),
        (True, False),
    ),
    "training=True": (
        lambda x: F.batch_norm(x, torch.ones(2), torch.ones(2), training=True),
        (True, False),
    ),
    "threshold=0.5": (lambda x: F.softplus(x, 1, 0.5), (False,)),
    "eps=3.0": (lambda x: F.cosine_similarity(x, x.flip(0), 1, 3.0), (False,)),
    "p=1.0": (lambda x: torch.cdist(x[0], x[1], p=1.0), (False,)),
    "accumulate=True": (
        lambda x: x.index_put((torch.tensor([0, 0]),), x[:2], True),
        (False,),
    ),
    "include_self=False": (
        lambda x: x.scatter_reduce(
            1, torch.zeros_like(x, dtype=torch.long), x, "mean", include_self=False
        ),
        (True,),
    ),
}


class Calls(nn.Module):
    """A layer, and a module that calls a function."""

    class Inner(nn.Module):
        def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.function = function

        def forward(self, x: Tensor) -> Tensor:
            return self.function(x)

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.inner = self.Inner(function)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(self.layer(x))


@pytest.mark.parametrize("argument", LOST)
def test_arguments_that_no_file_would_have_are_refused(
    argument: str, path: Path
) -> None:
    function, exporters = LOST[argument]
    torch.manual_seed(0)
    x = torch.randn(2, 2, 4, 4)
    model = calibrated(Calls(function), x)
    for dynamo in exporters:
        with pytest.raises(ExportError, match=f"^inner: calls .* with {argument}; exp"):
            torchq.export_onnx(model, x, path, dynamo=dynamo, progress=False)
    assert not path.exists()


@pytest.mark.slow
@pytest.mark.parametrize("argument", ["threshold=0.5", "eps=3.0"])
def test_arguments_that_one_exporter_writes_stay(argument: str, path: Path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 2, 4, 4)
    model = calibrated(Calls(LOST[argument][0]), x)
    torchq.export_onnx(model, x, path, dynamo=True, progress=False)
    assert torchq.verify_onnx(model, path, [x], progress=False).ok


@pytest.mark.parametrize("pool", [nn.AvgPool2d, nn.AvgPool3d])
def test_modules_with_such_an_argument_are_refused(pool: type[Any], path: Path) -> None:
    x = torch.randn(2, 3, *[4] * int(pool.__name__[-2]))
    model = nn.Sequential(
        nn.Linear(4, 4),
        pool(2, divisor_override=3),
    )
    model = calibrated(model, x)
    with pytest.raises(ExportError, match=r"^1: calls avg_pool.d with divisor_overri"):
        torchq.export_onnx(model, x, path, progress=False)
    assert not path.exists()


def test_a_missing_package_names_the_extra(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "onnx", None)
    with pytest.raises(
        MissingExtraError,
        match=r"export_onnx: onnx is not installed .*pip install torchq\[export\]",
    ):
        torchq.export_onnx(linear(), torch.randn(2, 4), path)


def test_unknown_targets_are_listed(path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"unknown target 'tvm'; expected one of: 'ascend', .*'fpga', .* 'tensorrt', 'torch'",
    ):
        torchq.export_onnx(
            linear(),
            torch.randn(2, 4),
            path,
            target="tvm",
        )


@pytest.mark.parametrize("dynamo", [False, True])
def test_a_deployed_model_has_no_file(path: Path, tmp_path: Path, dynamo: bool) -> None:
    model = nn.Sequential(
        nn.Linear(4, 4),
        nn.ReLU(),
    )
    x = torch.randn(2, 4)
    torchq.quantize_(model)
    torchq.calibrate(model, [x], progress=False)
    deployed = torchq.deploy(model)
    message = r"got a \w+ of a deployed model; expected the simulation.* that deploy was given"
    with pytest.raises(ExportError, match=message):
        torchq.export_onnx(deployed, x, path, dynamo=dynamo)
    assert not list(tmp_path.iterdir())


class Remembers(nn.Module):
    """A head that keeps constants for the shape of its last call, as detectors do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.shape = torch.Size()

    def forward(self, x: Tensor) -> Tensor:
        if self.shape != x.shape:
            self.shape = x.shape
            self.offsets = torch.zeros(x.shape)
        return self.linear(x) + self.offsets


@pytest.mark.slow
def test_a_batch_size_that_cannot_be_open_is_fixed_with_a_warning(path: Path) -> None:
    model = calibrated(Remembers(), torch.randn(2, 6))
    model(torch.randn(2, 6))  # calibrate puts back what the forward stored
    with pytest.warns(
        UserWarning, match="fixed batch size of the example. Pass dynamic_batch"
    ):
        torchq.export_onnx(model, torch.randn(2, 6), path, dynamo=True)
    (value,) = onnx.load(path).graph.input
    assert [d.dim_value for d in value.type.tensor_type.shape.dim] == [2, 6]
    assert torchq.verify_onnx(model, path, [torch.randn(2, 6)]).ok


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("dynamo", [False, True])
def test_what_a_forward_stores_while_it_is_traced_is_not_kept(
    dynamo: bool, path: Path
) -> None:
    if dynamo and torch.__version__ < (2, 10):
        pytest.skip("torch 2.9 exports no forward that stores a tensor")
    model = calibrated(Remembers(), torch.randn(3, 6))
    x = torch.randn(2, 6)
    model(torch.randn(3, 6))  # calibrate puts back what the forward stored
    shape = model.shape
    offsets = model.offsets
    torchq.export_onnx(model, x, path, dynamo=dynamo, dynamic_batch=False)
    assert model.shape is shape
    assert model.offsets is offsets
    assert type(model(x)) is Tensor


class Untraceable(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no tracing today")


def test_a_model_that_cannot_be_traced_at_all_is_an_error_without_a_warning(
    path: Path,
) -> None:
    with (
        pytest.raises(
            ExportError, match=r"torch could not export .*no tracing today.*dynamo="
        ),
        pytest.warns(UserWarning, match="no active quantizer") as seen,
    ):
        torchq.export_onnx(
            Untraceable(4, 4),
            torch.randn(2, 4),
            path,
            dynamo=False,
        )
    assert len(seen) == 1
    assert not torch.onnx.is_in_onnx_export()
    assert not (path).exists()


def test_mixed_precision_of_accelerate_is_refused_by_name(path: Path) -> None:
    """Its wrapper casts inside forward, and stays after ``unwrap_model`` unless asked otherwise."""
    model = calibrated(
        nn.Sequential(nn.Linear(6, 6)),
        torch.randn(4, 6),
    )
    original = model.forward
    model._original_forward = original
    inner = torch.autocast("cpu", dtype=torch.bfloat16)(original.__func__)
    model.forward = types.MethodType(inner, model)
    with pytest.raises(
        ExportError, match=r"unwrap_model\(model, keep_fp32_wrapper=False\)"
    ):
        torchq.export_onnx(model, torch.randn(2, 6), path, dynamo=False)


helper = onnx.helper


@pytest.fixture
def exported(tmp_path: Path) -> tuple[nn.Module, Path]:
    model = calibrated(
        Residual(),
        torch.randn(8, 3, 16, 16),
    )
    torchq.export_onnx(
        model, torch.randn(1, 3, 16, 16), tmp_path / "m.onnx", dynamo=False
    )
    return model, tmp_path / "m.onnx"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def full_disk(descriptor: int) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("limit", [None, 0], ids=["one file", "external data"])
def test_a_failed_call_leaves_the_files_as_they_were(
    exported: tuple[nn.Module, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    limit: int | None,
) -> None:
    model, path = exported
    if limit is not None:
        monkeypatch.setattr("torchq.onnx.ir._EXTERNAL_ABOVE", limit)
    torchq.export_onnx(model, torch.randn(1, 3, 16, 16), path, dynamo=False)
    before = contents(tmp_path)
    assert len(before) == (1 if limit is None else 2)
    monkeypatch.setattr(os, "fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        torchq.export_onnx(model, torch.randn(1, 3, 16, 16), path, dynamo=False)
    assert contents(tmp_path) == before


def breakages(good: bytes) -> dict[str, bytes]:
    """Contents of files that are no valid model."""
    model = onnx.ModelProto.FromString(good)
    circle = onnx.ModelProto.FromString(good)
    circle.graph.node[0].input[0] = circle.graph.node[-1].output[0]
    missing = onnx.ModelProto.FromString(good)
    del missing.graph.initializer[:]
    name = (
        onnx.ModelProto.FromString(good)
        .SerializeToString()
        .replace(b"MaxPool", b"M\xf9xPool")
    )
    shape = onnx.ModelProto.FromString(good)
    shape.graph.initializer[0].dims.append(2**40)
    kind = onnx.ModelProto.FromString(good)
    kind.graph.initializer[0].data_type = 77
    del model.graph.node[3].input[:]
    return {
        "nothing": b"",
        "zeros": bytes(64),
        "half a file": good[: len(good) // 2],
        "a node without inputs": model.SerializeToString(),
        "a circle": circle.SerializeToString(),
        "no stored tensors": missing.SerializeToString(),
        "a name that is no text": name,
        "a shape that does not fit": shape.SerializeToString(),
        "an unknown type": kind.SerializeToString(),
    }


def test_a_broken_file_is_one_error_with_its_name(
    exported: tuple[nn.Module, Path], tmp_path: Path
) -> None:
    model, path = exported
    broken = tmp_path / "broken.onnx"
    batch = [torch.randn(2, 3, 16, 16)]
    for kind, data in breakages(path.read_bytes()).items():
        broken.write_bytes(data)
        for call in (
            lambda: torchq.verify_onnx(model, broken, batch),
            lambda: torchq.inspect_onnx(broken),
        ):
            with pytest.raises(ExportError) as error:
                call()
            assert "broken.onnx: is not a valid ONNX file" in str(error.value), kind


class Deep(nn.Module):
    """Forty additions, each of a value with itself behind a convolution: 2**40 paths."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1) for _ in range(40))

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = conv(x) + x
        return x


@pytest.mark.slow
def test_every_float_node_of_a_deep_residual_network_is_listed(path: Path) -> None:
    with pytest.warns(UserWarning, match="no active quantizer"):
        torchq.export_onnx(
            Deep().eval(),
            torch.randn(1, 4, 5, 5),
            path,
        )
    report = torchq.inspect_onnx(path)
    kinds = [node.kind for node in report.fallbacks]
    assert kinds.count("Conv") == 40
    assert all(
        "stored in float" in n.reason or "not quantized" in n.reason
        for n in report.nodes
    )


def test_a_broken_graph_is_refused_by_name_and_not_written(path: Path) -> None:
    """The optimizer of torch's newer exporter loses constants now and then."""
    ir = pytest.importorskip("onnx_ir")
    node = helper.make_node("Add", ["x", "lost"], ["y"])
    ends = [helper.make_tensor_value_info(name, 1, [2]) for name in "xy"]
    graph = helper.make_graph(
        [node],
        "g",
        ends[:1],
        ends[1:],
    )
    model = ir.from_proto(helper.make_model(graph))
    with pytest.raises(
        ExportError, match=r"m\.onnx: the graph is broken \(.*pass dynamo=True or"
    ):
        save_model(model, path)
    assert not (path).exists()

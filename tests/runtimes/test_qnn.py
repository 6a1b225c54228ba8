"""Qualcomm's chips: what files hold, and what the emulator answers where its package is here."""

from __future__ import annotations

import copy
import json
import multiprocessing
import pickle
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.onnx.exported import calibrated
from torchq.errors import ConfigError, ExportError, MissingExtraError
from torchq.onnx.ir import load_model, nodes_of
from torchq.onnx.qdq import leads_only_to_quantizers
from torchq.runtimes import Qnn
from torchq.runtimes.qnn import compiling, open_context
from torchq.runtimes.qnn.passes import with_fixed_shapes
from torchq.runtimes.qnn.session import compiled

pytest.importorskip("onnx_ir")
onnx = pytest.importorskip("onnx")

X = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))


class Shuffled(nn.Module):
    """Moves, a bend with a slope, a sum and a head: each ends in float for other runtimes."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.block = nn.Conv2d(8, 8, 3, padding=1)
        self.grow = nn.Conv2d(8, 16, 3, padding=1)
        self.bend = nn.PReLU()
        self.shuffle = nn.PixelShuffle(2)
        self.last = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu()
        x = (x + self.block(x)).relu()
        x = self.shuffle(self.bend(self.grow(x)))
        return self.head(self.last(x).relu().mean((2, 3)))


def quantized() -> nn.Module:
    return calibrated(Shuffled().eval(), X, target="qnn", example=X)


def test_each_layer_of_a_file_leads_to_codes(tmp_path: Path) -> None:
    """The chip takes a layer whose result one QuantizeLinear reads, also behind a Relu."""
    path = tmp_path / "m.onnx"
    model = quantized()
    torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    layers = nodes_of(load_model(path), "Conv", "Gemm", "MatMul")
    assert len(layers) == 5
    assert all(leads_only_to_quantizers(layer.outputs[0], "Relu") for layer in layers)
    assert torchq.verify_onnx(model, path, [X], progress=False).ok


def test_a_file_of_fixed_shapes_has_no_open_length(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    torchq.export_onnx(quantized(), X, path, dynamo=False, progress=False)
    fixed = onnx.load_model_from_string(
        with_fixed_shapes(path.read_bytes(), (("x", (3, 3, 16, 16)),))
    )
    (graph_input,) = fixed.graph.input
    assert [d.dim_value for d in graph_input.type.tensor_type.shape.dim] == [
        3,
        3,
        16,
        16,
    ]
    values = [*fixed.graph.value_info, *fixed.graph.output]
    assert not [d for v in values for d in v.type.tensor_type.shape.dim if d.dim_param]
    assert not [node for node in fixed.graph.node if node.op_type == "Shape"]


@pytest.mark.parametrize(
    ("soc", "number"), [("SM8350", "30"), ("57", "57"), ("SM8750", "69")]
)
def test_a_chip_has_a_name_and_a_number(soc: str, number: str) -> None:
    assert Qnn(soc=soc).soc == number
    assert pickle.loads(pickle.dumps(Qnn(soc=soc))) == Qnn(soc=number)


def test_wrong_settings_are_named() -> None:
    with pytest.raises(
        ConfigError, match=r"Qnn: got soc 'SM9999'; expected one of .*'SM8550' \(43\)"
    ):
        Qnn(soc="SM9999")
    with pytest.raises(ConfigError, match="limit=0; expected seconds above 0"):
        Qnn(limit=0)


@pytest.mark.parametrize(
    ("version", "libc", "got"),
    [
        ((3, 10), ("glibc", "2.39"), r"got Python 3"),
        ((3, 12), ("glibc", "2.31"), r"got the C library glibc 2\.31"),
        ((3, 12), ("", ""), r"got the C library musl or another; expected"),
    ],
)
def test_a_machine_without_a_package_is_named(
    version: tuple[int, int],
    libc: tuple[str, str],
    got: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr("platform.libc_ver", lambda: libc)
    monkeypatch.setattr("platform.system", lambda: "Linux")
    with pytest.raises(ExportError, match=rf"{got}.*glibc 2\.35 or newer"):
        Qnn().check()
    assert not Qnn().here


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchq.runtimes.qnn.runtime._problem_of_machine", lambda: "")
    monkeypatch.setitem(sys.modules, "onnxruntime_qnn", None)
    with pytest.raises(MissingExtraError, match=r"Run pip install torchq\[qnn\]"):
        Qnn().check()


def test_a_model_for_another_target_is_refused() -> None:
    x = torch.randn(1, 3, 8, 8)
    model = calibrated(nn.Conv2d(3, 4, 3).eval(), x, target="openvino", example=x)
    with pytest.raises(ConfigError, match="a model that was quantized for 'openvino'"):
        torchq.deploy(model, x, target="qnn", progress=False)


def test_the_model_of_one_chip_is_that_of_another() -> None:
    x = torch.randn(1, 3, 8, 8)
    plans = [
        torchq.plan(Shuffled(), target=Qnn(soc=soc), example=x) for soc in ("43", "57")
    ]
    assert plans[0].outcome() == plans[1].outcome()


class Widened(nn.Module):
    """Operators that the emulator computes wrongly, or rightly."""

    def __init__(self, groups: int, padding: int, cut: bool) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(4, 4, 3, 2, output_padding=padding, groups=groups)
        # Windows over an edge have fewer places.
        self.pool = nn.AvgPool2d(4, ceil_mode=cut)
        self.last = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pool(self.up(x)))


@pytest.mark.parametrize(
    ("groups", "padding", "cut", "said"),
    [
        (1, 1, False, ""),
        (4, 0, False, ""),
        (
            4,
            1,
            False,
            "up: QNN computes wrong numbers for a grouped transposed convolution",
        ),
        (1, 1, True, "QNN computes wrong numbers for an average of .4, 4. places"),
    ],
)
def test_what_the_emulator_computes_wrongly_is_said(
    groups: int, padding: int, cut: bool, said: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 4, 9, 9)
    model = calibrated(Widened(groups, padding, cut).eval(), x, target="qnn", example=x)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torchq.export_onnx(model, x, tmp_path / "m.onnx", dynamo=False, progress=False)
    message = "".join(str(w.message) for w in caught)
    assert re.search(said, message) if said else "wrong numbers" not in message


def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> None:
    """Put another program in the place of the one that compiles."""
    program = tmp_path / "program.py"
    program.write_text(
        f"import json, sys, time\njob = json.load(open(sys.argv[1]))\n{body}"
    )
    monkeypatch.setattr(compiling, "__file__", str(program))


def compile_anything(**options: Any) -> bytes:
    return compiled(b"", "43", partly=False, where="deploy", **{"limit": 20, **options})


def test_a_compile_that_takes_too_long_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, monkeypatch, "time.sleep(60)")
    with pytest.raises(ExportError, match=r"took longer than 0\.5 s and was ended"):
        compile_anything(limit=0.5)


def test_a_compiler_that_dies_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_compiler(tmp_path, monkeypatch, "sys.exit(11)")
    with pytest.raises(
        ExportError, match=r"deploy: the provider failed .the process that compiles"
    ):
        compile_anything()


def test_what_the_chip_does_not_take_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [
        ["DequantizeLinear", f"{i}.weight_quantizer/Dequantize", "no kernel"]
        for i in range(7)
    ]
    answer = {"error": "it failed", "unsupported": nodes}
    body = f"json.dump({json.dumps(answer)}, open(job['answer'], 'w'))"
    fake_compiler(tmp_path, monkeypatch, body)
    with pytest.raises(
        ExportError, match=r"0 \(DequantizeLinear\): no kernel; .*, and 2 more"
    ):
        compile_anything()


def test_the_program_answers_whatever_happens(tmp_path: Path) -> None:
    """Without the package, or with a file that is none."""
    job = {key: str(tmp_path / key) for key in ("model", "context", "trace", "answer")}
    (tmp_path / "model").write_bytes(b"no file")
    (tmp_path / "trace").mkdir()
    (tmp_path / "job.json").write_text(
        json.dumps({**job, "soc": "43", "partly": False})
    )
    program = [sys.executable, compiling.__file__, str(tmp_path / "job.json")]
    assert subprocess.run(program, capture_output=True, timeout=60).returncode == 0
    answer = json.loads((tmp_path / "answer").read_text())
    assert answer["error"]
    assert answer["unsupported"] == []


@pytest.fixture(scope="module")
def deployed() -> tuple[nn.Module, nn.Module]:
    """A model, and the same on the emulator."""
    if not Qnn().here:
        pytest.skip("onnxruntime-qnn is not here")
    model = quantized()
    return model, torchq.deploy(model, X, target="qnn", progress=False)


def test_the_emulator_answers_as_the_simulation_does(
    deployed: tuple[nn.Module, nn.Module],
) -> None:
    model, emulated = deployed
    expected = model(X)
    step = float(model.head.output_quantizer.scale)
    # Codes off by one in five layers.
    assert (emulated(X) - expected).abs().max() <= 2.5 * step
    assert emulated(X[:1]).shape == (1, 5)  # another shape has a binary of its own
    assert torch.equal(
        pickle.loads(pickle.dumps(emulated))(X),
        emulated(X),
    )


def test_a_chip_that_answers_otherwise_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A weight of another size in the file is more than quantization itself moves."""
    if not Qnn().here:
        pytest.skip("onnxruntime-qnn is not here")

    def damaged(graph: bytes, shapes: Any) -> bytes:
        model = onnx.load_model_from_string(with_fixed_shapes(graph, shapes))
        scales = [
            n.input[1]
            for n in model.graph.node
            if n.name.startswith("last.weight_quant")
        ]
        (stored,) = (t for t in model.graph.initializer if t.name == scales[0])
        stored.CopyFrom(
            onnx.numpy_helper.from_array(
                2 * onnx.numpy_helper.to_array(stored), stored.name
            )
        )
        return model.SerializeToString()

    monkeypatch.setattr("torchq.runtimes.qnn.runtime.with_fixed_shapes", damaged)
    with pytest.raises(
        ExportError, match=r"relative error .* where quantization itself makes"
    ):
        torchq.deploy(quantized(), X, target="qnn", progress=False)


def test_layers_in_float_are_listed_or_run_on_the_cpu() -> None:
    if not Qnn().here:
        pytest.skip("onnxruntime-qnn is not here")
    model = quantized()
    model.grow.output_quantizer.mode = "off"
    model.quant_add.input_quantizer.mode = "off"
    with pytest.raises(
        ExportError, match=r"SM8550: the chip does not take .*grow .*partly=True"
    ):
        torchq.deploy(model, X, target="qnn", progress=False)
    partly = torchq.deploy(model, X, target=Qnn(partly=True), progress=False)
    assert partly(X).shape == (2, 5)


def test_a_binary_that_is_a_file_gives_the_same_codes(
    deployed: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    model, emulated = deployed
    write = Qnn().writers()[".qnn"]
    report = write(model, X, tmp_path / "model.qnn")
    assert "a binary for SM8550, for x (2, 3, " in str(report)
    run = open_context(report.path)
    (result,) = run({"x": X})
    assert torch.equal(result, emulated(X))


def test_a_binary_that_is_none_is_one_named_error(tmp_path: Path) -> None:
    if not Qnn().here:
        pytest.skip("onnxruntime-qnn is not here")
    with pytest.raises(ExportError, match=r"open_context: .*: No such file"):
        open_context(tmp_path / "none.qnn")
    (tmp_path / "other.qnn").write_bytes(b"no file")
    with pytest.raises(ExportError, match=r"cannot be opened .* the ending \.qnn"):
        open_context(tmp_path / "other.qnn")


def test_a_file_of_onnx_does_not_get_the_name_of_a_binary(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError,
        match=r"the name of a file that qnn has .*torchq\.runtimes\.Qnn\(\)\.write_context\(",
    ):
        torchq.export_onnx(quantized(), X, tmp_path / "m.qnn", progress=False)
    assert not list(tmp_path.iterdir())


def test_a_refused_binary_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "model.qnn"
    path.write_bytes(b"before")

    def refuse(*args: Any, **kwargs: Any) -> bytes:
        raise ExportError("the chip does not take it")

    monkeypatch.setattr("torchq.runtimes.qnn.runtime.compiled", refuse)
    monkeypatch.setattr(Qnn, "check", lambda self: None)
    with pytest.raises(ExportError, match="does not take it"):
        Qnn().writers()[".qnn"](quantized(), X, path)
    assert path.read_bytes() == b"before"


def test_a_forked_process_is_refused_and_does_not_hang(
    deployed: tuple[nn.Module, nn.Module],
) -> None:
    emulated = deployed[1]
    emulated(X)
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def call() -> None:
        try:
            emulated(X)
            sender.send("")
        except ExportError as error:
            sender.send(str(error))

    process = context.Process(target=call)
    process.start()
    said = receiver.recv() if receiver.poll(30) else "it hangs"
    process.kill()
    process.join()
    assert "forked since the model was opened" in said


def test_nothing_is_printed(
    deployed: tuple[nn.Module, nn.Module], capfd: pytest.CaptureFixture[str]
) -> None:
    copy.deepcopy(deployed[1])(X)
    assert capfd.readouterr().out == ""


def test_layers_of_the_emulator_that_get_equal_codes_compute_those_of_the_model(
    deployed: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    """Each within the bounds of the table, on a new chip and on an old one."""
    model = deployed[0]
    path = tmp_path / "m.onnx"
    torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    for soc in ("SM8550", "SM8350"):
        report = torchq.verify_onnx(
            model, path, [X], target=Qnn(soc=soc), progress=False
        )
        assert report.ok, str(report)
        differ = [row for row in report.layers if row.differ]
        assert differ
        assert all(row.max_diff == 1 for row in differ)


class Gated(nn.Module):
    """Scales channels by a sigmoid, as squeeze and excitation does."""

    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.gate = nn.Conv2d(16, 16, 1)
        self.sigmoid = gate
        self.last = nn.Conv2d(16, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.first(x))
        gate = self.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        return self.last(gate * x)


@pytest.mark.parametrize("gate", [nn.Sigmoid, nn.Hardsigmoid])
def test_a_sigmoid_of_16_bits_has_its_own_scale_where_it_is_looked_at(
    gate: type[nn.Module], tmp_path: Path
) -> None:
    """Its codes as results of a graph have the scale 1 / 65535 in the emulator."""
    if not Qnn().here:
        pytest.skip("onnxruntime-qnn is not here")
    torch.manual_seed(0)
    model = Gated(gate()).eval()
    path = tmp_path / "m.onnx"
    torchq.quantize_(
        model, torchq.recipes.w8a16(), target="qnn", example=X, progress=False
    )
    torchq.calibrate(model, [X], progress=False)
    torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    report = torchq.verify_onnx(model, path, [X], target="qnn", progress=False)
    assert report.ok, str(report)
    gates = [row for row in report.layers if row.elements == 2 * 16]
    assert gates
    assert all(row.max_diff < 100 for row in gates)


@dataclass(frozen=True, kw_only=True, repr=False)
class OtherScale(Qnn):
    """The emulator, with a layer whose weight has twice its scale."""

    def emulated(self, path: Path) -> Any:
        model = onnx.load(path)
        (scale,) = (
            tensor
            for tensor in model.graph.initializer
            if tensor.name == "block.weight_quantizer/scale"
        )
        doubled = 2 * onnx.numpy_helper.to_array(scale)
        scale.CopyFrom(onnx.numpy_helper.from_array(doubled, scale.name))
        onnx.save(model, path.with_suffix(".damaged"))
        return super().emulated(path.with_suffix(".damaged"))


def test_a_layer_of_the_emulator_that_computes_something_else_is_named(
    deployed: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    model = deployed[0]
    path = tmp_path / "m.onnx"
    torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    report = torchq.verify_onnx(
        model,
        path,
        [X],
        target=OtherScale(),
        progress=False,
    )
    assert not report.ok
    assert report.first is not None
    assert report.first.layers == ("block",)
    assert sum(not row.ok for row in report.layers) == 1


def test_a_dump_of_the_emulator_is_read_and_its_first_fault_is_named(
    deployed: tuple[nn.Module, nn.Module], tmp_path: Path
) -> None:
    """A session returns the codes of all quantizers, as a device would write them."""
    model = deployed[0]
    path = tmp_path / "m.onnx"
    torchq.export_onnx(model, X, path, dynamo=False, progress=False)
    graph = onnx.load(path)
    names = [
        node.output[0]
        for node in graph.graph.node
        if node.name.endswith("/QuantizeLinear") and node.input[0] != "x"
    ]
    for name in names:
        kind = onnx.TensorProto.UINT8
        graph.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    onnx.save(graph, tmp_path / "shown.onnx")
    results = Qnn().emulated(tmp_path / "shown.onnx")({"x": X})
    dump = dict(zip(names, results[1:], strict=True))
    # Each layer adds codes that are off to those in front of it, and a PReLU multiplies them.
    report = torchq.verify_dump(model, dump, X, share=0.5, steps=8)
    assert report.ok, str(report)
    assert len(report.tensors) == len(names)
    wrong = {**dump, names[2]: dump[names[2]] // 2}
    first = torchq.verify_dump(model, wrong, X, share=0.5, steps=8).first
    assert first is not None
    assert first.source == names[2]
    for name, codes in dump.items():
        file = re.sub(r"\W", "_", name)
        (tmp_path / f"{file}.raw").write_bytes(codes.numpy().tobytes())
    folder = torchq.verify_dump(model, tmp_path, X, share=0.5, steps=8)
    assert folder.ok
    assert len(folder.tensors) == len(names)

"""The target "executorch": the form of its programs, its files, and its integer kernels.

The form is tested with torch alone. What needs the package is skipped where that is missing;
``make test-targets`` runs it in an environment of its own.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.export import ExportedProgram

import torchq
from tests.contracts.engine_contract import EngineContract, calibrated_detector, images
from torchq import QuantConfig, QuantDescriptor, Rule, TensorQuantizer
from torchq.cli import main
from torchq.errors import ExportError, InputError, MissingExtraError
from torchq.nn.integer_kernel import kernels_off
from torchq.runtimes import Engine, ExecuTorch
from torchq.runtimes.executorch import export_pte, form, lower, to_exported_program
from torchq.runtimes.executorch.form import is_dq, is_q, kind_of
from torchq.runtimes.file_engine import EngineModule

ASYMMETRIC = QuantDescriptor(unsigned=True, symmetric=False)


def needs_executorch() -> None:
    pytest.importorskip(
        "executorch", reason="executorch is not installed: make test-targets"
    )


class Net(nn.Module):
    """In-place activations, a sum, pooling, a concatenation, a mean, views and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first = nn.Conv2d(8, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.side = nn.Conv2d(8, 8, 3, padding=1)
        self.join = nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, 5)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).relu_()
        x = self.pool(self.first(x).relu() + x)
        x = self.join(torch.cat([x, self.side(x)], 1)).relu()
        return self.head(self.drop(x.mean((2, 3))))


class Encoder(nn.Module):
    """A block of a transformer, all of whose linear layers are read in float."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(16)
        self.norm2 = nn.LayerNorm(16)
        self.qkv = nn.Linear(16, 48)
        self.proj = nn.Linear(16, 16)
        self.fc1 = nn.Linear(16, 32)
        self.fc2 = nn.Linear(32, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm(x)).chunk(3, -1)
        x = x + self.proj(torch.softmax(q @ k.transpose(1, 2) / 4, -1) @ v)
        x = x + self.fc2(F.gelu(self.fc1(self.norm2(x))))
        return self.head(x.mean(1))


def calibrated(
    model: nn.Module, x: Tensor, *args: Any, target: str | None = "executorch"
) -> Any:
    torchq.quantize_(model.eval(), *args, target=target, example=x)
    torchq.calibrate(model, [x, torch.randn_like(x)], progress=False)
    return model


@pytest.fixture
def net() -> tuple[nn.Module, Tensor, ExportedProgram]:
    x = torch.randn(2, 3, 16, 16)
    model = calibrated(Net(), x)
    return model, x, to_exported_program(model, x)


def nodes(program: ExportedProgram, kind: str) -> list[fx.Node]:
    return [node for node in program.graph.nodes if kind_of(node) == kind]


# --- programs -----------------------------------------------------------------------------------


def test_a_program_computes_what_the_model_simulates(
    net: tuple[nn.Module, Tensor, ExportedProgram],
) -> None:
    model, x, program = net
    before = copy.deepcopy(model.state_dict())
    with torch.no_grad(), kernels_off(model):
        assert torch.equal(program.module()(x), model(x))
        other = torch.randn_like(x)
        assert torch.equal(program.module()(other), model(other))
    after = model.state_dict()
    assert before.keys() == after.keys() and all(
        torch.equal(before[k], after[k]) for k in before
    )
    assert all(q.delegate is None for q in torchq.workflow.quantizers(model).values())


def test_every_operator_stands_in_the_pattern_that_is_delegated(
    net: tuple[nn.Module, Tensor, ExportedProgram],
) -> None:
    """Rules 1, 2, 3, 5 and 7: one Q for a tensor, one DQ for a reader, no view in between."""
    _, _, program = net
    for kind in ("add", "max_pool2d", "cat", "mean", "view", "conv2d"):
        for node in nodes(program, kind):
            (reader,) = node.users
            if kind_of(reader) == "relu":
                (reader,) = reader.users
            assert is_q(reader), f"{node} is read by {reader}"
            activations = node.all_input_nodes[: 1 if kind == "conv2d" else None]
            assert all(is_dq(source) for source in activations), node
    for node in program.graph.nodes:
        assert not is_dq(node) or len(node.users) == 1
        assert sum(map(is_q, node.users)) <= 1
        if is_q(node):
            scale, zero_point, least, largest, dtype = node.args[1:6]
            assert (type(scale), type(zero_point)) == (float, int)
            assert (least, largest, dtype) == (-128, 127, torch.int8)
    (cat,) = nodes(program, "cat")
    grids = {source.args[1:] for source in cat.all_input_nodes} | {
        q.args[1:] for q in cat.users
    }
    assert len(grids) == 1


def test_weights_are_stored_as_int8_with_a_scale_for_each_channel(
    net: tuple[nn.Module, Tensor, ExportedProgram],
) -> None:
    _, _, program = net
    for node in nodes(program, "conv2d"):
        codes, scale, zero_point, axis, *_ = node.args[1].args
        dtypes = [source.meta["val"].dtype for source in (codes, scale, zero_point)]
        assert dtypes == [torch.int8, torch.float32, torch.int64] and axis == 0
    floats = [
        k
        for k, v in program.state_dict.items()
        if v.is_floating_point() and v.dim() > 1
    ]
    # Which nothing behind it quantizes.
    assert floats == ["head.weight_quantizer.stored_codes"]
    assert len(nodes(program, "relu")) == 3  # one for each convolution: others are idle


def test_activations_that_are_unsigned_or_asymmetric_have_zero_points() -> None:
    x = torch.randn(2, 3, 8, 8)
    weight = QuantDescriptor(axis=0)
    config = QuantConfig(
        (Rule("type:torch.nn.*.Conv2d", input=ASYMMETRIC, weight=weight),)
    )
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ELU(), nn.Conv2d(4, 4, 1), nn.ReLU6())
    model = calibrated(layers, x, config, target=None)
    program = to_exported_program(model, x)
    points = [node.args[2] for node in nodes(program, "quantize_per_tensor")]
    assert all(-128 < point < 127 for point in points) and len(points) == 2
    assert torch.equal(program.module()(x), model(x))


def test_clamps_that_codes_show_to_be_idle_are_left_out() -> None:
    """Rule 4: a ReLU and a Q between two equal grids would round a second time."""
    x = torch.randn(2, 3, 8, 8)
    model = calibrated(
        nn.Sequential(nn.Conv2d(3, 4, 3), Twice(), nn.Conv2d(4, 4, 1)), x
    )
    program = to_exported_program(model, x)
    found = {
        kind: len(nodes(program, kind))
        for kind in ("relu", "hardtanh", "quantize_per_tensor")
    }
    assert found == {"relu": 1, "hardtanh": 1, "quantize_per_tensor": 3}
    assert torch.equal(program.module()(x), model(x))


class Twice(nn.Module):
    """A ReLU whose result is quantized, and clamps behind it: idle, idle, and not idle."""

    def __init__(self) -> None:
        super().__init__()
        self.quantizer = TensorQuantizer(QuantDescriptor(unsigned=True))

    def forward(self, x: Tensor) -> Tensor:
        y = self.quantizer(x.relu())
        return F.hardtanh(F.hardtanh(y.relu(), 0.0, 100.0), 0.0, 0.25)


def test_parts_of_a_tensor_are_slices_between_pairs() -> None:
    class Parts(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            a, b = self[0](x).chunk(2, dim=1)
            _, c = b.split([1, 3], 1)
            return self[1](torch.cat([a, b, c], 1))

    x = torch.randn(2, 3, 8, 8)
    model = calibrated(Parts(nn.Conv2d(3, 8, 3), nn.Conv2d(11, 4, 1)), x)
    program = to_exported_program(model, x)
    assert [node.args[1:4] for node in nodes(program, "slice")] == [
        (1, 0, 4),
        (1, 4, 8),
        (1, 1, 4),
    ]
    assert all(
        is_dq(n.args[0]) and all(map(is_q, n.users)) for n in nodes(program, "slice")
    )
    assert torch.equal(program.module()(x), model(x))


def test_grids_that_differ_are_kept_apart_in_a_concatenation() -> None:
    """Rule 7, also where the model has other ranges for what it joins: they are read in Q first."""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (torchq.nn.QuantIdentity() for _ in range(2))
            self.layer = nn.Conv2d(6, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(torch.cat([self.a(x), self.b(3 * x)], 1))

    x = torch.randn(2, 3, 8, 8)
    model = calibrated(Joined(), x, target=None)
    program = to_exported_program(model, x)
    (cat,) = nodes(program, "cat")
    assert len({node.args[1:] for node in (*cat.all_input_nodes, *cat.users)}) == 1
    assert torch.equal(program.module()(x), model(x))


def test_a_layer_that_is_not_delegated_has_a_float_weight_and_is_named() -> None:
    """Rule 6; portable kernels would compute garbage in silence."""
    x = torch.randn(2, 3, 8, 8)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.LayerNorm(6), nn.Conv2d(4, 4, 1))
    model = calibrated(layers, x, target=None)
    program, found = lower.traced(copy.deepcopy(model), x)
    assert found == {
        "0": "its result is read in float by layer_norm",
        "2": "its result is read in float by the output of the model",
    }
    assert not [
        node for node in program.graph.nodes if "dequantize_per_channel" in node.name
    ]
    assert torch.equal(program.module()(x), model(x))


def test_weights_in_float_have_sizes_that_do_not_vary() -> None:
    """XNNPACK takes another size for the window of a depthwise convolution otherwise."""
    x = torch.randn(2, 4, 8, 8)
    layers = nn.Sequential(nn.Conv2d(4, 4, 3, groups=4), nn.Sigmoid())
    model = calibrated(layers, x, target=None)
    program = to_exported_program(model, x)
    (layer,) = nodes(program, "conv2d")
    assert layer.args[1].op == "placeholder"
    sizes = layer.args[1].meta["val"].shape
    assert [type(size) for size in sizes] == [int, int, int, int]
    assert tuple(sizes) == (4, 1, 3, 3)


def test_linear_layers_whose_results_are_read_in_float_run_on_integers() -> None:
    """All but the last one, whose result is the model's; each result has one reader, its Q."""
    x = torch.randn(2, 6, 16)
    model = calibrated(Encoder(), x)
    program, found = lower.traced(copy.deepcopy(model), x)
    in_float = {"head": "its result is read in float by the output of the model"}
    assert found == {**dict.fromkeys(["qkv", "proj", "fc1", "fc2"], ""), **in_float}
    assert torch.equal(program.module()(x), model(x))
    ranged = [
        m.output_quantizer.amax for m in (model.qkv, model.proj, model.fc1, model.fc2)
    ]
    assert all(amax.numel() == 1 and bool(amax > 0) for amax in ranged)


def test_grouped_transposed_convolutions_compute_in_float() -> None:
    x = torch.randn(2, 4, 8, 8)
    layers = nn.ConvTranspose2d(4, 4, 2, groups=2), torchq.nn.QuantIdentity()
    _, found = lower.traced(calibrated(nn.Sequential(*layers), x), x)
    assert found["0"].startswith(
        "XNNPACK takes one scale for the weight of a transposed"
    )


class Audio(nn.Module):
    """Convolutions over time: with zeros in front, depthwise, folded and unfolded, transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv1d(4, 8, 3, stride=2)
        self.depthwise = nn.Conv1d(8, 8, 3, dilation=2, groups=8, bias=False)
        self.pool = nn.MaxPool1d(2, stride=1)
        self.same = nn.Conv1d(8, 8, 5, padding="same")
        self.up = nn.ConvTranspose1d(8, 4, 4, stride=2, padding=1)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Conv1d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.first(F.pad(x, (2, 0))))
        x = F.relu(self.depthwise(F.pad(x, (4, 0))))
        x = torch.tanh(self.same(self.pool(x)))
        result: Tensor = self.head(self.norm(self.up(x)).relu())
        return result


def one_code(head: Any) -> float:
    """Return what one code of its input changes at most: float sums give it at a tie."""
    weight = head.weight.detach().abs().flatten(1)
    return float(head.input_quantizer.scale * weight.sum(1).max())


AUDIO_IN_FLOAT = {
    "up": "its result is read in float by batch_norm",
    "head": "its result is read in float by the output of the model",
}


@pytest.mark.parametrize("shape", [(2, 4, 16), (1, 4, 16)])
def test_operators_of_one_dimension_have_a_second_one(shape: tuple[int, ...]) -> None:
    """Rule 8; ExecuTorch would let them compute outside of XNNPACK, or write broken files."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    model = calibrated(Audio(), x)
    program, found = lower.traced(copy.deepcopy(model), x)
    kinds = {kind_of(node) for node in program.graph.nodes}
    assert not {"conv1d", "conv_transpose1d", "max_pool1d"} & kinds
    assert {path: why for path, why in found.items() if why} == AUDIO_IN_FLOAT
    off = one_code(model.head)
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=off)


def test_a_convolution_of_one_dimension_takes_one_sample_without_a_batch() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 16)
    layers = nn.Sequential(nn.Conv1d(4, 8, 3), nn.ReLU(), nn.Conv1d(8, 2, 1))
    model = calibrated(layers, x)
    program, found = lower.traced(copy.deepcopy(model), x)
    assert found["0"] == ""
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular", "zeros"])
def test_what_is_put_around_an_image_keeps_its_grid(mode: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 3, 8, 8)
    around = nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode)
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), around, nn.ReLU())
    model = calibrated(nn.Sequential(*layers, nn.Conv2d(4, 4, 1)), x)
    program, found = lower.traced(copy.deepcopy(model), x)
    in_float = {path for path, why in found.items() if why}
    assert in_float == {"4"} or mode == "circular"
    with torch.no_grad():
        torch.testing.assert_close(program.module()(x), model(x), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("input", "weight", "text"),
    [
        (
            QuantDescriptor(dynamic=True),
            QuantDescriptor(),
            "0.input_quantizer: takes its range",
        ),
        (
            QuantDescriptor(4),
            QuantDescriptor(),
            "0.input_quantizer: .*activations of 8 bits",
        ),
        (
            QuantDescriptor((4, 3)),
            QuantDescriptor(),
            "0.input_quantizer: .*expected integers",
        ),
        (
            QuantDescriptor(axis=1),
            QuantDescriptor(),
            "0.input_quantizer: .*one scale for an act",
        ),
        (
            QuantDescriptor(rounding="half_up"),
            QuantDescriptor(),
            "rounds half_up; expected half_e",
        ),
        (
            QuantDescriptor(),
            QuantDescriptor(16),
            "0.weight_quantizer: .*expected integers",
        ),
        (QuantDescriptor(), ASYMMETRIC, "0.weight_quantizer: .*signed ones around 0"),
    ],
    ids=str,
)
def test_what_the_form_cannot_hold_is_refused_by_name(
    input: QuantDescriptor, weight: QuantDescriptor, text: str
) -> None:
    x = torch.randn(2, 3, 8, 8)
    config = QuantConfig((Rule("*", input=input, weight=weight),))
    model = calibrated(nn.Sequential(nn.Conv2d(3, 4, 3)), x, config, target=None)
    with pytest.raises(ExportError, match=text):
        to_exported_program(model, x)


def test_models_of_half_precision_and_code_that_cannot_be_traced_are_refused() -> None:
    x = torch.randn(2, 3, 8, 8)
    model = calibrated(nn.Sequential(nn.Conv2d(3, 4, 3)), x)
    with pytest.raises(
        ExportError, match=r"0\.weight: got torch\.bfloat16; expected torch\.float32"
    ):
        to_exported_program(copy.deepcopy(model).bfloat16(), x.bfloat16())

    class Branching(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x if bool(x.sum() > 0) else -x)

    model = calibrated(Branching(nn.Conv2d(3, 4, 3)), x)
    with pytest.raises(ExportError, match=r"Branching: torch\.export cannot trace it"):
        to_exported_program(model, x)


# --- the package --------------------------------------------------------------------------------


def test_a_missing_package_and_an_old_one_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.randn(2, 3, 8, 8)
    model = calibrated(nn.Sequential(nn.Conv2d(3, 4, 3)), x)
    path = tmp_path / "m.pte"
    monkeypatch.setitem(sys.modules, "executorch", None)
    with pytest.raises(
        MissingExtraError, match=r"export_pte: executorch is .*\[executorch\]"
    ):
        export_pte(model, x, path)
    with pytest.raises(
        MissingExtraError, match=r"target='executorch'.*torchq\[executorch\]"
    ):
        torchq.deploy(model, x)
    monkeypatch.setitem(sys.modules, "executorch", torch)  # any module
    monkeypatch.setattr(metadata, "version", lambda name: "1.4.0")
    with pytest.raises(
        ExportError, match=r"got executorch 1\.4\.0; expected 1\.5 or later"
    ):
        export_pte(model, x, path)
    assert list(tmp_path.iterdir()) == []


def test_the_command_line_checks_the_ending_and_the_package(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "executorch", None)
    rest = ["quantize", "--model", "torchvision:resnet18", "--data", "nowhere:loader"]
    assert main([*rest, "--target", "executorch", "--export", "m.pte"]) != 0
    assert "executorch is not installed" in capsys.readouterr().err
    assert main([*rest, "--target", "openvino", "--export", "m.pte"]) != 0
    assert "expected a name that ends in .onnx" in capsys.readouterr().err


def test_the_command_line_writes_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    needs_executorch()
    lines = (
        "import torch",
        "from torch import nn",
        "def build():",
        "    return nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))",
        "def load():",
        "    return [torch.randn(2, 3, 8, 8) for _ in range(3)]",
    )
    (tmp_path / "net_of_pte.py").write_text("\n".join(lines))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    source = ["--model", "net_of_pte:build", "--data", "net_of_pte:load", "--no-report"]
    assert (
        main(["quantize", *source, "--target", "executorch", "--export", "net.pte"])
        == 0
    )
    out = capsys.readouterr().out
    assert (
        "net.pte: 0.00 MiB for inputs of the shape (1, 3, 8, 8); 1 layers on integers"
        in out
    )
    assert "2: its result is read in float by the output of the model" in out
    assert Path("net.pte").read_bytes()[4:6] == b"ET"


@pytest.fixture(scope="module")
def engine() -> Engine:
    needs_executorch()
    return ExecuTorch()


@pytest.fixture(scope="module")
def simulated(engine: Engine) -> nn.Module:
    return calibrated_detector(engine.name)


@pytest.fixture(scope="module")
def deployed(engine: Engine, simulated: nn.Module) -> nn.Module:
    return torchq.deploy(simulated, images(1), target=engine)


class TestEngine(EngineContract):
    """The contract of engines; a file takes images of one size, as many as its example has."""

    usual_batch = 1

    @pytest.mark.parametrize("count", [0, 2])
    def test_the_batch_is_open(
        self, deployed: nn.Module, simulated: nn.Module, count: int
    ) -> None:
        with pytest.raises(
            InputError, match=r"argument 'image': got shape .*expected \(1, 3, 12"
        ):
            deployed(images(count))

    def test_the_size_is_open_where_the_model_accepts_any(
        self, deployed: nn.Module, simulated: nn.Module
    ) -> None:
        with pytest.raises(
            InputError, match=r"got shape \(1, 3, 20, 20\); expected \(1, 3, 12"
        ):
            deployed(images(1, size=20))

    def test_it_says_what_was_checked_and_what_computes_where(
        self, deployed: Any
    ) -> None:
        assert "compared with the simulation on the example" in deployed.checked
        (row,) = torchq.summary(deployed).layers
        assert row.note.startswith("1 of 3 layers run on integers")
        assert deployed.report.integer == ("stem",)
        assert deployed.report.in_float["head"] == "its result is read in float by mul"


OPERATORS: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda x: x + x.transpose(2, 3),
    "mul": lambda x: x * x.transpose(2, 3),
    "pool": lambda x: F.max_pool2d(x, 2),
    "mean": lambda x: x.mean((2, 3)),
    "average": lambda x: F.avg_pool2d(x, 2),
    "positive": lambda x: x.relu(),
    "clamped": lambda x: F.hardtanh(x, -0.3, 0.7),
    "half": lambda x: x[:, :4],
    "rows": lambda x: x.flatten(2).permute(0, 2, 1),
    "joined": lambda x: torch.cat([x, x.relu()], 1),
    "smooth": lambda x: F.hardswish(x),
}


class Layers(nn.Module):
    """One operator of each kind in front of a quantizer; all read codes of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleDict(
            {
                "dense": nn.Conv2d(8, 16, 3, padding=1),
                "strided": nn.Conv2d(8, 16, 3, stride=2, bias=False),
                "point": nn.Conv2d(8, 16, 1),
                "depthwise": nn.Conv2d(8, 8, 3, padding=1, groups=8),
                "grouped": nn.Conv2d(8, 16, 3, groups=2),
                "transposed": nn.ConvTranspose2d(8, 8, 2, stride=2),
                "rectified": nn.Conv2d(8, 16, 3),
                "capped": nn.Conv2d(8, 16, 3),
            }
        )
        self.linear = nn.Linear(16, 16)
        self.gated = nn.Linear(16, 16)
        names = (*self.convs, "linear", *OPERATORS)
        plain = ("strided", "grouped", "linear", "add", "mean")
        self.outs = nn.ModuleDict(
            {
                f"to_{n}": TensorQuantizer(None if n in plain else ASYMMETRIC)
                for n in names
            }
        )

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        found = {name: conv(x) for name, conv in self.convs.items()}
        found["rectified"], found["capped"] = (
            found["rectified"].relu(),
            F.relu6(found["capped"]),
        )
        found["linear"] = self.linear(x)
        found |= {name: operator(x) for name, operator in OPERATORS.items()}
        found = {name: self.outs[f"to_{name}"](value) for name, value in found.items()}
        # Read in float: it has a quantizer of its own.
        return {
            **found,
            "gated": -self.gated(x),
        }


@pytest.fixture(scope="module")
def layers(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Any, Tensor, dict[str, Tensor], Any]:
    """The layers with ranges, an input that is on its grid, and what the runtime returns."""
    needs_executorch()
    torch.manual_seed(0)
    model = Layers()
    x = torch.randn(2, 8, 16, 16)
    model = calibrated(model, x)
    with torch.no_grad():
        x = model.convs["dense"].input_quantizer(torch.randn_like(x))
        report = export_pte(model, x, tmp_path_factory.mktemp("layers") / "m.pte")
        deployed = torchq.deploy(model, x)
        return model, x, deployed(x), report


def codes_of(quantizer: Any, value: Tensor) -> Tensor:
    qparams = quantizer.qparams()
    return (value.double() / qparams.scale.double() + qparams.zero_point).round()


def int32_formula(
    conv: Any, quantizer: Any, x: Tensor, least: float | None = None
) -> Tensor:
    """Return the codes of XNNPACK's kernels: an exact sum, one factor of float32, ties to even."""
    given, result = (
        q.qparams().stored(signed=True) for q in (conv.input_quantizer, quantizer)
    )
    of_weight = conv.weight_quantizer.qparams()
    codes = (
        conv.input_quantizer.codes(x).double()
        - conv.input_quantizer.qparams().zero_point
    )
    weight = conv.weight_quantizer.codes(conv.weight).double()
    scale = given.scale * of_weight.scale.flatten()
    if isinstance(conv, nn.ConvTranspose2d):
        total = F.conv_transpose2d(codes, weight, None, conv.stride)
    else:
        total = F.conv2d(codes, weight, None, conv.stride, conv.padding, 1, conv.groups)
    if conv.bias is not None:
        total += torch.round(conv.corrected_bias(conv.bias) / scale).double()[
            :, None, None
        ]
    rounded = torch.round(total.float() * (scale / result.scale)[:, None, None])
    low = (
        -128
        if least is None
        else int(result.zero_point) + round(least / float(result.scale))
    )
    return (rounded + result.zero_point).clamp(low, 127)


@pytest.mark.parametrize(
    "name", ["dense", "strided", "point", "depthwise", "grouped", "rectified"]
)
def test_convolutions_equal_the_int32_formula_in_every_code(
    layers: tuple[Any, Tensor, dict[str, Tensor], Any], name: str
) -> None:
    model, x, got, _ = layers
    quantizer = model.outs[f"to_{name}"]
    least = 0.0 if name == "rectified" else None
    expected = int32_formula(model.convs[name], quantizer, x, least)
    stored = codes_of(quantizer, got[name]) - (
        128 if quantizer.descriptor.unsigned else 0
    )
    assert len(expected.unique()) > 100
    assert torch.equal(stored, expected.double())


@pytest.mark.parametrize(
    "name", ["transposed", "capped", "linear", "gated", *OPERATORS]
)
def test_codes_of_other_layers_are_off_by_one_at_most(
    layers: tuple[Any, Tensor, dict[str, Tensor], Any], name: str
) -> None:
    model, x, got, report = layers
    quantizer = (
        model.gated.output_quantizer if name == "gated" else model.outs[f"to_{name}"]
    )
    with torch.no_grad():
        expected = model(x)[name]
    off = codes_of(quantizer, got[name]) - codes_of(quantizer, expected)
    assert off.abs().max() <= 1
    assert (
        off.count_nonzero()
        <= {"average": 0.1, "add": 0.02}.get(name, 0.002) * off.numel()
    )
    assert set(report.integer) == {
        *(f"convs.{n}" for n in model.convs),
        "linear",
        "gated",
    }


def test_an_encoder_computes_on_integers_what_is_simulated(tmp_path: Path) -> None:
    needs_executorch()
    torch.manual_seed(0)
    x = torch.randn(1, 6, 16)
    model = calibrated(Encoder(), x)
    deployed = torchq.deploy(model, x)
    assert deployed.report.integer == ("qkv", "proj", "fc1", "fc2")
    assert not any("linear" in name for name in deployed.report.outside)
    with torch.no_grad():
        expected, got = model(x), deployed(x)
        with torchq.disabled(model):
            plain = model(x)
    assert (got - expected).norm() < 0.5 * (expected - plain).norm()


class Two(nn.Module):
    """A layer for each of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.first(x).relu() + self.second(y).relu()).mean((2, 3))


def test_a_model_of_two_inputs_is_deployed() -> None:
    needs_executorch()
    torch.manual_seed(0)
    x, y = torch.randn(2, 2, 3, 8, 8)
    model = Two().eval()
    torchq.quantize_(model, target="executorch", example=(x, y))
    torchq.calibrate(model, [(x, y)], progress=False)
    deployed = torchq.deploy(model, (x, y))
    with torch.no_grad():
        # The mean of the result is float, and added in another order.
        torch.testing.assert_close(deployed(x, y), model(x, y))
        torch.testing.assert_close(deployed(x=y, y=x), model(y, x))


def test_convolutions_over_time_run_on_integers() -> None:
    needs_executorch()
    torch.manual_seed(0)
    x = torch.randn(2, 4, 16)
    model = calibrated(Audio(), x)
    deployed = torchq.deploy(model, x)
    assert deployed.report.in_float == AUDIO_IN_FLOAT
    assert not [name for name in deployed.report.outside if "conv" in name]
    off = one_code(model.head)
    with torch.no_grad():
        torch.testing.assert_close(deployed(x), model(x), rtol=0, atol=off)


def test_a_quantized_convolution_outside_of_xnnpack_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The safety net behind rule 6, should a later partitioner want other patterns."""
    needs_executorch()
    x = torch.randn(2, 3, 8, 8)
    model = calibrated(
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.LayerNorm(6)), x, target=None
    )
    monkeypatch.setattr(form, "_why_float", lambda layer: "")
    with pytest.raises(
        ExportError, match=r"^0: XNNPACK leaves this quantized convolution outside"
    ):
        export_pte(model, x, tmp_path / "m.pte")
    assert list(tmp_path.iterdir()) == []


class TimesNumber(nn.Module):
    """A number of a stored tensor, as the strides of a detector are, that the input meets."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 8, 3)
        self.register_buffer("strides", torch.tensor([8.0, 16.0]))
        self.strides: Tensor

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y * self.strides[1].item()


def test_numbers_of_stored_tensors_are_arguments() -> None:
    needs_executorch()
    torch.manual_seed(0)
    model = TimesNumber().eval()
    x = torch.rand(1, 3, 8, 8)
    torchq.quantize_(model, target="executorch", example=x, progress=False)
    torchq.calibrate(model, [x], progress=False)
    deployed = torchq.deploy(model, x, target="executorch", progress=False)
    with torch.no_grad(), kernels_off(model):
        torch.testing.assert_close(deployed(x), model(x), rtol=1e-5, atol=1e-5)


def test_a_depthwise_convolution_in_front_of_a_float_function_is_deployed() -> None:
    needs_executorch()
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    model = nn.Sequential(
        nn.Conv2d(4, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8, padding=1),
        nn.Sigmoid(),
        nn.Conv2d(8, 4, 1),
    )
    config = torchq.recipes.int8().with_rules(Rule("3", skip=True, optional=True))
    model = calibrated(model, x, config)
    deployed = torchq.deploy(model, x)
    assert "2" in deployed.report.in_float
    with torch.no_grad():
        # Float sums, behind which each code may fall to the other side of a tie.
        step = model[4].input_quantizer.scale
        off = float(step * model[4].weight.abs().flatten(1).sum(1).max())
        torch.testing.assert_close(deployed(x), model(x), rtol=0, atol=off)


def test_a_file_that_cannot_run_is_named(
    engine: Engine, simulated: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(self: object, feeds: object) -> None:
        raise RuntimeError("method->execute() failed with error 0x1")

    monkeypatch.setattr(EngineModule, "forward", fails)
    with pytest.raises(
        ExportError,
        match=r"^deploy: target 'executorch quantized': the runtime cannot run the file that it "
        r"made \(method->execute\(\) failed with error 0x1\)\. Leave parts in float",
    ) as caught:
        torchq.deploy(simulated, images(1), target=engine)
    assert isinstance(caught.value.__cause__, RuntimeError)

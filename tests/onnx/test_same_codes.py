"""What is simulated is what runs: a file for ONNX Runtime has the codes of the model."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.onnx.exported import Residual, activation_qparams, run_file
from torchq.nn import QuantModule, TensorQuantizer
from torchq.nn.correction import folded_corrections
from torchq.onnx.ir import load_model
from torchq.onnx.qdq import qparams_of, weight_nodes
from torchq.runtime import open_session

pytest.importorskip("onnx")
pytest.importorskip("onnxruntime")

#: Float sums fall to the other side of a tie in about one code of a million, so not every image.
_MOST = 0.9
RECIPES = {
    "int8": lambda: torchq.recipes.int8(),
    "symmetric": lambda: torchq.recipes.int8(symmetric=True),
    "w4a4": lambda: torchq.recipes.integer(4, 4),
}


def made(recipe: str, path: Path, dynamo: bool = True) -> tuple[nn.Module, Tensor]:
    """Return a calibrated model whose file is written, and images."""
    torch.manual_seed(0)
    model = Residual().eval()
    x = torch.randn(32, 3, 12, 12)
    config = RECIPES[recipe]()
    torchq.quantize_(model, config, target="onnxruntime", example=x[:1], progress=False)
    torchq.calibrate(model, [x], progress=False)
    # The plan's target.
    torchq.export_onnx(model, x[:1], path, dynamo=dynamo, progress=False)
    return model, x


def other_scales(model: nn.Module, path: Path) -> list[str]:
    """Return the quantizers whose scales are other float32 numbers in the file."""
    file = load_model(path)
    actual = activation_qparams(file)
    actual |= {name: qparams_of(node) for name, node in weight_nodes(file).items()}
    own = {name: model.get_submodule(name.partition("#")[0]).scale for name in actual}
    same = {
        n: torch.equal(own[n].detach().flatten(), q.scale.flatten())
        for n, q in actual.items()
    }
    assert len(same) > 10
    return [name for name, is_same in same.items() if not is_same]


def share_equal(model: nn.Module, path: Path, x: Tensor) -> float:
    """Return the share of images that get the same result in a session as users have it."""
    with torch.no_grad():
        difference = (run_file(path, x, optimize=True)[0] - model(x)).abs().amax(1)
    return float((difference < 1e-5).float().mean())


@pytest.mark.sample(1)
@pytest.mark.parametrize("dynamo", [True, False])
@pytest.mark.parametrize("recipe", RECIPES)
def test_images_get_equal_results_in_a_session(
    recipe: str, dynamo: bool, path: Path
) -> None:
    model, x = made(recipe, path, dynamo)
    assert share_equal(model, path, x) >= _MOST
    with folded_corrections(model):  # files have gains in the scales of weights
        assert other_scales(model, path) == []
    biases = {n for n, m in model.named_modules() if getattr(m, "bias_format", "")}
    assert {"blocks.0.second", "blocks.1.down"} <= biases
    assert "head" not in biases
    # Codes of 4 bits are clipped first, so their layers run in float.
    assert ("blocks.0.first" in biases) is (recipe != "w4a4")


class Kinds(nn.Module):
    """Depthwise, grouped and dilated convolutions, an addition, and two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, stride=2)
        self.depthwise = nn.Conv2d(32, 32, 3, padding=1, groups=32)
        self.grouped = nn.Conv2d(32, 32, 1, groups=2, bias=False)
        self.dilated = nn.Conv2d(32, 16, 3, padding=2, dilation=2)
        self.hidden = nn.Linear(16, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu6(self.stem(x))
        x = self.grouped(F.relu6(self.depthwise(x))) + x
        x = self.dilated(x).relu().amax((2, 3))
        return self.head(self.hidden(x).relu())


class Gates(nn.Module):
    """SiLU, gates of channels and of elements, and averages over windows."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 24, 3, padding=1)
        self.silu = nn.SiLU()
        self.pool = nn.AvgPool2d(3, 2, padding=1)
        self.squeeze = nn.AdaptiveAvgPool2d(1)
        self.sigmoid = nn.Sigmoid()
        self.gate = nn.Conv2d(24, 24, 1)
        self.left = nn.Conv2d(24, 16, 1)
        self.right = nn.Conv2d(24, 16, 1)
        self.windows = nn.AvgPool2d((2, 3), ceil_mode=True)
        self.last = nn.Conv2d(16, 8, 1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.silu(self.stem(x)))
        x = self.sigmoid(self.gate(self.squeeze(x))) * x
        x = self.windows(self.left(x) * self.right(x))
        return self.head(self.last(x).relu().amax((2, 3)))


#: Codes of 4 bits are clipped first in files, which leaves the convolution in front in float.
ON_INTEGERS = {
    "int8": RECIPES["int8"],
    "symmetric": RECIPES["symmetric"],
    "w4a8": lambda: torchq.recipes.integer(4, 8),
}


@pytest.mark.parametrize("recipe", ON_INTEGERS)
@pytest.mark.parametrize("network", [Residual, Kinds, Gates])
def test_results_are_those_of_a_session_bit_for_bit(
    network: type[nn.Module], recipe: str, path: Path
) -> None:
    """As the model is, without gradients; a batch that no kernel has seen before, too."""
    torch.manual_seed(0)
    model = network().eval()
    x = torch.randn(48, 3, 12, 12)
    config = ON_INTEGERS[recipe]()
    torchq.quantize_(model, config, target="onnxruntime", example=x[:1], progress=False)
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x[:1], path, dynamo=False, progress=False)
    expected = run_file(path, x, optimize=True)[0]
    with torch.no_grad():
        assert torch.equal(model(x), expected)
        assert torch.equal(
            model(x[:5]),
            expected[:5],
        )


def test_the_plan_gives_operators_without_weights_to_integer_kernels() -> None:
    model = Gates().eval()
    x = torch.randn(2, 3, 12, 12)
    plan = torchq.plan(model, target="onnxruntime", example=x)
    rounded = {d.name: d.rounded_by for d in plan.replaced if d.weight is None}
    assert rounded == {
        "silu": "pool.input_quantizer",
        "pool": rounded["pool"],
        "squeeze": "gate.input_quantizer",
        "sigmoid": "quant_mul.input_quantizer",
        "quant_mul": rounded["quant_mul"],
        "quant_mul_1": "windows.input_quantizer",
        "windows": "last.input_quantizer",
    }
    assert rounded["pool"]
    assert rounded["quant_mul"]


def test_means_of_images_at_ties_are_those_of_a_session(path: Path) -> None:
    """Between equal scales every fourth mean of four codes lies between two codes."""
    torch.manual_seed(0)
    layers = (
        nn.Conv2d(3, 32, 1),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 5),
    )
    model = nn.Sequential(*layers).eval()
    x = torch.randn(64, 3, 2, 2)
    plan = torchq.quantize_(model, target="onnxruntime", example=x[:2], progress=False)
    assert plan.decision("2").rounded_by == "4.input_quantizer"
    torchq.calibrate(model, [x], progress=False)
    model[4].input_quantizer.range = model[2].input_quantizer.range
    torchq.export_onnx(model, x[:2], path, dynamo=False, progress=False)
    expected = run_file(path, x, optimize=True)[0]
    with torch.no_grad():
        assert torch.equal(model(x), expected)
    simulated = model(x).detach()
    assert not torch.equal(simulated, expected)


def test_float_results_of_four_bit_codes_are_those_of_a_session(path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 7)).eval()
    x = torch.randn(64, 40)
    config = torchq.recipes.integer(4, 4)
    torchq.quantize_(model, config, target="onnxruntime", example=x[:2], progress=False)
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x[:2], path, dynamo=False, progress=False)
    with torch.no_grad():
        assert torch.equal(
            model(x),
            run_file(path, x, optimize=True)[0],
        )


@pytest.mark.slow
def test_every_code_is_that_of_the_session(path: Path) -> None:
    model, x = made("int8", path)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert report.outputs[0].equal == 1
    assert sum(layer.differ for layer in report.layers) == 0
    layers = [m for m in model.modules() if getattr(m, "rounded_by", "")]
    assert len(layers) > 3
    layers[0].output_shift = torch.full((layers[0].weight.shape[0],), 3e-3)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert not report.ok


def biases_one_step_off(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, QuantModule) and module.bias_format:
            step = (
                module.input_quantizer.scale * module.weight_quantizer.scale.flatten()
            )
            module.bias.data += step


def signed_codes(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, TensorQuantizer) and module.keeps_sign:
            module.descriptor = module.descriptor.replace(unsigned=False)


def last_bit(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, TensorQuantizer):
            module.amax = torch.nextafter(module.amax, torch.tensor(torch.inf))


@pytest.mark.sample(1)
@pytest.mark.parametrize("damage", [biases_one_step_off, signed_codes, last_bit])
def test_another_grid_bias_or_last_bit_shows(
    damage: Callable[[nn.Module], None], path: Path
) -> None:
    model, x = made("int8", path)
    damage(model)
    is_seen = share_equal(model, path, x) < _MOST
    assert is_seen or (damage is last_bit and len(other_scales(model, path)) > 15)


class Forked(nn.Module):
    """A result that two layers read, as it is, padded, or one of them behind a reshape."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.left = nn.Conv2d(8, 4, 1)
        self.right = nn.Conv2d(8, 4, 1)
        self.flat = nn.Linear(8 * 64, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.first(x).relu()
        if self.kind == "reshaped":
            return self.left(x), self.flat(x.flatten(1))
        return self.left(x), self.right(
            F.pad(x, (1, 1, 1, 1)) if self.kind == "padded" else x
        )


@pytest.mark.filterwarnings("ignore:export_onnx")  # what the two layers return is float
@pytest.mark.parametrize(
    ("kind", "on_integers"),
    [("one", True), ("padded", True), ("two", False), ("reshaped", False)],
)
def test_a_result_of_two_ranges_is_computed_in_float(
    kind: str, on_integers: bool, path: Path, tmp_path: Path
) -> None:
    """Kernels return codes of one range; the plan knows, the file shows, and the codes agree."""
    model = Forked(kind).eval()
    x = torch.randn(8, 3, 8, 8)
    config = RECIPES["int8"]()
    weight = torchq.QuantDescriptor(7, axis=0)
    if kind == "two":
        narrow = torchq.QuantDescriptor(
            calib_method="percentile", calib_options={"percentile": 90}
        )
        config = config.with_rules(torchq.Rule("right", input=narrow, weight=weight))
    unused = "right" if kind == "reshaped" else "flat"
    settings = {
        "exclude": unused,
        "target": "onnxruntime",
        "example": x,
        "progress": False,
    }
    plan = torchq.quantize_(model, config, **settings)
    torchq.calibrate(model, [x], progress=False)
    torchq.export_onnx(model, x, path, dynamo=False, progress=False)
    decision = plan.decision("first")
    assert (decision.bias, decision.rounded_by) == (
        ("int32", "left.input_quantizer") if on_integers else ("", "")
    )
    open_session(path, optimize=True, save_optimized=tmp_path / "o.onnx")
    kinds = [
        node.op_type for node in load_model(tmp_path / "o.onnx", check=False).graph
    ]
    assert kinds.count("QLinearConv") == on_integers
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert report.ok, str(report)
    # Each reader has a row.
    assert max(layer.elements for layer in report.layers) <= 8 * 8 * 100


@pytest.mark.slow
def test_biases_are_rounded_in_training_too_and_stored_as_they_were(path: Path) -> None:
    model, _ = made("int8", path)
    layer = model.get_submodule("blocks.0.second")
    stored = layer.bias.detach().clone()
    step = layer.input_quantizer.scale * layer.weight_quantizer.scale.flatten()
    zeros = torch.zeros(1, 16, 4, 4)
    results = layer.train()(zeros)[0, :, 0, 0]
    assert torch.equal(
        results, torch.round((stored + layer.output_shift) / step) * step
    )
    assert not torch.equal(results, stored)
    assert torch.equal(layer.bias, stored)
    results.sum().backward()
    assert torch.equal(layer.bias.grad, torch.ones(16))
    with torchq.disabled(model):
        assert torch.equal(layer(zeros)[0, :, 0, 0], stored)
    assert torchq.restore_(model)
    assert "bias_format" not in vars(layer)


def test_a_form_that_the_plan_fixed_stays_and_a_contradiction_is_a_warning() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    x = torch.randn(2, 3, 8, 8)
    plan = torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    assert plan.decision("2").unsigned == ("input",)
    assert plan.decision("0").unsigned == ()
    assert model[2].input_quantizer.descriptor.unsigned is True  # before calibration
    model[1] = nn.Identity()
    with pytest.warns(UserWarning, match=r"2\.input_quantizer: got negative values"):
        torchq.calibrate(model, [x], progress=False)
    assert model[2].input_quantizer.descriptor.symmetric
    assert not model[0].input_quantizer.descriptor.symmetric


def test_tensorrt_has_signed_codes_and_rules_that_fix_unsigned_ones_stay() -> None:
    x = torch.randn(2, 3, 8, 8)
    for unsigned, expected in (("auto", False), (True, True), (False, False)):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
        config = torchq.recipes.integer(8, 8, unsigned=unsigned)
        plan = torchq.plan(model, config, target="tensorrt", example=x)
        assert plan.decision("2").input.unsigned is expected
        assert plan.decision("2").unsigned == ()


@pytest.mark.slow
def test_a_model_for_no_target_keeps_its_grid_with_a_warning(path: Path) -> None:
    torch.manual_seed(0)
    model = Residual().eval()
    x = torch.randn(2, 3, 12, 12)
    torchq.quantize_(model, progress=False)
    torchq.calibrate(model, [x], progress=False)
    with pytest.warns(UserWarning, match="quantized for no target") as seen:
        torchq.export_onnx(model, x, path, target="openvino", progress=False)
    texts = [
        str(w.message) for w in seen if "quantized for no target" in str(w.message)
    ]
    assert len(texts) == 1
    assert "target='openvino'" in texts[0]
    assert other_scales(model, path) == []

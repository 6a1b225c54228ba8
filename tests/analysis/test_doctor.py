"""One planted fault for each kind of finding, on different networks; and healthy networks."""

import copy
import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchvision import models
from torchvision.models.resnet import BasicBlock

import torchq
from tests.models import (
    ConvNet,
    Parts,
    StagedNet,
    TwoReaders,
    image_batches,
    simulated,
)
from torchq.analysis import CHECKS, DoctorReport, Finding
from torchq.errors import QuantizationError


def examined(
    model: nn.Module, batches: list[Any] | None, **options: Any
) -> DoctorReport:
    return torchq.doctor(model, batches, progress=False, **options)


def healthy(model: nn.Module, **options: Any) -> nn.Module:
    model.eval()
    torchq.fuse_(model, image_batches()[0])
    torchq.quantize_(model, **options)
    torchq.calibrate(model, image_batches(), progress=False)
    return model


def of(report: DoctorReport, kind: str) -> list[Finding]:
    return [finding for finding in report.findings if finding.kind == kind]


class Residual(nn.Module):
    """A residual block whose shortcut is not the result of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.tap = torchq.TensorQuantizer()
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(x)
        return x + self.tap(self.conv(x))


class Functional(nn.Module):
    """A forward that calls a convolution itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.conv = nn.Conv2d(3, 8, 3)
        self.kernel = nn.Parameter(torch.randn(3, 3, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.conv(torch.nn.functional.conv2d(x, self.kernel))


def attend(x: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(x, x, x)


class AttendsOutside(nn.Module):
    """Attention in a function that a table names, as models of transformers have it."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.functions = {"eager": attend}

    def set_attn_implementation(self, name: str) -> None:
        """Exist, as of the models that can be routed."""

    def forward(self, x: Tensor) -> Tensor:
        return self.functions["eager"](self.conv(x).flatten(2))


class Upsampling(nn.Sequential):
    """A transposed convolution behind an ordinary one."""

    def __init__(self) -> None:
        super().__init__(nn.Conv2d(3, 4, 3), nn.ConvTranspose2d(4, 6, 2, 2))


# Each of these returns a model with one fault, the name under which it is found, and its severity.


class Rows(nn.Module):
    """Boxes and scores of two maps, as rows; no score passes the threshold in small numbers."""

    def __init__(self, bias: float = -6.0) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 64, 3, padding=1)
        self.down = nn.Conv2d(64, 16, 3, 2, 1)
        self.boxes = nn.ModuleList([nn.Conv2d(16, 4, 1), nn.Conv2d(16, 4, 1)])
        self.scores = nn.ModuleList([nn.Conv2d(16, 3, 1), nn.Conv2d(16, 3, 1)])
        for layer in self.scores:
            nn.init.constant_(layer.bias, bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first = self.down(self.stem(x).relu()).relu()
        maps = (first, nn.functional.max_pool2d(first, 2))
        boxes = [b(m).flatten(2) for b, m in zip(self.boxes, maps, strict=True)]
        scores = [s(m).flatten(2) for s, m in zip(self.scores, maps, strict=True)]
        joined = torch.cat(scores, 2).transpose(1, 2).sigmoid()
        return torch.cat(boxes, 2).transpose(1, 2), joined


def plant_no_detection(bias: float = -6.0) -> tuple[nn.Module, str, str]:
    torch.manual_seed(0)
    model = Rows(bias).eval()
    batches = image_batches()
    simulated(model, batches, target="onnxruntime", example=batches[0])
    return model, "", "warning"


def test_a_detector_that_detects_something_is_healthy() -> None:
    model, _, _ = plant_no_detection(bias=3.0)
    assert of(examined(model, image_batches()), "no_detection") == []


def plant_unseen() -> tuple[nn.Module, str, str]:
    model = StagedNet().eval()
    model.auxiliary = nn.Linear(4, 2)
    simulated(model, image_batches(), on_unseen="dynamic")
    return model, "auxiliary.input_quantizer", "error"


def plant_uncalibrated() -> tuple[nn.Module, str, str]:
    model = healthy(ConvNet())
    model.left[0].input_quantizer.forget_amax()
    return model, "left.0.input_quantizer", "error"


def plant_dynamic_range() -> tuple[nn.Module, str, str]:
    model = healthy(ConvNet(), config=torchq.recipes.mxfp8())
    return model, "left.0.input_quantizer", "info"


def plant_zero_range() -> tuple[nn.Module, str, str]:
    model = healthy(StagedNet())
    model.layer4.conv.input_quantizer.set_amax(0.0)
    return model, "layer4.conv.input_quantizer", "error"


def plant_nan_range() -> tuple[nn.Module, str, str]:
    model = healthy(ConvNet())
    model.right[0].weight_quantizer.amax[2] = math.nan
    return model, "right.0.weight_quantizer", "error"


def learned_range() -> tuple[nn.Module, str, str]:
    model = healthy(ConvNet(), config=torchq.recipes.w4a4(first_last=None))
    with torch.no_grad():
        model.left[0].input_quantizer.amax.fill_(-0.1)
    return model, "left.0.input_quantizer", "error"


def plant_range_off() -> tuple[nn.Module, str, str]:
    model = healthy(StagedNet())
    model.layer4.conv.input_quantizer.set_amax(
        model.layer4.conv.input_quantizer.amax / 8
    )
    return model, "layer4.conv.input_quantizer", "error"


def plant_damage() -> tuple[nn.Module, str, str]:
    return healthy(ConvNet(), config=torchq.recipes.integer(2, 3)), "", "info"


def plant_wrong_order() -> tuple[nn.Module, str, str]:
    model = healthy(ConvNet())
    with torch.no_grad():
        model.head.weight.mul_(3)
    return model, "head.weight_quantizer", "error"


def plant_skipped_layer() -> tuple[nn.Module, str, str]:
    return healthy(StagedNet(), exclude=["layer4.conv"]), "layer4.conv", "info"


def plant_functional_call() -> tuple[nn.Module, str, str]:
    model = simulated(Functional().eval(), image_batches(), include=["inner.*"])
    return model, "", "warning"


def plant_attention_outside() -> tuple[nn.Module, str, str]:
    return healthy(AttendsOutside()), "", "info"


def plant_one_sided_add() -> tuple[nn.Module, str, str]:
    return healthy(nn.Sequential(Residual())), "0", "warning"


def plant_weight_axis() -> tuple[nn.Module, str, str]:
    wrong = torchq.Rule("1", weight=torchq.QuantDescriptor(axis=0))
    config = torchq.recipes.int8().with_rules(wrong)
    return healthy(Upsampling(), config=config), "1.weight_quantizer", "error"


def plant_range_spread() -> tuple[nn.Module, str, str]:
    model = ConvNet()
    with torch.no_grad():
        model.head.weight[1] *= 100
    model = healthy(model, config=torchq.recipes.int8_per_tensor())
    return model, "head.weight_quantizer", "warning"


def ruled_net(times: float) -> nn.Sequential:
    """Return a net whose second layer reads a channel that is larger than the others."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 1)).eval()
    with torch.no_grad():
        net[0].weight[5] *= times
        net[0].bias[5] *= times
        net[2].weight[:, 5] /= times  # The float results stay the same.
    return net


def plant_ruling_channel() -> tuple[nn.Module, str, str]:
    model = simulated(ruled_net(1000.0), image_batches(), correct=False)
    return model, "2.input_quantizer", "warning"


def plant_batchnorm_left() -> tuple[nn.Module, str, str]:
    model = simulated(StagedNet().eval(), image_batches())
    return model, "layer4.downsample.1", "warning"


PLANTED: dict[str, Callable[[], tuple[nn.Module, str, str]]] = {
    name.removeprefix("plant_"): function
    for name, function in list(globals().items())
    if name.startswith("plant_")
}


def test_every_kind_has_a_planted_fault() -> None:
    assert sorted(PLANTED) == sorted(CHECKS)


@pytest.mark.parametrize("kind", PLANTED)
def test_a_planted_fault_is_found_by_name(kind: str) -> None:
    torch.manual_seed(0)
    model, name, severity = PLANTED[kind]()
    state = copy.deepcopy(model.state_dict())
    report = examined(model, image_batches())
    found = {finding.name: finding for finding in of(report, kind)}
    assert any(where.startswith(name) for where in found), str(report)
    finding = next(f for where, f in found.items() if where.startswith(name))
    assert finding.severity == severity
    assert finding.remedy
    assert finding.evidence in str(report).replace("\n    ", " ")
    for key, value in model.state_dict().items():
        assert torch.equal(value.nan_to_num(), state[key].nan_to_num())


# The others keep their ranges.
@pytest.mark.filterwarnings("ignore:calibrate. .* are calibrated already")
@pytest.mark.parametrize("kind", PLANTED)
def test_calls_that_are_advised_run(kind: str) -> None:
    torch.manual_seed(0)
    model, _, _ = PLANTED[kind]()
    batches = image_batches()
    config = torchq.recipes.int8()
    for finding in of(examined(model, batches), kind)[:1]:
        if not finding.remedy.startswith(("torchq.", "for q in ", "print(")):
            assert kind in IN_WORDS, finding.remedy
            continue
        if kind == "attention_outside":  # a stand-in of a model of transformers
            compile(finding.remedy, kind, "exec")
            continue
        names = {"torchq": torchq, "model": model, "batches": batches, "config": config}
        exec(finding.remedy.replace("print(", "str("), names)


#: Kinds whose remedy is no call: the recipe or the code of the model is to be another one.
IN_WORDS = {"dynamic_range", "nan_range", "functional_call", "weight_axis", "damage"}

HEALTHY: dict[str, Callable[[], nn.Module]] = {
    "ConvNet": ConvNet,
    "StagedNet": StagedNet,
    "TwoReaders": TwoReaders,
    "Upsampling": Upsampling,
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_models_have_no_error(name: str) -> None:
    torch.manual_seed(0)
    batches = image_batches()
    model = HEALTHY[name]().eval()
    torchq.fuse_(model, batches[0])
    simulated(model, batches, example=batches[0])
    report = examined(model, batches)
    assert report.errors == (), str(report)
    assert report.ok
    assert examined(model, batches, strict=True) == report
    assert examined(model, None).ok


def test_what_heals_a_ruling_channel_is_measured() -> None:
    model, name, _ = plant_ruling_channel()
    report = examined(model, image_batches(), timed=False)
    (finding,) = of(report, "ruling_channel")
    assert finding.name == name
    assert finding.evidence.startswith("channel 5 is ")
    figures = re.search(
        r"outputs are ([\d.]+) dB from float, ([\d.]+) .*, ([\d.]+) with it in float",
        finding.evidence,
    )
    assert figures is not None, finding.evidence
    now, wide, as_float = map(float, figures.groups())
    assert wide > now + 5 and as_float > now + 5
    with_16_bits = torchq.Rule(
        "2", input=torchq.QuantDescriptor(16), weight=torchq.QuantDescriptor(axis=0)
    )
    config = torchq.recipes.int8().with_rules(with_16_bits)
    healed = simulated(ruled_net(1000.0), image_batches(), config, correct=False)
    rest = examined(healed, image_batches(), timed=False)
    assert of(rest, "ruling_channel") == []
    assert rest.outputs.sqnr == pytest.approx(wide, abs=1.5)  # all batches, not one


def ruled_rows() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    with torch.no_grad():
        net[0].weight[5] = 1000.0 * net[0].weight[5].abs()  # the ReLU lets it pass
    return net


#: Ranges that the descriptor fixes, in both forms.
FIXED = {
    "symmetric": torchq.QuantDescriptor(amax=900.0),
    "two ends": torchq.QuantDescriptor(
        unsigned=True, symmetric=False, amin=-100.0, amax=900.0
    ),
    "learned": torchq.QuantDescriptor(learn_amax=True, amax=900.0),
}


@pytest.mark.parametrize("input", FIXED.values(), ids=FIXED)
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 3, 6)])
def test_a_ruling_channel_is_found_in_any_rows_and_with_any_range(
    shape: tuple[int, ...], input: torchq.QuantDescriptor
) -> None:
    batch = torch.rand(shape, generator=torch.Generator().manual_seed(1))
    rule = torchq.Rule("2", input=input, weight=torchq.QuantDescriptor(axis=0))
    config = torchq.recipes.int8().with_rules(rule)
    model = simulated(ruled_rows(), [batch], config, correct=False)
    found = of(examined(model, [batch], timed=False), "ruling_channel")
    assert [finding.name for finding in found] == ["2.input_quantizer"]
    assert "channel 5 is" in found[0].evidence


def test_a_channel_below_the_limit_is_no_finding() -> None:
    model = simulated(ruled_net(8.0), image_batches(), correct=False)
    assert of(examined(model, image_batches(), timed=False), "ruling_channel") == []


def test_an_addition_that_a_runtime_can_fuse_is_no_finding() -> None:
    """Leave one branch open where it ends in a convolution, as TensorRT wants it."""
    model = StagedNet().eval()
    example = image_batches()[0]
    torchq.fuse_(model, example)
    simulated(model, image_batches(), target="tensorrt", example=example)
    assert of(examined(model, image_batches()), "one_sided_add") == []


def test_the_place_where_nan_begins_is_named() -> None:
    model = healthy(ConvNet())
    with torch.no_grad():
        model.left[0].bias[0] = math.nan
    found = of(examined(model, image_batches()), "nan_range")
    assert [f.name for f in found] == ["right.0.input_quantizer"]


def test_an_unfinished_calibration_is_found() -> None:
    model = healthy(ConvNet())
    model.head.input_quantizer.mode = "observe"
    found = of(examined(model, None), "wrong_order")
    assert [(f.name, f.severity) for f in found] == [("head.input_quantizer", "error")]


@pytest.mark.parametrize("method", ["mse", "percentile"])
def test_ranges_that_a_method_cut_are_not_stale(method: str) -> None:
    model = simulated(
        ConvNet().eval(),
        image_batches(),
        torchq.recipes.integer(4, 4, weight_method=method),
    )
    assert of(examined(model, image_batches()), "wrong_order") == []


def test_a_learned_range_that_became_negative_is_found() -> None:
    model, name, severity = learned_range()
    (finding,) = of(examined(model, None), "zero_range")
    assert (finding.name, finding.severity) == (name, severity)
    assert "smaller learning rate" in finding.remedy


def test_ranges_of_0_are_right_for_what_is_0() -> None:
    """A channel that a ReLU never lets through may have no range where each has its own."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8))
    with torch.no_grad():
        net[0].weight[2] = 0
        net[0].bias[2] = -1
    batches = image_batches()
    model = simulated(net.eval(), batches, target="openvino", example=batches[0])
    live = torch.arange(8) != 2
    quantizer = model[2].input_quantizer
    quantizer.range = quantizer.range.map(lambda end: end * live.view(end.shape))

    def of_input(report: DoctorReport) -> Finding:
        found = {finding.name: finding for finding in of(report, "zero_range")}
        return found["2.input_quantizer"]

    report = examined(model, batches, timed=False)
    finding = of_input(report)
    assert finding.severity == "info"
    assert (
        "1 of 8 ranges are 0: these channels are 0 in these batches" in finding.evidence
    )
    assert report.outputs is not None
    # Nothing shows that it is so.
    finding = of_input(examined(model, None))
    assert (
        finding.severity == "warning" and "these channels become 0" in finding.evidence
    )
    with torch.no_grad():
        model[0].bias[2] = 1
    finding = of_input(examined(model, batches))
    assert finding.severity == "error" and "these channels become 0" in finding.evidence


def test_a_range_of_0_is_right_for_a_tensor_of_zeros() -> None:
    model = simulated(nn.Sequential(nn.Linear(4, 2)), [torch.zeros(3, 4)])
    (finding,) = of(examined(model, [torch.zeros(3, 4)]), "zero_range")
    assert finding.severity == "info" and "all that it reads is 0" in finding.evidence
    (finding,) = of(examined(model, [torch.ones(3, 4)]), "zero_range")
    assert finding.severity == "error" and "everything becomes 0" in finding.evidence


def test_kinds_that_need_a_run_are_named_as_left_out() -> None:
    report = examined(healthy(ConvNet()), None)
    assert {"unseen", "batchnorm_left"} <= set(report.skipped)
    assert "checks need batches" in str(report)


def test_strict_raises_and_reports_serialise() -> None:
    model, name, _ = plant_wrong_order()
    with pytest.raises(QuantizationError, match="doctor: got 1 errors; expected none"):
        examined(model, None, strict=True)
    report = examined(model, None)
    assert not report.ok
    assert json.loads(json.dumps(asdict(report)))["findings"][0]["name"] == name
    assert "1 error" in report.headline


class Product(nn.Module):
    """A layer whose output channels are the last axis of its weight, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 9))
        self.bias = nn.Parameter(torch.zeros(9))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x, self.weight)


def test_a_weight_of_a_function_has_its_channels_where_the_function_has_them() -> None:
    model = nn.Sequential(Product(), nn.Linear(9, 4)).eval()
    batches = [torch.randn(8, 6)]
    simulated(model, batches, example=batches[0])
    assert not examined(model, batches).errors
    model[0].weight.data[:, 2] = (
        1e-9  # Nothing of this channel is left beside the others.
    )
    model[0].weight_quantizer = torchq.TensorQuantizer(torchq.QuantDescriptor(axis=0))
    torchq.calibrate(model, batches, force=True, progress=False)
    (finding,) = of(examined(model, batches), "weight_axis")
    assert finding.name == "0.weight_quantizer"
    assert "are axis (1,)" in finding.evidence
    (row, *_) = torchq.layer_errors(model, batches, progress=False).rows
    assert (row.dead_channels, row.quantizers[1].channels) == (1, 9)


class Sliced(Parts):
    """Calls functions with a part of a weight, as slimmable networks do."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight[:4])


class Bilinear(Parts):
    """Multiplies by a weight in a function that torchq does not quantize."""

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.bilinear(x, x, self.core)


def test_a_call_with_a_part_of_a_weight_is_named() -> None:
    model = nn.Sequential(
        nn.Linear(6, 6), Sliced(weight=nn.Parameter(torch.randn(8, 6)))
    ).eval()
    batches = [torch.randn(8, 6)]
    simulated(model, batches, include=[nn.Linear], exclude=[Sliced])
    (finding,) = of(examined(model, batches), "functional_call")
    assert finding.name == "1"
    assert "linear with a weight that stays float (1.weight)" in finding.evidence
    torchq.quantize_(model, include=[Sliced], example=batches[0])
    torchq.calibrate(model, batches, force=True, progress=False)
    assert not of(examined(model, batches), "functional_call")


def test_a_function_that_cannot_be_quantized_is_named_too() -> None:
    model = nn.Sequential(
        nn.Linear(6, 4), Bilinear(core=nn.Parameter(torch.randn(3, 4, 4)))
    ).eval()
    torchq.quantize_(model)
    batches = [torch.randn(8, 6)]
    torchq.calibrate(model, batches, progress=False)
    (finding,) = of(examined(model, batches), "functional_call")
    assert finding.name == "1"
    assert "bilinear" in finding.evidence
    assert "a layer of its own" in finding.remedy


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "resnet": lambda: models.ResNet(BasicBlock, [1, 2, 1, 1], num_classes=5),
    "vision transformer": lambda: models.VisionTransformer(
        32, 8, 2, 2, 24, 48, num_classes=5
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_healthy_networks_have_no_finding_but_channels_of_zeros(name: str) -> None:
    torch.manual_seed(0)
    model = NETWORKS[name]().eval()
    batches = [torch.randn(2, 3, 32, 32) for _ in range(2)]
    torchq.fuse_(model, batches[0], progress=False)
    simulated(model, batches, on_unseen="dynamic")
    report = torchq.doctor(model, batches, progress=False)
    assert report.errors == report.of("warning") == (), str(report)
    assert {finding.kind for finding in report.findings} <= {"zero_range"}


def test_the_first_lines_say_how_near_the_simulation_is_and_how_much_is_quantized() -> (
    None
):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    batches = [torch.randn(16, 8)]
    plan = torchq.quantize_(model, example=batches[0], exclude=["2"], progress=False)
    torchq.calibrate(model, batches, progress=False)
    report = torchq.doctor(model, batches, progress=False)
    assert report.outputs is not None
    first, second = str(report).splitlines()[:2]
    assert first == f"the simulation beside the float model: {report.outputs.evidence}"
    assert second == str(plan.share) == "66.7% of the multiply-adds quantized"

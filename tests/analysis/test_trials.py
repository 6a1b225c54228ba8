"""Even channels are tried on copies, and advised where the outputs are nearer to float for it."""

import copy
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.analysis.test_doctor import examined, of, ruled_net
from tests.models import image_batches, simulated
from torchq.analysis.checks import (
    Evened,
    Healing,
    Observation,
    Patient,
    exceeded,
    observe,
    ruling_channels,
)
from torchq.analysis.trials import DEPTHWISE, Trials
from torchq.config import Rule
from torchq.graph import call_model
from torchq.swap import plan_of
from torchq.workflow import quantizers
from torchq.workflow.equalization import evened_layers

EVENED = (
    "torchq.restore_(model); torchq.ptq.equalize_(model, batches[0]); torchq.quantize_(model, "
    "config, target='onnxruntime', example=batches[0]); torchq.calibrate(model, batches)"
)
DEPTHWISE_EVENED = (
    "torchq.restore_(model); torchq.quantize_(model, config, target='onnxruntime', "
    "example=batches[0]); torchq.ptq.equalize_depthwise_(model, batches); "
    "torchq.calibrate(model, batches)"
)
INT8 = torchq.recipes.int8()


def named(target: str) -> torchq.QuantConfig:
    """Return INT8 with a rule that names the depthwise layer, to which calibration keeps."""
    plan = torchq.plan(
        depthwise_net().eval(), INT8, target=target, example=image_batches()[0]
    )
    planned = plan.decision("2")
    assert planned is not None
    return INT8.with_rules(Rule("2", input=planned.input, weight=planned.weight))


def quantized(
    model: nn.Module,
    target: str | None = "onnxruntime",
    config: torchq.QuantConfig = INT8,
) -> nn.Module:
    batches = image_batches()
    return simulated(model.eval(), batches, config, target=target, example=batches[0])


def do(code: str, model: nn.Module, config: torchq.QuantConfig = INT8) -> None:
    """Run the line that is advised."""
    names = {"torchq": torchq, "model": model, "config": config}
    exec(code, {**names, "batches": image_batches()})


def depthwise_net(function: type[nn.Module] = nn.ReLU6) -> nn.Sequential:
    """Return a net whose depthwise layer reads channels of which one is 40 times the others."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3),
        function(),
        nn.Conv2d(16, 16, 3, groups=16),
        nn.ReLU(),
        nn.Conv2d(16, 8, 1),
    )
    with torch.no_grad():
        net[0].weight.mul_(0.05)
        net[0].bias.mul_(0.05)
        net[2].weight.mul_(20)
        for name, factor in (("0", 40.0), ("2", 1 / 40)):
            layer: Any = net.get_submodule(name)
            layer.weight[5] *= factor
        net[0].bias[5] *= 40.0
    return net


def test_even_channels_are_advised_where_factors_pass_and_do_what_is_said() -> None:
    model = quantized(ruled_net(1000.0))
    before = copy.deepcopy(model)
    batches = image_batches()
    report = examined(model, batches, timed=False)
    (finding,) = of(report, "ruling_channel")
    assert finding.severity == "warning" and finding.remedy == EVENED
    assert report.cures[0].code == EVENED
    healing = healing_of(before)
    assert healing.even is not None and healing.even.function == "equalize_"
    assert healing.even.evened > healing.wide + 10
    assert (
        f"{healing.even.evened:.1f} with channels evened by equalize_"
        in finding.evidence
    )
    do(finding.remedy, model)
    after = torchq.doctor(model, batches[:1], timed=False, progress=False)
    assert after.outputs is not None
    assert after.outputs.sqnr == pytest.approx(healing.even.evened, abs=1.5)
    # It is not advised again.
    assert of(after, "ruling_channel") == [] and after.cures == ()


def seen_by(model: nn.Module, batches: list[Any]) -> Observation:
    def run(batch: Any) -> object:
        return call_model(model, batch)

    seen = observe(model, quantizers(model), batches, run)
    assert seen is not None
    return seen


def healing_of(model: nn.Module) -> Healing:
    """Return what heals the input that one channel rules."""
    batches = image_batches()
    patient = Patient(model, quantizers(model), set(), seen_by(model, batches))
    return Trials(model, batches, None).healings(ruling_channels(patient))[
        "2.input_quantizer"
    ]


class ReadTwice(nn.Sequential):
    """The ruled net, whose first layer is read by another one too: no factor can pass."""

    def forward(self, x: Tensor) -> Tensor:
        ruled = self[1](self[0](x))
        return torch.cat([self[2](ruled), ruled[:, :1]], 1)


def test_where_no_factor_passes_wider_codes_are_advised() -> None:
    model = quantized(ReadTwice(*ruled_net(1000.0)), None)
    healing = healing_of(model)
    assert healing.even is None and healing.gain > 5
    (finding,) = of(examined(model, image_batches(), timed=False), "ruling_channel")
    assert "QuantDescriptor(16)" in finding.remedy
    assert "equalize" not in finding.remedy + finding.evidence


def test_even_channels_that_do_not_help_are_not_advised() -> None:
    """The images make the channel large, where weights are of one size already."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 8, 1)).eval()
    with torch.no_grad():
        net[0].weight.abs_().clamp_(min=0.1)
        net[0].weight[:, 0] = 0
        net[0].weight[5] = torch.tensor([0.5, 0.0, 0.0])[:, None, None]
    batches = [x * torch.tensor([500.0, 1, 1])[:, None, None] for x in image_batches()]
    simulated(net, batches, INT8, target="onnxruntime", example=batches[0])
    (finding,) = of(examined(net, batches, timed=False), "ruling_channel")
    assert "with channels evened by equalize_" in finding.evidence
    assert "torchq.ptq.equalize_" not in finding.remedy


@pytest.mark.parametrize(
    ("evened", "wide", "is_best"),
    [
        (28.0, 30.5, True),  # nearly as good, and no code is wider
        (26.0, 30.5, False),
        (33.0, 60.0, True),  # more than a good model needs
        (10.9, 9.0, False),  # less than a decibel
    ],
)
def test_even_channels_win_where_they_are_enough(
    evened: float, wide: float, is_best: bool
) -> None:
    even = Evened("equalize_", now=10.0, anew=9.0, evened=evened)
    healing = Healing(10.0, wide, wide, even)
    assert healing.wants_even_channels == is_best
    line = healing.remedy("2", "onnxruntime")
    assert (line == EVENED) == is_best
    again = Evened("equalize_", now=10.0, anew=evened - 0.5, evened=evened)
    assert not Healing(10.0, wide, wide, again).wants_even_channels


@pytest.mark.parametrize("function", [nn.ReLU6, nn.ReLU])
def test_even_inputs_of_depthwise_layers_are_a_cure(function: type[nn.Module]) -> None:
    config = named("onnxruntime")
    model = quantized(depthwise_net(function), config=config)
    batches = image_batches()
    report = examined(model, batches, timed=False)
    cure = report.cures[0]
    assert cure.code == DEPTHWISE_EVENED
    (finding,) = of(report, "damage")
    assert finding.remedy == cure.code and cure.text in finding.evidence
    page = torchq.report(model, batches, progress=False, plan=False).data
    assert page["verdict"]["advice"][0] == vars(cure)
    even = Trials(model, batches, None).even_inputs(seen_by(model, batches), {"2": 1.0})
    assert even is not None and f"to {even.evened:.1f} dB" in cure.text
    do(cure.code, model, config)
    after = examined(model, batches, timed=False)
    assert after.outputs is not None
    assert after.outputs.sqnr == pytest.approx(even.evened, abs=0.01)
    assert all("equalize" not in cure.code for cure in after.cures)


def test_what_calibration_evens_by_itself_needs_no_cure() -> None:
    model = quantized(depthwise_net())
    assert plan_of(model).decision("2").even is not None  # type: ignore[union-attr]
    report = examined(model, image_batches(), timed=False)
    assert all("equalize" not in cure.code for cure in report.cures)


def test_even_inputs_are_tried_where_they_may_gain_alone() -> None:
    model = quantized(depthwise_net(), config=named("onnxruntime"))
    batches = image_batches()
    seen = seen_by(model, batches)
    trials = Trials(model, batches, None)
    assert trials.even_inputs(seen, {"2": 0.1, "4": 0.9}) is None
    assert trials.tried == ()
    # The share is an estimate, and may be twice as much.
    assert trials.even_inputs(seen, {"2": 0.15, "4": 0.85}) is not None
    assert trials.tried == (DEPTHWISE,)
    # Ranges of their own for each channel leave nothing to gain.
    own = quantized(depthwise_net(), "openvino")
    assert evened_layers(own, batches[0], depthwise=True) == ()
    assert (
        Trials(own, batches, None).even_inputs(seen_by(own, batches), {"2": 1.0})
        is None
    )
    # Lines call the model itself.
    by_hand = Trials(model, batches, lambda model, batch: model(batch))
    assert by_hand.even_inputs(seen, {"2": 1.0}) is None


@pytest.mark.parametrize("fitted", ["learned ranges", "rounded weights"])
def test_what_a_new_calibration_would_lose_is_not_tried(fitted: str) -> None:
    model = quantized(depthwise_net())
    batches = image_batches()
    if fitted == "rounded weights":
        torchq.ptq.gptq_(model, batches, progress=False)
    else:
        learned = torchq.QuantDescriptor(learn_amax=True)
        config = INT8.with_rules(torchq.Rule("2", input=learned))
        torchq.restore_(model)
        simulated(model, batches, config)
    trials = Trials(model, batches, None)
    assert trials.even_inputs(seen_by(model, batches), {"2": 1.0}) is None
    assert trials.tried == ()


def test_what_float_layers_gain_is_measured() -> None:
    """A share of the damage is an estimate, which noise that grows on its way may belie."""
    model = quantized(ReadTwice(*ruled_net(1000.0)), None)
    batches = image_batches()
    report = examined(model, batches, timed=False)
    text = report.cures[-1].text
    assert "Leave 2 in float, which takes away" in text
    measured = re.search(
        r"by estimate; measured, the outputs come ([\d.]+) dB nearer", text
    )
    assert measured is not None, text
    without = copy.deepcopy(model)
    for quantizer in torchq.workflow.select_quantizers(without, ["2"]).values():
        quantizer.quantizing = False
    now, then = (
        torchq.analysis.compare_outputs(m, batches, progress=False).sqnr
        for m in (model, without)
    )
    assert then > now + 1
    assert float(measured[1]) == pytest.approx(then - now, abs=0.051)


def state(model: nn.Module) -> list[object]:
    """Return what a call must leave alone, for comparison."""
    modules = list(model.modules())
    return [
        [(name, id(p), p._version) for name, p in model.named_parameters()],
        [(type(m), m.training, len(m._forward_hooks)) for m in modules],
        [id(m) for m in modules],
        [q.delegate for q in quantizers(model).values()],
        plan_of(model).to_dict(),
        torch.get_rng_state().tolist(),
        random.getstate(),
    ]


@pytest.mark.parametrize("make", [lambda: ruled_net(1000.0), depthwise_net])
def test_trials_leave_the_model_as_it_is(make: Any) -> None:
    model = quantized(make())
    batches = image_batches()
    seen = seen_by(model, batches)
    model.train()
    model[0].eval()
    calls: list[object] = []

    def draw(*_: object) -> None:
        calls.append((torch.rand(1), random.random()))

    model[2].register_forward_hook(draw)
    patient = Patient(model, quantizers(model), set(), seen)
    tensors = copy.deepcopy(model.state_dict())
    before = state(model)
    trials = Trials(model, batches, None)
    trials.healings(ruling_channels(patient)[:1])
    trials.even_inputs(seen, {"2": 1.0})
    trials.gain_in_float(["2"])
    assert trials.tried and calls
    assert state(model) == before
    for key, value in model.state_dict().items():
        assert torch.equal(value, tensors[key])


def test_ranges_that_are_averaged_over_samples_do_not_count_as_short() -> None:
    """A calibration keeps the mean of what samples reach where the outputs are better for it."""
    model = quantized(nn.Sequential(nn.Conv2d(3, 4, 3)), None)
    batches = [torch.cat([x[:3], 12 * x[3:]]) for x in image_batches()]
    largest = torch.cat(batches).abs().flatten(1).amax(1)
    assert largest.max() > 2 * largest.mean()
    patient = Patient(model, quantizers(model), set(), seen_by(model, batches))
    model[0].input_quantizer.set_amax(largest.mean())
    assert exceeded(patient) == []
    model[0].input_quantizer.set_amax(largest.mean() / 1.6)
    assert exceeded(patient) == ["0.input_quantizer"]

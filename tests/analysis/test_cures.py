"""What is advised helps: each cure is measured on a small net that was trained for its task."""

import copy
import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.fusion.blocks.repvgg import RepVGGBlock
from tests.models import Parts, simulated
from torchq.analysis import DoctorReport
from torchq.analysis.checks import Healing, Patient, damage
from torchq.analysis.doctor import cures
from torchq.analysis.layers import (
    line_equalized,
    line_with,
    lines_without,
    named_target,
)
from torchq.analysis.outputs import Outputs
from torchq.nn.correction import corrected_layers
from torchq.swap import plan_of
from torchq.workflow import quantizers, weight_quantizers

W4A4 = torchq.recipes.w4a4()


def images(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return noisy patterns of 10 classes, (count, 1, 8, 8) in 0..1, and their labels."""
    patterns = torch.rand(10, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(10, (count,), generator=generator)
    noise = torch.randn(count, 1, 8, 8, generator=generator)
    return (patterns[labels] + 0.6 * noise).clamp(0, 1), labels


@cache
def trained() -> nn.Module:
    """Return a fused RepVGG that was trained for two seconds."""
    torch.manual_seed(0)
    blocks = [RepVGGBlock(1, 16), *(RepVGGBlock(16, 16) for _ in range(3))]
    model = nn.Sequential(
        *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(40):
        x, labels = images(64, step + 1)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), labels).backward()
        optimizer.step()
    model.eval()
    torchq.fuse_(model, images(4, 0)[0])
    return model


def batches() -> list[Tensor]:
    return list(images(256, 1000)[0].split(64))


def quantized(config: Any, model: nn.Module | None = None, **options: Any) -> nn.Module:
    model = copy.deepcopy(trained() if model is None else model)
    target = options.pop("target", None)
    torchq.quantize_(model, config, target=target, example=batches()[0])
    torchq.calibrate(model, batches(), progress=False, **options)
    return model


def examined(model: nn.Module, **options: Any) -> DoctorReport:
    return torchq.doctor(
        model, list(images(512, 2000)[0].split(128)), progress=False, **options
    )


def advised(model: nn.Module, shares: dict[str, float]) -> list[str]:
    """Return the calls that would help if layers had these shares of the damage."""
    patient = Patient(model, quantizers(model), weight_quantizers(model), None)
    return [cure.code for cure in cures(patient, shares)]


@torch.no_grad()
def same(model: nn.Module, other: nn.Module | None = None) -> float:
    """Return the share of other images with the class of the float model."""
    x, other = images(1000, 3000)[0], other or trained()
    return (model(x).argmax(1) == other(x).argmax(1)).float().mean().item()


def do(code: str, model: nn.Module, config: Any = None) -> None:
    """Run the call that is advised."""
    names = {"torchq": torchq, "model": model, "config": config}
    exec(code, {**names, "batches": batches(), "example": batches()[0]})


def test_ranges_of_other_data_are_calibrated_again() -> None:
    model = simulated(copy.deepcopy(trained()), [x / 10 for x in batches()])
    report, before = examined(model), same(model)
    assert {f.kind for f in report.errors} == {"range_off"}
    assert report.outputs is None and "values reach" in report.errors[0].evidence
    do(report.errors[0].remedy, model)
    assert examined(model).ok and before < 0.8 and same(model) > 0.97


def test_ranges_that_are_a_little_short_are_an_error_where_they_do_damage() -> None:
    model = quantized(torchq.recipes.int8(), target="onnxruntime")
    for module in model.modules():
        if (
            isinstance(module, torchq.TensorQuantizer)
            and module.descriptor.axis is None
        ):
            module.range = module.range.map(lambda end: end / 3)
    report = examined(model)
    assert (
        report.ok
        and report.cures[0].code == "torchq.calibrate(model, batches, force=True)"
    )
    assert "does not fit these values" in report.cures[0].text


def test_ranges_that_a_method_cuts_are_no_error() -> None:
    """With 4 bits the least squared error leaves rare values far outside."""
    model = quantized(W4A4)
    for module in model.modules():
        if (
            isinstance(module, torchq.TensorQuantizer)
            and module.descriptor.num_bits == 4
        ):
            module.set_amax(module.amax / 12)
    report = examined(model)
    assert report.ok and "torchq.calibrate" not in report.cures[0].code


def test_values_are_those_of_the_float_model_whatever_is_corrected() -> None:
    model = quantized(torchq.recipes.int8())
    for layer in corrected_layers(model):
        channels = layer.output_shift.numel()
        layer.correct_output_(torch.full((channels,), 5.0), torch.zeros(channels))
    assert len(corrected_layers(model)) == 5
    assert examined(model).ok and len(corrected_layers(model)) == 5


def test_a_correction_that_is_off_comes_first() -> None:
    model = quantized(torchq.recipes.integer(4, 4, first_last=8), correct=False)
    report, before = examined(model), same(model)
    (finding,) = [f for f in report.findings if f.kind == "damage"]
    assert finding.remedy == "torchq.calibrate(model, batches, force=True)"
    assert "results of 5 layers were never corrected" in finding.evidence
    do(finding.remedy, model)
    assert same(model) > before + 0.01
    assert "gptq_" in report.cures[1].code


@pytest.mark.slow
def test_four_bits_are_rounded_by_gptq_before_any_layer_stays_float() -> None:
    model = quantized(W4A4)
    report, before = examined(model), same(model)
    assert report.cures[0].code == "torchq.ptq.gptq_(model, batches)"
    assert "Weights of 4 bits are rounded to nearest" in str(report).replace(
        "\n    ", " "
    )
    do(report.cures[0].code, model)
    assert same(model) > before + 0.01
    assert all("gptq_" not in cure.code for cure in examined(model).cures)
    page = torchq.report(quantized(W4A4), batches(), progress=False, plan=False).data
    assert page["verdict"]["advice"][0] == vars(report.cures[0])
    codes = [advice["code"] for advice in page["verdict"]["advice"]]
    assert all("exclude=" not in code for code in codes[:-2])


def test_ends_of_four_bits_want_eight() -> None:
    config = torchq.recipes.integer(4, 4)
    model = quantized(config)
    ends = line_with("config.with_ends(8)")
    codes = advised(model, {"6": 0.6, "1": 0.4})
    assert codes == ["torchq.ptq.gptq_(model, batches)", ends, codes[2]]
    assert ends not in advised(model, {"1.rbr_reparam": 1.0})
    better = quantized(config.with_ends(8))
    assert same(better) > same(model)


def test_signed_codes_without_negative_values_want_a_target() -> None:
    config = torchq.recipes.integer(8, 4, unsigned=False)
    model = quantized(config)
    (first, *_) = examined(model).cures
    assert first.code == line_with(f"config, {named_target()}")
    assert "inputs without negative values have signed codes" in first.text
    assert all("target=" not in c.code for c in examined(quantized(W4A4)).cures)


def test_a_chip_without_float_wants_activations_of_sixteen_bits() -> None:
    model = with_one_bad_layer()
    narrow = quantized(None, model, target="qnn")
    code = advised(narrow, {"1.rbr_reparam": 1.0})[0]
    recipe = "torchq.recipes.w8a16()"
    assert code == line_with(f"{recipe}, target='qnn', example=batches[0]")
    wide = quantized(torchq.recipes.w8a16(), model, target="qnn")
    assert not any("w8a16" in code for code in advised(wide, {"1.rbr_reparam": 1.0}))
    assert same(wide, model) > same(narrow, model)
    for_other = quantized(None, model, target="onnxruntime")
    assert not any("w8a16" in c for c in advised(for_other, {"1.rbr_reparam": 1.0}))


def with_one_bad_layer() -> nn.Module:
    """Return the net with one channel that is 3,000 times larger, and read accordingly."""
    model = copy.deepcopy(trained())
    layers = [m for m in model.modules() if isinstance(m, nn.Conv2d)]
    with torch.no_grad():
        layers[2].weight[3] *= 3000
        layers[2].bias[3] *= 3000  # type: ignore[index]
        layers[3].weight[:, 3] /= 3000
    return model


def test_one_bad_layer_of_eight_bits_is_named() -> None:
    float_model = with_one_bad_layer()
    recipe = torchq.recipes.int8()
    model = quantized(recipe, float_model, target="onnxruntime")
    report = examined(model)
    even, without = report.cures
    assert even.code == line_equalized("onnxruntime")
    assert without.code == lines_without(["3.rbr_reparam"])
    (finding,) = [f for f in report.findings if f.kind == "damage"]
    assert (finding.severity, finding.remedy) == ("warning", even.code)
    assert same(model, float_model) < 0.9
    for cure in report.cures:
        better = copy.deepcopy(model)
        do(cure.code, better, recipe)
        assert same(better, float_model) > 0.98


def test_one_scale_for_unequal_channels_wants_equalization() -> None:
    recipe = torchq.recipes.integer(8, 8, per_channel=False)
    unequal = copy.deepcopy(trained())
    with torch.no_grad():
        unequal[3].rbr_reparam.weight[0] *= 100  # type: ignore[index]
    model = quantized(recipe, unequal, target="onnxruntime")
    code = line_equalized("onnxruntime")
    assert advised(model, {}) == [code]
    assert advised(quantized(recipe, target="onnxruntime"), {}) == []
    assert code not in advised(model, {"2.rbr_reparam": 1.0})
    do(code, model, recipe)
    assert plan_of(model).target == "onnxruntime"


def test_advice_for_the_ends_keeps_the_target() -> None:
    config = torchq.recipes.integer(4, 4)
    model = quantized(config, target="onnxruntime")
    ends = line_with("config.with_ends(8)", "onnxruntime")
    assert ends in advised(model, {"6": 0.6, "1": 0.4})
    do(ends, model, config)
    assert plan_of(model).target == "onnxruntime"
    remedies = [Healing(10.0, 30.0, 31.0), Healing(10.0, 12.0, 31.0)]
    for healing in remedies:
        line = healing.remedy("6", "onnxruntime").partition("  #")[0]
        do(line, model, config)
        assert plan_of(model).target == "onnxruntime"


def test_a_good_model_has_no_cure() -> None:
    report = examined(quantized(torchq.recipes.int8(), target="onnxruntime"))
    assert (
        report.outputs is not None
        and report.outputs.grade == "good"
        and report.cures == ()
    )
    assert [f.kind for f in report.findings if f.kind == "damage"] == []


@pytest.mark.parametrize("gain", [-5.0, 0.9, 1.1, math.nan])
def test_layers_are_left_in_float_where_that_helps(gain: float) -> None:
    model = quantized(torchq.recipes.int8(), target="onnxruntime")
    known = quantizers(model)
    patient = Patient(model, known, weight_quantizers(model), None, gain_in_float=gain)
    codes = [cure.code for cure in cures(patient, {"6": 0.9, "1": 0.1})]
    assert (lines_without(["6"]) in codes) == (not gain < 1)


def test_damage_is_told_where_nothing_cheap_helps() -> None:
    model = quantized(torchq.recipes.int8(), target="onnxruntime")

    def told(outputs: Outputs) -> list[str]:
        known = quantizers(model)
        patient = Patient(model, known, weight_quantizers(model), None, outputs)
        return [remedy for *_, remedy in damage(patient)]

    (remedy,) = told(Outputs(17.7, 0.938, 200))
    assert 'budget={"mean_bits": 12}' in remedy
    names = {"torchq": torchq, "model": model, "batches": batches()[:1]}
    exec(remedy, names)
    torchq.quantize_(copy.deepcopy(trained()), names["config"], example=batches()[0])
    assert told(Outputs(41.0, 0.999, 200)) == []
    # Nothing is known of these.
    assert told(Outputs(math.nan, None, 0)) == []
    assert told(Outputs(17.7, None, 0, comparable=False)) == []


class Boxes(Parts):
    """Return a dictionary for each image, with as many boxes as scores are above a half."""

    def forward(self, images: list[Tensor]) -> list[dict[str, Tensor]]:
        found = []
        for row in self.layer(torch.stack(images).flatten(1)).sigmoid():
            keep = row > 0.5
            corners = torch.arange(20.0)[keep, None] * torch.tensor([10.0, 0, 10, 0])
            boxes = corners + torch.tensor([0.0, 0, 5, 5])
            labels = torch.zeros(len(boxes), dtype=torch.long)
            found.append({"boxes": boxes, "scores": row[keep], "labels": labels})
        return found


def test_lists_of_boxes_are_compared_by_detections_alone() -> None:
    torch.manual_seed(0)
    model = Boxes(layer=nn.Linear(64, 20)).eval()
    torchq.quantize_(model, torchq.recipes.integer(2, 2))
    data = [(list(images(count, count)[0]),) for count in (8, 6, 8)]
    torchq.calibrate(model, data, progress=False)
    report = torchq.doctor(model, data, progress=False)
    assert all(f.kind != "damage" for f in report.findings)
    assert (
        "functions compare them"
        in torchq.report(model, data, progress=False, plan=False).data["verdict"][
            "sentence"
        ]
    )
    report = torchq.doctor(model, data, metric="detections", progress=False)
    (finding,) = [f for f in report.findings if f.kind == "damage"]
    assert finding.remedy == "torchq.ptq.gptq_(model, batches)"


def test_the_metric_of_detections_judges_by_boxes() -> None:
    class Head(nn.Module):
        """One box, which is large where the mean of an image is."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 6)
            self.layer.weight.data *= 10

        def forward(self, x: Tensor) -> Tensor:
            rows = self.layer(x.flatten(1)).sigmoid()
            boxes = torch.cat([rows[:, :2], rows[:, :2] + rows[:, 2:4]], 1)
            return torch.cat([boxes, rows[:, 4:5], torch.zeros(len(x), 1)], 1)[:, None]

    torch.manual_seed(0)
    model = quantized(torchq.recipes.integer(2, 2), Head().eval())
    report = examined(model, metric="detections")
    assert report.outputs is not None and report.outputs.metric == "detections"
    assert report.outputs.float_score == 1 and report.outputs.grade != "good"
    assert "objects 1 becomes 0." in str(report)
    assert any(f.kind == "damage" for f in report.findings)
    data = torchq.report(
        model, batches(), metric="detections", progress=False, plan=False
    ).data
    assert data["outputs"]["metric"] == data["ranking"]["metric"] == "detections"
    with pytest.raises(
        torchq.errors.ConfigError, match="doctor: got metric 'sqnr'; expected a fu"
    ):
        examined(model, metric="sqnr")
    with torch.no_grad():
        model.get_parameter("layer.bias")[4] = -30
    with pytest.raises(
        torchq.errors.CalibrationError, match="the float model detects nothing"
    ):
        examined(model, metric="detections")

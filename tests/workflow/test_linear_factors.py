"""Factors of channels that linear layers read: where outputs get nearer to float, nowhere else."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.config import Rule
from torchq.errors import ConfigError
from torchq.swap import plan_of
from torchq.swap.plan import Plan
from torchq.workflow import input_factors, linear_factors
from torchq.workflow.runs import without_padding

SIZE = 32


class Block(nn.Module):
    """A norm that a residual reads too, with one channel that rules its range."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        self.norm = nn.LayerNorm(SIZE)
        self.query = nn.Linear(SIZE, SIZE)
        self.key = nn.Linear(SIZE, SIZE)
        self.out = nn.Linear(SIZE, SIZE)
        self.head = nn.Linear(SIZE, 6)
        with torch.no_grad():
            for parameter in (*self.query.parameters(), *self.key.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
            for parameter in (*self.out.parameters(), *self.head.parameters()):
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 6)
            self.norm.weight[2] = 80.0
            # Nothing of the large channel reaches the head but through the branch.
            for layer in (self.query, self.key):
                layer.weight[:, 2] *= 0.01
            self.head.weight[:, 2] *= 0.001

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return self.head(y + self.out((self.query(y) * self.key(y)).tanh()))


def rows(scale: float = 1.0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(256, SIZE, generator=generator) * scale for _ in range(4)]


def quantized(target: str | None = None, **options: Any) -> Any:
    # Weights of 7 bits: products of 8 overflow on CPUs without VNNI.
    options.setdefault("config", torchq.recipes.int8(reduce_range=True))
    model = Block().eval()
    torchq.quantize_(model, target=target, example=rows()[0], progress=False, **options)
    return model


def calibrated(model: nn.Module, **options: Any) -> torchq.CalibrationReport:
    return torchq.calibrate(model, rows(), progress=False, **options)


@torch.no_grad()
def decibels(model: nn.Module) -> float:
    """Return the ratio of signal to noise on rows that calibration did not see."""
    generator = torch.Generator().manual_seed(6)
    x = torch.randn(200, SIZE, generator=generator)
    exact = Block().eval()(x)
    noise = (model.eval()(x) - exact).square().sum()
    return float(10 * (exact.square().sum() / noise).log10())


@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino"])
def test_factors_are_taken_where_the_outputs_are_nearer_to_float(
    target: str | None,
) -> None:
    plain, model = quantized(target), quantized(target)
    calibrated(plain, correct=False)
    report = calibrated(model)
    assert {"query", "key"} <= set(report.factors.layers)
    assert decibels(model) > decibels(plain) + 3
    line = "linear layers read channels divided by factors (SmoothQuant): output "
    assert line in str(report)
    plan = plan_of(model)
    decision = plan.decision("query")
    assert decision is not None and decision.factors is not None
    assert decision.factors.by == "calibrate" and decision.factors.gain > 0
    assert "SmoothQuant, alpha" in plan.explain("query")
    # Layers that read one tensor have the same factors, powers of two.
    one, other = (model.query.input_quantizer, model.key.input_quantizer)
    assert torch.equal(one.pre_quant_scale, other.pre_quant_scale)
    exponents = model.query.weight_quantizer.pre_quant_scale.log2()
    assert torch.equal(exponents, exponents.round()) and exponents[0, 2] > 0


def test_the_ranges_are_those_of_a_run_with_the_factors() -> None:
    model = quantized("openvino")
    calibrated(model)
    quantizers = torchq.workflow.quantizers(model)
    before = {name: copy.deepcopy(q.range) for name, q in quantizers.items()}
    # Without a correction the factors stay, and the batches run through them.
    calibrated(model, force=True, correct=False)
    assert model.query.input_quantizer.pre_quant_scale is not None
    for name, quantizer in quantizers.items():
        for (_, old), (_, new) in zip(
            before[name].ends(), quantizer.range.ends(), strict=True
        ):
            assert torch.equal(old, new), name


def test_off_and_restored_it_has_the_bits_of_the_float_model() -> None:
    model = quantized()
    calibrated(model)
    x = torch.cat(rows())
    with torch.no_grad():
        exact = Block().eval()(x)
        with torchq.disabled(model):
            assert torch.equal(model(x), exact)
        torchq.restore_(model)
        assert torch.equal(model(x), exact)


def test_factors_that_bring_nothing_at_the_output_are_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As those of some vision transformers: nothing of the calibration may show then."""
    plain, model = quantized(), quantized()
    monkeypatch.setattr(linear_factors, "_SHARE", 2.0)
    calibrated(plain)
    monkeypatch.undo()
    # Exponents that ruin the weights, which a look at the layers alone would not drop.
    monkeypatch.setattr(linear_factors, "_ALPHAS", (1.0,))
    monkeypatch.setattr(linear_factors, "_WORTH", 1e9)
    monkeypatch.setattr(
        linear_factors,
        "channel_factors",
        lambda x, w, alpha: 1 + 500 * (x < x.median()),
    )
    report = calibrated(model)
    assert report.factors.tried and not report.factors.layers
    assert report.factors.outputs.is_worse and "SmoothQuant" not in str(report)
    assert plan_of(model) == plan_of(plain)
    first, second = model.state_dict(), plain.state_dict()
    assert first.keys() == second.keys()
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_factors_that_bring_little_at_the_output_are_dropped() -> None:
    """The head keeps its one range by a rule, and its noise hides what the others gain."""
    descriptor = torchq.QuantDescriptor()
    rule = Rule("head", input=descriptor, weight=descriptor.replace(axis=0))
    recipe = torchq.recipes.int8(reduce_range=True)
    model = quantized(config=recipe.with_rules(rule))
    report = calibrated(model)
    assert report.factors.tried == 2 and 0.5 < report.factors.outputs.gain < 1
    assert not report.factors.layers
    assert model.query.input_quantizer.pre_quant_scale is None
    assert model.query.weight_quantizer.pre_quant_scale is None


def delegate_weight(model: Any) -> None:
    """Let a function quantize a weight, which may compute anything."""
    model.query.weight_quantizer.delegate = lambda x, _: x


def compute_weight(model: Any) -> None:
    """Compute a weight in each forward, as spectral_norm and its like do."""
    nn.utils.parametrizations.weight_norm(model.query)


@pytest.mark.parametrize("change", [delegate_weight, compute_weight])
def test_layers_whose_weights_are_made_otherwise_have_no_factors(
    change: Callable[[Any], None],
) -> None:
    model = quantized()
    change(model)
    report = calibrated(model)
    assert "query" not in report.factors.layers and "head" in report.factors.layers
    assert model.query.input_quantizer.pre_quant_scale is None


def test_a_rule_for_all_modules_names_no_layer() -> None:
    descriptor = torchq.QuantDescriptor()
    rule = Rule("*", input=descriptor, weight=descriptor.replace(axis=0))
    model = quantized(config=torchq.QuantConfig((rule,)))
    assert {"query", "head"} <= set(calibrated(model).factors.layers)


def test_convolutions_beside_linear_layers_are_left_alone() -> None:
    class Patches(Block):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv1d(1, 1, 3, padding=1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.patches(x.unsqueeze(1)).squeeze(1))

    model = Patches().eval()
    torchq.quantize_(model, example=rows()[0], progress=False)
    report = calibrated(model)
    assert "query" in report.factors.layers and "patches" not in report.factors.layers


def test_layers_that_share_a_quantizer_with_another_have_no_factors() -> None:
    model = quantized()
    model.head.input_quantizer = model.query.input_quantizer
    report = calibrated(model)
    assert not {"query", "key", "head"} & set(report.factors.layers)
    assert model.query.input_quantizer.pre_quant_scale is None


def test_a_layer_of_which_one_quantizer_is_set_anew_keeps_its_factors() -> None:
    model = quantized()
    calibrated(model)
    before = plan_of(model)
    factors = model.query.input_quantizer.pre_quant_scale.clone()
    amax = model.query.input_quantizer.amax.clone()
    model.query.input_quantizer.forget_amax()
    with pytest.warns(UserWarning, match="6 quantizers are calibrated already"):
        calibrated(model)
    assert plan_of(model) == before
    assert torch.equal(model.query.input_quantizer.pre_quant_scale, factors)
    assert model.query.weight_quantizer.pre_quant_scale is not None
    assert torch.equal(model.query.input_quantizer.amax, amax)


def test_a_model_without_multiplications_is_not_tried() -> None:
    model = nn.Sequential(nn.AvgPool1d(2)).eval()
    torchq.quantize_(model, target="onnxruntime", example=rows()[0], progress=False)
    report = calibrated(model)
    assert report.ranges and report.factors.tried == 0


@pytest.mark.parametrize(
    "of", ["call", "inputs", "weights", "columns", "fixed", "floats"]
)
def test_other_ranges_than_those_of_ends_leave_channels_alone(of: str) -> None:
    """Neither the ends of channels nor the weights by rows tell such ranges."""
    descriptor = torchq.QuantDescriptor()
    by = {
        "columns": {"weight": descriptor.replace(axis=1)},
        "floats": {"input": torchq.QuantDescriptor((4, 3))},
        "fixed": {"input": descriptor.replace(amax=300.0)},
        "inputs": {"input": descriptor.replace(calib_method="mse")},
        "weights": {"weight": descriptor.replace(axis=0, calib_method="activation")},
    }
    usual = {"input": descriptor, "weight": descriptor.replace(axis=0)}
    rule = Rule("type:Linear", **{**usual, **by.get(of, {})})
    model = quantized(config=torchq.recipes.int8().with_rules(rule))
    report = calibrated(model, **({"method": "mse"} if of == "call" else {}))
    assert report.factors.tried == 0
    assert model.query.input_quantizer.pre_quant_scale is None


class Overwritten(Block):
    """The second of two layers reads the same tensor, with other numbers in it by then."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        query = self.query(y)
        whole = y.clone()
        y[:, 2] /= 80.0
        y[:, 5] *= 80.0
        return self.head(whole + self.out((query * self.key(y)).tanh()))


def test_a_tensor_that_was_overwritten_is_another_one() -> None:
    model: Any = Overwritten().eval()
    recipe = torchq.recipes.int8(reduce_range=True)
    torchq.quantize_(model, recipe, example=rows()[0], progress=False)
    report = calibrated(model)
    assert {"query", "key"} <= set(report.factors.layers)
    of_query, of_key = (
        layer.weight_quantizer.pre_quant_scale.flatten()
        for layer in (model.query, model.key)
    )
    assert of_query[2] > of_key[2] and of_query[5] < of_key[5]


def test_the_exponent_is_the_one_with_the_least_error_of_its_layers() -> None:
    """Both that are tried are computed here by equation 4 of the paper, on all rows."""
    block = Block().eval().requires_grad_(False)
    block.key.weight[:, 7] *= 16
    model = copy.deepcopy(block)
    recipe = torchq.recipes.int8(reduce_range=True)
    torchq.quantize_(model, recipe, example=rows()[0], progress=False)
    report = calibrated(model)
    x = block.norm(torch.cat(rows()))
    layers = (block.query, block.key)
    largest = x.abs().amax(0)
    columns = torch.stack([layer.weight.abs().amax(0) for layer in layers]).amax(0)

    def error(factors: Tensor) -> float:
        total = 0.0
        for layer in layers:
            read, weight = x / factors, layer.weight * factors
            scale = read.abs().amax() / 127
            steps = weight.abs().amax(1, keepdim=True) / 63
            codes = (read / scale).round() * scale
            rounded = codes @ ((weight / steps).round() * steps).t()
            total += float((rounded - x @ layer.weight.t()).square().sum())
        return total

    errors = {}
    factors = {}
    for alpha in (0.5, 0.8):
        logs = alpha * largest.log2() - (1 - alpha) * columns.log2()
        factors[alpha] = (logs - logs.mean()).round().exp2()
        errors[alpha] = error(factors[alpha])
    chosen = report.factors.layers["query"]
    held: Any = model.query.weight_quantizer.pre_quant_scale
    assert torch.equal(held.flatten(), factors[chosen.alpha])
    assert chosen.alpha == min(errors, key=lambda alpha: errors[alpha])
    gain = 10 * math.log10(error(torch.ones(SIZE)) / errors[chosen.alpha])
    assert chosen.gain == pytest.approx(gain, abs=1.0)


def test_channels_of_zeros_have_the_factor_one() -> None:
    """On either side; of the others the factors are those of the paper, over their mean."""
    x = torch.tensor([0.0, 0.25, 16.0, 3.0, 0.0])
    weight = torch.tensor([2.0, 4.0, 1.0, 0.0, 0.0])
    plain = [0.25**0.5 / 4.0**0.5, 16.0**0.5]
    mean = math.sqrt(plain[0] * plain[1])
    expected = torch.tensor([1.0, plain[0] / mean, plain[1] / mean, 1.0, 1.0])
    torch.testing.assert_close(linear_factors.channel_factors(x, weight, 0.5), expected)
    ones = linear_factors.channel_factors(x, weight.new_zeros(5), 0.8)
    assert torch.equal(ones, torch.ones(5))


def test_factors_are_the_nearest_powers_of_two_that_float16_holds() -> None:
    factors = torch.tensor([1.4, 1.5, 0.7, 0.72, 3.0, 1e9, 1e-9])
    expected = torch.tensor([1.0, 2.0, 0.5, 1.0, 4.0, 1024.0, 1 / 1024])
    assert torch.equal(linear_factors.powers_of_two(factors), expected)


def test_outputs_that_nobody_can_tell_from_float_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = quantized()
    monkeypatch.setattr(input_factors, "UNNOTICED", 1e9)
    report = calibrated(model)
    assert report.factors.tried == 0
    assert model.query.input_quantizer.pre_quant_scale is None


def test_channels_that_few_rows_tell_of_are_left_alone() -> None:
    """What reads one row an image: ends of each channel from a few images clip others."""
    model = quantized()
    few = [x[:64] for x in rows()]
    assert torchq.calibrate(model, few, progress=False).factors.tried == 0
    assert model.query.input_quantizer.pre_quant_scale is None


def test_few_rows_of_many_calls_are_kept() -> None:
    layer = nn.Linear(4, 2)
    inputs = linear_factors.LinearInputs({"layer": layer})
    generator = torch.Generator().manual_seed(0)
    calls = [torch.randn(100, 4, generator=generator) + n for n in range(10)]
    with inputs.recording():
        for x in (*calls, calls[0][:0]):
            layer(x)
    read = torch.cat(calls)
    assert inputs.counts == {"layer": 1000}
    assert torch.equal(inputs.ends["layer"], torch.stack([read.amin(0), read.amax(0)]))
    # From all over a call, and from several.
    kept = torch.cat([x[::6][:16] for x in calls[:4]])
    assert torch.equal(inputs.rows["layer"], kept)


def test_a_convolutional_network_is_not_tried() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 2)).eval()
    x = torch.randn(4, 3, 8, 8) * torch.tensor([1.0, 50.0, 1.0]).view(3, 1, 1)
    torchq.quantize_(model, example=x, progress=False)
    assert torchq.calibrate(model, [x], progress=False).factors.tried == 0


def test_a_rule_that_names_a_layer_keeps_it_as_it_is() -> None:
    descriptor = torchq.QuantDescriptor()
    rule = Rule("head", input=descriptor, weight=descriptor.replace(axis=0))
    model = quantized(config=torchq.recipes.int8().with_rules(rule))
    report = calibrated(model)
    assert "key" in report.factors.layers and "head" not in report.factors.layers
    assert model.head.weight_quantizer.pre_quant_scale is None


def test_inference_mode_finds_the_same_factors() -> None:
    """Its tensors count no versions, by which layers that read one tensor are known."""
    expected = quantized()
    calibrated(expected)
    model = quantized()
    with torch.inference_mode():
        calibrated(model)
    assert [d.factors for d in plan_of(model).decisions] == [
        d.factors for d in plan_of(expected).decisions
    ]
    assert any(d.factors for d in plan_of(model).decisions)


def test_a_second_calibration_decides_anew() -> None:
    model = quantized("onnxruntime")
    first = calibrated(model)
    state = copy.deepcopy(model.state_dict())
    again = calibrated(model, force=True)
    assert again.factors == first.factors and first.factors.layers
    after = model.state_dict()
    assert all(torch.equal(state[key], after[key]) for key in state)
    # On rows where the large channel is none, no layer has factors any more.
    with torch.no_grad():
        model.norm.weight[2] = 1.0
    calibrated(model, force=True)
    assert model.query.input_quantizer.pre_quant_scale is None
    assert not any(d.factors for d in plan_of(model).decisions)


def test_the_choice_is_saved_and_loaded(tmp_path: Path) -> None:
    model = quantized("onnxruntime")
    calibrated(model)
    torchq.save(model, tmp_path / "model.pt")
    loaded = torchq.load(Block().eval(), tmp_path / "model.pt")
    assert plan_of(loaded) == plan_of(model)
    assert any(d.factors for d in plan_of(loaded).decisions)
    with torch.no_grad():
        assert torch.equal(loaded(rows()[0]), model(rows()[0]))
    damaged = plan_of(model).to_dict()
    row = next(row for row in damaged["decisions"] if "factors" in row)
    row["factors"]["alpha"] = 7.0
    with pytest.raises(ConfigError, match=r"factors.alpha: got 7.0; expected 0 to 1"):
        Plan.from_dict(damaged)


@pytest.mark.parametrize("calibrations", [1, 2])
def test_an_interrupt_leaves_everything_as_it_was(calibrations: int) -> None:
    model = quantized("onnxruntime")
    if calibrations == 2:
        calibrated(model)
    before = plan_of(model)
    state = copy.deepcopy(model.state_dict())
    calls = []

    def stop(module: Any, args: object) -> None:
        has_factors = module.query.input_quantizer.pre_quant_scale is not None
        calls.append(has_factors)
        # With factors of this calibration, behind those that the first run was without.
        if has_factors and not all(calls):
            raise KeyboardInterrupt

    with model.register_forward_pre_hook(stop), pytest.raises(KeyboardInterrupt):
        calibrated(model, force=True)
    assert plan_of(model) == before
    after = model.state_dict()
    assert state.keys() == after.keys()
    assert all(torch.equal(state[key], after[key]) for key in state)


def test_preparing_to_train_leaves_it_out() -> None:
    model = Block()
    torchq.qat.prepare(model, rows(), progress=False)
    quantizers = torchq.workflow.quantizers(model).values()
    assert all(q.pre_quant_scale is None for q in quantizers)


def test_positions_that_a_mask_calls_filled_up_are_not_compared() -> None:
    class Reader(nn.Module):
        def forward(self, tokens: Tensor, attention_mask: Tensor) -> Tensor:
            return tokens

    mask = torch.tensor([[1, 1, 0], [1, 0, 0]])
    x = torch.arange(24.0).view(2, 3, 4)
    pooled = torch.ones(2, 3)
    for args, kwargs in (((x, mask), {}), ((x,), {"attention_mask": mask})):
        kept, other = without_padding(Reader(), args, kwargs, [x, pooled])
        assert torch.equal(kept, torch.stack([x[0, 0], x[0, 1], x[1, 0]]))
        assert other is pooled
    whole = {"attention_mask": torch.ones(2, 3)}
    assert without_padding(Reader(), (x,), whole, [x])[0] is x


def test_files_hold_the_factors(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    model = quantized("onnxruntime")
    calibrated(model)
    assert math.isfinite(decibels(model))
    x = rows()[0]
    path = tmp_path / "model.onnx"
    torchq.export_onnx(model, x, path, target="onnxruntime", dynamo=False)
    report = torchq.verify_onnx(model, path, [x], progress=False)
    assert report.ok, str(report)


def test_nothing_is_tried_where_a_function_calls_parts_of_the_model() -> None:
    blocks = nn.ModuleDict({"block": Block().eval()})
    torchq.quantize_(blocks, torchq.recipes.int8(reduce_range=True), progress=False)
    report = torchq.calibrate(
        blocks,
        rows(),
        forward=lambda model, x: model["block"](x),
        progress=False,
    )
    assert not report.factors.layers and not report.factors.outputs.batches

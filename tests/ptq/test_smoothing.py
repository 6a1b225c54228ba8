"""SmoothQuant against the equations of Xiao et al. (2023), section 4."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.errors import ConfigError, QuantizationError
from torchq.nn import QuantModule
from torchq.nn.integer_kernel import kernels_off
from torchq.ptq import smooth_


class RMSNorm(nn.Module):
    """The norm of another library; with ``offset`` the weight is not a plain factor."""

    def __init__(self, size: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)
        self.offset = offset

    def forward(self, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
        return y * (self.weight + self.offset)


class Net(nn.Module):
    """Two projections behind a norm, one behind an activation, one behind another norm."""

    def __init__(self, offset: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.rms = RMSNorm(8, offset)
        self.q = nn.Linear(8, 8)
        self.k = nn.Linear(8, 8)
        self.out = nn.Linear(8, 8, bias=False)
        self.head = nn.Linear(8, 4)
        self.unused = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        x = x + self.out(torch.tanh(self.q(y)) * self.k(y))
        return self.head(self.rms(x))


def net(offset: float = 0.0) -> Any:
    torch.manual_seed(0)
    model = Net(offset).eval()
    with torch.no_grad():
        model.norm.weight[2] = (
            60.0  # one channel with huge values, as in language models
        )
        model.rms.weight[5] = 40.0
    torchq.quantize_(model, torchq.recipes.int8())
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, 8, generator=generator) for _ in range(2)]


def test_factors_are_those_of_equation_4() -> None:
    model, floats = net(), net()
    with torch.no_grad():
        y = floats.norm(torch.cat(batches())).abs().flatten(0, 1).amax(0)
    w = torch.stack(
        [floats.q.weight.abs().amax(0), floats.k.weight.abs().amax(0)]
    ).amax(0)
    expected = y**0.5 / w**0.5
    expected = expected / expected.log().mean().exp()
    report = smooth_(model, batches(), alpha=0.5, progress=False)
    torch.testing.assert_close(model.norm.weight, floats.norm.weight / expected)
    torch.testing.assert_close(model.norm.bias, floats.norm.bias / expected)
    torch.testing.assert_close(model.q.weight, floats.q.weight * expected)
    torch.testing.assert_close(model.k.weight, floats.k.weight * expected)
    groups = [(group.layers, group.source) for group in report.groups]
    assert groups == [(("q", "k"), "norm"), (("head",), "rms")]
    assert report.groups[0].spread_after < 0.3 * report.groups[0].spread_before
    assert report.skipped["unused"] == "the first batch did not reach it"
    assert (
        list(report.skipped) == ["out", "unused"] and "a norm" in report.skipped["out"]
    )
    assert torch.equal(model.out.weight, floats.out.weight)
    assert "q, k" in str(report) and "2 inputs, output changed by" in str(report)


@pytest.mark.parametrize("alpha", [0.5, "auto"])
def test_quantized_outputs_become_better_and_float_ones_stay(
    alpha: Any, tmp_path: Path
) -> None:
    x = torch.cat(batches())
    errors = []
    with torch.no_grad(), torchq.disabled(floats := net()):
        expected = floats(x)
    for smoothed in (False, True):
        model = net()
        if smoothed:
            report = smooth_(model, batches(), alpha=alpha, progress=False)
            assert report.error < 1e-5
            with torch.no_grad(), torchq.disabled(model):
                # Weights are float32 and changed by factors: a few units in the last place.
                torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-5)
        # A correction would try factors of quantizers by itself.
        torchq.calibrate(
            model, batches(), on_unseen="disable", correct=False, progress=False
        )
        with torch.no_grad():
            errors.append((model(x) - expected).norm().item())
    assert errors[1] < 0.7 * errors[0]
    torchq.save(model, tmp_path / "model.pt")
    loaded = torchq.load(Net().eval(), tmp_path / "model.pt")
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))


def test_a_norm_that_uses_its_weight_in_another_way_is_found_and_nothing_changes() -> (
    None
):
    model = net(offset=1.0)  # x * (1 + weight), as in Gemma
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(QuantizationError, match="smooth_: the float output changed by"):
        smooth_(model, batches(), progress=False)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())


def test_layers_that_cannot_be_smoothed_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), *(nn.Linear(8, 8) for _ in range(3)))
    model[3].weight = model[2].weight
    torchq.quantize_(model, torchq.recipes.int8())
    report = smooth_(model, [torch.rand(4, 8)], progress=False)
    assert [group.layers for group in report.groups] == [("1",)]
    reason = "it shares its weight with another module"
    assert report.skipped == {"2": reason, "3": reason}


def test_factors_that_would_be_worse_than_none_are_left_out() -> None:
    """Inputs and weights that have codes without an error, which every exponent would change."""
    torch.manual_seed(0)
    model = nn.Sequential(RMSNorm(8), nn.Linear(8, 64))
    with torch.no_grad():
        model[0].weight.fill_(1)
        model[1].weight.sign_()
        model[1].weight[:, 3] *= 2 / 127
    before = model[1].weight.detach().clone()
    torchq.quantize_(model, torchq.recipes.integer(8, 3))
    report = smooth_(model, [torch.rand(64, 8).round() * 2 - 1], progress=False)
    assert report.groups[0].alpha is None and "none" in str(report)
    assert torch.equal(model[1].weight, before) and bool((model[0].weight == 1).all())
    assert report.groups[0].spread_before == report.groups[0].spread_after


class Residual(nn.Module):
    """A norm that a residual reads too, as in BERT, so that it cannot take factors."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.q = nn.Linear(8, 16)
        self.k = nn.Linear(8, 16)
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return y + self.out(self.q(y).tanh() * self.k(y))


def residual() -> Any:
    torch.manual_seed(0)
    model = Residual().eval()
    with torch.no_grad():
        model.norm.weight[2] = 60.0
    return model


def smoothed_residual(target: str | None = None) -> Any:
    model = residual()
    # Weights of 7 bits: products of 8 overflow on CPUs without VNNI.
    config = torchq.recipes.int8(reduce_range=True)
    torchq.quantize_(model, config, target=target, example=batches()[0], progress=False)
    report = smooth_(model, batches(), behind="anything", progress=False)
    assert [group.layers for group in report.groups] == [("q", "k"), ("out",)]
    torchq.calibrate(model, batches(), progress=False)
    return model


def test_quantizers_hold_factors_where_no_norm_can() -> None:
    x = torch.cat(batches())
    plain = residual()
    torchq.quantize_(plain, torchq.recipes.int8(reduce_range=True), progress=False)
    torchq.calibrate(plain, batches(), correct=False, progress=False)
    model = smoothed_residual()
    factors = model.q.weight_quantizer.pre_quant_scale
    assert torch.equal(factors, factors.log2().round().exp2()) and factors[0, 2] > 1
    assert torch.equal(
        model.q.input_quantizer.pre_quant_scale * factors, 0 * factors + 1
    )
    with torch.no_grad():
        exact = residual()(x)
        # The residual alone keeps the channel of 60, so the branch is what is compared.
        branch = exact - residual().norm(x)
        errors = [float((m(x) - exact).norm() / branch.norm()) for m in (plain, model)]
        assert errors[1] < 0.7 * errors[0]
        with torchq.disabled(model):
            assert torch.equal(model(x), exact)
    torchq.restore_(model)
    with torch.no_grad():
        assert torch.equal(model(x), exact)
    state, before = model.state_dict(), residual().state_dict()
    assert all(torch.equal(state[name], before[name]) for name in before)


def test_a_file_holds_factors_that_quantizers_hold(tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    x = torch.cat(batches())
    model = smoothed_residual("onnxruntime")
    torchq.export_onnx(
        model, x, tmp_path / "model.onnx", target="onnxruntime", dynamo=False
    )
    report = torchq.verify_onnx(model, tmp_path / "model.onnx", [x], progress=False)
    assert report.ok, str(report)
    torchq.save(model, tmp_path / "model.pt")
    loaded = torchq.load(residual(), tmp_path / "model.pt")
    deployed = torchq.deploy(model, x, target="torch")
    with torch.no_grad():
        assert torch.equal(loaded(x), model(x))
        # Sums of integers are exact, and scaled in another order than those of floats.
        torch.testing.assert_close(deployed(x), model(x), rtol=1e-4, atol=1e-3)


def test_evaluation_multiplies_the_codes_of_layers_with_factors() -> None:
    model = smoothed_residual("onnxruntime")
    layer = model.out
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(2))
    of_input, of_weight = layer.input_quantizer, layer.weight_quantizer
    grid = of_input.qparams()
    x_codes = of_input.codes(of_input.scaled(x)) - grid.zero_point
    w_codes = of_weight.codes(of_weight.scaled(layer.weight))
    sums = x_codes.double() @ w_codes.double().t()
    with torch.no_grad():
        shifted = layer.bias + layer.output_shift if layer.is_corrected else layer.bias
        step = grid.scale * of_weight.qparams().scale.flatten()
        exact = sums * step.double() + shifted.double()
        # A product and a sum of float32, and no error of sums.
        difference = (layer(x) - exact).abs()
        bound = (sums * step).abs() * 2**-23 + exact.abs() * 2**-23
        assert bool((difference <= bound).all())


class Behind(nn.Module):
    """A convolution whose result a kernel would round for the linear layer behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 16, 3)
        self.head = nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu().flatten(1))


def test_layers_in_front_of_factors_give_floats() -> None:
    torch.manual_seed(0)
    model: Any = Behind().eval()
    x = torch.randn(4, 3, 4, 4)
    torchq.quantize_(model, target="onnxruntime", example=x, progress=False)
    smooth_(model, [x], alpha=0.5, behind="anything", progress=False)
    torchq.calibrate(model, [x], progress=False)
    assert model.first.rounded_by == "head.input_quantizer"
    twin = copy.deepcopy(model)
    with torch.no_grad(), kernels_off(model):
        simulated = model(x)
    with torch.no_grad():
        # Codes are equal, so only sums of float32 differ, by rounding. A step is 1e-3.
        torch.testing.assert_close(model(x), simulated, rtol=1e-5, atol=1e-6)
        assert torch.equal(twin(x), model(x))


def test_gains_fold_into_weights_whose_quantizers_have_factors() -> None:
    model = residual()
    torchq.quantize_(model, torchq.recipes.integer(4, 8), progress=False)
    smooth_(model, batches(), behind="anything", progress=False)
    torchq.calibrate(model, batches(), progress=False)
    assert model.q.output_gain.numel()
    x = torch.cat(batches())
    with torch.no_grad():
        expected = model(x)
        for layer in (model.q, model.k, model.out):
            layer.fold_correction_()
        # Scales are rounded to float32 once more.
        torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("algorithm", ["gptq_", "adaround_"])
def test_layers_with_factors_are_left_alone_by_what_rounds_weights(
    algorithm: str,
) -> None:
    model = smoothed_residual()
    report = getattr(torchq.ptq, algorithm)(model, batches(), progress=False)
    for name in ("q", "k"):
        assert "multiplies it by factors, of smooth_ or of" in report.skipped[name]


def test_an_unknown_place_behind_which_to_smooth_is_named() -> None:
    with pytest.raises(ConfigError, match="got behind='all'; expected 'norms' or"):
        smooth_(net(), batches(), behind="all", progress=False)  # type: ignore[arg-type]


class WithMatrix(nn.Module):
    """Multiplies by a parameter of its own, in a call that is quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first = nn.Linear(8, 8)
        self.matrix = nn.Parameter(torch.rand(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.first(self.norm(x)).relu() @ self.matrix


def test_layers_inside_of_a_block_with_a_quantized_call_are_found() -> None:
    model = nn.Sequential(WithMatrix(), nn.Linear(8, 2)).eval()
    x = torch.rand(4, 8)
    torchq.quantize_(model, example=x, progress=False)
    assert isinstance(model[0], QuantModule)
    report = smooth_(model, [x], progress=False)
    assert [group.source for group in report.groups] == ["0.norm"]

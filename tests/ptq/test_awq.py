"""AWQ against the equations of Lin et al. (2023), section 3.2."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from torchq.errors import CalibrationError, ConfigError, QuantizationError
from torchq.ptq import awq_
from torchq.workflow.layer_matrices import input_matrix
from torchq.workflow.output_search import search_weight_amax


class OffsetRMSNorm(nn.RMSNorm):
    """Multiplies by one more than its weight, as in Gemma."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 1 / self.weight)


class Block(nn.Module):
    """Attention and a gated product; an ``offset`` makes the norm's weight no plain factor."""

    def __init__(self, values: int = 8, offset: bool = False) -> None:
        super().__init__()
        self.norm = OffsetRMSNorm(8) if offset else nn.RMSNorm(8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, values)
        self.out, self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 16), nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = (
            layer(y).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v)
        )
        if v.shape[1] != q.shape[1]:
            v = v.repeat_interleave(2, dim=1)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)
        x = x + self.out(y)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def block(values: int = 8, offset: bool = False, inputs: int | None = None) -> Any:
    torch.manual_seed(0)
    model = Block(values, offset).eval()
    with torch.no_grad():
        model.norm.weight[2] = 20.0  # one channel with large values, as in language models
        model.up.weight[3] *= 20.0
    torchq.quantize_(model, torchq.recipes.integer(3, inputs, weight_method="max"))
    return model


def batches() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, 6, 8, generator=generator) for _ in range(2)]


def nearest(weight: Tensor) -> Tensor:
    """Return a weight in codes -4 to 3 with a range of each row."""
    scale = weight.abs().amax(1, keepdim=True) / 3
    return (weight / scale).round().clamp(-4, 3) * scale


def test_factors_are_those_of_equation_5_with_the_best_exponent() -> None:
    """s = s_X^a with s_X = mean|x|, and the least |Q(W diag(s)) diag(s)^-1 X - W X|."""
    model, floats = block(), block()
    report = awq_(model, batches(), progress=False)
    with torch.no_grad():
        x = floats.norm(torch.cat(batches())).flatten(0, 1)
        layers = [floats.q, floats.k, floats.v]
        errors, factors = {}, {}
        for i in range(20):
            s = x.abs().mean(0) ** (i / 20)
            s = factors[i / 20] = s / s.log().mean().exp()
            products = [(nearest(m.weight * s) / s - m.weight) @ x.T for m in layers]
            errors[i / 20] = sum(p.square().sum().item() for p in products)
        power = sum((m.weight @ x.T).square().sum().item() for m in layers)
    best = min(errors, key=errors.__getitem__)
    group = report.groups[0]
    assert group.layers == ("q", "k", "v") and group.source == "norm" and group.alpha == best > 0
    assert group.error_before == pytest.approx(errors[0.0] / power, rel=1e-4)
    torch.testing.assert_close(model.norm.weight, floats.norm.weight / factors[best])
    torch.testing.assert_close(model.q.weight, floats.q.weight * factors[best])
    assert all(group.error_after < group.error_before for group in report.groups)


def test_layers_before_take_factors_where_the_output_stays() -> None:
    report = awq_(block(), batches(), progress=False)
    sources = {name: group.source for group in report.groups for name in group.layers}
    assert sources["out"] == "v" and sources["down"] == "up" and sources["gate"] is None
    assert report.error < 1e-5 and report.skipped == {}
    assert "down" in str(report) and "output changed by" in str(report)
    # Heads that share values have fewer of them than the next layer has inputs.
    shared = awq_(block(values=4), batches(), progress=False)
    assert {g.layers: g.source for g in shared.groups}[("out",)] is None
    quantized = awq_(block(values=4, inputs=8), batches(), progress=False)
    assert {g.layers: g.source for g in quantized.groups}[("out",)] == "input quantizers"


@pytest.mark.parametrize("inputs", [None, 8])
def test_quantized_outputs_become_better_and_float_ones_stay(inputs: int | None) -> None:
    x = torch.randn(8, 6, 8, generator=torch.Generator().manual_seed(2))
    with torch.no_grad(), torchq.disabled(floats := block()):
        expected = floats(x)
    errors = []
    for searched in (False, True):
        model = block(inputs=inputs)
        if searched:
            awq_(model, batches(), progress=False)
            with torch.no_grad(), torchq.disabled(model):
                # Weights are float32 and changed by factors: a few units in the last place.
                torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
        if inputs or not searched:
            torchq.calibrate(model, batches(), progress=False)  # without a warning
        with torch.no_grad():
            errors.append((model(x) - expected).norm().item())
    assert errors[1] < 0.7 * errors[0]


def test_convolutions_take_factors_through_relu_and_pooling() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Conv2d(8, 6, 3, groups=2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    ).eval()
    with torch.no_grad():
        model[0].weight[1] *= 30  # type: ignore[operator]
    x = torch.rand(4, 3, 12, 12)
    expected = model(x).detach()
    torchq.quantize_(model, torchq.recipes.integer(4, None))
    report = awq_(model, [x], progress=False)
    assert [group.source for group in report.groups] == [None, "0", "2", "3"]
    with torch.no_grad(), torchq.disabled(model):
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-5)


LAYERS = [
    (nn.Linear(8, 3), {"axis": 0}, (5, 8)),
    (nn.Linear(8, 3), {}, (5, 8)),
    (nn.Linear(8, 3), {"block_size": 3}, (5, 8)),
    (nn.Conv2d(8, 4, 3, groups=2), {"axis": 0}, (2, 8, 5, 5)),
    (nn.Conv2d(8, 4, 2), {"block_size": 4, "block_axis": 1}, (2, 8, 5, 5)),
]


@pytest.mark.parametrize(("layer", "granularity", "shape"), LAYERS)
def test_ranges_have_the_least_error_of_the_output(
    layer: Any, granularity: dict[str, int], shape: tuple[int, ...]
) -> None:
    """Each range is the best of all candidates with the rest of the weight unrounded."""
    layer, x = copy.deepcopy(layer), torch.randn(shape, generator=torch.Generator().manual_seed(3))
    d = torchq.QuantDescriptor(3, **granularity)  # type: ignore[arg-type]
    torchq.quantize_(layer, torchq.QuantConfig((torchq.Rule("*", weight=d),)))
    fractions = (1.0, 0.8, 0.6, 0.4)
    with torch.no_grad():
        amax, mean = search_weight_amax(layer, input_matrix(layer, x), fractions=fractions)
        weight = layer.weight.clone()
        with torchq.disabled(layer):
            expected = layer(x)
        layer.weight_quantizer.set_amax(amax)
        largest = layer.weight_quantizer.descriptor.granularity.amax(weight)
        found = torch.full_like(amax, torch.nan)
        for index in range(amax.numel()):
            errors = []
            for fraction in fractions:
                trial = amax.clone()
                trial.view(-1)[index] = largest.reshape(-1)[index] * fraction
                layer.weight_quantizer.set_amax(trial)
                mixed = torch.where(
                    _group(d, weight, index), layer.weight_quantizer(weight), weight
                )
                layer.weight_quantizer.mode = "off"
                layer.weight.copy_(mixed)
                errors.append((layer(x) - expected).square().sum().item())
                layer.weight.copy_(weight)
                layer.weight_quantizer.mode = "quantize"
            best = fractions[errors.index(min(errors))]
            found.view(-1)[index] = largest.reshape(-1)[index] * best
    torch.testing.assert_close(amax, found)
    assert mean == pytest.approx((amax / largest).mean().item())


def _group(d: torchq.QuantDescriptor, weight: Tensor, index: int) -> Tensor:
    """Return which elements of a weight belong to one range."""
    shape = d.granularity.amax_shape(weight.shape)
    chosen = torch.zeros(shape)
    chosen.view(-1)[index] = 1
    parts = d.granularity.split(weight)
    aligned = d.granularity.align(chosen, weight.shape).expand_as(parts)
    return d.granularity.join(aligned, weight.shape) > 0


def test_bad_input_changes_nothing() -> None:
    model = block(offset=True)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(QuantizationError, match="awq_: the float output changed by"):
        awq_(model, batches(), progress=False)
    with pytest.raises(CalibrationError, match="awq_: got no batch; expected at least one"):
        awq_(model, [], progress=False)
    with pytest.raises(CalibrationError, match="awq_: q: got NaN or infinite inputs"):
        awq_(model, [batches()[0] * torch.nan], progress=False)
    with pytest.raises(ConfigError, match=r"awq_: got no layer to treat \(none is quantized\)"):
        awq_(nn.Sequential(nn.Linear(8, 8)), batches())
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    torchq.calibrate(model)
    with pytest.raises(ConfigError, match=r"awq_: got a calibrated model \(.* has a range\)"):
        awq_(model, batches())


def test_layers_that_are_left_alone_are_named() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    model[2].weight = model[1].weight
    torchq.quantize_(model, torchq.recipes.integer(4, None))
    report = awq_(model, [torch.rand(4, 8)], progress=False)
    reason = "it shares its weight with another module"
    assert report.skipped == {"1": reason, "2": reason}


@pytest.mark.parametrize("function", [awq_, torchq.ptq.smooth_])
def test_an_interrupt_changes_nothing(function: Any) -> None:
    """The fourth run is the one that verifies the output after all factors are folded."""
    model, runs = block(inputs=8), 0
    before = copy.deepcopy(model.state_dict())

    def interrupted(model: nn.Module, batch: Tensor) -> Any:
        nonlocal runs
        runs += 1
        if runs == 4:
            assert not torch.equal(model.norm.weight, before["norm.weight"])
            raise KeyboardInterrupt
        return model(batch)

    run = torchq.ptq.RunOptions(forward=interrupted)
    with pytest.raises(KeyboardInterrupt):
        function(model, batches(), run=run, progress=False)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(before[name], t) for name, t in model.state_dict().items())
    assert all(q.mode == "quantize" for q in torchq.workflow.quantizers(model).values())


def test_calibration_afterwards_is_silent_if_a_layer_was_left_alone() -> None:
    """A layer that runs twice keeps its weights; the others have ranges that stay."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.once, self.twice = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.twice(torch.tanh(self.twice(self.once(x))))

    model = Twice().eval()
    torchq.quantize_(model, torchq.recipes.integer(4, 8))
    data = [torch.randn(16, 8)]
    assert "twice" in awq_(model, data, progress=False).skipped
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = torchq.calibrate(model, data, progress=False)
    assert report.kept == ("once.weight_quantizer",)

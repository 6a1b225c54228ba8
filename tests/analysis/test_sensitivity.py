"""The ranking of layers: values, work and state."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import StagedNet, image_batches, simulated
from torchq.errors import ConfigError


def classifier(layers: int = 6, width: int = 24) -> nn.Sequential:
    torch.manual_seed(11)
    parts: list[nn.Module] = []
    for _ in range(layers - 1):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts, nn.Linear(width, 10))


def vectors(count: int = 2, width: int = 24) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(64, width, generator=generator) for _ in range(count)]


def quantized(
    model: nn.Module, batches: list[Tensor], *rules: torchq.Rule
) -> nn.Module:
    return simulated(model, batches, torchq.recipes.integer(6, 6).with_rules(*rules))


def coarse(pattern: str, bits: int = 3) -> torchq.Rule:
    descriptor = torchq.QuantDescriptor(bits)
    return torchq.Rule(pattern, input=descriptor, weight=descriptor)


def test_the_worst_layers_feed_exclude() -> None:
    batches = vectors()
    model = quantized(classifier(), batches, coarse("4"))
    report = torchq.sensitivity(model, batches, progress=False)
    assert report.worst(1) == ["4"]
    assert report.worst(0) == []
    again = classifier()
    swapped = torchq.quantize_(again, exclude=report.worst(2))
    assert {d.name for d in swapped.skipped} == set(report.worst(2))


class Routed(nn.Module):
    """A small batch takes another way than a large one; a layer runs twice, results change."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.small, self.large, self.last = (
            nn.Linear(24, 24) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(self.a(x).relu_())
        return self.last((self.small(x) if len(x) < 8 else self.large(x)).mul_(2) + x)


def test_values_are_those_of_separate_runs() -> None:
    batches = [*vectors(), vectors(1)[0][:5]]
    model = quantized(Routed().eval(), batches)
    report = torchq.sensitivity(model, batches, progress=False)
    names = {"a", "small", "large", "last"}
    assert {row.name for row in report.rows} == names
    for row in report.rows:
        signal = noise = 0.0
        for batch in batches:
            with torch.no_grad(), torchq.disabled(model):
                expected = model(batch).double()
            others = [f"{name}.*_quantizer" for name in names - {row.name}]
            with torch.no_grad(), torchq.disabled(model, others):
                noise += float((model(batch).double() - expected).square().sum())
            signal += float(expected.square().sum())
        assert row.value == pytest.approx(10 * math.log10(signal / noise), rel=1e-5)


@pytest.mark.parametrize("scope", ["input", "weight"])
def test_scopes_switch_a_part(scope: str) -> None:
    batches = vectors()
    model = quantized(classifier(3), batches)
    report = torchq.sensitivity(model, batches, scope=scope, progress=False)
    assert len(report.rows) == 3
    with torch.no_grad(), torchq.disabled(model):
        expected = model(batches[0])
    others = {"input": "*.weight_quantizer", "weight": "*.input_quantizer"}[scope]
    with (
        torch.no_grad(),
        torchq.disabled(model, [others, *(f"{n}.*" for n in report.worst(2))]),
    ):
        assert not torch.equal(model(batches[0]), expected)
    whole = torchq.sensitivity(model, batches, progress=False)
    by_name = {row.name: row.value for row in whole.rows}
    assert all(row.value > by_name[row.name] for row in report.rows)


def test_functions_as_metrics() -> None:
    batches = vectors()
    model = quantized(classifier(), batches, coarse("2", 2))
    with torch.no_grad(), torchq.disabled(model):
        labelled = [(x, model(x).argmax(1)) for x in batches]

    def accuracy(output: Tensor, batch: tuple[Tensor, Tensor]) -> Tensor:
        return (output.argmax(1) == batch[1]).float().mean()

    def evaluate(model: nn.Module) -> float:
        return sum(float(accuracy(model(b[0]), b)) for b in labelled) / len(labelled)

    by_output = torchq.sensitivity(model, labelled, accuracy, progress=False)
    by_model = torchq.sensitivity(model, labelled, evaluate, progress=False)
    assert by_output.worst(9) == by_model.worst(9)
    assert by_output.reference == by_model.reference == 1.0
    values = {row.name: row.value for row in by_model.rows}
    assert {row.name: row.value for row in by_output.rows} == pytest.approx(values)
    assert by_output.baseline == pytest.approx(by_model.baseline)
    assert by_output.metric == "accuracy"


def divergence(model: nn.Module, batches: list[Tensor], name: str) -> float:
    """Return what quantizing one layer alone does to the probabilities of classes."""
    others = [
        n for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != name
    ]
    with torch.no_grad():
        with torchq.disabled(model):
            expected = model(torch.cat(batches)).double().log_softmax(1)
        with torchq.disabled(model, [f"{other}.*_quantizer" for other in others]):
            actual = model(torch.cat(batches)).double().log_softmax(1)
    return float(
        nn.functional.kl_div(actual, expected, log_target=True, reduction="batchmean")
    )


def test_the_estimate_agrees_with_the_measured_divergence() -> None:
    """Compare on a net whose layers differ: the estimate is exact to second order."""
    batches = vectors(4)
    rules = [coarse(str(2 * i), 4 + i % 3) for i in range(5)]
    model = quantized(classifier(), batches, *rules)
    estimated = torchq.sensitivity(model, batches, "fisher", progress=False)
    for row in estimated.rows:
        # 16 probes of 256 samples: the standard deviation is about a tenth.
        assert row.value == pytest.approx(divergence(model, batches, row.name), rel=0.5)
    again = torchq.sensitivity(model, batches, "fisher", progress=False)
    assert again == estimated


class Heads(nn.Module):
    """A layer that returns several tensors, which the next ones read."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.out = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        mixed, weights = self.attention(x, x, x)
        return self.out(mixed).mean(1) * weights.sum((1, 2)).unsqueeze(1)


def test_the_estimate_follows_layers_that_return_several_tensors() -> None:
    batches = [
        torch.randn(8, 5, 4, generator=torch.Generator().manual_seed(i))
        for i in range(2)
    ]
    model = simulated(
        Heads().eval(),
        batches,
        torchq.recipes.integer(4, 4),
    )
    rows = torchq.sensitivity(model, batches, "fisher", progress=False).rows
    assert {row.name for row in rows} >= {"attention", "out"}
    assert all(row.value > 0 for row in rows)


def test_the_estimate_says_where_it_cannot_work() -> None:
    class NoGradient(nn.Sequential):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    model = NoGradient(nn.Linear(4, 4))
    torchq.quantize_(model)
    with pytest.raises(ConfigError, match="Use metric='sqnr'"):
        torchq.sensitivity(model, [torch.ones(2, 4)], "fisher", progress=False)


def test_layers_that_are_not_reached_are_named_apart() -> None:
    model = StagedNet()
    model.extra = nn.Linear(2, 2)
    torchq.quantize_(model)
    report = torchq.sensitivity(model, image_batches(), progress=False)
    assert report.unseen == ("extra",)
    assert "extra" not in [row.name for row in report.rows]


def test_the_printed_ranking_names_what_to_exclude() -> None:
    batches = vectors(1)
    report = torchq.sensitivity(
        quantized(classifier(), batches), batches, progress=False
    )
    assert f"try exclude={report.worst(2)!r}" in str(report)


def test_a_broken_layer_comes_first() -> None:
    batches = vectors(1)
    model = quantized(classifier(), batches)
    model[6].input_quantizer.amax.fill_(math.nan)
    report = torchq.sensitivity(model, batches, progress=False)
    assert report.worst(1) == ["6"]
    assert "not finite" in str(report)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"metric": "psnr"}, "got metric 'psnr'; expected 'sqnr', 'fisher'"),
        ({"metric": lambda a, b, c: 0}, "expected 'sqnr', 'fisher'"),
        ({"metric": "kl"}, "'fisher' .for the divergence of class probabilities."),
        ({"scope": "layers"}, "got scope 'layers'"),
        (
            {"scope": ["head*"]},
            r"got scope \[.head.*; expected one of .layer., .input., .weight.",
        ),
    ],
)
def test_wrong_arguments_are_named(options: dict[str, Any], text: str) -> None:
    batches = vectors(1)
    model = quantized(classifier(2), batches)
    with pytest.raises(ConfigError, match=text):
        torchq.sensitivity(model, batches, progress=False, **options)

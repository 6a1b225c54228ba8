"""What counts of an output: not losses, further tensors or equal NaN; broken layers are named."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from tests.models import Parts, simulated
from torchq.analysis.outputs import only_scores, scores_in
from torchq.errors import CalibrationError, ExportError
from torchq.graph import results_in


@dataclass
class Output:
    """What a model of the library Transformers returns."""

    logits: Tensor
    encoder_last_hidden_state: Tensor
    loss: Tensor | None = None


class Sequences(nn.Module):
    """An encoder and a decoder, whose hidden state is larger than its scores. Input (N, L)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 32)
        self.encode = nn.Linear(32, 32)
        self.decode = nn.Linear(32, 32)
        self.head = nn.Linear(32, 5)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        hidden = self.encode(self.embed(tokens))
        logits = self.head(self.decode(hidden).relu())
        if labels is None:
            return Output(logits, hidden)
        return Output(logits, hidden, nn.functional.cross_entropy(logits[:, 0], labels))


def sequences(with_labels: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    batches = [
        {"tokens": torch.randint(0, 20, (4, 6), generator=generator)} for _ in range(2)
    ]
    return [
        {**b, "labels": torch.tensor([0, 1, 2, 3])} if with_labels else b
        for b in batches
    ]


def quantized(batches: list[Any]) -> nn.Module:
    torch.manual_seed(3)
    return simulated(
        Sequences().eval(),
        batches,
        torchq.recipes.integer(4, 4),
    )


def test_a_loss_is_no_result() -> None:
    logits = torch.randn(2, 5)
    hidden = torch.randn(2, 3, 4)
    loss = torch.tensor(1.0)
    assert [t.shape for t in results_in(Output(logits, hidden, loss))] == [
        (2, 5),
        (2, 3, 4),
    ]
    assert results_in(loss)[0] is loss


@pytest.mark.parametrize("name", ["logits", "logits_per_image", "out"])
def test_scores_are_found_by_their_name(name: str) -> None:
    scores = torch.randn(2, 5)
    output = {"features": torch.randn(2, 30), name: scores}
    assert only_scores(output) is scores
    assert [id(t) for t in scores_in(output)] == [id(scores)]
    pair = (torch.randn(2, 5), torch.randn(2, 7))  # without names neither is certain
    assert only_scores(pair) is None
    assert len(scores_in(pair)) == 2


def test_the_estimate_looks_at_the_scores_beside_larger_tensors() -> None:
    batches = sequences()
    report = torchq.sensitivity(quantized(batches), batches, "fisher", progress=False)
    assert all(row.value > 0 for row in report.rows)
    model = quantized(batches)
    with torch.no_grad():
        actual = torch.cat([model(**batch).logits for batch in batches]).log_softmax(-1)
        with torchq.disabled(model):
            expected = torch.cat(
                [model(**batch).logits for batch in batches]
            ).log_softmax(-1)
    divergence = float((expected.exp() * (expected - actual)).sum(-1).mean())
    assert report.baseline == pytest.approx(divergence, rel=0.5)


def test_labels_in_a_batch_change_no_figure() -> None:
    plain = sequences()
    labelled = sequences(with_labels=True)
    model = quantized(plain)
    for measure in (torchq.sensitivity, torchq.layer_errors):
        assert str(measure(model, plain, progress=False)) == str(
            measure(model, labelled, progress=False)
        )
    actual = [
        torchq.report(model, b, plan=False, progress=False) for b in (plain, labelled)
    ]
    assert actual[0].data["outputs"] == actual[1].data["outputs"]
    assert actual[1].data["outputs"]["predictions"] == 48


def images() -> Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def broken(place: str, value: float) -> tuple[Any, Tensor, str]:
    """Return a quantized network, a batch, and the layer that first returns ``value``."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)
    ).eval()
    x = images()
    simulated(model, [x])
    tensors = {"weight": model[0].weight.data, "bias": model[3].bias.data, "input": x}
    tensors[place].view(-1)[0] = value
    return model, x, "3" if place == "bias" else "0"


PLACES = pytest.mark.parametrize("place", ["weight", "bias", "input"])
VALUES = pytest.mark.parametrize("value", [math.nan, math.inf])


@PLACES
@VALUES
def test_layer_errors_name_the_first_layer(place: str, value: float) -> None:
    model, x, first = broken(place, value)
    actual = torchq.layer_errors(model, [x], progress=False)
    assert f"NaN or infinity comes first from {first}: look at its weight" in str(
        actual
    )
    assert actual.first_not_finite is not None
    assert actual.first_not_finite.name == first
    row = next(row for row in actual.rows if row.name == first)
    assert math.isnan(row.cosine)
    assert math.isnan(actual.worst[0].local_sqnr)
    assert math.isnan(actual.output_sqnr)


@PLACES
def test_the_report_does_not_call_nan_equal_predictions(place: str) -> None:
    model, x, first = broken(place, math.nan)
    actual = torchq.report(model, [x], plan=False, progress=False)
    verdict = actual.data["verdict"]
    outputs = actual.data["outputs"]
    assert outputs["agreement"] == (0.0 if place != "input" else 0.75)
    assert verdict["grade"] == "poor"
    assert not verdict["blame"]
    assert (
        f"NaN or infinity for these batches, and {first} is the first"
        in verdict["sentence"]
    )
    assert "exclude" not in str(verdict["advice"])


@VALUES
@pytest.mark.parametrize("metric", ["sqnr", "fisher"])
def test_a_ranking_without_values_recommends_nothing(metric: str, value: float) -> None:
    model, x, _ = broken("bias", value)
    message = str(torchq.sensitivity(model, [x], metric, progress=False))
    assert "exclude" not in message
    assert (
        "torchq.layer_errors names the layer that NaN or infinity comes from"
        in " ".join(message.split())
    )


def test_mixed_precision_names_what_is_wrong() -> None:
    model, x, _ = broken("bias", math.nan)
    with pytest.raises(
        CalibrationError, match=r"damage of NaN for 0 in w8a8; .*layer_errors"
    ):
        torchq.mixed_precision(
            model,
            [x],
            budget={"mean_bits": 6},
            progress=False,
        )


def test_one_of_two_outputs_is_enough() -> None:
    class Two(Parts):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    model = Two(a=nn.Linear(4, 2), b=nn.Linear(4, 2)).eval()
    x = torch.randn(3, 4)
    simulated(model, [x])
    model.b.bias.data[0] = math.nan
    assert math.isnan(torchq.layer_errors(model, [x], progress=False).output_sqnr)


@pytest.mark.sample(1)
@pytest.mark.parametrize("engine", ["torch", "onnxruntime", "openvino"])
def test_deploy_refuses_a_simulation_that_returns_nan(engine: str) -> None:
    if engine != "torch":
        pytest.importorskip(engine)
    model, x, _ = broken("bias", math.nan)
    with pytest.raises(
        ExportError, match=r"deploy: result 0 of the simulation is NaN .*layer_err"
    ):
        torchq.deploy(model, x, target=engine, progress=False)


def test_deploy_takes_models_that_mask_scores_by_infinity() -> None:
    class Masked(Parts):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(x).index_fill(1, torch.tensor([1, 4]), -math.inf)

    model = Masked(head=nn.Linear(8, 6)).eval()
    x = torch.randn(3, 8)
    simulated(model, [x], torchq.recipes.int8(reduce_range=True))
    int8 = torchq.deploy(model, x, progress=False)
    torch.testing.assert_close(
        int8(x),
        model(x),
        rtol=1e-5,
        atol=1e-5,
    )

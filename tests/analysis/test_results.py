"""What counts of an output: losses and further tensors of language models do not mislead."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torchq
from torchq.analysis.metrics import only_scores, results_in, scores_in


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
        self.encode, self.decode, self.head = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 5)

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Output:
        hidden = self.encode(self.embed(tokens))
        logits = self.head(self.decode(hidden).relu())
        if labels is None:
            return Output(logits, hidden)
        return Output(logits, hidden, nn.functional.cross_entropy(logits[:, 0], labels))


def sequences(with_labels: bool = False) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(4)
    batches = [{"tokens": torch.randint(0, 20, (4, 6), generator=generator)} for _ in range(2)]
    return [{**b, "labels": torch.tensor([0, 1, 2, 3])} if with_labels else b for b in batches]


def quantized(batches: list[Any]) -> nn.Module:
    torch.manual_seed(3)
    model = Sequences().eval()
    torchq.quantize_(model, torchq.recipes.integer(4, 4))
    torchq.calibrate(model, batches, progress=False)
    return model


def test_a_loss_is_no_result() -> None:
    logits, hidden, loss = torch.randn(2, 5), torch.randn(2, 3, 4), torch.tensor(1.0)
    assert [t.shape for t in results_in(Output(logits, hidden, loss))] == [(2, 5), (2, 3, 4)]
    assert results_in(loss)[0] is loss


@pytest.mark.parametrize("name", ["logits", "logits_per_image", "out"])
def test_scores_are_found_by_their_name(name: str) -> None:
    scores = torch.randn(2, 5)
    output = {"features": torch.randn(2, 30), name: scores}
    assert only_scores(output) is scores
    assert [id(t) for t in scores_in(output)] == [id(scores)]
    pair = (torch.randn(2, 5), torch.randn(2, 7))  # without names neither is certain
    assert only_scores(pair) is None and len(scores_in(pair)) == 2


def test_the_estimate_looks_at_the_scores_beside_larger_tensors() -> None:
    batches = sequences()
    report = torchq.sensitivity(quantized(batches), batches, "fisher", progress=False)
    assert all(row.value > 0 for row in report.rows)
    model = quantized(batches)
    with torch.no_grad():
        found = torch.cat([model(**batch).logits for batch in batches]).log_softmax(-1)
        with torchq.disabled(model):
            wanted = torch.cat([model(**batch).logits for batch in batches]).log_softmax(-1)
    divergence = float((wanted.exp() * (wanted - found)).sum(-1).mean())
    assert report.baseline == pytest.approx(divergence, rel=0.5)


def test_labels_in_a_batch_change_no_figure() -> None:
    plain, labelled = sequences(), sequences(with_labels=True)
    model = quantized(plain)
    for measure in (torchq.sensitivity, torchq.layer_errors):
        assert str(measure(model, plain, progress=False)) == str(
            measure(model, labelled, progress=False)
        )
    found = [torchq.report(model, b, plan=False, progress=False) for b in (plain, labelled)]
    assert found[0].data["outputs"] == found[1].data["outputs"]
    assert found[1].data["outputs"]["predictions"] == 48

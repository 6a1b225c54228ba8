"""Distillation from the float twin: its losses, and what it leaves alone."""

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torchq
from tests.models import ConvNet, Parts, image_batches
from torchq.errors import ConfigError
from torchq.qat import Distillation, float_twin, logit_loss


def prepared() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = ConvNet().eval()
    original = copy.deepcopy(model)
    # Ranges by the largest magnitude leave something to learn.
    recipe = torchq.recipes.integer(
        4, 4, first_last=8, weight_method="max", learn_ranges=True
    )
    torchq.qat.prepare(model, image_batches(), recipe, progress=False)
    return model, original


def test_the_twin_computes_what_the_float_model_did_and_shares_what_is_frozen() -> None:
    model, original = prepared()
    model.stem.requires_grad_(False)
    twin = float_twin(model.train())
    x = image_batches()[0]
    assert torch.equal(twin(x), original(x))
    assert twin.stem[0].weight is model.stem[0].weight
    assert twin.head.weight is not model.head.weight
    assert not any(p.requires_grad for p in twin.parameters())
    assert model.training
    assert torchq.workflow.is_quantized(model)


@pytest.mark.parametrize(
    ("temperature", "dim"),
    [(1.0, -1), (4.0, 1)],
)
def test_the_logit_loss_is_the_softened_divergence(
    temperature: float, dim: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(3, 5, 2, generator=generator) for _ in range(2))
    p = F.softmax(teacher / temperature, dim)
    q = F.softmax(student / temperature, dim)
    expected = (p * (p / q).log()).sum(dim).mean() * temperature**2
    torch.testing.assert_close(logit_loss(student, teacher, temperature, dim), expected)
    assert logit_loss(teacher, teacher, temperature, dim) == 0


def test_the_loss_compares_the_call_with_the_float_original() -> None:
    model, original = prepared()
    x = image_batches()[0]
    with Distillation(model, temperature=2.0) as distillation:
        y = model(x)
        loss = distillation.loss()
    torch.testing.assert_close(loss, logit_loss(y, original(x), 2.0))
    assert loss > 0
    loss.backward()
    assert model.stem[0].weight.grad is not None


def test_hooks_go_also_after_an_exception() -> None:
    model, _ = prepared()
    hooks = [len(m._forward_hooks) for m in model.modules()]
    distillation = Distillation(model)
    with pytest.raises(RuntimeError, match="expected input"), distillation:
        model(torch.zeros(1, 1, 8, 8))
    assert [len(m._forward_hooks) for m in model.modules()] == hooks
    with pytest.raises(ConfigError, match="got no call of the model"):
        distillation.loss()


class Wrapped(Parts):
    """Keyword arguments, and an object with logits, as in Hugging Face's models."""

    def forward(self, inputs: Tensor, labels: Tensor | None = None) -> Any:
        logits = self.linear(inputs)
        return SimpleNamespace(loss=logits.sum(), logits=logits)


def test_keyword_arguments_and_outputs_with_logits() -> None:
    model = Wrapped(linear=nn.Linear(4, 3))
    torchq.quantize_(model, torchq.recipes.w4a4(first_last=None))
    plain = float_twin(model)
    x = torch.randn(2, 4)
    with Distillation(model) as distillation:
        output = model(inputs=x, labels=torch.zeros(2))
        expected = logit_loss(output.logits, plain(x).logits)
        torch.testing.assert_close(distillation.loss(), expected)


def test_errors() -> None:
    model, _ = prepared()
    with pytest.raises(
        ConfigError, match=r"got temperature=0\.0; expected a number > 0"
    ):
        Distillation(model, temperature=0.0)
    with pytest.raises(
        ConfigError, match=r"got shapes \(2, 1\) of the student and \(2, 3\) of"
    ):
        logit_loss(
            torch.zeros(2, 1),
            torch.zeros(2, 3),
        )

"""The methods of training that accuracy_qat compares, as a table, and the loop that runs one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images
from benchmarks.qat_training import Training, fit
from torchq.qat import Distillation

__all__ = ["METHODS", "SHORT", "Method", "learn_", "train_"]

#: The steps of methods that are compared with one another, and their learning rate.
SHORT = 150, 0.01
#: How much faster ranges of activations learn than weights, where they learn fast.
_FAST = 64.0
#: The quantizers with few bits. Those of the first and the last layer have 8.
_WEIGHTS, _INPUTS = ("layer*.weight_quantizer", "layer*.input_quantizer")
#: What distillation divides logits by.
_TEMPERATURE = 4.0


@dataclass(frozen=True)
class Method:
    """How training differs from LSQ on all ranges, with the logits of the float twin.

    Attributes:
        weight_ranges: how ranges of weights learn, as for ``learn_ranges_``; None fixes them.
        input_ranges: the same for activations.
        input_range_lr: the learning rate of ranges of activations over that of weights.
        loss: ``"logits"`` of the float twin, or ``"labels"``.
        per_channel: weights have a range per output channel.
    """

    weight_ranges: str | None = "lsq"
    input_ranges: str | None = "lsq"
    input_range_lr: float | None = None
    loss: str = "logits"
    per_channel: bool = True


#: Name -> method. Names without a mention of the labels learn from the float twin.
METHODS = {
    "lsq": Method(),
    "lsq, fast input ranges": Method(input_range_lr=_FAST),
    "fixed ranges": Method(weight_ranges=None, input_ranges=None),
    "pact": Method(input_ranges="pact"),
    "labels": Method(loss="labels"),
    "per tensor": Method(per_channel=False),
    "lsq+": Method(input_ranges="lsq+"),
}


def learn_(model: nn.Module, method: Method) -> None:
    """Let the ranges of a calibrated model learn as the method says, in place."""
    for pattern, how in ((_WEIGHTS, method.weight_ranges), (_INPUTS, method.input_ranges)):
        if how is not None:
            torchq.qat.learn_ranges_(model, how, pattern)


class _Autocast(nn.Module):
    """A compiled module whose products have bfloat16 operands."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.compiled = torch.compile(module)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.compiled(x).float()


def train_(
    model: nn.Module,
    teacher: nn.Module,
    data: Images,
    method: Method,
    plan: Training,
    *,
    bf16: bool = False,
    label: str = "train",
    checkpoint: Path | None = None,
) -> None:
    """Train a prepared model in place.

    Args:
        model: with calibrated ranges that learn already.
        teacher: the float network.
        data: the images of training.
        method: how to train.
        plan: how long and how fast.
        bf16: compile, and multiply in bfloat16.
        label: as for :func:`benchmarks.qat_training.fit`.
        checkpoint: as there.
    """
    student, teacher = (_Autocast(m) if bf16 else m for m in (model, teacher))
    with Distillation(student, teacher, temperature=_TEMPERATURE) as distillation:
        loss = _loss(student, data, None if method.loss == "labels" else distillation)
        fit(model, loss, plan, label=label, checkpoint=checkpoint)


def _loss(
    student: nn.Module, data: Images, distillation: Distillation | None
) -> Callable[[torch.Generator], Tensor]:
    """Return the loss of a batch that a generator draws, against the labels or the teacher."""

    def loss(generator: torch.Generator) -> Tensor:
        index = torch.randint(len(data.labels), (64,), generator=generator)
        images, labels = data.augmented(index, generator)
        y = student(images)
        return (
            nn.functional.cross_entropy(y, labels) if distillation is None else distillation.loss()
        )

    return loss

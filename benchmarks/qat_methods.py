"""The methods of training that accuracy_qat compares, as a table, and the loop that runs one."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn

import torchq
from benchmarks.cifar import Images
from benchmarks.qat_training import Training, fit
from torchq.qat import Distillation, Oscillations, bits_at_, dampening_loss, use_estimator_

__all__ = ["FAST", "METHODS", "SHORT", "Method", "learn_", "train_"]

#: The steps of methods that are compared with one another, and their learning rate.
SHORT = 150, 0.01
#: How much faster ranges of activations learn than weights, where they learn fast.
FAST = 64.0
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
        log2: the optimizer steps in the logarithm of ranges.
        range_lr: the learning rate of ranges over that of weights.
        input_range_lr: the same for ranges of activations; None takes ``range_lr``.
        estimator: of the gradient; None is the straight-through estimator.
        patterns: the quantizers with this estimator.
        options: the options of the estimator in equal parts of the training, one after the other.
        loss: ``"logits"`` or ``"layers"`` of the float twin, or ``"labels"``.
        damping: the factor of the dampening loss at the end; it grows from 0.
        freezing: the frequency above which oscillating weights freeze, at first and at the end.
        per_channel: weights have a range per output channel.
        bits: widths in equal parts of the training.
    """

    weight_ranges: str | None = "lsq"
    input_ranges: str | None = "lsq"
    log2: bool = False
    range_lr: float = 1.0
    input_range_lr: float | None = None
    estimator: str | None = None
    patterns: tuple[str, ...] = (_WEIGHTS, _INPUTS)
    options: tuple[Mapping[str, float], ...] = field(default=({},))
    loss: str = "logits"
    damping: float = 0.0
    freezing: tuple[float, float] | None = None
    per_channel: bool = True
    bits: tuple[int, ...] = ()

    @property
    def is_countable(self) -> bool:
        """Return True where a code that changes means that a weight crossed a border.

        It does not where widths change.
        """
        return not self.bits


#: Name -> method. Names without a mention of the labels learn from the float twin.
METHODS = {
    "lsq": Method(),
    "lsq, fast input ranges": Method(input_range_lr=FAST),
    "fixed ranges": Method(weight_ranges=None, input_ranges=None),
    "pact": Method(input_ranges="pact"),
    "tqt": Method("tqt", "tqt", log2=True, range_lr=30.0),
    "ewgs": Method(estimator="ewgs", options=({"delta": 0.2},)),
    "dsq": Method(estimator="dsq", options=({"sharpness": 3.0},)),
    "soft, annealed": Method(
        estimator="soft",
        patterns=(_WEIGHTS,),
        options=({"sharpness": 2.0}, {"sharpness": 5.0}, {"sharpness": 20.0}),
    ),
    "stochastic": Method(estimator="stochastic", patterns=(_WEIGHTS,)),
    "qdrop": Method(estimator="qdrop", patterns=(_INPUTS,), options=({"probability": 0.5},)),
    "noise": Method(estimator="noise", patterns=(_WEIGHTS,)),
    "damped": Method(damping=0.1),
    "frozen": Method(freezing=(0.04, 0.01)),
    "labels": Method(loss="labels"),
    "layers": Method(loss="layers"),
    "progressive bits": Method(bits=(8, 6, 4)),
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


def _part(step: int, steps: int, count: int) -> int:
    """Return in which of ``count`` equal parts of the training a step lies."""
    return min(step * count // steps, count - 1)


def _schedule(
    model: nn.Module, method: Method, steps: int, oscillations: Oscillations | None
) -> tuple[Callable[[int], None], Callable[[int], None]]:
    """Return what is to be done before each step, and after it."""
    widths = method.bits
    starts = {math.ceil(i * steps / len(widths)): bits for i, bits in enumerate(widths)}

    current: list[int] = []

    def before(step: int) -> None:
        part = _part(step, steps, len(method.options))
        if method.estimator is not None and current != [part]:
            current[:] = [part]
            options = method.options[part]
            use_estimator_(model, method.estimator, method.patterns, **options)
        if starts:
            bits_at_(model, step, starts, (_WEIGHTS, _INPUTS))

    def after(step: int) -> None:
        if oscillations is None:
            return
        if method.freezing is not None:
            first, last = method.freezing
            share = 0.5 + 0.5 * math.cos(math.pi * step / steps)
            oscillations.freeze_above = last + (first - last) * share
        oscillations.update_()

    return before, after


def train_(
    model: nn.Module,
    teacher: nn.Module,
    data: Images,
    method: Method,
    plan: Training,
    *,
    bf16: bool = False,
    watched: bool = False,
    label: str = "train",
    checkpoint: Path | None = None,
) -> float | None:
    """Train a prepared model in place.

    Args:
        model: with calibrated ranges that learn already.
        teacher: the float network.
        data: the images of training.
        method: how to train.
        plan: how long and how fast.
        bf16: compile, and multiply in bfloat16.
        watched: count oscillating weights.
        label: as for :func:`benchmarks.qat_training.fit`.
        checkpoint: as there.

    Returns:
        The share of weights that oscillate at the end, if they were counted.
    """
    watched |= method.freezing is not None
    oscillations = Oscillations(model) if watched else None
    before, after = _schedule(model, method, plan.steps, oscillations)
    student, teacher = (_Autocast(m) if bf16 else m for m in (model, teacher))
    progress = [0.0]

    def begin(step: int) -> None:
        progress[0] = step / plan.steps
        before(step)

    def extra() -> Tensor | float:
        factor = method.damping * progress[0]
        return factor * dampening_loss(model) if factor else 0.0

    layers = "*layer?.?" if method.loss == "layers" else ()
    with Distillation(student, teacher, temperature=_TEMPERATURE, layers=layers) as distillation:
        fit(
            model,
            _loss(student, data, None if method.loss == "labels" else distillation, extra),
            plan,
            before=begin,
            after=after,
            label=label,
            checkpoint=checkpoint,
            extras={} if oscillations is None else {"oscillations": oscillations},
        )
    return None if oscillations is None else round(oscillations.share(), 5)


def _loss(
    student: nn.Module,
    data: Images,
    distillation: Distillation | None,
    extra: Callable[[], Tensor | float],
) -> Callable[[torch.Generator], Tensor]:
    """Return the loss of a batch that a generator draws, against the labels or the teacher."""

    def loss(generator: torch.Generator) -> Tensor:
        index = torch.randint(len(data.labels), (64,), generator=generator)
        images, labels = data.augmented(index, generator)
        y = student(images)
        if distillation is None:
            return nn.functional.cross_entropy(y, labels) + extra()
        return distillation.loss() + extra()

    return loss

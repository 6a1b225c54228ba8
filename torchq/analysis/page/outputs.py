"""The outputs of a quantized model beside those of the float one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.analysis.layers import active_quantizers, quantizing
from torchq.analysis.ranking.metrics import Evaluation, Score, Sqnr, class_axis, find_metric
from torchq.errors import ConfigError
from torchq.graph import Forward, call_model, state_kept, tensors_in
from torchq.utils import device_of, evaluating, progress_bar

__all__ = ["Agreement", "Outputs", "compare_outputs"]


@dataclass
class Agreement:
    """Counts of predictions.

    Attributes:
        same: those with the class that the float model gives.
        predictions: all of them.
    """

    same: int = 0
    predictions: int = 0

    def add(self, found: Any, expected: Any) -> None:
        """Add the outputs of one batch; outputs without classes add nothing."""
        ours, theirs = _scores(found), _scores(expected)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return
        axis = class_axis(theirs)
        same = ours.argmax(axis) == theirs.argmax(axis)
        self.same += int(same.sum())
        self.predictions += same.numel()

    @property
    def share(self) -> float | None:
        """The share of equal predictions; None without any."""
        return self.same / self.predictions if self.predictions else None


def _scores(output: Any) -> Tensor | None:
    """Return the one output with at least two classes, or None."""
    found = [t for t in tensors_in(output) if t.is_floating_point()]
    if len(found) != 1 or found[0].dim() < 2 or found[0].shape[class_axis(found[0])] < 2:
        return None
    return found[0]


@dataclass(frozen=True)
class Outputs:
    """What quantization does to the outputs.

    Attributes:
        sqnr: signal to noise ratio in dB.
        agreement: share of predictions with the class of the float model; None without classes.
        predictions: how many there were.
        metric: name of the user's metric; empty without one.
        float_score: the metric of the float model.
        score: the metric of the quantized model.
    """

    sqnr: float
    agreement: float | None
    predictions: int
    metric: str = ""
    float_score: float | None = None
    score: float | None = None


def compare_outputs(
    model: nn.Module,
    batches: Iterable[Any],
    metric: Any = None,
    *,
    reference: nn.Module | None = None,
    forward: Forward | None = None,
    progress: bool = True,
) -> Outputs:
    """Run a quantized model on batches, with its quantizers off and on.

    Args:
        model: quantized; left unchanged.
        batches: what to run.
        metric: ``metric(output, batch)`` or ``metric(model)``, or None.
        reference: another float model to compare with; default the model without quantizers.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        progress: show a bar.

    Raises:
        ConfigError: The metric is no such function.
    """
    chosen = None if metric is None else find_metric("report", metric)
    if chosen is not None and not isinstance(chosen, (Score, Evaluation)):
        raise ConfigError(
            f"report: got metric {metric!r}; expected a function metric(output, batch) or "
            "metric(model), or None"
        )
    known, device = active_quantizers(model), device_of(model)
    original = model if reference is None else reference
    sums: dict[str, list[float]] = {}
    agreement, noise = Agreement(), Sqnr()

    def add(name: str, new: list[float]) -> None:
        old = sums.get(name, [0.0] * len(new))
        sums[name] = [a + b for a, b in zip(old, new, strict=True)]

    with torch.no_grad(), evaluating(model), evaluating(original), state_kept(model):
        for batch in progress_bar(batches, description="compare outputs", enabled=progress):
            with quantizing(known, []):
                expected = call_model(original, batch, forward=forward, device=device)
            found = call_model(model, batch, forward=forward, device=device)
            agreement.add(found, expected)
            add("noise", noise.sums(found, expected, batch))
            if isinstance(chosen, Score):
                add("float", chosen.sums(expected, expected, batch))
                add("quantized", chosen.sums(found, expected, batch))
        scores: list[float | None] = [None, None]
        if isinstance(chosen, Score) and sums:
            scores = [chosen.value(sums["float"]), chosen.value(sums["quantized"])]
        elif isinstance(chosen, Evaluation):
            with quantizing(known, []):
                scores[0] = chosen.of(original)
            scores[1] = chosen.of(model)
    return Outputs(
        sqnr=noise.value(sums["noise"]) if sums else math.nan,
        agreement=agreement.share,
        predictions=agreement.predictions,
        metric="" if chosen is None else chosen.name,
        float_score=scores[0],
        score=scores[1],
    )

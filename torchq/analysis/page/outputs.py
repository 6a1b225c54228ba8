"""The outputs of a quantized model beside those of the float one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from torchq.analysis.layers import active_quantizers, quantizing
from torchq.analysis.metrics import Evaluation, Score, Sqnr, class_axis, find_metric, only_scores
from torchq.errors import ConfigError
from torchq.graph import Forward, call_model, state_kept
from torchq.utils import device_of, evaluating, progress_bar


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
        """Add the outputs of one batch; outputs without classes add nothing, NaN never agrees."""
        ours, theirs = only_scores(found), only_scores(expected)
        if ours is None or theirs is None or ours.shape != theirs.shape:
            return
        axis = class_axis(theirs)
        known = ~(ours.isnan() | theirs.isnan()).any(axis)
        same = known & (ours.argmax(axis) == theirs.argmax(axis))
        self.same += int(same.sum())
        self.predictions += same.numel()

    @property
    def share(self) -> float | None:
        """The share of equal predictions; None without any."""
        return self.same / self.predictions if self.predictions else None


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
    chosen = None if metric is None else _user_metric(metric)
    original = model if reference is None else reference
    comparison = _Comparison(chosen)
    known, device = active_quantizers(model), device_of(model)
    scores: list[float | None] = [None, None]
    with torch.no_grad(), evaluating(model), evaluating(original), state_kept(model):
        for batch in progress_bar(batches, description="compare outputs", enabled=progress):
            with quantizing(known, []):
                expected = call_model(original, batch, forward=forward, device=device)
            found = call_model(model, batch, forward=forward, device=device)
            comparison.add(found, expected, batch)
        if isinstance(chosen, Evaluation):
            with quantizing(known, []):
                scores[0] = chosen.of(original)
            scores[1] = chosen.of(model)
    return comparison.outputs(scores)


def _user_metric(metric: Any) -> Score | Evaluation:
    chosen = None if isinstance(metric, str) else find_metric("report", metric)
    if not isinstance(chosen, (Score, Evaluation)):
        raise ConfigError(
            f"report: got metric {metric!r}; expected a function metric(output, batch) or "
            "metric(model), or None"
        )
    return chosen


class _Comparison:
    """Sums over the batches that were compared."""

    def __init__(self, metric: Score | Evaluation | None) -> None:
        self._metric = metric
        self._sums: dict[str, list[float]] = {}
        self._agreement, self._noise = Agreement(), Sqnr()

    def add(self, found: Any, expected: Any, batch: Any) -> None:
        self._agreement.add(found, expected)
        self._sum("noise", self._noise.sums(found, expected, batch))
        if isinstance(self._metric, Score):
            self._sum("float", self._metric.sums(expected, expected, batch))
            self._sum("quantized", self._metric.sums(found, expected, batch))

    def _sum(self, name: str, new: list[float]) -> None:
        old = self._sums.get(name, [0.0] * len(new))
        self._sums[name] = [a + b for a, b in zip(old, new, strict=True)]

    def outputs(self, scores: list[float | None]) -> Outputs:
        """Return the figures; ``scores`` are those of a metric that ran the models itself."""
        if isinstance(self._metric, Score) and self._sums:
            scores = [self._metric.value(self._sums[name]) for name in ("float", "quantized")]
        return Outputs(
            sqnr=self._noise.value(self._sums["noise"]) if self._sums else math.nan,
            agreement=self._agreement.share,
            predictions=self._agreement.predictions,
            metric="" if self._metric is None else self._metric.name,
            float_score=scores[0],
            score=scores[1],
        )

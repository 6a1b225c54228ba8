"""The outputs of a quantized model beside those of the float one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from torchq.analysis.layers import active_quantizers
from torchq.analysis.metrics import (
    Evaluation,
    Score,
    Sqnr,
    Sums,
    add_sums,
    class_axis,
    find_metric,
    only_scores,
)
from torchq.errors import ConfigError
from torchq.graph import Forward, call_model
from torchq.nn import quantizing_only
from torchq.utils import device_of, progress_bar, untouched


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
    forward: Forward | None = None,
    progress: bool = True,
) -> Outputs:
    """Run a quantized model on batches, with its quantizers off and on.

    Args:
        model: quantized; left unchanged.
        batches: what to run.
        metric: ``metric(output, batch)`` or ``metric(model)``, or None.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        progress: show a bar.

    Raises:
        ConfigError: The metric is no such function.
    """
    chosen = None if metric is None else _user_metric(metric)
    known, sums = active_quantizers(model), Sums()
    call = partial(call_model, model, forward=forward, device=device_of(model))
    scores: list[float | None] = [None, None]
    with untouched(model):
        for batch in progress_bar(batches, description="compare outputs", enabled=progress):
            with quantizing_only(known):
                expected = call(batch)
            found = call(batch)
            add_sums(sums, "noise", Sqnr().sums(found, expected, batch))
            add_sums(sums, "agreement", _agreement(found, expected))
            if isinstance(chosen, Score):
                add_sums(sums, "float", chosen.sums(expected, expected, batch))
                add_sums(sums, "quantized", chosen.sums(found, expected, batch))
        if isinstance(chosen, Evaluation):
            with quantizing_only(known):
                scores[0] = chosen.of(model)
            scores[1] = chosen.of(model)
    if isinstance(chosen, Score) and sums:
        scores = [chosen.value(sums[name]) for name in ("float", "quantized")]
    same, predictions = sums.get("agreement", [0.0, 0.0])
    return Outputs(
        sqnr=Sqnr().value(sums["noise"]) if sums else math.nan,
        agreement=same / predictions if predictions else None,
        predictions=int(predictions),
        metric="" if chosen is None else chosen.name,
        float_score=scores[0],
        score=scores[1],
    )


def _user_metric(metric: Any) -> Score | Evaluation:
    chosen = None if isinstance(metric, str) else find_metric("report", metric)
    if not isinstance(chosen, (Score, Evaluation)):
        raise ConfigError(
            f"report: got metric {metric!r}; expected a function metric(output, batch) or "
            "metric(model), or None"
        )
    return chosen


def _agreement(found: Any, expected: Any) -> list[float]:
    """Return how many predictions of one batch are those of the float model, and how many it has.

    Outputs without classes have none; NaN never agrees.
    """
    ours, theirs = only_scores(found), only_scores(expected)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return [0.0, 0.0]
    axis = class_axis(theirs)
    known = ~(ours.isnan() | theirs.isnan()).any(axis)
    same = known & (ours.argmax(axis) == theirs.argmax(axis))
    return [float(same.sum()), float(same.numel())]

"""What quantization does to the outputs of a model, and how bad that is."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn

from torchq.analysis.detections import Detections
from torchq.analysis.layers import active_quantizers
from torchq.analysis.metrics import (
    Evaluation,
    Score,
    Sqnr,
    Sums,
    add_sums,
    class_axis,
    decibel_text,
    find_metric,
    only_scores,
    results_in,
)
from torchq.errors import ConfigError
from torchq.graph import Forward, call_model
from torchq.nn import quantizing_only
from torchq.utils import device_of, progress_bar, untouched

#: Share of equal predictions from which on a model is good, and from which on it is usable.
_AGREEMENT = (0.99, 0.95)
#: The same for the metric "detections".
_DETECTIONS = (0.97, 0.9)
#: The same for the ratio of signal to noise at the output, where there are no classes.
_RATIO = (30.0, 20.0)
_GRADES = ("good", "fair", "poor")
#: Predictions below which their agreement says little.
_FEW = 100


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
        comparable: False where shapes differ from those of the float model, as of lists of boxes.
    """

    sqnr: float
    agreement: float | None
    predictions: int
    metric: str = ""
    float_score: float | None = None
    score: float | None = None
    comparable: bool = True

    @property
    def grade(self) -> str:
        """``"good"``, ``"fair"`` or ``"poor"``; also where outputs are no finite numbers."""
        if self.metric == Detections.name and self.score is not None:
            return _GRADES[_below(self.score, _DETECTIONS)]
        if math.isnan(self.sqnr):
            return "poor" if self.comparable else "fair"
        by_ratio = _below(self.sqnr, _RATIO)
        if self.agreement is None:
            return _GRADES[by_ratio]
        by_agreement = _below(self.agreement, _AGREEMENT)
        if self.predictions < _FEW:
            by_agreement = max(by_agreement, min(by_ratio, 1))
        return _GRADES[by_agreement]

    @property
    def evidence(self) -> str:
        """The measured figures, as the rest of a sentence."""
        ratio = decibel_text(self.sqnr)
        if self.score is not None and self.float_score is not None:
            return f"{self.metric} {self.float_score:.4g} becomes {self.score:.4g}"
        if not self.comparable:
            return (
                'outputs have other shapes than those of the float model; metric="detections" and '
                "functions compare them"
            )
        if self.agreement is None:
            return f"signal to noise at its output is {ratio}"
        count = f"{self.predictions:,} predictions"
        text = f"{self.agreement:.1%} of {count} are those of the float model"
        if self.predictions < _FEW:
            return f"signal to noise is {ratio}; {text}, too few to be sure"
        return text


def _below(value: float, bounds: tuple[float, float]) -> int:
    """Return the grade as a number: how many bounds a value does not reach."""
    return sum(not value >= bound for bound in bounds)


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
        metric: ``metric(output, batch)`` or ``metric(model)``, ``"detections"`` or a
            :class:`torchq.analysis.Detections`, or None.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        progress: show a bar.

    Raises:
        ConfigError: The metric is none of these.
        CalibrationError: The float model detects nothing in the batches.
    """
    chosen = user_metric("compare_outputs", metric)
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
            if isinstance(chosen, (Score, Detections)):
                add_sums(sums, "float", chosen.sums(expected, expected, batch))
                add_sums(sums, "quantized", chosen.sums(found, expected, batch))
        if isinstance(chosen, Evaluation):
            with quantizing_only(known):
                scores[0] = chosen.of(model)
            scores[1] = chosen.of(model)
    if isinstance(chosen, (Score, Detections)) and sums:
        scores = [chosen.value(sums[name]) for name in ("float", "quantized")]
        if isinstance(chosen, Detections):
            chosen.check_count(sums["float"])
    same, predictions, others = sums.get("agreement", [0.0, 0.0, 0.0])
    return Outputs(
        sqnr=Sqnr().value(sums["noise"]) if sums else math.nan,
        agreement=same / predictions if predictions else None,
        predictions=int(predictions),
        metric="" if chosen is None else chosen.name,
        float_score=scores[0],
        score=scores[1],
        comparable=not others,
    )


def user_metric(where: str, metric: Any) -> Score | Evaluation | Detections | None:
    """Return the metric that a user asked for, or None; ``where`` is the function called."""
    if metric is None:
        return None
    try:
        chosen = find_metric(where, metric)
    except ConfigError:
        chosen = None
    if not isinstance(chosen, (Score, Evaluation, Detections)):
        text = f"{where}: got metric {metric!r}; expected a function metric(output, batch) or "
        text += 'metric(model), "detections", or None'
        raise ConfigError(text)
    return chosen


def _agreement(found: Any, expected: Any) -> list[float]:
    """Return for one batch: equal predictions, all predictions, 1 where shapes differ."""
    shapes = [[tensor.shape for tensor in results_in(output)] for output in (found, expected)]
    differ = float(shapes[0] != shapes[1])
    ours, theirs = only_scores(found), only_scores(expected)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return [0.0, 0.0, differ]
    axis = class_axis(theirs)
    known = ~(ours.isnan() | theirs.isnan()).any(axis)  # NaN never agrees.
    same = known & (ours.argmax(axis) == theirs.argmax(axis))
    return [float(same.sum()), float(same.numel()), differ]

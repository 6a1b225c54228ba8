"""How an output is compared with the one that it should be."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torchq.analysis.noise import Noise, mean_ratio
from torchq.analysis.results import class_axis, results_in, scores_in
from torchq.errors import ConfigError
from torchq.graph import tensors_in

__all__ = [
    "Evaluate",
    "Evaluation",
    "KlDivergence",
    "Metric",
    "Score",
    "Sqnr",
    "batch_size",
    "find_metric",
]

#: What users give as a metric: of one output and its batch, or of a whole model.
Evaluate = Callable[..., Any]


class Metric:
    """A figure of outputs, computed from sums over batches, so that batches can be spread.

    Attributes:
        name: for reports.
        unit: behind the figure, may be empty.
        rising: True where a larger value is better.
    """

    name = ""
    unit = ""
    rising = True

    def sums(self, output: Any, reference: Any, batch: Any) -> list[float]:
        """Return the sums of one batch.

        Args:
            output: of the model with some quantizers on.
            reference: of the model that it is compared with.
            batch: what was run.
        """
        raise NotImplementedError

    def value(self, sums: list[float]) -> float:
        """Return the figure for sums that were added up over batches."""
        raise NotImplementedError


class Sqnr(Metric):
    """Signal to noise ratio in dB; over several outputs, that of the mean share of noise."""

    name, unit, rising = "sqnr", "dB", True

    def sums(self, output: Any, reference: Any, batch: Any) -> list[float]:
        """Return signal and noise of each output, one after the other."""
        found: list[float] = []
        for value, expected in zip(results_in(output), results_in(reference), strict=False):
            noise = Noise()
            noise.add(value, expected)
            found += [noise.signal, noise.noise]
        return found

    def value(self, sums: list[float]) -> float:
        """Return the ratio in dB."""
        return mean_ratio(list(zip(sums[::2], sums[1::2], strict=True)))


class KlDivergence(Metric):
    """Kullback-Leibler divergence of the classes' probabilities, in nats for each prediction."""

    name, unit, rising = "kl", "nat", False

    def sums(self, output: Any, reference: Any, batch: Any) -> list[float]:
        """Return the sum over predictions, and their number."""
        total, count = 0.0, 0
        for value, expected in zip(scores_in(output), scores_in(reference), strict=False):
            if value.shape != expected.shape:
                continue
            axis = class_axis(value)
            # In float32 the rounding of the difference hides layers that hardly hurt.
            found, wanted = (t.double().log_softmax(axis) for t in (value, expected))
            total += float((wanted.exp() * (wanted - found)).sum())
            count += value.numel() // value.shape[axis]
        return [total, float(count)]

    def value(self, sums: list[float]) -> float:
        """Return the mean over predictions; NaN where no output has classes."""
        return max(sums[0], 0.0) / sums[1] if sums[1] else math.nan


class Score(Metric):
    """The user's ``metric(output, batch)``, averaged over batches by their size."""

    rising = True

    def __init__(self, function: Evaluate) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def sums(self, output: Any, reference: Any, batch: Any) -> list[float]:
        """Return the score times the size of the batch, and the size."""
        score, size = self.function(output, batch), batch_size(batch)
        return [float(score) * size, float(size)]

    def value(self, sums: list[float]) -> float:
        """Return the mean."""
        return sums[0] / sums[1] if sums[1] else math.nan


class Evaluation(Metric):
    """The user's ``metric(model)``, which runs the model itself."""

    rising = True

    def __init__(self, function: Evaluate) -> None:
        self.function = function
        self.name = getattr(function, "__name__", type(function).__name__)

    def of(self, model: nn.Module) -> float:
        """Return the figure of a model."""
        with torch.no_grad():
            return float(self.function(model))


_KNOWN: dict[str, type[Metric]] = {"sqnr": Sqnr, "kl": KlDivergence}


def find_metric(where: str, metric: str | Evaluate) -> Metric:
    """Return the metric that a user asked for.

    Args:
        where: the function that was called, for the text of the error.
        metric: ``"sqnr"``, ``"kl"``, a function of an output and its batch, or of a model.

    Raises:
        ConfigError: It is none of these.
    """
    if isinstance(metric, str) and metric in _KNOWN:
        return _KNOWN[metric]()
    if callable(metric):
        count = _positional_count(metric)
        if count == 1:
            return Evaluation(metric)
        if count == 2:
            return Score(metric)
    raise ConfigError(
        f"{where}: got metric {metric!r}; expected {', '.join(map(repr, _KNOWN))}, 'fisher', a "
        "function metric(output, batch) or a function metric(model), which return a number that is "
        "larger for a better model"
    )


def _positional_count(function: Evaluate) -> int | None:
    """Return how many positional arguments a function requires; None where it cannot be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return None
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def batch_size(batch: Any) -> int:
    """Return how many images or sequences a batch holds: the length of its first tensor."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()), 1)

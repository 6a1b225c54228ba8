"""The tensors of an output that count, and how they are compared with what they should be."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from torchq.analysis.noise import Noise, mean_ratio
from torchq.errors import ConfigError
from torchq.graph import tensors_in

#: What Transformers ("logits", "logits_per_image") and torchvision ("out") call scores of classes.
_NAMES = ("logits", "out")


def results_in(output: Any) -> list[Tensor]:
    """Return the floating-point tensors of an output.

    A number among tensors is left out: it is the loss of a model that was given labels.
    """
    found = [tensor for tensor in tensors_in(output) if tensor.is_floating_point()]
    return [tensor for tensor in found if tensor.dim()] or found


def scores_in(output: Any) -> list[Tensor]:
    """Return the scores of classes in an output.

    Where a field has the name that other libraries use for scores, it is the only one: encoders
    and caches return further tensors, which have no classes. Else all results with two dimensions
    and two classes or more count.
    """
    named = _named(output)
    return [t for t in named or results_in(output) if _has_classes(t)]


def only_scores(output: Any) -> Tensor | None:
    """Return the scores where it is plain which tensor holds them: by its name, or alone."""
    found = _named(output) or results_in(output)
    return found[0] if len(found) == 1 and _has_classes(found[0]) else None


def _named(output: Any) -> list[Tensor]:
    fields = [value for name, value in _fields(output) if name.split("_")[0] in _NAMES]
    return results_in(fields[0]) if fields else []


def _has_classes(tensor: Tensor) -> bool:
    return tensor.dim() >= 2 and tensor.shape[class_axis(tensor)] > 1


def _fields(output: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(output, Mapping):
        yield from ((str(name), value) for name, value in output.items())
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        names = [field.name for field in dataclasses.fields(output)]
        yield from ((name, getattr(output, name)) for name in names)


def class_axis(output: Tensor) -> int:
    """Return the axis of the classes: 1 for images (N, C, H, W), else the last."""
    return 1 if output.dim() >= 4 else -1


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


def find_metric(where: str, metric: str | Evaluate) -> Metric:
    """Return the metric that a user asked for; ``where`` is the function that was called."""
    if metric == "sqnr":
        return Sqnr()
    if callable(metric):
        count = _positional_count(metric)
        if count == 1:
            return Evaluation(metric)
        if count == 2:
            return Score(metric)
    raise ConfigError(
        f"{where}: got metric {metric!r}; expected 'sqnr', 'fisher' (for the divergence of class "
        "probabilities), a function metric(output, batch) or a function metric(model), which "
        "return a number that is larger for a better model"
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

"""Figures of tensors and of outputs, what quantization does to outputs, and how figures print."""

import dataclasses
import inspect
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from typing import Any

import torch
from torch import Tensor, nn

from torchq.analysis.detections import Detections
from torchq.analysis.layers import active_quantizers
from torchq.errors import ConfigError
from torchq.graph import Forward, call_model, results_in, tensors_in
from torchq.nn import switched_off
from torchq.utils import RandomState, device_of, network_of, progress_bar, untouched

#: What Transformers ("logits", "logits_per_image") and torchvision ("out") call scores of classes.
_NAMES = ("logits", "out")

#: Share of equal predictions from which on a model is good, and from which on it is usable.
_AGREEMENT = (0.99, 0.95)
#: The same for the metric "detections".
_DETECTIONS = (0.97, 0.9)
#: The ratio of signal to noise at the output, in dB, from which on a model is good.
GOOD_RATIO = 30.0
#: The same as of predictions, where there are no classes.
_RATIO = (GOOD_RATIO, 20.0)
_GRADES = ("good", "fair", "poor")
#: Predictions below which their agreement says little.
_FEW = 100

#: What users give as a metric: of one output and its batch, or of a whole model.
Evaluate = Callable[..., Any]


def decibels(signal: float, noise: float) -> float:
    """Return ``10 log10(signal / noise)``; NaN where a sum is not finite."""
    if not (math.isfinite(signal) and math.isfinite(noise)):
        return math.nan
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def mean_ratio(sums: Sequence[tuple[float, float]]) -> float:
    """Return the ratio in dB for the mean share of noise of several tensors.

    ``sums`` are powers of signal and noise; tensors without signal do not count. The ratio is NaN
    without any signal, and where a sum is not finite.
    """
    if not all(math.isfinite(power) for pair in sums for power in pair):
        return math.nan
    shares = [noise / signal for signal, noise in sums if signal > 0]
    return decibels(1.0, sum(shares) / len(shares)) if shares else math.nan


@dataclass
class Noise:
    """Sums of squares of a reference, of differences from it, and of products of both."""

    signal: float = 0.0
    noise: float = 0.0
    correlation: float = 0.0

    def add(self, value: Tensor, reference: Tensor) -> None:
        """Add one pair of equal shape; an empty pair adds nothing."""
        if value.numel() == 0 or value.shape != reference.shape:
            return
        wide = torch.float64 if reference.dtype is torch.float64 else torch.float32
        expected = reference.detach().to(wide).reshape(-1)
        error = value.detach().to(wide).reshape(-1) - expected
        self.signal += float(torch.dot(expected, expected))
        self.noise += float(torch.dot(error, error))
        self.correlation += float(torch.dot(expected, error))

    @property
    def sqnr(self) -> float:
        """Signal to quantization noise ratio in dB."""
        return decibels(self.signal, self.noise)

    @property
    def cosine(self) -> float:
        """Cosine of the angle between all values and all references; 1 where both are 0.

        NaN where a sum is not finite.
        """
        power = self.signal + 2 * self.correlation + self.noise
        if not math.isfinite(power):
            return math.nan
        if self.signal <= 0 or power <= 0:
            return 1.0 if self.signal == power else 0.0
        cosine = (self.signal + self.correlation) / math.sqrt(self.signal * power)
        return min(1.0, max(-1.0, cosine))


def scores_in(output: object) -> list[Tensor]:
    """Return the scores of classes in an output.

    Where a field has the name that other libraries use for scores, it is the only one: encoders
    and caches return further tensors, which have no classes. Else all results with two dimensions
    and two classes or more count.
    """
    return [t for t in _named(output) or results_in(output) if _has_classes(t)]


def only_scores(output: object) -> Tensor | None:
    """Return the scores where it is plain which tensor holds them: by its name, or alone."""
    candidates = _named(output) or results_in(output)
    return (
        candidates[0] if len(candidates) == 1 and _has_classes(candidates[0]) else None
    )


def _named(output: object) -> list[Tensor]:
    fields = [value for name, value in _fields(output) if name.split("_")[0] in _NAMES]
    return results_in(fields[0]) if fields else []


def _has_classes(tensor: Tensor) -> bool:
    return tensor.dim() >= 2 and tensor.shape[class_axis(tensor)] > 1


def _fields(output: object) -> Iterator[tuple[str, object]]:
    if isinstance(output, Mapping):
        yield from ((str(name), value) for name, value in output.items())
    elif dataclasses.is_dataclass(output) and not isinstance(output, type):
        yield from (
            (f.name, getattr(output, f.name)) for f in dataclasses.fields(output)
        )


def class_axis(output: Tensor) -> int:
    """Return the axis of the classes: 1 for images (N, C, H, W), else the last."""
    return 1 if output.dim() >= 4 else -1


def batch_size(batch: object) -> int:
    """Return how many images or sequences a batch holds: the length of its first tensor."""
    return next((tensor.shape[0] for tensor in tensors_in(batch) if tensor.dim()), 1)


#: Key -> sums that were added up over batches.
Sums = dict[Any, list[float]]


def add_sums(known: Sums, key: object, new: list[float]) -> None:
    """Add the sums of one batch, which may hold more images, to those of the batches before."""
    pairs = zip_longest(known.get(key, []), new, fillvalue=0.0)
    known[key] = [a + b for a, b in pairs]


class Sqnr:
    """Signal to noise ratio in dB; over several outputs, that of the mean share of noise."""

    name, unit = "sqnr", "dB"

    def sums(self, output: object, reference: object, batch: object) -> list[float]:
        """Return signal and noise of each output of one batch, one after the other."""
        sums: list[float] = []
        for value, expected in zip(
            results_in(output), results_in(reference), strict=False
        ):
            noise = Noise()
            noise.add(value, expected)
            sums += [noise.signal, noise.noise]
        return sums

    def value(self, sums: list[float]) -> float:
        """Return the ratio in dB for sums over all batches."""
        return mean_ratio(list(zip(sums[::2], sums[1::2], strict=True)))


@dataclass(frozen=True)
class _OfUser:
    function: Evaluate

    @property
    def name(self) -> str:
        """The name of the function, or of the class of an object."""
        return getattr(self.function, "__name__", type(self.function).__name__)


class Score(_OfUser):
    """The user's ``metric(output, batch)``, averaged over batches by their size."""

    unit = ""

    def sums(self, output: object, reference: object, batch: object) -> list[float]:
        """Return the score of one batch times its size, and the size."""
        score = self.function(output, batch)
        size = batch_size(batch)
        return [float(score) * size, float(size)]

    def value(self, sums: list[float]) -> float:
        """Return the mean for sums over all batches."""
        return sums[0] / sums[1] if sums[1] else math.nan


class Evaluation(_OfUser):
    """The user's ``metric(model)``, which runs the model itself."""

    def of(self, model: nn.Module) -> float:
        """Return the figure of a model."""
        with torch.no_grad():
            return float(self.function(model))


def find_metric(
    where: str, metric: str | Evaluate | Detections
) -> Sqnr | Score | Detections | Evaluation:
    """Return the metric that a user asked for; ``where`` is the function that was called."""
    if metric == "sqnr":
        return Sqnr()
    if metric == "detections" or isinstance(metric, Detections):
        return Detections() if isinstance(metric, str) else metric
    if callable(metric):
        count = _positional_count(metric)
        if count in (1, 2):
            return Evaluation(metric) if count == 1 else Score(metric)
    raise ConfigError(
        f"{where}: got metric {metric!r}; expected 'sqnr', 'fisher' (for the divergence of class "
        "probabilities), 'detections', a function metric(output, batch) or a function "
        "metric(model), which return a number that is larger for a better model"
    )


def _positional_count(function: Evaluate) -> int:
    """Return how many positional arguments a function requires; -1 where it cannot be read."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return -1
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(p.kind in kinds and p.default is p.empty for p in parameters)


def bar(share: float, width: int = 20) -> str:
    """Return a bar of at most ``width`` characters for a share between 0 and 1."""
    if not math.isfinite(share):
        return "?"
    return "#" * round(min(max(share, 0.0), 1.0) * width)


def decibel_text(value: float) -> str:
    """Return a ratio in dB for a reader: ``exact`` without noise, ``not finite`` for NaN."""
    if math.isnan(value):
        return "not finite"
    return "exact" if value == math.inf else f"{value:.1f} dB"


def percent_text(share: float) -> str:
    """Return a share between 0 and 1 in percent; tiny ones are not rounded to 0."""
    if share == 0:
        return "0"
    return f"{share:.2%}" if share >= 0.0001 else f"{share:.1e}"


def plain(value: object, digits: int | None = None) -> Any:
    """Return JSON data of so many significant digits; None stands for what is not finite."""
    if isinstance(value, dict):
        return {key: plain(entry, digits) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(entry, digits) for entry in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    return value if digits is None else float(f"{value:.{digits}g}")


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
        objects: how many objects the float model detects, with the metric "detections".
        comparable: False where shapes differ from those of the float model, as of lists of boxes.
    """

    sqnr: float
    agreement: float | None
    predictions: int
    metric: str = ""
    float_score: float | None = None
    score: float | None = None
    objects: int = 0
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
            of = f" of {self.objects:,} objects" if self.objects else ""
            return f"{self.metric}{of} {self.float_score:.4g} becomes {self.score:.4g}"
        if not self.comparable:
            return (
                'outputs have other shapes than those of the float model; metric="detections" and '
                "functions compare them"
            )
        if self.agreement is None:
            return f"signal to noise at its output is {ratio}"
        count = f"{self.predictions:,} predictions"
        sentence = f"{self.agreement:.1%} of {count} are those of the float model"
        if self.predictions < _FEW:
            return f"signal to noise is {ratio}; {sentence}, too few to be sure"
        return sentence


def _below(value: float, bounds: tuple[float, float]) -> int:
    """Return the grade as a number: how many bounds a value does not reach."""
    return sum(not value >= bound for bound in bounds)


def compare_outputs(
    model: nn.Module,
    batches: Iterable[object],
    metric: object = None,
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
    model = network_of(model)
    chosen = user_metric("compare_outputs", metric)
    active, sums = active_quantizers(model), Sums()
    call = partial(call_model, model, forward=forward, device=device_of(model))
    scores: list[float | None] = [None, None]
    objects = 0
    with untouched(model):
        for batch in progress_bar(
            batches, description="compare outputs", enabled=progress
        ):
            start = RandomState.now()
            with switched_off(active):
                expected = call(batch)
            start.restore()  # Both draw the same random numbers.
            _add_figures(sums, chosen, call(batch), expected, batch)
        if isinstance(chosen, Evaluation):
            with switched_off(active):
                scores[0] = chosen.of(model)
            scores[1] = chosen.of(model)
    if isinstance(chosen, (Score, Detections)) and sums:
        scores = [chosen.value(sums[name]) for name in ("float", "quantized")]
        if isinstance(chosen, Detections):
            chosen.check_count(sums["float"])
            objects = chosen.of_sums(sums["float"]).count
    same, predictions, others = sums.get("agreement", [0.0, 0.0, 0.0])
    return Outputs(
        sqnr=Sqnr().value(sums["noise"]) if sums else math.nan,
        agreement=same / predictions if predictions else None,
        predictions=int(predictions),
        metric="" if chosen is None else chosen.name,
        float_score=scores[0],
        score=scores[1],
        objects=objects,
        comparable=not others,
    )


def _add_figures(
    sums: Sums, metric: object, found: object, expected: object, batch: object
) -> None:
    """Add what one batch gives to the sums of all figures."""
    if isinstance(metric, Detections) and not sums:
        metric.check_layout(expected)
    add_sums(sums, "noise", Sqnr().sums(found, expected, batch))
    add_sums(sums, "agreement", _agreement(found, expected))
    if isinstance(metric, (Score, Detections)):
        add_sums(sums, "float", metric.sums(expected, expected, batch))
        add_sums(sums, "quantized", metric.sums(found, expected, batch))


def user_metric(where: str, metric: Any) -> Score | Evaluation | Detections | None:
    """Return the metric that a user asked for, or None; ``where`` is the function called."""
    if metric is None:
        return None
    try:
        chosen = find_metric(where, metric)
    except ConfigError:
        chosen = None
    if not isinstance(chosen, (Score, Evaluation, Detections)):
        raise ConfigError(
            f"{where}: got metric {metric!r}; expected a function metric(output, batch) or "
            'metric(model), "detections", or None'
        )
    return chosen


def _agreement(found: object, expected: object) -> list[float]:
    """Return for one batch: equal predictions, all predictions, 1 where shapes differ."""
    shapes = [
        [tensor.shape for tensor in results_in(output)] for output in (found, expected)
    ]
    differ = float(shapes[0] != shapes[1])
    ours, theirs = only_scores(found), only_scores(expected)
    if ours is None or theirs is None or ours.shape != theirs.shape:
        return [0.0, 0.0, differ]
    axis = class_axis(theirs)
    comparable = ~(ours.isnan() | theirs.isnan()).any(axis)  # NaN never agrees.
    same = comparable & (ours.argmax(axis) == theirs.argmax(axis))
    return [float(same.sum()), float(same.numel()), differ]

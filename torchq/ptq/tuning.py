"""The search for settings that keep a metric."""

from __future__ import annotations

import inspect
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from torchq.config import QuantConfig
from torchq.errors import CalibrationError, ConfigError, TorchqError
from torchq.fusion.modules import CONVOLUTIONS
from torchq.nn import QuantModule
from torchq.ptq.tuning_settings import STAGES, Candidate, TunedConfig, mixed_settings, wider
from torchq.recipes import int8
from torchq.utils import copy_module, evaluating, kept_batches, progress_bar, table
from torchq.workflow import quantizers

log = logging.getLogger(__name__)

Metric = Callable[[nn.Module], float]

# Trials of mixed precision: each halves the interval of mean bits.
_BISECTIONS = 4
# Mean bits that are too close to try anything between them.
_CLOSE = 0.1
_FLOAT_BITS = 32
_LAYERS = (nn.Linear, *CONVOLUTIONS)


@dataclass(frozen=True)
class TuneTrial:
    """One row of the table of :func:`torchq.tune`.

    Attributes:
        change: what was changed from the best settings before it.
        settings: with the change; without it if mixed precision found nothing.
        metric: of the quantized model; NaN if it could not be made.
        mean_bits: the mean width of the weights of Linear and Conv layers and of all quantized
            ones; 32 where a weight is float; NaN if the model could not be made.
        seconds: that the trial took.
        error: why it could not be made, else "".
    """

    change: str
    settings: TunedConfig
    metric: float
    mean_bits: float
    seconds: float
    error: str = ""


@dataclass(frozen=True)
class TuneResult:
    """The result of :func:`tune`.

    Attributes:
        model: the quantized model of the best trial.
        config: its settings; ``config.apply_(float_model, batches)`` makes it again.
        float_metric: the metric of the float model.
        metric: the metric of :attr:`model`.
        mean_bits: the mean width of its weights.
        kept: True if the metric fell by no more than was allowed.
        table: the trials, in order.
    """

    model: nn.Module
    config: TunedConfig
    float_metric: float
    metric: float
    mean_bits: float
    kept: bool
    table: tuple[TuneTrial, ...]

    def __str__(self) -> str:
        rows = [("tried", "metric", "bits of a weight", "seconds")]
        rows.append(("float", f"{self.float_metric:.4g}", "32", ""))
        for trial in self.table:
            found = trial.error or f"{trial.metric:.4g}"
            bits = "" if math.isnan(trial.mean_bits) else f"{trial.mean_bits:.3g}"
            rows.append((trial.change, found, bits, f"{trial.seconds:.1f}"))
        verdict = "keeps the metric" if self.kept else "does NOT keep the metric"
        return table(rows, f"{self.config}: {self.metric:.4g}, {verdict}")


def tune(
    model: nn.Module,
    batches: Iterable[Any],
    metric: Metric,
    *,
    max_drop: float,
    recipe: QuantConfig | None = None,
    time_limit: float | None = None,
    progress: bool = True,
) -> TuneResult:
    """Find settings with which the quantized model keeps a metric.

    After the recipe itself these are tried in turn: other calibration methods, unsigned inputs, 8
    bits for the first and last layer, equalization of convolutions, SmoothQuant for
    transformers, then bias correction, GPTQ and AdaRound. Each trial changes the best
    settings so far in one point. The first trial that keeps the metric ends the search. If
    none does, mixed precision follows: four trials that halve the interval between the recipe's
    weights and wider ones, for the fewest mean bits that keep the metric.

    Args:
        model: a float model, fused (:func:`torchq.fuse_`); left unchanged.
        batches: for calibration and the algorithms, without labels or with them; see
            :func:`torchq.graph.call_arguments`. Keep them apart from the data of the metric.
        metric: called with each quantized model in eval mode; returns a number, larger is better.
        max_drop: the largest loss of the metric, in its own unit, >= 0.
        recipe: the widths that are wanted; default :func:`torchq.recipes.int8`.
        time_limit: seconds after which no trial is started; the best one so far is returned.
        progress: show a bar.

    Returns:
        The result, also if no trial keeps the metric; then with one warning.

    Raises:
        ConfigError: an argument is invalid, the model is quantized, or the metric of the float
            model is no finite number.
        CalibrationError: there is no batch, or no trial could be made.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
        >>> x = torch.rand(32, 4)
        >>> expected = model(x)
        >>> result = torchq.tune(
        ...     model, [x], lambda m: -(m(x) - expected).abs().max().item(), max_drop=0.1,
        ...     progress=False,
        ... )
        >>> result.kept, len(result.table)
        (True, 1)
    """
    kept = kept_batches("tune", batches)
    _check_metric(metric)
    quantized = next(iter(quantizers(model)), None)
    if quantized is not None:
        raise ConfigError(f"tune: got a quantized model ({quantized}); expected a float one")
    if not 0 <= max_drop < math.inf:
        raise ConfigError(f"tune: got max_drop={max_drop}; expected a number >= 0")
    float_metric = metric_of(metric, copy_module(model).eval())
    if not math.isfinite(float_metric):
        raise ConfigError(f"tune: the metric of the float model is {float_metric}; expected finite")
    search = _Search(model, kept, metric, float_metric - max_drop)
    start = TunedConfig(recipe or int8())
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    trials = search.trials(start, deadline)
    for _ in progress_bar(trials, description="tune", enabled=progress, unit="trial"):
        pass
    return _result(search, float_metric)


def _check_metric(metric: Any) -> None:
    """Raise ConfigError unless ``metric`` can be called with a model."""
    try:
        inspect.signature(metric).bind(None)
    except TypeError as error:
        raise ConfigError(
            f"tune: got a metric that cannot be called with a model alone ({error}); expected "
            "metric(model), which returns a number"
        ) from error
    except ValueError:  # Functions in C may have no signature.
        return


def _result(search: _Search, float_metric: float) -> TuneResult:
    """Return the best trial as a result, with its model."""
    if search.best is None:
        reasons = "; ".join(f"{trial.change}: {trial.error}" for trial in search.table[:3])
        raise CalibrationError(f"tune: no trial could be made ({reasons})")
    trial = search.best
    if not search.kept:
        warnings.warn(
            f"tune: the best of {len(search.table)} trials has the metric {trial.metric:.4g}; "
            f"expected at least {search.wanted:.4g}. Allow a larger max_drop or more bits",
            stacklevel=3,
        )
    found = search.model_of(trial.settings)
    figures = float_metric, trial.metric, trial.mean_bits
    return TuneResult(found, trial.settings, *figures, search.kept, tuple(search.table))


def metric_of(metric: Metric, model: nn.Module) -> float:
    """Return the metric of a model in eval mode."""
    with evaluating(model):
        value: Any = metric(model)
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"tune: the metric returned a {type(value).__name__}; expected a number"
        ) from error


def _mean_weight_bits(model: nn.Module) -> float:
    """Return the mean width of the weights of quantized layers, and of others of their kinds."""
    found: list[tuple[int, int]] = []
    for module in model.modules():
        if isinstance(module, QuantModule):
            for quantizer, weight in module.quantized_weights():
                on = quantizer.quantizing
                bits = quantizer.descriptor.format.bits if on else _FLOAT_BITS
                found.append((bits, weight.numel()))
        elif isinstance(module, _LAYERS):
            found.append((_FLOAT_BITS, module.weight.numel()))
    total = sum(count for _, count in found)
    return sum(bits * count for bits, count in found) / total if total else math.nan


class _Search:
    """The trials of one call of :func:`torchq.tune`; ``wanted`` is the least good metric.

    ``best`` is the trial of fewest bits among the good ones, else that of the largest metric.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], metric: Metric, wanted: float
    ) -> None:
        self.model, self.batches, self.metric, self.wanted = model, batches, metric, wanted
        self.table: list[TuneTrial] = []
        self.best: TuneTrial | None = None
        self._last: tuple[TunedConfig, nn.Module] | None = None

    def trials(self, start: TunedConfig, deadline: float) -> Iterator[TuneTrial]:
        """Yield trials until one is good enough or ``time.monotonic`` reaches the deadline."""
        for candidate in self._candidates(start):
            yield self._try(*candidate)
            if time.monotonic() >= deadline:
                return

    @property
    def kept(self) -> bool:
        """True if a trial is good enough."""
        return self.best is not None and self.best.metric >= self.wanted

    def _candidates(self, start: TunedConfig) -> Iterator[Candidate]:
        """Yield what is tried, each built on the best settings before it."""
        yield f"recipe {start.config.name}", start
        for stage in STAGES:
            rest = stage(start if self.best is None else self.best.settings, self.model)
            while not self.kept and (candidate := next(rest, None)) is not None:
                yield candidate
        if self.best is None or self.kept:
            return
        best, bits = self.best.settings, self.best.mean_bits
        wide, top = wider(best.config)
        if wide != "float":
            # Without this no mixture can be good enough.
            candidate = self._mixed(best, wide, top)
            if candidate is None:
                return
            yield candidate
        if wide == "float" or self.kept:
            yield from self._bisect(best, wide, bits, top)

    def _bisect(
        self, narrow: TunedConfig, wide: Literal["w8a8", "float"], low: float, high: float
    ) -> Iterator[Candidate]:
        """Yield mixed precision between mean bits that are too few and those that may be enough."""
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            candidate = self._mixed(narrow, wide, middle) if high - low > _CLOSE else None
            if candidate is None:
                return
            if all(trial.settings != candidate[1] for trial in self.table):
                yield candidate
                if self.table[-1].metric >= self.wanted:
                    high = self.table[-1].mean_bits
                    continue
            low = middle

    def _mixed(
        self, narrow: TunedConfig, wide: Literal["w8a8", "float"], mean_bits: float
    ) -> Candidate | None:
        """Return mixed precision within a budget, or None after a row with the reason."""
        try:
            return mixed_settings(narrow, wide, mean_bits, self.model, self.batches)
        except TorchqError as error:
            failed = TuneTrial("mixed precision", narrow, math.nan, math.nan, 0.0, str(error))
            self.table.append(failed)
            return None

    def model_of(self, settings: TunedConfig) -> nn.Module:
        """Return the model quantized with ``settings``, in eval mode."""
        if self._last is None or self._last[0] != settings:
            model = copy_module(self.model).eval()
            settings.apply_(model, self.batches)
            self._last = (settings, model)
        return self._last[1]

    def _try(self, change: str, settings: TunedConfig) -> TuneTrial:
        """Return the trial of one candidate, which is in the table then."""
        started, found, bits, error = time.monotonic(), math.nan, math.nan, ""
        try:
            model = self.model_of(settings)
            found, bits = metric_of(self.metric, model), _mean_weight_bits(model)
        except TorchqError as reason:
            error = str(reason)
        trial = TuneTrial(change, settings, found, bits, time.monotonic() - started, error)
        self.table.append(trial)
        log.debug("tune: %s: %s", trial.change, trial.error or trial.metric)
        if math.isfinite(found) and (
            self.best is None or self._order(trial) > self._order(self.best)
        ):
            self.best = trial
        return trial

    def _order(self, trial: TuneTrial) -> tuple[bool, float, float]:
        kept = trial.metric >= self.wanted
        return kept, -trial.mean_bits if kept else 0.0, trial.metric

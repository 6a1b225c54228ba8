"""The search for settings that keep a metric."""

from __future__ import annotations

import inspect
import math
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from torchq.config import QuantConfig
from torchq.errors import CalibrationError, ConfigError
from torchq.ptq.tuning.search import Metric, Search, metric_of
from torchq.ptq.tuning.settings import TunedConfig
from torchq.ptq.tuning.trial import TuneTrial
from torchq.recipes import int8
from torchq.utils import copy_module, kept_batches, progress_bar, table
from torchq.workflow import quantizers

__all__ = ["TuneResult", "tune"]


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
        return f"{table(rows)}\n{self.config}: {self.metric:.4g}, {verdict}"


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
    search = Search(model, kept, metric, float_metric - max_drop)
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


def _result(search: Search, float_metric: float) -> TuneResult:
    """Return the best trial as a result, with its model."""
    if search.best is None:
        reasons = "; ".join(f"{trial.change}: {trial.error}" for trial in search.table[:3])
        raise CalibrationError(f"tune: no trial could be made ({reasons})")
    trial = search.best
    settings = TunedConfig.from_json(trial.settings)
    if not search.kept:
        warnings.warn(
            f"tune: the best of {len(search.table)} trials has the metric {trial.metric:.4g}; "
            f"expected at least {search.wanted:.4g}. Allow a larger max_drop or more bits",
            stacklevel=3,
        )
    found = search.model_of(settings)
    figures = float_metric, trial.metric, trial.mean_bits
    return TuneResult(found, settings, *figures, search.kept, tuple(search.table))

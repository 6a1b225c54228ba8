"""The search for settings that keep a metric."""

from __future__ import annotations

import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from torchq.config import QuantConfig
from torchq.errors import CalibrationError, ConfigError, TorchqError
from torchq.ptq.tuning.candidates import STAGES, mixed_configs
from torchq.ptq.tuning.settings import TunedConfig
from torchq.recipes import int8
from torchq.utils import (
    NotebookText,
    copy_module,
    evaluating,
    parse_json,
    progress_bar,
    replacing,
    table,
)

__all__ = ["TuneResult", "TuneTrial", "tune"]

log = logging.getLogger(__name__)

Metric = Callable[[nn.Module], float]


@dataclass(frozen=True)
class TuneTrial:
    """One row of the table of :func:`tune`.

    Attributes:
        change: what was changed from the best settings before it.
        metric: of the quantized model; NaN if it could not be made.
        seconds: that the trial took.
        error: why it could not be made, else "".
        settings: the settings, as JSON text.
    """

    change: str
    metric: float
    seconds: float
    error: str
    settings: str


@dataclass(frozen=True)
class TuneResult(NotebookText):
    """The result of :func:`tune`.

    Attributes:
        model: the quantized model of the best trial.
        config: its settings; ``config.apply_(float_model, batches)`` makes it again.
        float_metric: the metric of the float model.
        metric: the metric of :attr:`model`.
        kept: True if the metric fell by no more than was allowed.
        table: the trials, in order.
    """

    model: nn.Module
    config: TunedConfig
    float_metric: float
    metric: float
    kept: bool
    table: tuple[TuneTrial, ...]

    def __str__(self) -> str:
        rows = [("tried", "metric", "seconds"), ("float", f"{self.float_metric:.4g}", "")]
        for trial in self.table:
            found = trial.error or f"{trial.metric:.4g}"
            rows.append((trial.change, found, f"{trial.seconds:.1f}"))
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
    checkpoint: str | Path | None = None,
    progress: bool = True,
) -> TuneResult:
    """Find settings with which the quantized model keeps a metric.

    After the recipe itself these are tried in turn: other calibration methods, unsigned inputs, 8
    bits for the first and last layer, equalization, bias correction, GPTQ and AdaRound, and last
    mixed precision. Each trial changes the best settings so far in one point. The first trial that
    keeps the metric ends the search.

    Args:
        model: a float model, fused (:func:`torchq.fuse_`); left unchanged.
        batches: for calibration and the algorithms, without labels or with them; see
            :func:`torchq.graph.call_arguments`. Keep them apart from the data of the metric.
        metric: called with each quantized model in eval mode; returns a number, larger is better.
        max_drop: the largest loss of the metric, in its own unit, >= 0.
        recipe: the widths that are wanted; default :func:`torchq.recipes.int8`.
        time_limit: seconds after which no trial is started; the best one so far is returned.
        checkpoint: a JSON file of the finished trials, which a second call does not repeat.
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
    kept_batches = list(batches)
    if not kept_batches:
        raise CalibrationError("tune: got no batch; expected at least one")
    if not 0 <= max_drop < math.inf:
        raise ConfigError(f"tune: got max_drop={max_drop}; expected a number >= 0")
    float_metric = _value(metric, copy_module(model).eval())
    if not math.isfinite(float_metric):
        raise ConfigError(f"tune: the metric of the float model is {float_metric}; expected finite")
    search = _Search(model, kept_batches, metric, float_metric - max_drop, checkpoint)
    start = TunedConfig(recipe or int8())
    search.run(start, math.inf if time_limit is None else time.monotonic() + time_limit, progress)
    if search.best is None:
        reasons = "; ".join(f"{trial.change}: {trial.error}" for trial in search.table[:3])
        raise CalibrationError(f"tune: no trial could be made ({reasons})")
    trial = search.best
    settings = TunedConfig.from_json(trial.settings)
    kept = trial.metric >= search.wanted
    if not kept:
        warnings.warn(
            f"tune: the best of {len(search.table)} trials has the metric {trial.metric:.4g}; "
            f"expected at least {search.wanted:.4g}. Allow a larger max_drop or more bits",
            stacklevel=2,
        )
    found = search.model_of(settings)
    return TuneResult(found, settings, float_metric, trial.metric, kept, tuple(search.table))


def _value(metric: Metric, model: nn.Module) -> float:
    with evaluating(model):
        return float(metric(model))


class _Search:
    """The trials of one call."""

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        metric: Metric,
        wanted: float,
        checkpoint: str | Path | None,
    ) -> None:
        self.model, self.batches, self.metric, self.wanted = model, batches, metric, wanted
        self.table: list[TuneTrial] = []
        self.best: TuneTrial | None = None
        self._file = None if checkpoint is None else Path(checkpoint)
        self._known = _read(self._file)
        self._last: tuple[str, nn.Module] | None = None

    def run(self, start: TunedConfig, deadline: float, progress: bool) -> None:
        """Try until a trial keeps the metric, or the time is over."""
        trials = self._candidates(start)
        for change, settings in progress_bar(
            trials, description="tune", enabled=progress, unit="trial"
        ):
            self._try(change, settings)
            if self._is_done or time.monotonic() >= deadline:
                return

    @property
    def _is_done(self) -> bool:
        return self.best is not None and self.best.metric >= self.wanted

    def _candidates(self, start: TunedConfig) -> Iterator[tuple[str, TunedConfig]]:
        yield f"recipe {start.config.name}", start
        for stage in STAGES:
            yield from stage(self._best_settings(start))
        best = self._best_settings(start)
        try:
            yield from mixed_configs(best, self.model, self.batches)
        except TorchqError as error:
            self.table.append(TuneTrial("mixed precision", math.nan, 0.0, str(error), ""))

    def _best_settings(self, start: TunedConfig) -> TunedConfig:
        return start if self.best is None else TunedConfig.from_json(self.best.settings)

    def model_of(self, settings: TunedConfig) -> nn.Module:
        """Return the model quantized with ``settings``, in eval mode."""
        text = settings.to_json()
        if self._last is None or self._last[0] != text:
            model = copy_module(self.model).eval()
            settings.apply_(model, self.batches)
            self._last = (text, model)
        return self._last[1]

    def _try(self, change: str, settings: TunedConfig) -> None:
        text, started = settings.to_json(), time.monotonic()
        trial = self._known.get(text)
        if trial is None:
            found, error = math.nan, ""
            try:
                found = _value(self.metric, self.model_of(settings))
            except TorchqError as reason:
                error = str(reason)
            seconds = time.monotonic() - started
            trial = TuneTrial(change, found, seconds, error, text)
            self._known[text] = trial
            self._write()
        self.table.append(trial)
        log.debug("tune: %s: %s", change, trial.error or trial.metric)
        better = self.best is None or trial.metric > self.best.metric
        if math.isfinite(trial.metric) and better:
            self.best = trial

    def _write(self) -> None:
        if self._file is not None:
            rows = [asdict(trial) for trial in self._known.values()]
            with replacing(self._file) as (path,):
                path.write_text(json.dumps({"trials": rows}, indent=1), encoding="utf-8")


def _read(path: Path | None) -> dict[str, TuneTrial]:
    """Return the trials of a checkpoint by their settings."""
    if path is None or not path.exists():
        return {}
    data = parse_json(path.read_text(encoding="utf-8"), f"tune: checkpoint {path}")
    try:
        trials = [TuneTrial(**row) for row in data["trials"]]
        return {trial.settings: trial for trial in trials}
    except (TypeError, KeyError) as error:
        raise ConfigError(
            f"tune: checkpoint {path}: got other data ({error}); expected a file of tune"
        ) from None

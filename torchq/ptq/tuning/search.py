"""The trials of one search: stages, then bisection between two widths of the weights."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from torch import nn

from torchq.errors import ConfigError, TorchqError
from torchq.nn import QuantModule
from torchq.ptq.tuning.candidates import (
    STAGES,
    Candidate,
    mixed_settings,
    wider,
)
from torchq.ptq.tuning.settings import TunedConfig
from torchq.ptq.tuning.trial import TuneTrial
from torchq.utils import copy_module, evaluating

__all__ = ["Metric", "Search", "metric_of"]

log = logging.getLogger(__name__)

Metric = Callable[[nn.Module], float]

# Trials of mixed precision: each halves the interval of mean bits.
_BISECTIONS = 4
# Mean bits that are too close to try anything between them.
_CLOSE = 0.1
_FLOAT_BITS = 32
_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


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


class Search:
    """The trials of one call of :func:`torchq.tune`.

    Args:
        model: in float.
        batches: for calibration and the algorithms.
        metric: larger is better.
        wanted: the least metric that is good enough.

    Attributes:
        table: the trials, in order.
        best: of the trials that are good enough the one with the fewest bits; without such a trial
            the one with the largest metric.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Any], metric: Metric, wanted: float
    ) -> None:
        self.model, self.batches, self.metric, self.wanted = model, batches, metric, wanted
        self.table: list[TuneTrial] = []
        self.best: TuneTrial | None = None
        self._last: tuple[str, nn.Module] | None = None

    def trials(self, start: TunedConfig, deadline: float) -> Iterator[TuneTrial]:
        """Try one candidate after the other, until one is good enough or the time is over.

        Args:
            start: the first settings.
            deadline: the reading of ``time.monotonic`` after which no trial starts.

        Yields:
            Each trial.
        """
        for candidate in self._candidates(start):
            yield self._try(*candidate)
            if time.monotonic() >= deadline:
                return

    @property
    def kept(self) -> bool:
        """True if a trial is good enough."""
        return self.best is not None and self._is_kept(self.best)

    def _is_kept(self, trial: TuneTrial) -> bool:
        return trial.metric >= self.wanted

    def _settings(self, start: TunedConfig) -> TunedConfig:
        return start if self.best is None else TunedConfig.from_json(self.best.settings)

    def _candidates(self, start: TunedConfig) -> Iterator[Candidate]:
        """Yield what is tried, each built on the best settings before it."""
        yield f"recipe {start.config.name}", start
        for stage in STAGES:
            rest = stage(self._settings(start), self.model)
            while not self.kept and (candidate := next(rest, None)) is not None:
                yield candidate
        if self.best is None or self.kept:
            return
        best, bits = self._settings(start), self.best.mean_bits
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
        """Yield mixed precision with the fewest mean bits that are good enough.

        Args:
            narrow: settings that are not good enough.
            wide: a format that may be.
            low: the mean bits of the one.
            high: the mean bits of the other.
        """
        for _ in range(_BISECTIONS):
            if not high - low > _CLOSE:
                return
            middle = (low + high) / 2
            candidate = self._mixed(narrow, wide, middle)
            if candidate is None:
                return
            if self._is_new(candidate):
                yield candidate
                if self._is_kept(self.table[-1]):
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
            self.table.append(TuneTrial("mixed precision", math.nan, math.nan, 0.0, str(error)))
            return None

    def _is_new(self, candidate: Candidate) -> bool:
        settings = candidate[1].to_json()
        return all(trial.settings != settings for trial in self.table)

    def model_of(self, settings: TunedConfig) -> nn.Module:
        """Return the model quantized with ``settings``, in eval mode."""
        text = settings.to_json()
        if self._last is None or self._last[0] != text:
            model = copy_module(self.model).eval()
            settings.apply_(model, self.batches)
            self._last = (text, model)
        return self._last[1]

    def _try(self, change: str, settings: TunedConfig) -> TuneTrial:
        """Return the trial of one candidate, which is in the table then."""
        started, found, bits, error = time.monotonic(), math.nan, math.nan, ""
        try:
            model = self.model_of(settings)
            found, bits = metric_of(self.metric, model), _mean_weight_bits(model)
        except TorchqError as reason:
            error = str(reason)
        seconds = time.monotonic() - started
        trial = TuneTrial(change, found, bits, seconds, error, settings.to_json())
        self._add(trial)
        return trial

    def _add(self, trial: TuneTrial) -> None:
        """Add a trial to the table, and find out if it is the best."""
        self.table.append(trial)
        log.debug("tune: %s: %s", trial.change, trial.error or trial.metric)
        if math.isfinite(trial.metric) and (
            self.best is None or self._order(trial) > self._order(self.best)
        ):
            self.best = trial

    def _order(self, trial: TuneTrial) -> tuple[bool, float, float]:
        kept = self._is_kept(trial)
        return kept, -trial.mean_bits if kept else 0.0, trial.metric

"""The search for settings that keep a metric: an ordered list of steps, from cheap to dear."""

from __future__ import annotations

import dataclasses
import inspect
import json
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

from torch import nn

from torchq.analysis.detections import Detections
from torchq.analysis.mixed_precision import mixed_precision
from torchq.calib import methods
from torchq.config import QuantConfig, Rule
from torchq.descriptor import QuantDescriptor
from torchq.errors import CalibrationError, ConfigError, TorchqError
from torchq.fusion.modules import CONVOLUTIONS
from torchq.nn import QuantModule
from torchq.ptq.adaround import adaround_
from torchq.ptq.bias_correction import correct_bias_
from torchq.ptq.equalization import equalize_
from torchq.ptq.gptq import gptq_
from torchq.ptq.smoothing import smooth_
from torchq.recipes import int8
from torchq.swap import quantize_
from torchq.utils import (
    check_fields,
    copy_module,
    evaluating,
    kept_batches,
    parse_json,
    progress_bar,
    short_repr,
    table,
)
from torchq.workflow import calibrate, quantizers

log = logging.getLogger(__name__)

Metric = Callable[[nn.Module], float]

# Trials of mixed precision: each halves the interval of mean bits.
_BISECTIONS = 4
# Mean bits that are too close to try anything between them.
_CLOSE = 0.1
_END_BITS = 8
_FLOAT_BITS = 32
_LAYERS = (nn.Linear, *CONVOLUTIONS)


#: Algorithms before calibration, by name, in the order in which they run.
PREPARATIONS: Mapping[str, Any] = {
    "equalization": lambda model, batches, progress: equalize_(model, batches[0]),
    "smoothing": smooth_,
}

#: Algorithms after calibration, by name.
ALGORITHMS: Mapping[str, Any] = {
    "bias correction": correct_bias_,
    "gptq": gptq_,
    "adaround": adaround_,
}


@dataclass(frozen=True)
class TunedConfig:
    """How a model is quantized, from a float model to the result.

    Args:
        config: the rules of :func:`torchq.quantize_`.
        method: the calibration method of activations; None takes that of each descriptor.
        before: names in :data:`PREPARATIONS`: what runs before calibration.
        algorithm: a name in :data:`ALGORITHMS`, or None: what runs after calibration.

    Example:
        >>> settings = TunedConfig(torchq.recipes.int8(), algorithm="gptq")
        >>> TunedConfig.from_json(settings.to_json()) == settings
        True
    """

    config: QuantConfig
    _: dataclasses.KW_ONLY
    method: str | None = None
    before: tuple[str, ...] = ()
    algorithm: str | None = None

    def __post_init__(self) -> None:
        names = {"algorithm": ALGORITHMS, "method": methods()}
        for field, known in names.items():
            value = getattr(self, field)
            if value is not None and value not in known:
                raise ConfigError(
                    f"TunedConfig: got {field}={short_repr(value)}; expected None or one of "
                    f"{', '.join(known)}"
                )
        if not set(self.before) <= set(PREPARATIONS):
            raise ConfigError(
                f"TunedConfig: got before={short_repr(self.before)}; expected names among "
                f"{', '.join(PREPARATIONS)}"
            )

    def apply_(self, model: nn.Module, batches: Sequence[Any], *, progress: bool = False) -> None:
        """Quantize ``model`` in place; inputs of layers that no batch reaches stay float, as said.

        Args:
            model: a float model, fused.
            batches: for calibration and the algorithm; see :func:`torchq.graph.call_arguments`.
            progress: show bars.

        Raises:
            TorchqError: what the functions raise.
        """
        quantize_(model, self.config, progress=progress)
        for name, function in PREPARATIONS.items():
            if name in self.before:
                function(model, batches, progress=progress)
        report = calibrate(
            model, batches, method=self.method, on_unseen="disable", progress=progress
        )
        if report.unseen:
            warnings.warn(
                f"no batch reached {', '.join(report.unseen)}: these inputs stay float",
                stacklevel=2,
            )
        if self.algorithm is not None:
            ALGORITHMS[self.algorithm](model, batches, progress=progress)

    def to_json(self, *, indent: int | None = 2) -> str:
        """Return the settings as JSON text."""
        data = {
            "config": self.config.to_dict(),
            "method": self.method,
            "before": list(self.before),
            "algorithm": self.algorithm,
        }
        return json.dumps(data, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> TunedConfig:
        """Return the settings that :meth:`to_json` was called on.

        Raises:
            ConfigError: not such a text.
        """
        known = ["config", "method", "before", "algorithm"]
        data = dict(
            check_fields(
                parse_json(text, "TunedConfig"), "TunedConfig", known=known, required=known
            )
        )
        before = data.pop("before")
        if not isinstance(before, list) or not all(isinstance(name, str) for name in before):
            got = short_repr(before)
            raise ConfigError(f"TunedConfig: got before={got}; expected a list of names")
        return cls(QuantConfig.from_dict(data.pop("config")), before=tuple(before), **data)

    def __str__(self) -> str:
        parts = [self.config.name]
        parts += [f"calibration {self.method}"] if self.method else []
        parts += self.before
        parts += [self.algorithm] if self.algorithm else []
        return ", ".join(parts)


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


#: Settings with one change, or the same settings where the change does not apply.
Step = Callable[[TunedConfig, nn.Module], TunedConfig]


def _changed(best: TunedConfig, model: nn.Module, **changes: Any) -> TunedConfig:
    return replace(best, **changes)


def _unsigned(best: TunedConfig, model: nn.Module) -> TunedConfig:
    """Let inputs be unsigned, where a rule leaves them signed."""

    def change(rule: Rule) -> Rule:
        d = rule.input
        if d is None or d.unsigned or d.dynamic or d.amax is not None or not d.format.is_integer:
            return rule
        return replace(rule, input=d.replace(unsigned="auto"))

    return replace(best, config=replace(best.config, rules=tuple(map(change, best.config.rules))))


def _wide_ends(best: TunedConfig, model: nn.Module) -> TunedConfig:
    """Give the first and last layer 8 bits, unless there are rules for them."""

    def wide(descriptor: QuantDescriptor | None) -> QuantDescriptor | None:
        is_narrow = descriptor is not None and _bits(descriptor) < _END_BITS
        return descriptor.replace(num_bits=_END_BITS) if descriptor and is_narrow else descriptor

    rules = best.config.rules
    widened = [replace(rule, input=wide(rule.input), weight=wide(rule.weight)) for rule in rules]
    ends = [new for new, old in zip(widened, rules, strict=True) if new != old and not old.skip]
    if not ends or any(rule.position for rule in rules):
        return best
    added = [
        replace(rule, position=position, optional=True)
        for position in ("first", "last")
        for rule in ends
    ]
    return replace(best, config=best.config.with_rules(*added))


def _bits(descriptor: QuantDescriptor) -> int:
    return descriptor.format.bits if descriptor.format.is_integer else _END_BITS


def _equalization(best: TunedConfig, model: nn.Module) -> TunedConfig:
    applies = any(isinstance(module, CONVOLUTIONS) for module in model.modules())
    return replace(best, before=(*best.before, "equalization")) if applies else best


def _smoothing(best: TunedConfig, model: nn.Module) -> TunedConfig:
    kinds = {type(module).__name__ for module in model.modules()}
    applies = any(kind.endswith(("LayerNorm", "RMSNorm")) for kind in kinds)
    return replace(best, before=(*best.before, "smoothing")) if applies else best


#: What is tried in turn, each on the best settings so far; mixed precision follows.
STEPS: Mapping[str, Step] = {
    **{f"calibration {m}": partial(_changed, method=m) for m in ("mse", "percentile", "entropy")},
    "unsigned inputs": _unsigned,
    "first and last layer 8 bits": _wide_ends,
    "equalization": _equalization,
    "smoothing": _smoothing,
    **{name: partial(_changed, algorithm=name) for name in ALGORITHMS},
}


def tune(
    model: nn.Module,
    batches: Iterable[Any],
    metric: Metric | Detections | Literal["detections"],
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
            ``"detections"``, or a :class:`torchq.analysis.Detections`, compares the boxes on
            ``batches`` with those of the float model.
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
    if metric == "detections" or isinstance(metric, Detections):
        chosen = metric if isinstance(metric, Detections) else Detections()
        metric = chosen.against(model, kept)
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
    deadline = math.inf if time_limit is None else time.monotonic() + time_limit
    candidates = search.candidates(TunedConfig(recipe or int8()))
    shown = progress_bar(candidates, description="tune", enabled=progress, unit="trial")
    for candidate in shown:
        search.try_out(*candidate)
        if time.monotonic() >= deadline:
            break
    return _result(search, float_metric)


def _check_metric(metric: Any) -> None:
    """Raise ConfigError unless ``metric`` can be called with a model."""
    if isinstance(metric, str):
        raise ConfigError(f'tune: got metric {metric!r}; expected "detections", or metric(model)')
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

    @property
    def kept(self) -> bool:
        """True if a trial is good enough."""
        return self.best is not None and self.best.metric >= self.wanted

    def candidates(self, start: TunedConfig) -> Iterator[tuple[str, TunedConfig]]:
        """Yield what to try until something is good enough; each is tried before the next."""
        yield f"recipe {start.config.name}", start
        for name, step in STEPS.items():
            before = start if self.best is None else self.best.settings
            if not self.kept and (settings := step(before, self.model)) != before:
                yield name, settings
        if self.best is not None and not self.kept:
            yield from self._mixtures(self.best)

    def _mixtures(self, narrow: TuneTrial) -> Iterator[tuple[str, TunedConfig]]:
        """Yield mixed precision between mean bits that are too few and those that may be enough."""
        weights = [rule.weight for rule in narrow.settings.config.rules]
        is_narrow = min((_bits(d) for d in weights if d is not None), default=32) < _END_BITS
        # Where everything in the wide format is not enough, no mixture can be.
        low, high, steps = narrow.mean_bits, float(_FLOAT_BITS), _BISECTIONS
        if is_narrow:
            high, steps = float(_END_BITS), _BISECTIONS + 1
        bits = high if is_narrow else (low + high) / 2
        for step in range(steps):
            candidate = self._mixed(narrow.settings, "w8a8" if is_narrow else "float", bits)
            if candidate is None:
                return
            is_good = False
            if all(trial.settings != candidate[1] for trial in self.table):
                yield candidate
                is_good = self.table[-1].metric >= self.wanted
            if is_good:
                high = self.table[-1].mean_bits
            elif step == 0 and is_narrow:
                return
            else:
                low = bits
            bits = (low + high) / 2
            if high - low <= _CLOSE:
                return

    def _mixed(
        self, narrow: TunedConfig, wide: Literal["w8a8", "float"], mean_bits: float
    ) -> tuple[str, TunedConfig] | None:
        """Return mixed precision within a budget, or None after a row with the reason."""
        try:
            config = mixed_precision(
                self.model,
                self.batches,
                budget={"mean_bits": mean_bits},
                formats=[replace(narrow.config, name="narrow"), wide],
                progress=False,
            )
        except TorchqError as error:
            failed = TuneTrial("mixed precision", narrow, math.nan, math.nan, 0.0, str(error))
            self.table.append(failed)
            return None
        bits = f"{config.costs['mean_bits']:.3g} bits"
        named = QuantConfig(config.rules, name=f"mixed, {bits} a weight")
        return f"mixed precision, {bits}", replace(narrow, config=named)

    def model_of(self, settings: TunedConfig) -> nn.Module:
        """Return the model quantized with ``settings``, in eval mode."""
        if self._last is None or self._last[0] != settings:
            model = copy_module(self.model).eval()
            settings.apply_(model, self.batches)
            self._last = (settings, model)
        return self._last[1]

    def try_out(self, change: str, settings: TunedConfig) -> None:
        """Quantize and measure one candidate, and add its row to the table."""
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

    def _order(self, trial: TuneTrial) -> tuple[bool, float, float]:
        kept = trial.metric >= self.wanted
        return kept, -trial.mean_bits if kept else 0.0, trial.metric

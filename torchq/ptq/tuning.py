"""The search for settings that keep a metric: an ordered list, from cheap to dear."""

from __future__ import annotations

import dataclasses
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, Literal

from torch import nn

from torchq import recipes
from torchq.analysis.detections import Detections
from torchq.analysis.mixed_precision import MixedPrecision, mixed_precision
from torchq.analysis.outputs import Evaluation, user_metric
from torchq.calib import methods
from torchq.config import QuantConfig
from torchq.descriptor import QuantDescriptor
from torchq.errors import CalibrationError, ConfigError, TorchqError
from torchq.graph.operators import CONVOLUTIONS, LAYERS
from torchq.nn import QuantModule
from torchq.ptq.adaround import adaround_
from torchq.ptq.bias_correction import correct_bias_
from torchq.ptq.gptq import gptq_
from torchq.ptq.smoothing import smooth_
from torchq.runtime import Runtime, runtime_of
from torchq.runtimes import Pays, speed
from torchq.swap import plan, quantize_
from torchq.utils import (
    copy_module,
    evaluating,
    kept_batches,
    network_of,
    progress_bar,
    short_repr,
    table,
    wrap,
)
from torchq.workflow import CalibrationReport, calibrate, quantizers, weight_quantizers
from torchq.workflow.equalization import equalize_, equalize_depthwise_, is_depthwise

log = logging.getLogger(__name__)

Metric = Callable[[nn.Module], float]

_FEW_BITS, _BYTE, _FLOAT_BITS = 4, 8, 32
#: The outcome of a trial in whose middle the time was over.
_ENDED = "ended at the time limit"


#: Algorithms of :mod:`torchq.ptq` before calibration, in the order in which they run.
PREPARATIONS: Mapping[str, Any] = {
    "equalize_": lambda model, batches, progress: equalize_(model, batches[0]),
    "equalize_depthwise_": equalize_depthwise_,
    "smooth_": smooth_,
    "smooth_ anything": partial(smooth_, behind="anything"),
}
#: Names of preparations -> the lines that call them.
_LINES = {
    "equalize_": "torchq.ptq.equalize_(model, batches[0])",
    "equalize_depthwise_": "torchq.ptq.equalize_depthwise_(model, batches)",
    "smooth_": "torchq.ptq.smooth_(model, batches)",
    "smooth_ anything": 'torchq.ptq.smooth_(model, batches, behind="anything")',
}

#: Algorithms of :mod:`torchq.ptq` after calibration.
ALGORITHMS: Mapping[str, Any] = {
    "correct_bias_": correct_bias_,
    "gptq_": gptq_,
    "adaround_": adaround_,
}


@dataclass(frozen=True)
class TunedConfig:
    """How a model is quantized, from a float model to the result.

    Args:
        config: the rules of :func:`torchq.quantize_`.
        target: the runtime that the model is for, or None.
        method: the calibration method of activations; None takes that of each descriptor.
        before: names in :data:`PREPARATIONS`: what runs before calibration.
        algorithm: a name in :data:`ALGORITHMS`, or None: what runs after calibration.
        exclude: paths that stay float, as the runtime gains no time by them.
        source: the expression that makes ``config``, for :meth:`code`.

    Example:
        >>> print(TunedConfig(torchq.recipes.int8(), method="mse", algorithm="gptq_").code())
        torchq.quantize_(model, config, example=batches[0])
        torchq.calibrate(model, batches, method='mse')
        torchq.ptq.gptq_(model, batches)
    """

    config: QuantConfig
    _: dataclasses.KW_ONLY
    target: str | Runtime | None = None
    method: str | None = None
    before: tuple[str, ...] = ()
    algorithm: str | None = None
    exclude: tuple[str, ...] = ()
    source: str = field(default="config", compare=False)

    def __post_init__(self) -> None:
        choices = [
            ("method", self.method, methods()),
            ("algorithm", self.algorithm, ALGORITHMS),
        ]
        choices += [("before", name, PREPARATIONS) for name in self.before]
        for argument, value, allowed in choices:
            if value is not None and value not in allowed:
                raise ConfigError(
                    f"TunedConfig: got {argument}={short_repr(value)}; expected None or one of "
                    f"{', '.join(allowed)}"
                )

    def apply_(
        self, model: nn.Module, batches: Sequence[object], *, progress: bool = False
    ) -> CalibrationReport:
        """Quantize ``model`` in place; inputs of layers that no batch reaches stay float, as said.

        Args:
            model: a float model, fused.
            batches: for calibration and the algorithm; see :func:`torchq.graph.call_arguments`.
            progress: show bars.

        Raises:
            TorchqError: what the functions raise.
        """
        example = batches[0]
        quantize_(
            model,
            self.config,
            exclude=self.exclude,
            target=self.target,
            example=example,
            progress=progress,
        )
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
        return report

    def code(self, on_unseen: str = "error") -> str:
        """Return the lines that do the same to a float ``model`` with a list ``batches``.

        A target that was an object stands there as ``target``: its name would not say its settings.
        """
        target = "" if self.target is None else ", target=target"
        if isinstance(self.target, str):
            target = f", target={self.target!r}"
        method = "" if self.method is None else f", method={self.method!r}"
        unseen = "" if on_unseen == "error" else f", on_unseen={on_unseen!r}"
        exclude = f", exclude={list(self.exclude)!r}" if self.exclude else ""
        lines = [
            f"torchq.quantize_(model, {self.source}{exclude}{target}, example=batches[0])"
        ]
        lines += [_LINES[name] for name in self.before]
        lines.append(f"torchq.calibrate(model, batches{method}{unseen})")
        if self.algorithm is not None:
            lines.append(f"torchq.ptq.{self.algorithm}(model, batches)")
        return "\n".join(lines)


@dataclass(frozen=True)
class TuneTrial:
    """One row of the table of :func:`torchq.tune`.

    Attributes:
        change: what was changed from the best settings before it.
        reason: why that may help.
        settings: with the change; without it if it could not be made.
        metric: of the quantized model; NaN if it could not be made.
        mean_bits: the mean width of the weights of Linear and Conv layers and of all quantized
            ones; 32 where a weight is float; NaN if the model could not be made.
        seconds: that the trial took.
        speedup: the time of the float model on the runtime over that of this one; NaN where it
            was not asked for.
        error: why it could not be made, else "".
    """

    change: str
    reason: str
    settings: TunedConfig
    metric: float = math.nan
    mean_bits: float = math.nan
    seconds: float = 0.0
    speedup: float = math.nan
    error: str = ""


@dataclass(frozen=True)
class TuneResult:
    """The result of :func:`tune`; ``print`` it.

    Attributes:
        model: the quantized model of the best trial.
        config: its settings; ``config.apply_(float_model, batches)`` makes it again. Where the
            float model is the result, those that the search would have begun with.
        code: the lines that make it of a float ``model`` and a list ``batches``; in them ``recipe``
            is the argument of the call.
        float_metric: the metric of the float model.
        metric: the metric of :attr:`model`.
        mean_bits: the mean width of its weights.
        kept: True if the metric fell by no more than was allowed, and the model is as fast as was
            asked for.
        table: the trials, in order.
    """

    model: nn.Module
    config: TunedConfig
    code: str
    float_metric: float
    metric: float
    mean_bits: float
    kept: bool
    table: tuple[TuneTrial, ...]

    def __str__(self) -> str:
        rows = [("tried", "metric", "bits of a weight", "seconds", "speed", "because")]
        rows.append(("float", f"{self.float_metric:.4g}", "32", "", "1x", ""))
        for trial in self.table:
            outcome = trial.error or f"{trial.metric:.4g}"
            bits = "" if math.isnan(trial.mean_bits) else f"{trial.mean_bits:.3g}"
            speed = "" if math.isnan(trial.speedup) else f"{trial.speedup:.2f}x"
            took = f"{trial.seconds:.1f}"
            rows.append((trial.change, outcome, bits, took, speed, trial.reason))
        is_timed = any(not math.isnan(trial.speedup) for trial in self.table)
        shown: list[tuple[str, ...]] = [
            row if is_timed else (*row[:4], row[5]) for row in rows
        ]
        verdict = "keeps the metric" if self.kept else "does NOT keep the metric"
        if is_timed and not self.kept:
            verdict += ", or is too slow"
        seconds = sum(trial.seconds for trial in self.table)
        text = f"{self.metric:.4g} of {self.float_metric:.4g} {verdict}: "
        text += f"{len(self.table)} trials in {seconds:.1f} s. {self._correction()}"
        text += "The same from the float model:"
        return table(shown, f"{wrap(text)}\n{self.code}")

    def _correction(self) -> str:
        """Return whether the correction of biases in order helped; "" where it was not tried."""
        for number, trial in enumerate(self.table):
            earlier = [
                t.metric for t in self.table[:number] if not math.isnan(t.metric)
            ]
            if trial.change != "correct_bias_" or trial.error or not earlier:
                continue
            gain = trial.metric - max(earlier)
            does = "helped" if gain > 0 else "hurt" if gain < 0 else "changed nothing"
            return f"correct_bias_ {does}: {max(earlier):.4g} -> {trial.metric:.4g}. "
        return ""


def _bits(descriptor: QuantDescriptor) -> int:
    return descriptor.format.bits if descriptor.format.is_integer else _BYTE


def _descriptors(config: QuantConfig, slot: str) -> list[QuantDescriptor]:
    descriptors = (getattr(rule, slot) for rule in config.rules)
    return [descriptor for descriptor in descriptors if descriptor is not None]


#: From the best settings so far and the search to settings with one change, or to the same ones
#: where it does not apply.
Change = Callable[[TunedConfig, "_Search"], TunedConfig]


def _with(settings: TunedConfig, call: str, config: QuantConfig) -> TunedConfig:
    """Return settings with the config that a method of theirs returns."""
    if config == settings.config:
        return settings
    return replace(settings, config=config, source=f"{settings.source}.{call}")


def _method(best: TunedConfig, search: _Search, name: str) -> TunedConfig:
    inputs = _descriptors(best.config, "input")
    # With few bits recipes search the least error already.
    applies = all(_bits(d) > _FEW_BITS and d.calib_method != name for d in inputs)
    return replace(best, method=name) if applies and inputs else best


def _algorithm(
    best: TunedConfig,
    search: _Search,
    name: str,
    least: int = 1,
    most: int = _FLOAT_BITS,
) -> TunedConfig:
    """Return settings with an algorithm, for narrowest weights and inputs of some widths."""
    widths = [
        _bits(d)
        for slot in ("weight", "input")
        for d in _descriptors(best.config, slot)
    ]
    return (
        replace(best, algorithm=name)
        if least <= min(widths, default=_FLOAT_BITS) <= most
        else best
    )


def _ends(best: TunedConfig, search: _Search, bits: int | None) -> TunedConfig:
    return _with(best, f"with_ends({bits})", best.config.with_ends(bits))


def _wide_inputs(best: TunedConfig, search: _Search) -> TunedConfig:
    """Return settings with activations of more bits, for chips that compute on integers alone."""
    runtime = runtime_of(best.target)
    bits = _BYTE if runtime is None else runtime.widest_inputs
    narrow = any(_bits(d) < bits for d in _descriptors(best.config, "input"))
    if bits <= _BYTE or not narrow:
        return best
    return _with(best, f"with_input_bits({bits})", best.config.with_input_bits(bits))


def _zero_points(best: TunedConfig, search: _Search) -> TunedConfig:
    # A plan for a target chooses the form of codes. Behind ReLUs the image alone has a sign.
    model = search.last
    weights = weight_quantizers(model)
    inputs = [q.descriptor for q in quantizers(model).values() if id(q) not in weights]
    if best.target is not None or sum(not d.unsigned for d in inputs) < 2:
        return best
    return _with(best, "with_zero_points()", best.config.with_zero_points())


def _equalization(best: TunedConfig, search: _Search) -> TunedConfig:
    weights = _descriptors(best.config, "weight")
    per_tensor = any(d.axis is None and d.block_size is None for d in weights)
    applies = per_tensor and any(
        isinstance(m, CONVOLUTIONS) for m in search.model.modules()
    )
    return replace(best, before=(*best.before, "equalize_")) if applies else best


def _even_inputs(best: TunedConfig, search: _Search) -> TunedConfig:
    weights = _descriptors(best.config, "weight")
    per_channel = any(d.axis is not None for d in weights)
    runtime = runtime_of(best.target)
    codes = None if runtime is None else runtime.codes
    # Such a runtime has a range for each channel of what depthwise layers read.
    has_own_ranges = codes is not None and codes.by_channel
    is_mobile = any(map(is_depthwise, search.model.modules()))
    if not per_channel or has_own_ranges or not is_mobile:
        return best
    return replace(best, before=(*best.before, "equalize_depthwise_"))


def _smoothing(best: TunedConfig, search: _Search) -> TunedConfig:
    if not _has_norms_of_tokens(search.model):
        return best
    return replace(best, before=(*best.before, "smooth_"))


def _smoothing_anything(best: TunedConfig, search: _Search) -> TunedConfig:
    # What rounds weights of few bits by their layer's output leaves those with factors alone.
    few = any(d.format.bits < _BYTE for d in _descriptors(best.config, "weight"))
    if few or not _has_norms_of_tokens(search.model):
        return best
    others = [name for name in best.before if name != "smooth_"]
    return replace(best, before=(*others, "smooth_ anything"))


def _has_norms_of_tokens(model: nn.Module) -> bool:
    kinds = {type(module).__name__ for module in model.modules()}
    return any(kind.endswith(("LayerNorm", "RMSNorm")) for kind in kinds)


def _mixture(best: TunedConfig, search: _Search, part: float) -> TunedConfig:
    """Let some layers be wider: mean bits a part of the way to 8 bits, or to float."""
    plain = [
        t for t in search.table if not isinstance(t.settings.config, MixedPrecision)
    ]
    narrow = max(plain, key=lambda t: -math.inf if math.isnan(t.metric) else t.metric)
    few = any(_bits(d) < _BYTE for d in _descriptors(narrow.settings.config, "weight"))
    wide, most = ("w8a8", _BYTE) if few else ("float", _FLOAT_BITS)
    budget = {
        "mean_bits": round(narrow.mean_bits + part * (most - narrow.mean_bits), 2)
    }
    formats: list[QuantConfig | str] = [narrow.settings.config, wide]
    config = mixed_precision(
        search.model, search.batches, budget=budget, formats=formats, progress=False
    )
    arguments = f'{budget=}, formats=[{narrow.settings.source}, "{wide}"]'
    source = f"torchq.mixed_precision(model, batches, {arguments})"
    return replace(narrow.settings, config=config, source=source)


#: What is tried in turn, each on the best settings so far: name, reason, change.
SETTINGS: Sequence[tuple[str, str, Change]] = (
    (
        "activations in 16 bits",
        "the chip has no float, and takes them",
        _wide_inputs,
    ),
    (
        "ends in 8 bits",
        "the first and last layer are sensitive",
        partial(_ends, bits=_BYTE),
    ),
    (
        "correct_bias_",
        "layers can make up for those before them",  # as calibrate lets them with few bits
        partial(_algorithm, name="correct_bias_", least=_FEW_BITS + 1),
    ),
    (
        "equalize_depthwise_",
        "channels of unequal size share the range of a depthwise input",
        _even_inputs,
    ),
    ("zero points", "few negative inputs, as behind SiLU, waste codes", _zero_points),
    (
        "mse ranges",
        "rare large inputs make others coarse",
        partial(_method, name="mse"),
    ),
    ("percentile ranges", "the same", partial(_method, name="percentile")),
    ("equalize_", "channels of unequal size share a scale", _equalization),
    ("smooth_", "norms give some channels huge inputs", _smoothing),
    (
        "smooth_ anything",
        "a residual reads what norms give",  # as in BERT, so that these can take no factors
        _smoothing_anything,
    ),
    ("gptq_", "weights can make up for each other", partial(_algorithm, name="gptq_")),
    (
        "ends in float",
        "the first and last layer are sensitive",
        partial(_ends, bits=None),
    ),
    (
        "adaround_",
        "2 or 3 bits want learned rounding",
        partial(_algorithm, name="adaround_", most=3),
    ),
    *(
        (
            "mixed precision",
            "few layers do most of the damage",
            partial(_mixture, part=part),
        )
        for part in (0.2, 0.4, 0.6, 0.8)
    ),
)


def tune(
    model: nn.Module,
    batches: Iterable[object],
    metric: Metric | Detections | Literal["detections"],
    *,
    max_drop: float,
    recipe: QuantConfig | None = None,
    target: str | Runtime | None = None,
    faster_than: float | None = None,
    time: Callable[[Path], float] | None = None,
    time_limit: float | None = None,
    progress: bool = True,
) -> TuneResult:
    """Find settings with which the quantized model keeps a metric.

    After the recipe itself, as :func:`torchq.calibrate` treats it, come from cheap to dear those of
    :data:`torchq.ptq.tuning.SETTINGS` that apply: 16 bits for activations where the chip takes
    them and has no float, 8 bits for the first and last layer, the correction of results in order,
    inputs with zero points, other ranges, equalization, SmoothQuant, GPTQ, float for the first and
    last layer, AdaRound. Each trial changes the best settings so far in one
    point and is judged by the metric alone; the first one that keeps it ends the search. Mixed
    precision comes last, with mean bits that rise by fifths of the way to 8 bits, or to float.

    With ``faster_than`` time counts too: what gains none on the runtime stays float from the start,
    as ``torchq.plan(..., keep="pays")`` decides, and a trial must also be fast enough. Where the
    float model is not slower, the result is the float model.

    Args:
        model: a float model, fused (:func:`torchq.fuse_`); left unchanged.
        batches: for calibration and the algorithms, without labels or with them; see
            :func:`torchq.graph.call_arguments`. Keep them apart from the data of the metric.
        metric: called with each quantized model in eval mode; returns a number, larger is better.
            ``"detections"``, or a :class:`torchq.analysis.Detections`, compares the boxes on
            ``batches`` with those of the float model.
        max_drop: the largest loss of the metric, in its own unit, >= 0.
        recipe: the widths that are wanted; default that of the target, or
            :func:`torchq.recipes.int8`.
        target: the runtime that the model is for; see :func:`torchq.quantize_`.
        faster_than: the least speedup over the float model on the runtime, such as 1.2; None looks
            at no time. It needs a target.
        time: seconds of a call where the runtime is elsewhere; see :class:`torchq.runtimes.Pays`.
        time_limit: seconds after which no trial is started, and the one that runs is ended at its
            next call of the model; the best one before it is returned. The first trial is always
            finished, as there would be no result without it.
        progress: show a bar.

    Returns:
        The result, also if no trial keeps the metric; then with one warning. ``print`` says what
        was tried, what it cost, and the lines that do the same.

    Raises:
        ConfigError: an argument is invalid, the model is quantized, or the metric of the float
            model is no finite number.
        CalibrationError: there is no batch, no trial could be made, or the float model detects
            nothing in the batches.

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
        >>> print(result.code)
        torchq.quantize_(model, torchq.recipes.int8(), example=batches[0])
        torchq.calibrate(model, batches)
    """
    model = network_of(model)
    kept_list = kept_batches("tune", batches)
    if not isinstance(max_drop, (int, float)) or not 0 <= max_drop < math.inf:
        raise ConfigError(f"tune: got max_drop={max_drop!r}; expected a number >= 0")
    quantized = next(iter(quantizers(model)), None)
    if quantized is not None:
        raise ConfigError(
            f"tune: got a quantized model ({quantized}); expected a float one"
        )
    measure = _found_metric(metric, model, kept_list)
    float_metric = metric_of(measure, copy_module(model).eval())
    if not math.isfinite(float_metric):
        raise ConfigError(
            f"tune: the metric of the float model is {float_metric}; expected finite"
        )
    start = _start(recipe, target)
    goal = _Goal(float_metric - max_drop, _checked_speedup(faster_than, start), time)
    deadline = None if time_limit is None else monotonic() + time_limit
    search = _Search(model, kept_list, measure, goal, deadline)
    if faster_than is not None:
        planned = plan(
            model,
            start.config,
            target=target,
            example=kept_list[0],
            keep=Pays(time=time),
        )
        if not planned.replaced:
            return _float_result(search, start, planned.timing, float_metric)
        left = [d.name for d in planned.skipped if d.by == Pays.name]
        start = replace(start, exclude=tuple(left))
    candidates = search.candidates(start)
    for trial in progress_bar(
        candidates, description="tune", enabled=progress, unit="trial"
    ):
        search.try_out(trial)
        if search.is_over:
            break
    return _result(search, float_metric)


def _start(recipe: QuantConfig | None, target: str | Runtime | None) -> TunedConfig:
    """Return the settings of the first trial."""
    runtime = runtime_of(target)
    if recipe is not None:
        source = "recipe"
    else:
        recipe = recipes.int8() if runtime is None else runtime.recipe()
        source = "torchq.recipes.int8()" if recipe == recipes.int8() else "recipe"
    return TunedConfig(recipe, target=target, source=source)


def _checked_speedup(faster_than: float | None, start: TunedConfig) -> float | None:
    if faster_than is None:
        return None
    if not isinstance(faster_than, (int, float)) or not 0 < faster_than < math.inf:
        raise ConfigError(
            f"tune: got faster_than={faster_than!r}; expected a factor above 0, such as 1.2"
        )
    if start.target is None:
        raise ConfigError(
            f"tune: got faster_than={faster_than} and no target; expected one, as a model is "
            "timed on a runtime. Pass target="
        )
    return faster_than


def _float_result(
    search: _Search, start: TunedConfig, timing: str, float_metric: float
) -> TuneResult:
    """Return the float model as the result."""
    assert search.goal.speedup is not None
    reason = f"integers gain no time: {timing}"
    trial = TuneTrial(
        "stay in float",
        reason,
        start,
        float_metric,
        mean_bits=_FLOAT_BITS,
        speedup=1.0,
    )
    kept = search.goal.is_met_by(trial)
    if not kept:
        warnings.warn(
            f"tune: {reason}; expected {search.goal.speedup:g} times as fast. The result is the "
            "float model",
            stacklevel=3,
        )
    model = copy_module(search.model).eval()
    code = f"# The model stays float, as {reason}."
    figures = float_metric, float_metric, float(_FLOAT_BITS)
    return TuneResult(model, start, code, *figures, kept, (trial,))


def _found_metric(
    metric: object, model: nn.Module, batches: Sequence[object]
) -> Metric:
    """Return what is called with each quantized model."""
    chosen = user_metric("tune", metric)
    if isinstance(chosen, Detections):
        return chosen.against(model, batches)
    if isinstance(chosen, Evaluation):
        return chosen.function
    raise ConfigError(
        f'tune: got metric {metric!r}; expected metric(model), or "detections"'
    )


def _result(search: _Search, float_metric: float) -> TuneResult:
    """Return the best trial as a result, with its model."""
    if search.best is None:
        reasons = "; ".join(
            f"{trial.change}: {trial.error}" for trial in search.table[:3]
        )
        raise CalibrationError(f"tune: no trial could be made ({reasons})")
    trial = search.best
    if not search.kept:
        warnings.warn(
            f"tune: the best of {len(search.table)} trials has the metric {trial.metric:.4g}"
            f"{_faster(trial)}; expected at least {search.goal.metric:.4g}"
            f"{_faster_wanted(search.goal)}. Allow a larger max_drop or more bits",
            stacklevel=3,
        )
    assert search.best_made is not None
    model, report = search.best_made
    code = trial.settings.code("disable" if report.unseen else "error")
    figures = float_metric, trial.metric, trial.mean_bits
    return TuneResult(
        model, trial.settings, code, *figures, search.kept, tuple(search.table)
    )


def _faster(trial: TuneTrial) -> str:
    return "" if math.isnan(trial.speedup) else f" and is {trial.speedup:.2f}x float"


def _faster_wanted(goal: _Goal) -> str:
    return "" if goal.speedup is None else f" and {goal.speedup:g}x"


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
    ranked: list[tuple[int, int]] = []
    for module in model.modules():
        if isinstance(module, QuantModule):
            for quantizer, weight in module.quantized_weights():
                on = quantizer.quantizing
                bits = quantizer.descriptor.format.bits if on else _FLOAT_BITS
                ranked.append((bits, weight.numel()))
        elif isinstance(module, LAYERS):
            ranked.append((_FLOAT_BITS, module.weight.numel()))
    total = sum(count for _, count in ranked)
    return sum(bits * count for bits, count in ranked) / total if total else math.nan


@dataclass(frozen=True)
class _Goal:
    """What ends the search.

    Attributes:
        metric: the least that is good enough.
        speedup: the least over the float model; None where time does not count.
        time: seconds of a call where the runtime is elsewhere.
    """

    metric: float
    speedup: float | None
    time: Callable[[Path], float] | None

    def is_fast(self, trial: TuneTrial) -> bool:
        """Return True if a trial is fast enough."""
        return self.speedup is None or trial.speedup >= self.speedup

    def is_met_by(self, trial: TuneTrial) -> bool:
        """Return True if a trial is good and fast enough."""
        return trial.metric >= self.metric and self.is_fast(trial)

    def rank(self, trial: TuneTrial) -> tuple[bool, float]:
        """Return what is larger for the better one of two trials."""
        return self.is_fast(trial), trial.metric


class _OutOfTime(BaseException):
    """The time is over in the middle of a trial.

    No error: what catches errors of a model or a metric must not go on.
    """


@contextmanager
def _ending_at(deadline: float | None, model: nn.Module) -> Iterator[None]:
    """Raise :class:`_OutOfTime` in the first call of a model behind a moment of the clock.

    A layer by itself is let alone: corrections leave layers with hooks as they are.
    """
    if deadline is None or next(model.children(), None) is None:
        yield
        return

    def check(module: nn.Module, args: object) -> None:
        if monotonic() >= deadline:
            raise _OutOfTime

    handle = model.register_forward_pre_hook(check)
    try:
        yield
    finally:
        handle.remove()


class _Search:
    """The trials of one call of :func:`torchq.tune`.

    Attributes:
        best: the best trial so far.
        best_made: its model, in eval mode, and its calibration.
        last: the last model, float at first.
        is_over: no trial may begin any more.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: Sequence[Any],
        metric: Metric,
        goal: _Goal,
        deadline: float | None,
    ) -> None:
        self.model, self.batches = model, batches
        self.metric, self.goal = metric, goal
        self.table: list[TuneTrial] = []
        self.best: TuneTrial | None = None
        self.best_made: tuple[nn.Module, CalibrationReport] | None = None
        self.last = model
        self.is_over = False
        self._deadline = deadline
        self._made: tuple[TunedConfig, CalibrationReport] | None = None

    @property
    def kept(self) -> bool:
        """True if a trial is good enough."""
        return self.best is not None and self.goal.is_met_by(self.best)

    def candidates(self, start: TunedConfig) -> Iterator[TuneTrial]:
        """Yield what to try until something is good enough; each is tried before the next."""
        yield TuneTrial(
            f"recipe {start.config.name}", "calibrate and its correction", start
        )
        for name, reason, change in SETTINGS:
            if self.kept:
                return
            before = start if self.best is None else self.best.settings
            try:
                with _ending_at(self._deadline, self.model):
                    settings = change(before, self)
            except _OutOfTime:
                self.is_over = True
                self.table.append(TuneTrial(name, reason, before, error=_ENDED))
                return
            except TorchqError as error:
                self.table.append(TuneTrial(name, reason, before, error=str(error)))
                continue
            if all(settings != trial.settings for trial in self.table):
                yield TuneTrial(name, reason, settings)

    def _model_of(
        self, settings: TunedConfig, deadline: float | None
    ) -> tuple[nn.Module, CalibrationReport]:
        """Return the model quantized with ``settings``, in eval mode, and its calibration."""
        if self._made is None or self._made[0] != settings:
            model = copy_module(self.model).eval()
            with _ending_at(deadline, model):
                self._made = settings, settings.apply_(model, self.batches)
            self.last = model
        return self.last, self._made[1]

    def try_out(self, trial: TuneTrial) -> None:
        """Quantize and measure one candidate, and add its row to the table."""
        started = monotonic()
        metric = math.nan
        gain = math.nan
        bits = math.nan
        error = ""
        # There would be no result without the first one.
        deadline = None if self.best is None else self._deadline
        made = None
        try:
            made = self._model_of(trial.settings, deadline)
            model, _ = made
            with _ending_at(deadline, model):
                metric = metric_of(self.metric, model)
            bits = _mean_weight_bits(model)
            if self.goal.speedup is not None:
                gain = speed(model, self.batches[0], self.goal.time).gain
        except _OutOfTime:
            error = _ENDED
        except TorchqError as reason:
            error = str(reason)
        trial = replace(
            trial,
            metric=metric,
            mean_bits=bits,
            seconds=monotonic() - started,
            speedup=gain,
            error=error,
        )
        self.table.append(trial)
        log.debug("tune: %s: %s", trial.change, trial.error or trial.metric)
        if math.isfinite(metric) and (
            self.best is None or self.goal.rank(trial) > self.goal.rank(self.best)
        ):
            self.best = trial
            self.best_made = made
        self.is_over = self._deadline is not None and monotonic() >= self._deadline

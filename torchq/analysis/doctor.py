"""What is wrong with a quantized model, and the call that mends it.

What helps where quantization does damage comes in the order of measurements on nets with trained
weights, the cheapest first: a correction costs one more read of the data, GPTQ some seconds, and a
layer in float its speed for ever.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import attrgetter
from typing import Any

from torch import nn

from torchq.analysis.checks import (
    BYTE,
    CHECKS,
    LEAST_GAIN,
    SEVERITIES,
    Cure,
    Finding,
    Observation,
    Patient,
    Severity,
    damage,
    exceeded,
    observe,
    range_spread,
    ruling_channels,
)
from torchq.analysis.detections import Detections
from torchq.analysis.layers import (
    line_equalized,
    line_with,
    lines_without,
    named_target,
)
from torchq.analysis.outputs import Outputs, compare_outputs, user_metric
from torchq.analysis.sensitivity import SensitivityReport, sensitivity
from torchq.analysis.trials import Trials, has_rounded_weights
from torchq.errors import ConfigError, QuantizationError
from torchq.graph import Forward, call_arguments, call_model
from torchq.nn import TensorQuantizer
from torchq.runtime import runtime_of
from torchq.runtimes.beside_float import speed_line
from torchq.swap import plan_of
from torchq.swap.plan import Decision, Plan
from torchq.utils import (
    device_of,
    kept_batches,
    network_of,
    progress_bar,
    uncompiled,
    unwrapped,
    wrap,
    wrap_code,
)
from torchq.workflow import quantizers, weight_quantizers
from torchq.workflow.correction import uncorrected

_WHERE = "doctor"
_SHOWN = 6  # places of one kind in a printed report
#: Layers that are blamed at most, and the share of the damage that makes them blamed.
_BLAMED, _MOST = 3, 0.5
#: Widths of weights up to which rounding to nearest is what hurts.
_FEW_BITS = 4


@dataclass(frozen=True)
class DoctorReport:
    """All findings, the gravest first; ``print`` it.

    Attributes:
        findings: what was found.
        checks: the kinds that were looked for.
        skipped: kinds that need batches, where none were given.
        outputs: what quantization does to the outputs; None without batches or with errors.
        cures: what helps where that is damage, the cheapest first.
        share: how much of the model is quantized, as its plan says.
        speed: how fast and how large it is on its runtime, beside the float model; may be empty.
    """

    findings: tuple[Finding, ...]
    checks: tuple[str, ...]
    skipped: tuple[str, ...] = ()
    outputs: Outputs | None = None
    cures: tuple[Cure, ...] = ()
    share: str = ""
    speed: str = ""

    def of(self, severity: Severity) -> tuple[Finding, ...]:
        """Return the findings of one severity."""
        return tuple(
            finding for finding in self.findings if finding.severity == severity
        )

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings of severity error."""
        return self.of("error")

    @property
    def ok(self) -> bool:
        """True without a finding of severity error."""
        return not self.errors

    @property
    def headline(self) -> str:
        """The counts, in one sentence."""
        counts = Counter(finding.severity for finding in self.findings)
        counted = [
            f"{counts[s]} {s}{'s' if counts[s] != 1 and s != 'info' else ''}"
            for s in SEVERITIES
            if counts[s]
        ]
        sentence = (
            f"{', '.join(counted) or 'nothing found'} in {len(self.checks)} checks"
        )
        return sentence + (
            f"; {len(self.skipped)} more checks need batches" if self.skipped else ""
        )

    def __str__(self) -> str:
        lines = [line for line in (self.share, wrap(self.speed)) if line]
        if self.outputs is not None:
            lines.insert(
                0,
                wrap(f"the simulation beside the float model: {self.outputs.evidence}"),
            )
        groups: dict[tuple[str, str, str], list[Finding]] = {}
        for finding in self.findings:
            groups.setdefault(
                (finding.severity, finding.kind, finding.remedy), []
            ).append(finding)
        for (severity, kind, remedy), alike in groups.items():
            lines.append(f"{severity.upper()} {kind}")
            for f in alike[:_SHOWN]:
                lines.append(
                    wrap(f"  {f.name or '(root)'}: {f.evidence}", indent="    ")
                )
            if len(alike) > _SHOWN:
                lines.append(f"  and {len(alike) - _SHOWN} more")
            lines.append(wrap_code(remedy, first="  -> ", indent="     "))
        return "\n".join([*lines, self.headline])


@uncompiled()
def doctor(
    model: nn.Module,
    batches: Iterable[object] | None = None,
    *,
    metric: object = None,
    forward: Forward | None = None,
    num_batches: int | None = 4,
    timed: bool = True,
    strict: bool = False,
    progress: bool = True,
) -> DoctorReport:
    """Look for the mistakes that are usual with quantized models.

    Args:
        model: quantized; left unchanged.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
            Without them the checks that need a run are left out. They are kept in memory.
        metric: what says how far outputs are damaged: ``metric(output, batch)``, ``metric(model)``,
            larger for a better model; ``"detections"`` or a :class:`torchq.analysis.Detections`.
            None compares predictions.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        timed: with batches, time a model for a runtime that is here beside the float model, which
            takes an export of both.
        strict: raise an error if there is a finding of severity error.
        progress: show a bar.

    Returns:
        The findings, each with the call that mends it; ``print`` it.

    Raises:
        ConfigError: The model has no quantizer, or the metric is none of these.
        CalibrationError: ``batches`` holds none, or nothing that the float model detects.
        QuantizationError: With ``strict``, there is a finding of severity error.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4))
        >>> swapped = torchq.quantize_(model)
        >>> [finding.kind for finding in torchq.doctor(model).errors]
        ['uncalibrated', 'uncalibrated']
    """
    model = network_of(model)
    model = unwrapped(model)
    user_metric(_WHERE, metric)
    sample_batches = (
        None if batches is None else kept_batches(_WHERE, batches, num_batches)
    )
    options: dict[str, Any] = {"forward": forward, "progress": progress}
    by_path = known_quantizers(model)
    observation = None
    run = partial(call_model, model, forward=forward, device=device_of(model))
    if sample_batches is not None:
        observation = observe(
            model,
            by_path,
            progress_bar(sample_batches, description=_WHERE, enabled=progress),
            run,
        )
    report = examine(
        model,
        observation,
        lambda: compare_outputs(model, sample_batches or (), metric, **options),
        lambda: ranking_of(model, sample_batches or (), metric, **options),
        Trials(model, sample_batches or (), forward),
    )
    if timed and sample_batches and report.ok and forward is None:
        args, kwargs = call_arguments(model, sample_batches[0])
        report = replace(report, speed=speed_line(model, kwargs or args))
    if strict and not report.ok:
        mismatch = f"got {len(report.errors)} errors; expected none"
        raise QuantizationError(f"{_WHERE}: {mismatch}\n{report}")
    return report


def known_quantizers(model: nn.Module) -> dict[str, TensorQuantizer]:
    """Return the quantizers of a model by path; an error says that it has none."""
    by_path = quantizers(model)
    if not by_path:
        raise ConfigError(
            f"{_WHERE}: {type(model).__name__} has no quantizer; expected a quantized model. "
            "Run torchq.quantize_(model) first"
        )
    return by_path


def examine(
    model: nn.Module,
    seen: Observation | None,
    outputs: Callable[[], Outputs],
    ranking: Callable[[], SensitivityReport],
    trials: Trials,
) -> DoctorReport:
    """Return the report of :func:`doctor`; what costs time is called if it is needed."""
    by_path = known_quantizers(model)
    patient = Patient(model, by_path, weight_quantizers(model), seen)
    rulings = ruling_channels(patient)
    if rulings:
        patient = replace(patient, healed=trials.healings(rulings))
    chosen = [
        kind for kind in CHECKS if seen is not None or not CHECKS[kind].needs_batches
    ]
    findings = [
        Finding(kind, *row) for kind in chosen for row in CHECKS[kind].find(patient)
    ]
    # An error is mended first: what it does to the outputs says nothing of the rest.
    if seen is not None and all(finding.severity != "error" for finding in findings):
        compared = outputs()
        patient = replace(patient, outputs=compared)
        if compared.grade != "good" and (
            compared.comparable or compared.score is not None
        ):
            shares = damage_shares(ranking())
            even_inputs = trials.even_inputs(seen, shares)
            patient = replace(patient, even_inputs=even_inputs)
            if blamed := culprits(shares):
                gain = trials.gain_in_float(blamed)
                patient = replace(patient, gain_in_float=gain)
            patient = replace(patient, cures=tuple(cures(patient, shares)))
        findings += [Finding("damage", *row) for row in damage(patient)]
    findings.sort(key=lambda finding: SEVERITIES.index(finding.severity))
    skipped = tuple(kind for kind in CHECKS if kind not in chosen)
    share = plan_of(model).share
    return DoctorReport(
        findings=tuple(findings),
        checks=tuple(chosen),
        skipped=skipped,
        outputs=patient.outputs,
        cures=patient.cures,
        share="" if share is None else str(share),
    )


def ranking_of(
    model: nn.Module, batches: Sequence[Any], metric: Any, **options: Any
) -> SensitivityReport:
    """Rank layers by detections if these are the metric, by the estimate for classes, or noise."""
    if metric == Detections.name or isinstance(metric, Detections):
        return sensitivity(model, batches, metric, **options)
    try:
        return sensitivity(model, batches, "fisher", **options)
    except (ConfigError, RuntimeError):  # no classes, or a forward without gradients
        return sensitivity(model, batches, "sqnr", **options)


def damage_shares(ranking: SensitivityReport) -> dict[str, float]:
    """Return each layer's share of the damage that all do one by one; the shares add up to 1.

    Errors of different layers are independent, so that divergences and powers of noise add up.
    """
    harms = ranking.harms()
    # These layers leave nothing of the output.
    if any(map(math.isnan, harms.values())):
        harms = {name: float(math.isnan(harm)) for name, harm in harms.items()}
    total = sum(harms.values())
    return {name: harm / total if total else 0.0 for name, harm in harms.items()}


def culprits(shares: dict[str, float]) -> list[str]:
    """Return the layers to exclude: the fewest that do half of the damage, if three or fewer do."""
    worst_layers = []
    together = 0.0
    for name, share in list(shares.items())[:_BLAMED]:
        worst_layers.append(name)
        together += share
        if together >= _MOST:
            return worst_layers
    return []


def cures(patient: Patient, shares: dict[str, float]) -> list[Cure]:
    """Return what helps, the cheapest first; ``shares`` is what :func:`damage_shares` returned.

    Where few layers do most of the damage, only what helps these counts.
    """
    plan = plan_of(patient.model)
    blamed = culprits(shares)
    layers = [d for d in plan.replaced if d.weight is not None]
    hurt = [d for d in layers if not blamed or set(d.names) & set(blamed)]
    names = {name for d in hurt for name in d.names}
    rounded = has_rounded_weights(patient.model)
    candidates = [
        _recalibrate(patient, rounded),
        _even_channels(patient),
        _wide_inputs(plan, layers),
        _grid(patient, plan, names),
    ]
    few = [d for d in hurt if _bits(d) <= _FEW_BITS]
    if few and not rounded:
        advice = (
            f"Weights of {_bits(few[0])} bits are rounded to nearest: gptq_ rounds them for the "
            "least error of the results, which takes seconds to minutes."
        )
        candidates.append(Cure(advice, "torchq.ptq.gptq_(model, batches)"))
    candidates.append(_ends(plan, layers, names))
    unequal = sorted(
        names & {path.rpartition(".")[0] for _, path, _, _ in range_spread(patient)}
    )
    if unequal:
        advice = (
            f"{joined_names(unequal[:_BLAMED])}: one scale for channels of very different "
            "size."
        )
        candidates.append(Cure(advice, line_equalized(plan.target)))
    # What is not finite says nothing; the share is an estimate.
    helps = not patient.gain_in_float < LEAST_GAIN
    if blamed and helps:
        share = sum(shares[name] for name in blamed)
        advice = (
            f"Leave {joined_names(blamed)} in float, which takes away {share:.0%} of the "
            f"damage{_measured(patient.gain_in_float)}."
        )
        candidates.append(Cure(advice, lines_without(blamed)))
    return [cure for cure in candidates if cure is not None]


def _measured(gain: float) -> str:
    """Return what was measured, as the end of a sentence with an estimate; "" for nothing."""
    if not math.isfinite(gain):
        return ""
    return f" by estimate; measured, the outputs come {gain:.1f} dB nearer to float"


def _even_channels(patient: Patient) -> Cure | None:
    """Return the cure for channels of unequal size, where it was seen to help."""
    wanted = [h.even for h in patient.healed.values() if h.wants_even_channels]
    if patient.even_inputs is not None and patient.even_inputs.helps:
        wanted.append(patient.even_inputs)
    even = max(
        (e for e in wanted if e is not None), key=attrgetter("gain"), default=None
    )
    if even is None:
        return None
    advice = (
        "Channels that differ in size share one range. Made even, they bring the outputs "
        f"{even.gain:.1f} dB nearer to float on these batches, to {even.evened:.1f} dB, and all "
        "codes keep their width."
    )
    return Cure(advice, even.line(patient.target))


def _recalibrate(patient: Patient, rounded: bool) -> Cure | None:
    off = exceeded(patient)
    few = 0
    if not (
        off or rounded or any(q.descriptor.learn_amax for q in patient.active.values())
    ):
        few = len(uncorrected(patient.model))
    if off:
        advice = (
            f"The range of {joined_names(off[:_BLAMED])} does not fit these values: "
            "calibrate on data of the task."
        )
    elif few:
        advice = (
            f"The results of {few} layers were never corrected: calibrate "
            "does so, unless the model was trained with these ranges."
        )
    else:
        return None
    return Cure(advice, "torchq.calibrate(model, batches, force=True)")


def _wide_inputs(plan: Plan, layers: Sequence[Decision]) -> Cure | None:
    """Return the cure of chips that compute on integers alone: activations of more bits."""
    runtime = runtime_of(plan.target)
    bits = BYTE if runtime is None else runtime.widest_inputs
    widest = max((_bits(d, "input") for d in layers), default=bits)
    if bits == BYTE or widest >= bits:
        return None
    advice = (
        f"{plan.target} takes activations of {bits} bits, which are rounded "
        f"{2 ** (bits - BYTE)} times as finely; weights keep their 8 bits."
    )
    recipe = f"torchq.recipes.w8a{bits}()"
    return Cure(advice, line_with(recipe, plan.target))


def _grid(patient: Patient, plan: Plan, names: set[str]) -> Cure | None:
    """Return the cure for signed codes of inputs without negative values."""
    samples = {} if patient.seen is None else patient.seen.samples
    one_signed = set()
    for path, quantizer in patient.active.items():
        sample = samples.get(id(quantizer))
        is_input = id(quantizer) not in patient.weights
        if (
            is_input
            and sample is not None
            and sample.low >= 0
            and _has_signed_codes(quantizer)
        ):
            one_signed.add(path.rpartition(".")[0])
    few = len(names & one_signed)
    if plan.target is not None or not few:
        return None
    read = (
        "An input without negative values has"
        if few == 1
        else f"{few} inputs without negative values have"
    )
    advice = (
        f"{read} signed codes, of which half are wasted: a "
        "target, such as this one, chooses the codes for the values, where it has such codes."
    )
    return Cure(advice, line_with(f"config, {named_target()}"))


def _has_signed_codes(quantizer: TensorQuantizer) -> bool:
    """Return True for codes whose negative half another sign could use; training keeps its own."""
    d = quantizer.descriptor
    return d.format.is_integer and d.symmetric and not d.unsigned and not d.learn_amax


def _ends(plan: Plan, layers: Sequence[Decision], hurt: set[str]) -> Cure | None:
    """Return the cure for a first or last layer that does harm in fewer than 8 bits."""
    narrow = []
    for decision in (*layers[:1], *layers[-1:]):
        bits = min(_bits(decision), _bits(decision, "input"))
        if bits < BYTE and set(decision.names) & hurt:
            narrow.append(decision.name or "(root)")
    if not narrow:
        return None
    advice = (
        f"{joined_names(list(dict.fromkeys(narrow)))}: the first and last layer are few and "
        "sensitive, and want 8 bits."
    )
    return Cure(advice, line_with(f"config.with_ends({BYTE})", plan.target))


def _bits(decision: Decision, slot: str = "weight") -> int:
    """Return the width of integer codes; 8 for what has none."""
    descriptor = decision.descriptors.get(slot)
    if descriptor is None or not descriptor.format.is_integer:
        return BYTE
    return descriptor.format.bits


def joined_names(names: Sequence[str]) -> str:
    """Return names as a list in a sentence."""
    shown = [name or "(root)" for name in names]
    if len(shown) < 2:
        return "".join(shown)
    return f"{', '.join(shown[:-1])} and {shown[-1]}"

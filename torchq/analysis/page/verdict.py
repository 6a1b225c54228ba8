"""The state of a model in a few sentences, for a reader who never saw the figures."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torchq.analysis.checks import Finding
from torchq.analysis.doctor import DoctorReport
from torchq.analysis.layer_errors import LayerErrors
from torchq.analysis.metrics import decibel_text
from torchq.analysis.sensitivity import SensitivityReport

#: Share of equal predictions from which on a model is good, and from which on it is usable.
_AGREEMENT = (0.99, 0.95)
#: The same for the ratio of signal to noise at the output, where there are no classes.
_RATIO = (30.0, 20.0)
_GRADES = ("good", "fair", "poor")
#: Predictions below which their agreement says little.
_FEW = 100
#: Layers that are blamed at most, and the share of the damage that makes them blamed.
_BLAMED, _MOST = 3, 0.5


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
    """

    sqnr: float
    agreement: float | None
    predictions: int
    metric: str = ""
    float_score: float | None = None
    score: float | None = None


def damage_shares(ranking: SensitivityReport) -> dict[str, float]:
    """Return each layer's share of the damage that all do one by one; the shares add up to 1.

    Errors of different layers are independent, so that divergences and powers of noise add up.
    """
    values = [row.value for row in ranking.rows]
    harms = [10 ** (-v / 10) for v in values] if ranking.unit == "dB" else values
    if any(map(math.isnan, harms)):  # These layers leave nothing of the output.
        harms = [float(math.isnan(harm)) for harm in harms]
    total = sum(harms)
    names = [row.name for row in ranking.rows]
    return {n: harm / total if total else 0.0 for n, harm in zip(names, harms, strict=True)}


def culprits(ranking: SensitivityReport) -> list[str]:
    """Return the layers to exclude: the fewest that do half of the damage, if three or fewer do."""
    found, together = [], 0.0
    for name, share in list(damage_shares(ranking).items())[:_BLAMED]:
        found.append(name)
        together += share
        if together >= _MOST:
            return found
    return []


def verdict(
    outputs: Outputs, errors: LayerErrors, ranking: SensitivityReport, examined: DoctorReport
) -> dict[str, Any]:
    """Return ``grade`` ("good", "fair" or "poor"), ``sentence``, ``blame`` (which layers and why).

    ``advice`` holds sentences with the call, the most useful first.
    """
    grade = _grade(outputs, examined)
    if math.isnan(outputs.sqnr):
        return _not_finite(grade, errors, examined)
    return {
        "grade": grade,
        "sentence": _sentence(outputs, grade),
        "blame": _blame(errors, ranking),
        "advice": _advice(grade, ranking, examined),
    }


def _not_finite(grade: str, errors: LayerErrors, examined: DoctorReport) -> dict[str, Any]:
    """Return the verdict on a model that returns NaN or infinity, which says nothing of others."""
    first = errors.first_not_finite
    where = "" if first is None else f", and {first.name or '(root)'} is the first layer to do so"
    text = "Look at its weight, its bias and what it is given, then measure again."
    advice = [*_repairs(examined), {"text": text, "code": ""}]
    sentence = f"The model returns NaN or infinity for these batches{where}."
    return {"grade": grade, "sentence": sentence, "blame": "", "advice": advice}


def _grade(outputs: Outputs, examined: DoctorReport) -> str:
    if not examined.ok or math.isnan(outputs.sqnr):
        return "poor"
    by_ratio = sum(outputs.sqnr < bound for bound in _RATIO)
    if outputs.agreement is None:
        return _GRADES[by_ratio]
    by_agreement = sum(outputs.agreement < bound for bound in _AGREEMENT)
    if outputs.predictions < _FEW:
        by_agreement = max(by_agreement, min(by_ratio, 1))
    return _GRADES[by_agreement]


def _sentence(outputs: Outputs, grade: str) -> str:
    effect = {
        "good": "Quantization hardly changes this model",
        "fair": "Quantization changes this model noticeably",
        "poor": "Quantization damages this model",
    }[grade]
    if outputs.score is not None and outputs.float_score is not None:
        return f"{effect}: {outputs.metric} {outputs.float_score:.4g} becomes {outputs.score:.4g}."
    if outputs.agreement is not None:
        count = f"{outputs.predictions:,} predictions"
        text = f"{outputs.agreement:.1%} of {count} are those of the float model"
        if outputs.predictions < _FEW:
            ratio = decibel_text(outputs.sqnr)
            return f"{effect}: signal to noise is {ratio}; {text}, too few to be sure."
        return f"{effect}: {text}."
    return f"{effect}: signal to noise at its output is {decibel_text(outputs.sqnr)}."


def _blame(errors: LayerErrors, ranking: SensitivityReport) -> str:
    """Return the sentence that says which layers do the damage, and how much of it."""
    shares, names = damage_shares(ranking), culprits(ranking)
    if not shares:
        return ""
    if names:
        parts = [f"{name or '(root)'} ({shares[name]:.0%})" for name in names]
        text = f"Most of the damage at the output comes from {_and(parts)}"
    else:
        name, share = next(iter(shares.items()))
        text = f"No single layer is to blame: the worst of {len(shares)}, {name}, does {share:.0%} "
        text += "of the damage at the output"
    noisiest = [row for row in errors.worst[:1] if row.name not in list(shares)[:_BLAMED]]
    for row in noisiest:
        ratio = decibel_text(row.local_sqnr)
        text += f". {row.name or '(root)'} makes the largest error by itself ({ratio}), "
        text += "but the output bears it better"
    return text + "."


def _advice(grade: str, ranking: SensitivityReport, examined: DoctorReport) -> list[dict[str, str]]:
    found = _repairs(examined)
    names, shares = culprits(ranking), damage_shares(ranking)
    if grade == "good" and not found:
        found.append({"text": "Nothing needs to be done: export or deploy it.", "code": ""})
    if names:
        share = sum(shares[name] for name in names)
        text = f"Leave {_and(names)} in float, which takes away {share:.0%} of the damage."
        if grade == "good":
            text = f"To come closer still, leave {_and(names)} in float: {share:.0%} of the "
            text += "little damage is done there."
        code = f"torchq.quantize_(model, config, exclude={names!r})"
        found.append({"text": text, "code": code})
    if grade != "good":
        text = "Or give each layer its own format under a budget."
        if not names:
            text = "Give each layer its own format under a budget, as many layers do the damage."
        code = 'config = torchq.mixed_precision(model, batches, budget={"mean_bits": 6})'
        found.append({"text": text, "code": code})
    return found


def _repairs(examined: DoctorReport) -> list[dict[str, str]]:
    """Return what mends the doctor's errors, those with one remedy together."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in examined.errors:
        alike.setdefault((finding.kind, finding.remedy), []).append(finding)
    found = []
    for (_, remedy), findings in list(alike.items())[:3]:
        where = findings[0].name or "the model"
        others = f" So it is at {len(findings) - 1} more places." if len(findings) > 1 else ""
        text = f"Mend {where}: it {findings[0].evidence}.{others}"
        found.append({"text": text, "code": remedy})
    return found


def _and(names: list[str]) -> str:
    shown = [name or "(root)" for name in names]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)

"""The state of a model in a few sentences, for a reader who never saw the figures."""

import math
from typing import Any

from torchq.analysis.checks import Finding
from torchq.analysis.cures import culprits, damage_shares, joined_names
from torchq.analysis.doctor import DoctorReport
from torchq.analysis.layer_errors import LayerErrors
from torchq.analysis.metrics import decibel_text
from torchq.analysis.outputs import Outputs
from torchq.analysis.sensitivity import SensitivityReport

#: Layers whose rank makes it no surprise that their own error is large.
_BLAMED = 3
_EFFECTS = {
    "good": "Quantization hardly changes this model",
    "fair": "Quantization changes this model noticeably",
    "poor": "Quantization damages this model",
}


def verdict(
    outputs: Outputs, errors: LayerErrors, ranking: SensitivityReport, examined: DoctorReport
) -> dict[str, Any]:
    """Return ``grade`` ("good", "fair" or "poor"), ``sentence``, ``blame`` (which layers and why).

    ``advice`` holds sentences with the call, the most useful first.
    """
    grade = outputs.grade if examined.ok else "poor"
    if math.isnan(outputs.sqnr) and outputs.comparable:
        return _not_finite(grade, errors, examined)
    return {
        "grade": grade,
        "sentence": f"{_EFFECTS[grade]}: {outputs.evidence}.",
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


def _blame(errors: LayerErrors, ranking: SensitivityReport) -> str:
    """Return the sentence that says which layers do the damage, and how much of it."""
    shares = damage_shares(ranking)
    names = culprits(shares)
    if not shares:
        return ""
    if names:
        parts = [f"{name or '(root)'} ({shares[name]:.0%})" for name in names]
        text = f"Most of the damage at the output comes from {joined_names(parts)}"
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
    found = _repairs(examined) + [vars(cure) for cure in examined.cures]
    if grade == "good":
        if not found:
            found.append({"text": "Nothing needs to be done: export or deploy it.", "code": ""})
        shares = damage_shares(ranking)
        if names := culprits(shares):
            share = sum(shares[name] for name in names)
            text = f"To come closer still, leave {joined_names(names)} in float: {share:.0%} of "
            text += "the little damage is done there."
            code = f"torchq.quantize_(model, config, exclude={names!r})"
            found.append({"text": text, "code": code})
        return found
    if not examined.ok:
        return found
    text = f"{'Or give' if found else 'Give'} each layer its own format under a budget."
    code = 'config = torchq.mixed_precision(model, batches, budget={"mean_bits": 6})'
    return [*found, {"text": text, "code": code}]


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

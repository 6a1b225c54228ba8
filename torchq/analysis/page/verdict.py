"""The state of a model in a few sentences, for a reader who never saw the figures."""

from __future__ import annotations

import math
from typing import Any

from torchq.analysis.diagnosis import DoctorReport, Finding
from torchq.analysis.layer_errors import LayerErrors
from torchq.analysis.page.outputs import Outputs
from torchq.analysis.ranking import SensitivityReport
from torchq.analysis.tables import decibel_text

__all__ = ["verdict"]

#: Share of equal predictions from which on a model is good, and from which on it is usable.
_AGREEMENT = (0.99, 0.95)
#: The same for the ratio of signal to noise at the output, where there are no classes.
_RATIO = (30.0, 20.0)
_GRADES = ("good", "fair", "poor")


def verdict(
    outputs: Outputs, errors: LayerErrors, ranking: SensitivityReport, examined: DoctorReport
) -> dict[str, Any]:
    """Return the grade, the sentence, and what to do first.

    Returns:
        ``grade``: "good", "fair" or "poor"; ``sentence``; ``blame``: which layers and why;
        ``advice``: sentences with the call, the most useful first.
    """
    grade = _grade(outputs, examined)
    return {
        "grade": grade,
        "sentence": _sentence(outputs, grade),
        "blame": _blame(errors, ranking),
        "advice": _advice(grade, ranking, examined),
    }


def _grade(outputs: Outputs, examined: DoctorReport) -> str:
    if not examined.ok or math.isnan(outputs.sqnr):
        return "poor"
    value, bounds = outputs.sqnr, _RATIO
    if outputs.agreement is not None:
        value, bounds = outputs.agreement, _AGREEMENT
    return _GRADES[sum(value < bound for bound in bounds)]


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
        return f"{effect}: {outputs.agreement:.1%} of {count} are those of the float model."
    return f"{effect}: signal to noise at its output is {decibel_text(outputs.sqnr)}."


def _blame(errors: LayerErrors, ranking: SensitivityReport) -> str:
    names = ranking.worst(2)
    if not names:
        return ""
    text = f"{_and(names)} {'hurts' if len(names) == 1 else 'hurt'} the output most"
    born = {row.name: row.local_sqnr for row in errors.rows}
    known = [decibel_text(born[name]) for name in names if name in born]
    if known:
        text += f" ({_and(known)} when quantized alone, before anything else adds to it)"
    others = [row.name or "(root)" for row in errors.worst[:1] if row.name not in names]
    if others:
        text += f"; the noisiest layer by itself is {others[0]}, which the output bears better"
    return text + "."


def _advice(grade: str, ranking: SensitivityReport, examined: DoctorReport) -> list[dict[str, str]]:
    found = []
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in examined.errors:
        alike.setdefault((finding.kind, finding.remedy), []).append(finding)
    for (_, remedy), findings in list(alike.items())[:3]:
        where = findings[0].name or "the model"
        others = f" So it is at {len(findings) - 1} more places." if len(findings) > 1 else ""
        text = f"Mend {where}: it {findings[0].evidence}.{others}"
        found.append({"text": text, "code": remedy})
    if grade != "good":
        names = ranking.worst(2)
        found.append(
            {
                "text": f"Leave {_and(names)} in float, which takes away the largest part of the "
                "damage.",
                "code": f"torchq.quantize_(model, config, exclude={names!r})",
            }
        )
        found.append(
            {
                "text": "Or give each layer its own format under a budget.",
                "code": 'config = torchq.mixed_precision(model, batches, budget={"mean_bits": 6})',
            }
        )
    if not found:
        found.append({"text": "Nothing needs to be done: export or deploy it.", "code": ""})
    return found


def _and(names: list[str]) -> str:
    return " and ".join(name or "(root)" for name in names)

"""What helps a model that quantization damages: the cheapest cure first, float layers last.

The order is that of measurements on nets with trained weights: a correction costs one more read of
the data, GPTQ some seconds, and a layer in float its speed for ever.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torchq.analysis.sensitivity import SensitivityReport
from torchq.swap.plan import Decision, Plan

#: Layers that are blamed at most, and the share of the damage that makes them blamed.
_BLAMED, _MOST = 3, 0.5
#: Widths of weights up to which rounding to nearest is what hurts.
_FEW_BITS = 4
_BYTE = 8


@dataclass(frozen=True)
class Cure:
    """One thing to do: a sentence with the reason, and the call."""

    text: str
    code: str


@dataclass(frozen=True)
class Figures:
    """What was measured of a quantized model.

    Attributes:
        shares: path of each layer -> its share of the damage, the largest first.
        off: quantizers of inputs whose values do not fit their ranges.
        uncorrected: layers whose results :func:`torchq.calibrate` could correct and did not.
        one_signed: layers whose input has signed codes and no negative value.
        rounded: layers whose weights lie on their grids, as ``gptq_`` leaves them.
        unequal: layers with one scale for channels of very different size.
    """

    shares: dict[str, float]
    off: Sequence[str] = ()
    uncorrected: Sequence[str] = ()
    one_signed: Sequence[str] = ()
    rounded: Sequence[str] = ()
    unequal: Sequence[str] = ()


def damage_shares(ranking: SensitivityReport) -> dict[str, float]:
    """Return each layer's share of the damage that all do one by one; the shares add up to 1.

    Errors of different layers are independent, so that divergences and powers of noise add up.
    """
    values = [row.value for row in ranking.rows]
    if ranking.unit == "dB":
        harms = [10 ** (-v / 10) for v in values]
    elif ranking.reference is not None and ranking.rising:
        harms = [max(ranking.reference - v, 0.0) for v in values]
    else:
        harms = values
    if any(map(math.isnan, harms)):  # These layers leave nothing of the output.
        harms = [float(math.isnan(harm)) for harm in harms]
    total = sum(harms)
    names = [row.name for row in ranking.rows]
    return {n: harm / total if total else 0.0 for n, harm in zip(names, harms, strict=True)}


def culprits(shares: dict[str, float]) -> list[str]:
    """Return the layers to exclude: the fewest that do half of the damage, if three or fewer do."""
    found, together = [], 0.0
    for name, share in list(shares.items())[:_BLAMED]:
        found.append(name)
        together += share
        if together >= _MOST:
            return found
    return []


def cures(plan: Plan, seen: Figures) -> list[Cure]:
    """Return what helps, the cheapest first.

    Where few layers do most of the damage, only what helps these counts.

    Args:
        plan: of the quantized model; see :func:`torchq.swap.plan_of`.
        seen: what was measured.
    """
    blamed = culprits(seen.shares)
    layers = [d for d in plan.replaced if d.weight is not None]
    hurt = [d for d in layers if not blamed or set(d.names) & set(blamed)]
    names = {name for d in hurt for name in d.names}
    found = [_recalibrate(seen), _grid(plan, names & set(seen.one_signed))]
    few = [d for d in hurt if _bits(d) <= _FEW_BITS]
    if few and not seen.rounded:
        text = f"Weights of {_bits(few[0])} bits are rounded to nearest: gptq_ rounds them for the "
        text += "least error of the results, which takes seconds to minutes."
        found.append(Cure(text, "torchq.ptq.gptq_(model, batches)"))
    found.append(_ends(layers, names))
    unequal = sorted(names & set(seen.unequal))
    if unequal:
        text = f"{joined_names(unequal[:_BLAMED])}: one scale for channels of very different size."
        found.append(Cure(text, "torchq.ptq.equalize_(model, example) before torchq.calibrate"))
    if blamed:
        share = sum(seen.shares[name] for name in blamed)
        text = f"Leave {joined_names(blamed)} in float, which takes away {share:.0%} of the damage."
        found.append(Cure(text, f"torchq.quantize_(model, config, exclude={blamed!r})"))
    return [cure for cure in found if cure is not None]


def _recalibrate(seen: Figures) -> Cure | None:
    if seen.off:
        text = f"The range of {joined_names(seen.off[:_BLAMED])} does not fit these values: "
        text += "calibrate on data of the task."
    elif seen.uncorrected and not seen.rounded:
        text = f"The results of {len(seen.uncorrected)} layers were never corrected: calibrate "
        text += "does so, unless the model was trained with these ranges."
    else:
        return None
    return Cure(text, "torchq.calibrate(model, batches, force=True)")


def _grid(plan: Plan, one_signed: set[str]) -> Cure | None:
    if plan.target is not None or not one_signed:
        return None
    few = len(one_signed)
    text = f"{few} inputs without negative values have signed codes, of which half are wasted: a "
    text += "target chooses the codes for the values, where it has such codes."
    return Cure(text, "torchq.quantize_(model, config, target=..., example=example)")


def _ends(layers: Sequence[Decision], hurt: set[str]) -> Cure | None:
    """Return the cure for a first or last layer that does harm in fewer than 8 bits."""
    ends = [d for d in (*layers[:1], *layers[-1:]) if set(d.names) & hurt]
    narrow = [d.name or "(root)" for d in ends if min(_bits(d), _bits(d, "input")) < _BYTE]
    if not narrow:
        return None
    text = f"{joined_names(list(dict.fromkeys(narrow)))}: the first and last layer are few and "
    text += "sensitive, and want 8 bits."
    return Cure(text, f"torchq.quantize_(model, config.with_ends({_BYTE}))")


def _bits(decision: Decision, slot: str = "weight") -> int:
    """Return the width of integer codes; 8 for what has none."""
    found = decision.descriptors.get(slot)
    return found.format.bits if found is not None and found.format.is_integer else _BYTE


def joined_names(names: Sequence[str]) -> str:
    """Return names as a list in a sentence."""
    shown = [name or "(root)" for name in names]
    return " and ".join([", ".join(shown[:-1]), shown[-1]] if len(shown) > 1 else shown)

"""All figures of a report, as JSON data."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from torchq.analysis.doctor import doctor
from torchq.analysis.layer_errors import LayerErrors, layer_errors
from torchq.analysis.layers import QuantizedLayer, active_quantizers, quantized_layers
from torchq.analysis.metrics import batch_size
from torchq.analysis.mixed_precision import (
    LayerFacts,
    MixedPrecision,
    gather_facts,
    mixed_precision,
)
from torchq.analysis.page.outputs import compare_outputs
from torchq.analysis.page.samples import channel_rows, histogram_rows
from torchq.analysis.page.verdict import culprits, damage_shares, verdict
from torchq.analysis.sensitivity import SensitivityReport, sensitivity
from torchq.analysis.text import plain
from torchq.errors import ConfigError
from torchq.graph import Forward, call_model
from torchq.nn import quantizing_only
from torchq.utils import device_of, untouched, unwrapped
from torchq.version import __version__

_FORMATS = ("w8a8", "w6a6", "w4a8", "w4a4")


def collect(
    model: nn.Module,
    batches: Sequence[Any],
    metric: Any,
    plan: MixedPrecision | bool,
    forward: Forward | None,
    progress: bool,
) -> dict[str, Any]:
    """Measure everything that a report shows; None in the data stands for what is not finite."""
    model = unwrapped(model)
    layers = quantized_layers(model, "report")
    options: dict[str, Any] = {"forward": forward, "progress": progress}
    run = partial(call_model, model, forward=forward, device=device_of(model))
    outputs = compare_outputs(model, batches, metric, **options)
    errors = layer_errors(model, batches, **options)
    ranking = _ranking(model, batches, options)
    examined = doctor(model, batches, **options)
    found_plan, plan_note = _plan(model, batches, plan, options)
    found = histogram_rows(model, layers, batches, run, progress=progress)
    data = {
        "torchq": __version__,
        "torch": torch.__version__,
        "model": type(model).__name__,
        "batches": len(batches),
        "inputs": sum(map(batch_size, batches)),
        "outputs": vars(outputs),
        "verdict": verdict(outputs, errors, ranking, examined),
        "ranking": {
            "metric": ranking.metric,
            "unit": ranking.unit,
            "worst": [name or "(root)" for name in culprits(ranking)],
        },
        "layers": _layer_rows(layers, errors, ranking, _facts(model, layers, run, batches[0])),
        "quantizers": _quantizer_rows(layers, errors, found),
        "channels": channel_rows(layers),
        "findings": [vars(finding) for finding in examined.findings],
        "checks": list(examined.checks),
        "plan": None if found_plan is None else found_plan.summary(),
        "plan_note": plan_note,
    }
    return dict(plain(data, digits=5))


def _ranking(
    model: nn.Module, batches: Sequence[Any], options: dict[str, Any]
) -> SensitivityReport:
    """Rank by the estimate where the model has classes, else by noise."""
    try:
        return sensitivity(model, batches, "fisher", **options)
    except (ConfigError, RuntimeError):  # no classes, or a forward without gradients
        return sensitivity(model, batches, "sqnr", **options)


def _plan(
    model: nn.Module, batches: Sequence[Any], plan: MixedPrecision | bool, options: dict[str, Any]
) -> tuple[MixedPrecision | None, str]:
    if isinstance(plan, MixedPrecision):
        return plan, ""
    if not plan:
        return None, "No plan was asked for: pass plan=True, or a result of torchq.mixed_precision."
    try:
        budget = {"mean_bits": 6.0}
        made = mixed_precision(
            model, batches, budget=budget, formats=_FORMATS, metric="fisher", **options
        )
        return made, ""
    except (ConfigError, RuntimeError) as error:
        return None, f"There is no plan: {error}"


def _facts(
    model: nn.Module, layers: list[QuantizedLayer], run: Any, batch: Any
) -> dict[str, LayerFacts]:
    names = [layer.name for layer in layers]
    with untouched(model), quantizing_only(active_quantizers(model)):
        return gather_facts(model, names, partial(run, batch), batch_size(batch))


def _layer_rows(
    layers: list[QuantizedLayer],
    errors: LayerErrors,
    ranking: SensitivityReport,
    facts: dict[str, LayerFacts],
) -> list[dict[str, Any]]:
    by_name = {layer.name: layer for layer in layers}
    ranked = {row.name: (place, row.value) for place, row in enumerate(ranking.rows, 1)}
    shares = damage_shares(ranking)
    rows = []
    for row in errors.rows:
        place, harm = ranked.get(row.name, (None, None))
        rows.append(
            {
                "name": row.name or "(root)",
                "rank": place,
                "harm": harm,
                "damage": shares.get(row.name, 0.0),
                "kind": row.kind,
                "local_sqnr": row.local_sqnr,
                "sqnr": row.sqnr,
                "local_error": _relative_error(row.local_sqnr),
                "error": _relative_error(row.sqnr),
                "born": row.born,
                "clipped": row.clipped,
                "codes": row.used_codes,
                "dead": row.dead_channels,
                "quantizers": [q.name for q in row.quantizers],
                **_size_row(by_name[row.name], facts[row.name]),
            }
        )
    return rows


def _relative_error(sqnr: float) -> float:
    """Return the size of an error beside the signal, from a ratio in dB: 1 is as large."""
    return float(10 ** (-sqnr / 20))


def _size_row(layer: QuantizedLayer, facts: LayerFacts) -> dict[str, Any]:
    weight_bits, input_bits = (
        min((q.descriptor.format.bits for q in quantizers.values()), default=32)
        for quantizers in (layer.weights, layer.inputs)
    )
    return {
        "weights": facts.weights,
        "weight_bits": weight_bits,
        "input_bits": input_bits,
        "bytes": facts.weights * weight_bits / 8,
        "float_bytes": facts.weights * 4,
        "operations": facts.multiplications,
    }


def _quantizer_rows(
    layers: list[QuantizedLayer], errors: LayerErrors, found: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """Return the rows of histograms with what layer errors know of the same quantizers."""
    known = {q.name: q for row in errors.rows for q in row.quantizers}
    weights = {path for layer in layers for path in layer.weights}
    return {
        path: {
            **row,
            "descriptor": known[path].descriptor,
            "is_weight": path in weights,
            "clipped": known[path].clipped,
            "codes": known[path].used_codes,
            "all_codes": known[path].codes,
            "dead": known[path].dead_channels,
            "channels": known[path].channels,
            "sqnr": known[path].sqnr,
        }
        for path, row in found.items()
        if path in known
    }

"""All figures of a report, as JSON data, and the state of the model in a few sentences."""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.analysis.checks import Finding, Sample, observe
from torchq.analysis.doctor import (
    DoctorReport,
    culprits,
    damage_shares,
    examine,
    joined_names,
    ranking_of,
)
from torchq.analysis.layer_errors import LayerErrors, layer_errors
from torchq.analysis.layers import (
    QuantizedLayer,
    active_quantizers,
    channel_axes,
    line_of_formats,
    lines_without,
    quantized_layers,
)
from torchq.analysis.mixed_precision import (
    LayerFacts,
    MixedPrecision,
    gather_facts,
    mixed_precision,
)
from torchq.analysis.outputs import (
    Outputs,
    batch_size,
    compare_outputs,
    decibel_text,
    plain,
)
from torchq.analysis.sensitivity import SensitivityReport
from torchq.analysis.trials import Trials
from torchq.calib import Calibrator
from torchq.errors import CalibrationError, ConfigError, TorchqError
from torchq.formats import PerTensor
from torchq.graph import Forward, call_arguments, call_model
from torchq.nn import QuantModule, TensorQuantizer, switched_off
from torchq.nn.convert import float_name
from torchq.runtime import planned_runtime, planned_target
from torchq.runtimes.beside_float import speed
from torchq.runtimes.timing import can_be_timed
from torchq.utils import device_of, network_of, progress_bar, untouched, unwrapped
from torchq.version import __version__
from torchq.workflow import quantizers

_FORMATS = ("w8a8", "w6a6", "w4a8", "w4a4")
_METHODS = ("max", "percentile", "mse", "entropy")
_BINS = 96
#: Channels that a chart shows; more are put together.
_CHANNELS = 128
#: Layers whose rank makes it no surprise that their own error is large.
_BLAMED = 3
_EFFECTS = {
    "good": "Quantization hardly changes this model",
    "fair": "Quantization changes this model noticeably",
    "poor": "Quantization damages this model",
}


def collect(
    model: nn.Module,
    batches: Sequence[object],
    metric: object,
    plan: MixedPrecision | bool,
    forward: Forward | None,
    timed: bool,
    progress: bool,
) -> dict[str, Any]:
    """Measure everything that a report shows; None in the data stands for what is not finite."""
    model = network_of(model)
    model = unwrapped(model)
    layers = quantized_layers(model, "report")
    options: dict[str, Any] = {"forward": forward, "progress": progress}
    run = partial(call_model, model, forward=forward, device=device_of(model))
    outputs = compare_outputs(model, batches, metric, **options)
    errors = layer_errors(model, batches, **options)
    ranking = ranking_of(model, batches, metric, **options)
    shown = progress_bar(batches, description="values", enabled=progress)
    observation = observe(model, quantizers(model), shown, run)
    examined = examine(
        model,
        observation,
        lambda: outputs,
        lambda: ranking,
        Trials(model, batches, forward),
    )
    worst = [name or "(root)" for name in culprits(damage_shares(ranking))]
    found_plan, plan_note = _plan(model, batches, plan, options)
    histograms = _histogram_rows(
        layers, {} if observation is None else observation.samples, progress
    )
    rows = _layer_rows(layers, errors, ranking, _facts(model, layers, batches[0], run))
    data = {
        "torchq": __version__,
        "torch": torch.__version__,
        "model": float_name(model),
        "batches": len(batches),
        "inputs": sum(map(batch_size, batches)),
        "outputs": vars(outputs),
        "verdict": verdict(outputs, errors, ranking, examined, _mean_weight_bits(rows)),
        "share": examined.share,
        **_on_target(
            model, batches[0], timed=timed and examined.ok and forward is None
        ),
        "ranking": {"metric": ranking.metric, "unit": ranking.unit, "worst": worst},
        "layers": rows,
        "quantizers": _quantizer_rows(layers, errors, histograms),
        "channels": dict(_channel_rows(layers)),
        "findings": [vars(finding) for finding in examined.findings],
        "checks": list(examined.checks),
        "plan": None if found_plan is None else found_plan.summary(),
        "plan_note": plan_note,
    }
    return dict(plain(data, digits=5))


def _on_target(model: nn.Module, batch: object, *, timed: bool) -> dict[str, Any]:
    """Return the runtime of a model, and how fast and large it is there beside float.

    ``speed`` is None where the model was not timed, and ``speed_note`` says why.
    """
    facts = {"target": planned_target(model) or "", "speed": None, "speed_note": ""}
    if not timed or not can_be_timed(planned_runtime(model)):
        return facts
    args, kwargs = call_arguments(model, batch)
    try:
        measured = speed(model, kwargs or args)
    except TorchqError as error:
        return {**facts, "speed_note": f"not timed: {error}"}
    (float_bytes, quantized_bytes) = measured.bytes
    row = {
        "ms": measured.quantized.median * 1e3,
        "float_ms": measured.in_float.median * 1e3,
        "gain": measured.gain,
        "is_faster": measured.is_faster,
        "bytes": quantized_bytes,
        "float_bytes": float_bytes,
        "call": measured.call,
    }
    return {**facts, "speed": row}


def _facts(
    model: nn.Module,
    layers: list[QuantizedLayer],
    batch: object,
    run: Callable[[Any], object],
) -> dict[str, LayerFacts]:
    """Return sizes and multiplications of layers; the model runs in float on one batch."""
    with untouched(model), switched_off(active_quantizers(model)):
        names = [layer.name for layer in layers]
        return gather_facts(model, names, partial(run, batch), batch_size(batch))


def _plan(
    model: nn.Module,
    batches: Sequence[object],
    plan: MixedPrecision | bool,
    options: dict[str, object],
) -> tuple[MixedPrecision | None, str]:
    if isinstance(plan, MixedPrecision):
        return plan, ""
    if not plan:
        return (
            None,
            "No plan was asked for: pass plan=True, or a result of torchq.mixed_precision.",
        )
    search: dict[str, Any] = {
        "budget": {"mean_bits": 6.0},
        "formats": _FORMATS,
        **options,
    }
    try:
        return mixed_precision(model, batches, metric="fisher", **search), ""
    except (ConfigError, RuntimeError) as error:
        return None, f"There is no plan: {error}"


def _layer_rows(
    layers: list[QuantizedLayer],
    errors: LayerErrors,
    ranking: SensitivityReport,
    facts: dict[str, LayerFacts],
) -> list[dict[str, object]]:
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
                "local_error": 10
                ** (-row.local_sqnr / 20),  # beside the signal, which is 1
                "error": 10 ** (-row.sqnr / 20),
                "born": row.born,
                "clipped": row.clipped,
                "codes": row.used_codes,
                "dead": row.dead_channels,
                "quantizers": [q.name for q in row.quantizers],
                **_size_row(by_name[row.name], facts[row.name]),
            }
        )
    return rows


def _size_row(layer: QuantizedLayer, facts: LayerFacts) -> dict[str, object]:
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
    layers: list[QuantizedLayer],
    errors: LayerErrors,
    found: dict[str, dict[str, object]],
) -> dict[str, dict[str, object]]:
    """Return the rows of histograms with what layer errors know of the same quantizers."""
    errors_by_path = {q.name: q for row in errors.rows for q in row.quantizers}
    weights = {path for layer in layers for path in layer.weights}
    return {
        path: {
            **row,
            "descriptor": errors_by_path[path].descriptor,
            "is_weight": path in weights,
            "clipped": errors_by_path[path].clipped,
            "codes": errors_by_path[path].used_codes,
            "all_codes": errors_by_path[path].codes,
            "dead": errors_by_path[path].dead_channels,
            "channels": errors_by_path[path].channels,
            "sqnr": errors_by_path[path].sqnr,
        }
        for path, row in found.items()
        if path in errors_by_path
    }


def _histogram_rows(
    layers: list[QuantizedLayer], samples: dict[int, Sample], progress: bool
) -> dict[str, dict[str, object]]:
    """Return for each quantizer its histogram and every method's amax."""
    quantizer_by_path = {
        path: q for layer in layers for path, q in layer.quantizers.items()
    }
    weights: dict[str, Sample] = {
        path: Sample() for layer in layers for path in layer.weights
    }
    for path, _, quantizer, weight in _weights(layers):
        if weight.numel():
            weights[path].add(quantizer.scaled(weight))
    sample_by_path = {
        path: weights.get(path) or samples.get(id(q), Sample())
        for path, q in quantizer_by_path.items()
    }
    shown = progress_bar(
        sample_by_path.items(), description="ranges", unit="quantizer", enabled=progress
    )
    return {
        path: _row(quantizer_by_path[path], sample, path in weights)
        for path, sample in shown
        if sample.values
    }


def _weights(
    layers: list[QuantizedLayer],
) -> Iterator[tuple[str, QuantModule, TensorQuantizer, Tensor]]:
    """Yield the path of each weight quantizer, its module, itself and the weight."""
    for layer in layers:
        if isinstance(layer.module, QuantModule):
            paths = {id(q): path for path, q in layer.weights.items()}
            for quantizer, weight in layer.module.quantized_weights():
                if id(quantizer) in paths:
                    yield paths[id(quantizer)], layer.module, quantizer, weight


def _row(
    quantizer: TensorQuantizer, sample: Sample, is_weight: bool
) -> dict[str, object]:
    values = torch.cat(sample.values)
    values = values[torch.isfinite(values)]
    low, high = sample.low, sample.high
    row: dict[str, Any] = {"low": low, "high": high, "counts": [], "methods": {}}
    if values.numel() and low < high < float("inf") and low > -float("inf"):
        row["counts"] = torch.histc(values, _BINS, low, high).int().tolist()
    descriptor = quantizer.descriptor
    if quantizer.calibrated and not descriptor.dynamic:
        amax = quantizer.amax.detach().float()
        row["amax"] = [float(amax.min()), float(amax.max())]
    if not is_weight and descriptor.block_size is None and descriptor.axis is None:
        row["methods"] = _methods(quantizer, values, max(-low, high))
    return row


def _methods(
    quantizer: TensorQuantizer, values: Tensor, largest: float
) -> dict[str, float]:
    """Return the amax that each method finds on the sample."""
    amax_by_method = {"max": largest}
    for method in _METHODS[1:]:
        try:
            calibrator = Calibrator(
                method, format=quantizer.descriptor.format, granularity=PerTensor()
            )
            calibrator.collect(values)
            amax_by_method[method] = float(calibrator.range().high)
        except (CalibrationError, ConfigError):
            continue  # A method without an answer for these values has no mark.
    return amax_by_method


def _channel_rows(
    layers: list[QuantizedLayer],
) -> Iterator[tuple[str, list[list[float]]]]:
    """Yield the path of each weight quantizer with the ends of its channels."""
    for path, module, quantizer, weight in _weights(layers):
        if weight.dim() > 1:
            axis = channel_axes(module).get(id(quantizer), (0,))[-1]
            yield path, _channels(quantizer, weight, axis)


@torch.no_grad()
def _channels(
    quantizer: TensorQuantizer, weight: Tensor, axis: int
) -> list[list[float]]:
    """Return the ends of each channel, and those when rounded; of many, neighbours together."""
    axis = axis if axis < weight.dim() else 0
    rounded = quantizer(weight.detach())
    ends = []
    for tensor in (quantizer.scaled(weight.detach()), rounded):
        rows = tensor.movedim(axis, 0).flatten(1).float()
        ends += [rows.amin(1), rows.amax(1)]
    # (channels, 4): low and high of the weight, and low and high when rounded.
    table = torch.stack(ends, 1)
    if len(table) > _CHANNELS:
        is_low = torch.tensor([True, False, True, False], device="cpu")
        merged = []
        for part in table.chunk(_CHANNELS):
            merged.append(torch.where(is_low, part.amin(0).cpu(), part.amax(0).cpu()))
        table = torch.stack(merged)
    return [[float(f"{value:.4g}") for value in row] for row in table.tolist()]


def verdict(
    outputs: Outputs,
    errors: LayerErrors,
    ranking: SensitivityReport,
    examined: DoctorReport,
    weight_bits: float,
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
        "advice": _advice(grade, ranking, examined, weight_bits),
    }


def _not_finite(
    grade: str, errors: LayerErrors, examined: DoctorReport
) -> dict[str, object]:
    """Return the verdict on a model that returns NaN or infinity, which says nothing of others."""
    first = errors.first_not_finite
    where = (
        ""
        if first is None
        else f", and {first.name or '(root)'} is the first layer to do so"
    )
    step = "Look at its weight, its bias and what it is given, then measure again."
    advice = [*_repairs(examined), {"text": step, "code": ""}]
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
        sentence = f"Most of the damage at the output comes from {joined_names(parts)}"
    else:
        name, share = next(iter(shares.items()))
        sentence = (
            f"No single layer is to blame: the worst of {len(shares)}, {name}, does {share:.0%} "
            "of the damage at the output"
        )
    noisiest = [
        row for row in errors.worst[:1] if row.name not in list(shares)[:_BLAMED]
    ]
    for row in noisiest:
        ratio = decibel_text(row.local_sqnr)
        sentence += (
            f". {row.name or '(root)'} makes the largest error by itself ({ratio}), "
            "but the output bears it better"
        )
    return sentence + "."


def _advice(
    grade: str, ranking: SensitivityReport, examined: DoctorReport, weight_bits: float
) -> list[dict[str, str]]:
    steps = _repairs(examined) + [vars(cure) for cure in examined.cures]
    if grade == "good":
        if not steps:
            steps.append(
                {"text": "Nothing needs to be done: export or deploy it.", "code": ""}
            )
        shares = damage_shares(ranking)
        if names := culprits(shares):
            share = sum(shares[name] for name in names)
            step = (
                f"To come closer still, leave {joined_names(names)} in float: {share:.0%} of "
                "the little damage is done there."
            )
            steps.append({"text": step, "code": lines_without(names)})
        return steps
    if not examined.ok:
        return steps
    step = f"{'Or give' if steps else 'Give'} each layer its own format under a budget."
    return [*steps, {"text": step, "code": line_of_formats(weight_bits)}]


def _mean_weight_bits(rows: Sequence[dict[str, Any]]) -> float:
    """Return how many bits the weights of the rows of layers have on average."""
    count = sum(row["weights"] for row in rows)
    return sum(row["weights"] * row["weight_bits"] for row in rows) / max(count, 1)


def _repairs(examined: DoctorReport) -> list[dict[str, str]]:
    """Return what mends the doctor's errors, those with one remedy together."""
    alike: dict[tuple[str, str], list[Finding]] = {}
    for finding in examined.errors:
        alike.setdefault((finding.kind, finding.remedy), []).append(finding)
    steps = []
    for (_, remedy), findings in list(alike.items())[:3]:
        where = findings[0].name or "the model"
        others = (
            f" So it is at {len(findings) - 1} more places."
            if len(findings) > 1
            else ""
        )
        step = f"Mend {where}: it {findings[0].evidence}.{others}"
        steps.append({"text": step, "code": remedy})
    return steps

"""Histograms of what quantizers see, with the range that each calibration method would choose."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from torchq.analysis.layers import QuantizedLayer, active_quantizers, channel_axes, passing
from torchq.calib import make_calibrator
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import PerTensor
from torchq.nn import QuantModule, TensorQuantizer
from torchq.utils import progress_bar, untouched, watching

_METHODS = ("max", "percentile", "mse", "entropy")
_BINS = 96
#: Values of one call that are kept.
_KEPT = 8192
#: Channels that a chart shows; more are put together.
_CHANNELS = 128


@dataclass
class _Sample:
    """Values of one quantizer, and their true ends."""

    values: list[Tensor] = field(default_factory=list)
    low: float = 0.0
    high: float = 0.0

    def add(self, x: Tensor) -> None:
        flat = x.detach().reshape(-1)
        if not flat.numel():
            return
        low, high = torch.aminmax(flat)
        self.low, self.high = min(self.low, float(low)), max(self.high, float(high))
        self.values.append(flat[:: max(1, flat.numel() // _KEPT)].float().cpu().clone())


def histogram_rows(
    model: nn.Module,
    layers: list[QuantizedLayer],
    batches: Iterable[Any],
    run: Callable[[Any], Any],
    *,
    progress: bool,
) -> dict[str, dict[str, Any]]:
    """Return for each quantizer its histogram and the amax of every method, as JSON data.

    The model runs in float; ``run`` calls it on one batch.
    """
    quantizers = {path: q for layer in layers for path, q in layer.quantizers.items()}
    samples = {path: _Sample() for path in quantizers}
    weights = {path for layer in layers for path in layer.weights}
    inputs = [
        (q, partial(_sample, q, samples[path]))
        for path, q in quantizers.items()
        if path not in weights
    ]
    shown = progress_bar(batches, description="histograms", enabled=progress)
    with (
        untouched(model),
        passing(active_quantizers(model)),
        watching(inputs, before=True),
    ):
        for batch in shown:
            run(batch)
    for path, _, _, weight in _weights(layers):
        samples[path].add(weight)
    shown = progress_bar(samples.items(), description="ranges", unit="quantizer", enabled=progress)
    return {
        path: _row(quantizers[path], sample, path in weights)
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


def _sample(q: TensorQuantizer, sample: _Sample, args: Any, kwargs: Any, _: None) -> None:
    """Add one call of a quantizer."""
    scale = q.pre_quant_scale
    sample.add(args[0] if scale is None else args[0] * scale.to(args[0].dtype))


def _row(quantizer: TensorQuantizer, sample: _Sample, is_weight: bool) -> dict[str, Any]:
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


def _methods(quantizer: TensorQuantizer, values: Tensor, largest: float) -> dict[str, float]:
    """Return the amax that each method finds on the sample."""
    found = {"max": largest}
    for method in _METHODS[1:]:
        try:
            calibrator = make_calibrator(
                method, format=quantizer.descriptor.format, granularity=PerTensor()
            )
            calibrator.collect(values)
            found[method] = float(calibrator.range().high)
        except (CalibrationError, ConfigError):
            continue  # A method without an answer for these values has no mark.
    return found


def channel_rows(layers: list[QuantizedLayer]) -> dict[str, list[list[float]]]:
    """Return for each weight quantizer the ends of every channel, before and after rounding.

    A row holds the smallest and the largest weight of a channel, and the same of its rounded
    weights. Neighbouring channels are put together where there are very many.
    """
    return {
        path: _channels(quantizer, weight, channel_axes(module).get(id(quantizer), (0,))[-1])
        for path, module, quantizer, weight in _weights(layers)
        if weight.dim() > 1
    }


@torch.no_grad()
def _channels(quantizer: TensorQuantizer, weight: Tensor, axis: int) -> list[list[float]]:
    axis = axis if axis < weight.dim() else 0
    rounded = quantizer(weight.detach())
    ends = []
    for tensor in (weight.detach(), rounded):
        rows = tensor.movedim(axis, 0).flatten(1).float()
        ends += [rows.amin(1), rows.amax(1)]
    table = torch.stack(ends, 1)
    if len(table) > _CHANNELS:
        parts = table.chunk(_CHANNELS)
        low = torch.tensor([True, False, True, False], device="cpu")
        table = torch.stack([torch.where(low, p.amin(0).cpu(), p.amax(0).cpu()) for p in parts])
    return [[float(f"{value:.4g}") for value in row] for row in table.tolist()]

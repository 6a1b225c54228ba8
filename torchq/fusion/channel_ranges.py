"""How unequal the channels of a model's weights are, before and after fusing.

Unequal channels are what makes a network collapse under quantization.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import torch
from torch import Tensor, nn

from torchq.fusion.modules import TRANSPOSED, is_layer
from torchq.graph import call_model
from torchq.utils import evaluating, table

__all__ = ["LayerRange", "RangeReport", "diagnose_ranges", "peak_of", "spread_of"]

_SHOWN = 10  # the layers of a printed report


def spread_of(layer: nn.Module, weight: Tensor) -> float:
    """Return the largest over the median per-output-channel magnitude of a layer's weight.

    It is 1 where all channels are alike. With one scale for the whole tensor the median channel
    loses ``log2(spread)`` bits. Channels that are all zero do not count.

    Args:
        layer: tells which axis holds the output channels.
        weight: of the layout of the layer's weight.
    """
    rows = _rows(layer, weight)
    peaks = rows.amax(1) if rows.numel() else rows.new_zeros(0)
    peaks = peaks[peaks > 0]
    return (peaks.max() / peaks.median()).item() if peaks.numel() else 1.0


def peak_of(layer: nn.Module, weight: Tensor) -> float:
    """Return the largest magnitude over the root mean square inside an output channel.

    It is the median over channels, between 1 and the root of a channel's size. A merged identity
    is one large tap among small ones: then even a range per channel leaves few codes for the
    others.

    Args:
        layer: tells which axis holds the output channels.
        weight: of the layout of the layer's weight.
    """
    rows = _rows(layer, weight)
    energy = rows.square().mean(1).sqrt()
    live = energy > 0
    return (rows.amax(1)[live] / energy[live]).median().item() if bool(live.any()) else 1.0


def _rows(layer: nn.Module, weight: Tensor) -> Tensor:
    """Return the magnitudes of ``weight`` in float64, one row per output channel."""
    weight = weight.detach().double().abs()
    if isinstance(layer, TRANSPOSED):
        weight = weight.reshape(layer.groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)
    return weight.flatten(1) if weight.numel() else weight.new_zeros(0, 1)


@dataclass(frozen=True)
class LayerRange:
    """The ranges of one layer.

    Attributes:
        name: its path.
        spread: see :func:`spread_of`.
        peak: see :func:`peak_of`.
        outliers: largest magnitude of its input over the 99.9th percentile; None without an
            example.
    """

    name: str
    spread: float
    peak: float
    outliers: float | None = None

    @property
    def lost_bits(self) -> float:
        """The bits that the median channel loses under one scale per tensor: ``log2(spread)``."""
        return math.log2(self.spread)


@dataclass(frozen=True)
class RangeReport:
    """The ranges of all layers of a model, in order; ``print`` shows the worst ones.

    Attributes:
        layers: one entry per convolution and linear layer.
    """

    layers: tuple[LayerRange, ...]

    @property
    def worst(self) -> LayerRange | None:
        """The layer with the largest spread; None where there is no layer."""
        return max(self.layers, key=lambda layer: layer.spread, default=None)

    def compare(self, after: RangeReport) -> str:
        """Return how ranges changed from this report to ``after``, and what that means.

        Args:
            after: the report on the same model, say after fusing.
        """
        was, now = self.worst, after.worst
        if was is None or now is None:
            return "no layers to compare"
        earlier = median_low(layer.spread for layer in self.layers)
        later = median_low(layer.spread for layer in after.layers)
        text = f"worst weight spread {was.spread:.1f} ({was.name}) -> {now.spread:.1f} ({now.name})"
        text += f"; median over layers {earlier:.1f} -> {later:.1f}"
        if now.lost_bits > 2:
            text += (
                f". Under one scale per tensor a typical channel of {now.name} keeps"
                f" {8 - now.lost_bits:.1f} of 8 bits: use one per channel"
            )
        return text + _compare_peaks(self, after) + _outlier_text(after)

    def __str__(self) -> str:
        """Return a table of the layers with the largest spread."""
        rows = [("layer", "spread", "lost bits", "peak", "outliers")]
        for row in sorted(self.layers, key=lambda layer: -layer.spread)[:_SHOWN]:
            outliers = "-" if row.outliers is None else f"{row.outliers:.1f}"
            numbers = (f"{row.spread:.1f}", f"{row.lost_bits:.1f}", f"{row.peak:.1f}")
            rows.append((row.name, *numbers, outliers))
        return table(rows)


def diagnose_ranges(model: nn.Module, example: Any = None) -> RangeReport:
    """Return how unequal the channels of each layer are, and how far outliers of its input reach.

    A merged RepVGG block adds an identity and a 1x1 kernel, each scaled by its own BatchNorm, to
    the 3x3 kernel. A few channels grow large, and one range for the whole tensor then leaves few
    codes for the others (Chu et al., "Make RepVGG Greater Again", 2212.01593). Call this before
    and after :func:`torchq.fuse_` and read ``before.compare(after)``.

    Args:
        model: left unchanged.
        example: one input (see :func:`torchq.fuse_`), or None to look at weights only.

    Returns:
        The report on all convolutions and linear layers.

    Example:
        >>> diagnose_ranges(torch.nn.Sequential(torch.nn.Linear(1, 1))).layers[0].spread
        1.0
    """
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if is_layer(module) and not module.weight.is_meta
    ]
    outliers: dict[int, float] = {}
    if example is not None:
        outliers = _outliers([module for _, module in layers], model, example)
    return RangeReport(
        tuple(_range(name, module, outliers.get(id(module))) for name, module in layers)
    )


def _range(name: str, layer: Any, outliers: float | None) -> LayerRange:
    return LayerRange(name, spread_of(layer, layer.weight), peak_of(layer, layer.weight), outliers)


def _compare_peaks(before: RangeReport, after: RangeReport) -> str:
    """Return the part of the comparison about single large weights inside channels."""
    worst = max(after.layers, key=lambda layer: layer.peak)
    was = median_low(layer.peak for layer in before.layers)
    now = median_low(layer.peak for layer in after.layers)
    text = (
        f". Inside a channel the largest weight is {was:.1f} -> {now:.1f} times the usual one"
        " (root mean square, median over layers)"
    )
    if worst.peak > 8 and now > 1.5 * was:
        text += (
            f", {worst.peak:.1f} in {worst.name}: a merged identity is one large tap; 8 bits bear"
            " it, 4 bits do not"
        )
    return text


def _outlier_text(report: RangeReport) -> str:
    """Return the part of the comparison about outliers of inputs; empty where there are none."""
    found = [(layer.outliers or 0.0, layer.name) for layer in report.layers]
    found = [(outliers, name) for outliers, name in found if outliers > 4]
    if not found:
        return ""
    largest, name = max(found)
    return (
        f". Input outliers in {len(found)} layers, up to {largest:.1f} times the 99.9th percentile"
        f" ({name}): calibrate by entropy, mse or percentile rather than by the maximum"
    )


def _outliers(layers: Iterable[nn.Module], model: nn.Module, example: Any) -> dict[int, float]:
    """Return by layer id the largest magnitude of its input over the 99.9th percentile."""
    found: dict[int, float] = {}

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        values = args[0].detach().abs().flatten().float()
        if not values.numel():
            return
        position = max(1, round(0.999 * values.numel()))
        usual = values.kthvalue(position).values.item()
        ratio = values.max().item() / usual if usual > 0 else 1.0
        found[id(module)] = max(found.get(id(module), 0.0), ratio)

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(look).remove)
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        call_model(model, example)
    return found

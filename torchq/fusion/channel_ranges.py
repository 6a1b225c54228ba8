"""How unequal the channels of a model are: what makes a network collapse under quantization, before and after fusing."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.fusion.modules import TRANSPOSED, is_layer
from torchq.graph import call_model
from torchq.utils import evaluating

__all__ = ["LayerRange", "RangeReport", "diagnose_ranges", "peak_of", "spread_of"]


def spread_of(layer: nn.Module, weight: Tensor) -> float:
    """Largest over median per-output-channel magnitude of a layer's weight; 1 where all channels are alike.

    With one scale for the whole tensor the median channel keeps ``log2(spread)`` bits fewer. Channels that are all zero do not count.
    """
    peaks = _channel_peaks(layer, weight)
    peaks = peaks[peaks > 0]
    return (peaks.max() / peaks.median()).item() if peaks.numel() else 1.0


def peak_of(layer: nn.Module, weight: Tensor) -> float:
    """Largest magnitude over root mean square inside an output channel, median over channels: 1 to the root of the channel's size.

    A merged identity is one large tap among small ones; even a range per channel leaves few codes for the others then.
    """
    rows = _rows(layer, weight)
    energy = rows.square().mean(1).sqrt()
    live = energy > 0
    return (rows.amax(1)[live] / energy[live]).median().item() if bool(live.any()) else 1.0


def _channel_peaks(layer: nn.Module, weight: Tensor) -> Tensor:
    rows = _rows(layer, weight)
    return rows.amax(1) if rows.numel() else rows.new_zeros(0)


def _rows(layer: nn.Module, weight: Tensor) -> Tensor:
    """Magnitudes, one row per output channel."""
    weight = weight.detach().double().abs()
    if isinstance(layer, TRANSPOSED):
        weight = weight.reshape(layer.groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)
    return weight.flatten(1) if weight.numel() else weight.new_zeros(0, 1)


@dataclass(frozen=True)
class LayerRange:
    """Ranges of one layer.

    Attributes:
        name: its path.
        spread: see :func:`spread_of`.
        peak: see :func:`peak_of`.
        lost_bits: what the median channel loses under one scale per tensor, ``log2(spread)``.
        outliers: largest magnitude of its input over the 99.9th percentile; None without an example.
    """

    name: str
    spread: float
    peak: float
    outliers: float | None = None

    @property
    def lost_bits(self) -> float:
        return torch.tensor(self.spread).log2().item()


@dataclass(frozen=True)
class RangeReport:
    """Ranges of all layers of a model, in order; ``print`` shows the worst ones."""

    layers: tuple[LayerRange, ...]

    @property
    def worst(self) -> LayerRange | None:
        """The layer with the largest spread."""
        return max(self.layers, key=lambda layer: layer.spread, default=None)

    def compare(self, after: RangeReport) -> str:
        """A short text: how spreads changed from this report to ``after`` (say, by fusing), and what that means."""
        before = self.worst
        now = after.worst
        if before is None or now is None:
            return "no layers to compare"
        text = f"worst weight spread {before.spread:.1f} ({before.name}) -> {now.spread:.1f} ({now.name})"
        median = torch.tensor([layer.spread for layer in after.layers]).median().item()
        earlier = torch.tensor([layer.spread for layer in self.layers]).median().item()
        text += f"; median over layers {earlier:.1f} -> {median:.1f}"
        if now.lost_bits > 2:
            text += f". Under one scale per tensor a typical channel of {now.name} keeps {8 - now.lost_bits:.1f} of 8 bits: use one per channel"
        text += _peaks(self, after)
        outliers = [
            layer for layer in after.layers if layer.outliers is not None and layer.outliers > 4
        ]
        if outliers:
            worst = max(outliers, key=lambda layer: layer.outliers or 0.0)
            text += f". Input outliers in {len(outliers)} layers, up to {worst.outliers:.1f} times the 99.9th percentile ({worst.name})"
            text += ": calibrate by entropy, mse or percentile rather than by the maximum"
        return text

    def __str__(self) -> str:
        rows = sorted(self.layers, key=lambda layer: -layer.spread)[:10]
        lines = [f"{'layer':40} {'spread':>8} {'lost bits':>9} {'peak':>6} {'outliers':>8}"]
        for row in rows:
            outliers = "-" if row.outliers is None else f"{row.outliers:.1f}"
            lines.append(
                f"{row.name:40} {row.spread:8.1f} {row.lost_bits:9.1f} {row.peak:6.1f} {outliers:>8}"
            )
        return "\n".join(lines)


def diagnose_ranges(model: nn.Module, example: Any = None) -> RangeReport:
    """How unequal the channels of every convolution and linear layer are, and how far outliers of their inputs reach.

    A merged RepVGG block adds an identity and a 1x1 kernel, each scaled by its own BatchNorm, to the 3x3 kernel: a few channels
    grow large, and one range for the whole tensor then leaves few codes for the others (Chu et al., "Make RepVGG Greater Again",
    2212.01593). Call this before and after :func:`torchq.fuse_` and read ``before.compare(after)``.

    Args:
        model: left unchanged.
        example: one input (see :func:`torchq.fuse_`) or None to look at weights only.
    """
    layers = [
        (name, module)
        for name, module in model.named_modules()
        if is_layer(module) and not module.weight.is_meta
    ]
    outliers = (
        {} if example is None else _outliers([module for _, module in layers], model, example)
    )
    return RangeReport(
        tuple(_range(name, module, outliers.get(id(module))) for name, module in layers)
    )


def _range(name: str, layer: Any, outliers: float | None) -> LayerRange:
    return LayerRange(name, spread_of(layer, layer.weight), peak_of(layer, layer.weight), outliers)


def _peaks(before: RangeReport, after: RangeReport) -> str:
    """The part of the comparison about single large weights inside channels."""
    worst = max(after.layers, key=lambda layer: layer.peak)
    was, now = (
        torch.tensor([layer.peak for layer in report.layers]).median().item()
        for report in (before, after)
    )
    text = f". Inside a channel the largest weight is {was:.1f} -> {now:.1f} times the usual one (root mean square, median over layers)"
    if worst.peak > 8 and now > 1.5 * was:
        text += f", {worst.peak:.1f} in {worst.name}: a merged identity is one large tap; 8 bits bear it, 4 bits do not"
    return text


def _outliers(layers: Iterable[nn.Module], model: nn.Module, example: Any) -> dict[int, float]:
    found: dict[int, float] = {}

    def look(module: nn.Module, args: tuple[Any, ...]) -> None:
        values = args[0].detach().abs().flatten().float()
        if values.numel():
            rank = max(1, round(0.999 * values.numel()))
            usual = values.kthvalue(rank).values.item()
            found[id(module)] = max(
                found.get(id(module), 0.0), values.max().item() / usual if usual > 0 else 1.0
            )

    with ExitStack() as stack:
        for layer in layers:
            stack.callback(layer.register_forward_pre_hook(look).remove)
        stack.enter_context(evaluating(model))
        stack.enter_context(torch.no_grad())
        call_model(model, example)
    return found

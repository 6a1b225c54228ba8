"""SmoothQuant: move outliers of activation channels into the weights that read them.

Reference: Xiao et al., SmoothQuant: Accurate and Efficient Post-Training Quantization for Large
Language Models (ICML 2023), section 4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.ptq.blockwise import RunOptions
from torchq.ptq.channels import input_ranges, spread
from torchq.ptq.reports import report_text
from torchq.ptq.smoothing.channel_inputs import Inputs
from torchq.ptq.smoothing.factors import (
    channel_factors,
    fold_,
)
from torchq.ptq.smoothing.folding import check_not_calibrated, fold_all
from torchq.ptq.smoothing.groups import ChannelGroup
from torchq.ptq.smoothing.search import best_alpha

__all__ = ["SmoothReport", "SmoothedGroup", "smooth_"]

_ALPHAS = tuple(i / 10 for i in range(10))


@dataclass(frozen=True)
class SmoothedGroup:
    """Layers that read one tensor, and what was done.

    Attributes:
        layers: their paths.
        source: path of the norm that took the inverse factors; None if the input quantizers did.
        alpha: the share of the difficulty that moved to the weights; None if nothing changed,
            because all factors would have made the error larger.
        spread_before: the largest over the median magnitude of the input channels.
        spread_after: the same afterwards.
    """

    layers: tuple[str, ...]
    source: str | None
    alpha: float | None
    spread_before: float
    spread_after: float


@dataclass(frozen=True)
class SmoothReport:
    """The result of :func:`smooth_`.

    Attributes:
        groups: what was smoothed, in running order.
        skipped: path of each quantized layer that was left alone -> the reason.
        error: the relative change of the float output on the first batch.
    """

    groups: tuple[SmoothedGroup, ...]
    skipped: Mapping[str, str]
    error: float

    def __str__(self) -> str:
        rows = []
        for group in self.groups:
            change = f"{group.spread_before:.3g} -> {group.spread_after:.3g}"
            where = group.source or "input quantizer"
            alpha = "none" if group.alpha is None else f"{group.alpha:g}"
            rows.append((", ".join(group.layers), where, alpha, change))
        header = ("layers", "factors in", "alpha", "spread of channels")
        last = f"{len(self.groups)} inputs, output changed by {self.error:.1e}"
        return report_text(header, rows, self.skipped, last)


def smooth_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    alpha: float | Literal["auto"] = "auto",
    tolerance: float | None = None,
    run: RunOptions | None = None,
    progress: bool = True,
) -> SmoothReport:
    """Divide the input channels of quantized Linear layers by factors, in place.

    Call it after :func:`torchq.quantize_` and before :func:`torchq.calibrate`. The factor of
    channel j is ``max|x_j|^alpha / max|w_j|^(1 - alpha)`` (equation 4 of the paper); the weights
    are multiplied by it. A LayerNorm or RMSNorm whose output only such layers read takes the
    inverse factors; elsewhere the input quantizer multiplies by them (``pre_quant_scale``). The
    float output stays the same, which is verified on the first batch. A call that fails changes
    nothing.

    Args:
        model: a quantized model that is not calibrated.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
        alpha: 0 leaves all difficulty in the activations, 1 moves all of it to the weights.
            ``"auto"`` searches 0.0, 0.1, ... 0.9 for each input, for the least error of the layers'
            outputs, and leaves an input as it is if all of these make the error larger.
        tolerance: the largest relative change of the float output that is accepted; None means
            1e-4 for float32, and 8 units in the last place for dtypes of 16 bits.
        run: how the model is run; see :class:`RunOptions`.
        progress: show a progress bar.

    Returns:
        The report.

    Raises:
        ConfigError: the model is calibrated already, has no layer to treat, or alpha is out of
            range.
        CalibrationError: there is no batch, or an input is NaN or infinite.
        QuantizationError: the float output changed by more than ``tolerance``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
        >>> _ = torchq.quantize_(model, torchq.recipes.int8())
        >>> torchq.ptq.smooth_(model, [torch.randn(16, 8)], progress=False).groups[0].source
        '0'
    """
    if alpha != "auto" and not (isinstance(alpha, (int, float)) and 0 <= alpha <= 1):
        raise ConfigError(f"smooth_: got alpha={alpha!r}; expected 0 to 1, or 'auto'")
    check_not_calibrated("smooth_", model)
    found = fold_all(
        "smooth_",
        model,
        batches,
        lambda group, inputs: _smooth(group, inputs, alpha),
        tolerance=tolerance,
        run=run or RunOptions(),
        progress=progress,
    )
    return SmoothReport(*found)


def _smooth(group: ChannelGroup, inputs: Inputs, asked: float | str) -> SmoothedGroup:
    """Smooth one group in place."""
    columns = torch.stack([input_ranges(layer).float() for _, layer in group.layers]).amax(0)

    def factors(exponent: float | None) -> Tensor:
        if exponent is None:
            return torch.ones_like(columns)
        return channel_factors(inputs.largest, columns, exponent)

    alpha: float | None
    if isinstance(asked, str):
        alpha = best_alpha(group, inputs, factors, (None, *_ALPHAS))
    else:
        alpha = asked
    found = factors(alpha)
    if alpha is not None:
        fold_(group, found)
    source = None if group.source is None else group.source[0]
    before, after = spread(inputs.largest), spread(inputs.largest / found)
    return SmoothedGroup(group.names, source, alpha, before, after)

"""AWQ: protect the weights that read large activations.

Reference: Lin et al., AWQ: Activation-aware Weight Quantization for On-Device LLM Compression and
Acceleration (MLSys 2024), section 3.2.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from torchq.functional import fake_quantize
from torchq.ptq.blockwise import RunOptions
from torchq.ptq.reports import report_text
from torchq.ptq.smoothing.channel_inputs import Inputs
from torchq.ptq.smoothing.factors import (
    channel_factors,
    fold_,
)
from torchq.ptq.smoothing.folding import check_not_calibrated, fold_all
from torchq.ptq.smoothing.groups import ChannelGroup
from torchq.ptq.smoothing.search import best_alpha, entry_factors
from torchq.utils import NotebookText
from torchq.workflow.output_search import WEIGHT_FRACTIONS, output_error, search_weight_amax

__all__ = ["AWQGroup", "AWQReport", "awq_"]

# The exponents of the paper's grid search.
_ALPHAS = tuple(i / 20 for i in range(20))


@dataclass(frozen=True)
class AWQGroup:
    """Layers that read one tensor, and what was done.

    Attributes:
        layers: their paths.
        source: path of the norm or layer that took the inverse factors; ``"input quantizers"`` if
            these did; None if nothing can take them, so that only the ranges were searched.
        alpha: the exponent of the factors; 0 leaves the weights as they are.
        error_before: the squared error of the outputs with rounded weights, over their power.
        error_after: the same with factors and ranges.
        clipping: the mean of the ranges over the largest magnitudes.
    """

    layers: tuple[str, ...]
    source: str | None
    alpha: float
    error_before: float
    error_after: float
    clipping: float


@dataclass(frozen=True)
class AWQReport(NotebookText):
    """The result of :func:`awq_`.

    Attributes:
        groups: what was treated, in running order.
        skipped: path of each quantized layer that was left alone -> the reason.
        error: the relative change of the float output on the first batch.
    """

    groups: tuple[AWQGroup, ...]
    skipped: Mapping[str, str]
    error: float

    def __str__(self) -> str:
        rows = []
        for group in self.groups:
            error = f"{group.error_before:.3%} -> {group.error_after:.3%}"
            what = (group.source or "nothing", f"{group.alpha:g}", f"{group.clipping:.0%}")
            rows.append((", ".join(group.layers), *what, error))
        header = ("layers", "factors in", "alpha", "range", "error of the output, relative")
        last = f"{len(self.groups)} inputs, output changed by {self.error:.1e}"
        return report_text(header, rows, self.skipped, last)


def awq_(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    clip: bool = True,
    tolerance: float | None = None,
    run: RunOptions | None = None,
    progress: bool = True,
) -> AWQReport:
    """Scale the weights of Linear and Conv layers by the size of what they read, in place.

    Call it after :func:`torchq.quantize_`, for models with weights of few bits, and before
    :func:`torchq.calibrate`, which sets the ranges of inputs if there are any. Column j of a weight
    is multiplied by ``mean|x_j|^alpha`` (equation 5 of the paper), so that columns that read large
    inputs are rounded more finely. The norm before the layer takes the inverse, or a layer before
    it, through ReLU, products and attention; elsewhere the input quantizer of a Linear layer does.
    The float output stays the same, which is verified on the first batch. Then every range of a
    weight is searched. A call that fails changes nothing.

    Args:
        model: a quantized model that is not calibrated.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
        clip: search the ranges of the weights for the least error of the outputs; False takes the
            largest magnitudes.
        tolerance: the largest relative change of the float output that is accepted; None means
            1e-4 for float32, and 8 units in the last place for dtypes of 16 bits.
        run: how the model is run; see :class:`RunOptions`.
        progress: show a progress bar.

    Returns:
        The report.

    Raises:
        ConfigError: the model is calibrated already, or has no quantized Linear or Conv layer.
        CalibrationError: there is no batch, or an input is NaN or infinite.
        QuantizationError: the float output changed by more than ``tolerance``.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.LayerNorm(8), torch.nn.Linear(8, 4))
        >>> _ = torchq.quantize_(model, torchq.recipes.integer(4, None))
        >>> torchq.ptq.awq_(model, [torch.randn(16, 8)], progress=False).groups[0].source
        '0'
    """
    check_not_calibrated("awq_", model)
    found = fold_all(
        "awq_",
        model,
        batches,
        _scale,
        lambda group, inputs, scaled: _set_ranges(group, inputs, scaled, clip),
        weights=True,
        tolerance=tolerance,
        run=run or RunOptions(),
        progress=progress,
    )
    return AWQReport(*found)


@dataclass(frozen=True)
class _Scaled:
    """The factors of one group, and the error without them."""

    factors: Tensor
    source: str | None
    alpha: float
    error_before: float


def _scale(group: ChannelGroup, inputs: Inputs) -> _Scaled:
    """Find and fold the factors of one group."""
    source = group.source[0] if group.source is not None else None
    if source is None and group.takes_scale():
        source = "input quantizers"

    def factors(alpha: float) -> Tensor:
        return channel_factors(inputs.mean, None, alpha)

    alphas = _ALPHAS if source is not None else (0.0,)
    alpha, errors = best_alpha(group, inputs, factors, alphas)
    found = factors(alpha)
    if alpha:
        fold_(group, found)
    return _Scaled(found, source, alpha, errors[0.0])


def _set_ranges(group: ChannelGroup, inputs: Inputs, scaled: _Scaled, clip: bool) -> AWQGroup:
    """Set the weight ranges of one group."""
    errors, fractions = [], []
    for _, layer in group.layers:
        x = inputs.matrix(layer) / entry_factors(layer, scaled.factors).unsqueeze(2)
        tried = WEIGHT_FRACTIONS if clip else (1.0,)
        amax, fraction = search_weight_amax(layer, x, fractions=tried)
        layer.weight_quantizer.set_amax(amax)
        d, weight = layer.weight_quantizer.descriptor, layer.weight.float()
        rounded = fake_quantize(weight, amax, d.format, d.granularity, d.block_scale_format)
        errors.append(output_error(layer, x, rounded, x))
        fractions.append(fraction)
    mean = sum(errors) / len(errors)
    clipping = sum(fractions) / len(fractions)
    return AWQGroup(group.names, scaled.source, scaled.alpha, scaled.error_before, mean, clipping)

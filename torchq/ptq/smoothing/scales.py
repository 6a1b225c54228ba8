"""The factors of SmoothQuant, and the search for its exponent."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.functional import fake_quantize, reduce_amax
from torchq.ptq.smoothing.groups import SmoothingGroup

__all__ = ["best_alpha", "smoothing_scale"]

_ALPHAS = tuple(i / 10 for i in range(10))


def smoothing_scale(x: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """Return ``max|x_j|^alpha / max|w_j|^(1 - alpha)``, equation 4 of the paper.

    The factors are divided by their geometric mean, so that alpha = 0 with equal weights changes
    nothing. A channel that is zero on either side keeps the factor 1.

    Args:
        x: the largest magnitude of each input channel.
        weight: the largest magnitude of each column of the weights.
        alpha: 0 to 1.
    """
    live = (x > 0) & (weight > 0)
    log = alpha * x.clamp(min=1e-30).log() - (1 - alpha) * weight.clamp(min=1e-30).log()
    if not bool(live.any()):
        return torch.ones_like(x)
    return torch.where(live, (log - log[live].mean()).exp(), 1.0)


def best_alpha(group: SmoothingGroup, rows: Tensor, x: Tensor, weight: Tensor) -> float:
    """Return the exponent with the least squared error of the outputs of a group.

    Args:
        group: its layers have quantizers, whose formats are tried with the largest magnitudes.
        rows: some inputs.
        x: see :func:`smoothing_scale`.
        weight: see :func:`smoothing_scale`.
    """
    errors = {}
    for alpha in _ALPHAS:
        scale = smoothing_scale(x, weight, alpha)
        errors[alpha] = sum(_error(layer, rows, scale) for _, layer in group.layers)
    return min(_ALPHAS, key=errors.__getitem__)


def _error(layer: Any, rows: Tensor, scale: Tensor) -> float:
    """Return the squared error of the output of one layer with some factors."""
    w = layer.weight.detach().float()
    expected = rows @ w.T
    x = _quantized(layer.input_quantizer, rows / scale)
    found = x @ _quantized(layer.weight_quantizer, w * scale).T
    return float((found - expected).square().sum())


def _quantized(quantizer: Any, x: Tensor) -> Tensor:
    """Return ``x`` fake quantized in the range of its largest magnitudes."""
    d = getattr(quantizer, "descriptor", None)
    if d is None:
        return x
    amax = reduce_amax(x, d.granularity)
    return fake_quantize(x, amax, d.format, d.granularity, d.block_scale_format)

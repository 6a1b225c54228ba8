"""The search for the exponent of the factors by the error of the layers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq.functional import fake_quantize, reduce_amax, reduce_range
from torchq.nn import TensorQuantizer
from torchq.ptq.smoothing.channel_inputs import Inputs
from torchq.ptq.smoothing.groups import ChannelGroup

__all__ = ["best_alpha"]


def best_alpha(
    group: ChannelGroup,
    inputs: Inputs,
    factors: Callable[[float | None], Tensor],
    alphas: Sequence[float | None],
) -> float | None:
    """Return the exponent with the least squared error of the outputs of a group.

    Args:
        group: its layers have quantizers, whose formats are tried with the largest magnitudes.
        inputs: what it reads.
        factors: from an exponent to the factor of each channel.
        alphas: the exponents; of several with the same error the first one is returned.
    """
    layers, errors = [layer for _, layer in group.layers], {}
    for alpha in alphas:
        scale = factors(alpha)
        errors[alpha] = sum(_error(layer, inputs.samples, scale) for layer in layers)
    return min(alphas, key=errors.__getitem__)


def _error(layer: Any, x: Tensor, factors: Tensor) -> float:
    """Return the squared error of the output of one layer with some factors."""
    weight = layer.weight.detach().float()
    rounded = _quantized(layer.weight_quantizer, weight * factors)
    found = _quantized(layer.input_quantizer, x / factors) @ rounded.t()
    return float((found - x @ weight.t()).square().sum())


def _quantized(quantizer: nn.Module, x: Tensor) -> Tensor:
    """Return ``x`` fake quantized in the range of its largest magnitudes."""
    if not isinstance(quantizer, TensorQuantizer):
        return x
    d = quantizer.descriptor
    if d.unsigned == "auto":
        d = d.replace(unsigned=bool((x >= 0).all()))
    if d.symmetric:
        amin, amax = None, reduce_amax(x, d.granularity)
    else:
        amin, amax = reduce_range(x, d.granularity)
    return fake_quantize(
        x.to(torch.float32), amax, d.format, d.granularity, d.block_scale_format, amin=amin
    )

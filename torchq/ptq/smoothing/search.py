"""The search for the exponent of the factors by the error of the layers' outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from torchq.formats import PerTensor
from torchq.functional import fake_quantize, reduce_amax, reduce_range
from torchq.nn import TensorQuantizer
from torchq.ptq.smoothing.channel_inputs import Inputs
from torchq.ptq.smoothing.groups import ChannelGroup
from torchq.workflow.layer_matrices import weight_from_matrix, weight_matrix

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
    matrices = [(layer, inputs.matrix(layer)) for _, layer in group.layers]
    errors = {}
    for alpha in alphas:
        scale = factors(alpha)
        errors[alpha] = sum(_error(layer, x, _entry_factors(layer, scale)) for layer, x in matrices)
    return min(alphas, key=errors.__getitem__)


def _entry_factors(layer: Any, factors: Tensor) -> Tensor:
    """Return the factor of every entry of the input matrix of a layer, (groups, inputs)."""
    if isinstance(layer, nn.Linear):
        return factors.unsqueeze(0)
    taps = layer.weight[0, 0].numel()
    return factors.view(layer.groups, -1).repeat_interleave(taps, dim=1)


def _product(layer: Any, x: Tensor) -> Tensor:
    return weight_matrix(layer, layer.weight.detach().float()) @ x


def _error(layer: Any, x: Tensor, factors: Tensor) -> float:
    """Return the squared error of the output of one layer with some factors."""
    weight = weight_matrix(layer, layer.weight.detach().float()) * factors.unsqueeze(1)
    rounded = _quantized(layer.weight_quantizer, weight_from_matrix(layer, weight))
    x_rounded = _quantized_inputs(layer, x / factors.unsqueeze(2))
    found = weight_matrix(layer, rounded) @ x_rounded
    return float((found - _product(layer, x)).square().sum())


def _quantized_inputs(layer: Any, x: Tensor) -> Tensor:
    """Return an input matrix as the input quantizer would round it."""
    quantizer = layer.input_quantizer
    if isinstance(layer, nn.Linear):
        return _quantized(quantizer, x[0].t()).t().unsqueeze(0)
    d = getattr(quantizer, "descriptor", None)
    is_whole = d is not None and isinstance(d.granularity, PerTensor)
    return _quantized(quantizer, x) if is_whole else x


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

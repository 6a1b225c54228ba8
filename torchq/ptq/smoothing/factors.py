"""The factors between activations and weights, and how layers and their source take them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchq.graph import call_model, tensors_in
from torchq.ptq.blockwise import RunOptions
from torchq.ptq.channels import scale_inputs_, tensors_restored_on_error
from torchq.ptq.ranks import Group, all_largest
from torchq.ptq.smoothing.groups import ChannelGroup
from torchq.utils import device_of

__all__ = ["channel_factors", "fold_", "model_outputs", "relative_error", "restored_on_error"]


def channel_factors(x: Tensor, weight: Tensor, alpha: float) -> Tensor:
    """Return ``x_j^alpha / weight_j^(1 - alpha)`` of each channel j.

    With the largest magnitudes it is equation 4 of the paper. The factors are divided by their
    geometric mean, so that equal channels change nothing. A channel that is zero on either side
    keeps the factor 1.

    Args:
        x: the size of each input channel.
        weight: the size of each column of the weights.
        alpha: 0 to 1.
    """
    live = (x > 0) & (weight > 0)
    log = alpha * x.clamp(min=1e-30).log() - (1 - alpha) * weight.clamp(min=1e-30).log()
    if not bool(live.any()):
        return torch.ones_like(x)
    return torch.where(live, (log - log[live].mean()).exp(), 1.0)


def fold_(group: ChannelGroup, factors: Tensor) -> None:
    """Multiply the input channels of the layers by factors, and what they read by the inverse.

    A norm before them takes the inverse; without one the input quantizers do.

    Args:
        group: changed in place.
        factors: one of each channel.
    """
    for _, layer in group.layers:
        scale_inputs_(layer, factors)
        if group.source is None:
            inverse = (1 / factors).to(layer.weight.dtype)
            old = layer.input_quantizer.pre_quant_scale
            layer.input_quantizer.pre_quant_scale = inverse if old is None else old * inverse
    if group.source is None:
        return
    norm: Any = group.source[1]
    for parameter in (norm.weight, getattr(norm, "bias", None)):
        if parameter is not None:
            parameter.div_(factors.to(parameter.dtype))


def model_outputs(model: Any, batch: Any, run: RunOptions) -> list[Tensor]:
    """Return the floating-point outputs of a model, in float64."""
    out = call_model(model, batch, forward=run.forward, device=device_of(model))
    return [tensor.double() for tensor in tensors_in(out) if tensor.is_floating_point()]


def relative_error(found: Iterable[Tensor], expected: Iterable[Tensor], group: Group) -> float:
    """Return the largest relative change of a tensor, of all processes of ``group``."""
    pairs = zip(found, expected, strict=True)
    errors = [(f - e).norm() / e.norm().clamp(min=1e-30) for f, e in pairs]
    return all_largest(torch.stack(errors).max(), group).item() if errors else 0.0


@contextmanager
def restored_on_error(groups: list[ChannelGroup]) -> Iterator[None]:
    """Bring weights and factors back if anything ends the block early."""
    layers = [layer for group in groups for _, layer in group.layers]
    inputs = [layer.input_quantizer for layer in layers]
    scales = [(q, q.pre_quant_scale) for q in inputs if hasattr(q, "pre_quant_scale")]
    with tensors_restored_on_error(m for group in groups for m in group.modules()):
        try:
            yield
        except BaseException:
            for quantizer, scale in scales:
                quantizer.pre_quant_scale = scale
            raise

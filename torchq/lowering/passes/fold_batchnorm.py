"""What the rules of a rewrite compute: qparams of quantizers, and BatchNorm as part of a layer."""

from __future__ import annotations

import torch
from torch import nn

from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.qparams import QParams
from torchq.lowering.registry import active

__all__ = ["NORMS", "fold_norm", "static_qparams"]

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def static_qparams(quantizer: nn.Module) -> QParams | None:
    """The qparams of a quantizer that rounds onto a fixed one."""
    found = active(quantizer)
    if (
        found is None
        or found.descriptor.dynamic
        or not found.descriptor.fake_quant
        or found.pre_quant_scale is not None
    ):
        return None
    qparams = QParams.of(found)
    return qparams if isinstance(qparams, QParams) else None


def fold_norm(layer: Int8Conv, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
    """Put a BatchNorm in eval mode behind ``layer`` into its scales and bias."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var.double() + norm.eps)
    shift = -norm.running_mean.double() * scale
    if norm.weight is not None:
        scale, shift = (
            scale * norm.weight.double(),
            shift * norm.weight.double() + norm.bias.double(),
        )
    scale, shift = layer.per_row(scale), layer.per_row(shift)
    if layer.bias is not None:
        shift = shift + layer.bias.double() * scale
    layer.weight_scale = (layer.weight_scale.double() * scale).float().detach()
    layer.bias = shift.float().detach()

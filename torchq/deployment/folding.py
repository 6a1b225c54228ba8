"""What the rules of a rewrite compute: grids of quantizers, and BatchNorm as part of a layer."""

from __future__ import annotations

import torch
from torch import nn

from torchq.deployment.grid import Grid
from torchq.deployment.layers import Int8Conv
from torchq.deployment.lowering import active

__all__ = ["NORMS", "fold_norm", "static_grid"]

NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def static_grid(quantizer: nn.Module) -> Grid | None:
    """The grid of a quantizer that rounds onto a fixed one."""
    found = active(quantizer)
    if found is None or found.descriptor.dynamic or not found.descriptor.fake_quant or found.pre_quant_scale is not None:
        return None
    grid = Grid.of(found)
    return grid if isinstance(grid, Grid) else None


def fold_norm(layer: Int8Conv, norm: nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d) -> None:
    """Put a BatchNorm in eval mode behind ``layer`` into its steps and bias."""
    assert norm.running_mean is not None and norm.running_var is not None
    scale = torch.rsqrt(norm.running_var.double() + norm.eps)
    shift = -norm.running_mean.double() * scale
    if norm.weight is not None:
        scale, shift = scale * norm.weight.double(), shift * norm.weight.double() + norm.bias.double()
    scale, shift = layer.per_row(scale), layer.per_row(shift)
    if layer.bias is not None:
        shift = shift + layer.bias.double() * scale
    layer.weight_step = (layer.weight_step.double() * scale).float().detach()
    layer.bias = shift.float().detach()

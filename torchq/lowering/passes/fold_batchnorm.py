"""Pass that folds BatchNorm into an integer convolution."""

from __future__ import annotations

import torch
from torch import fx, nn

from torchq.fusion.linear_map.kernel_algebra import batch_norm_affine
from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.passes.fuse_epilogue import plain_layer

__all__ = ["fold_batchnorm"]


def fold_batchnorm(editor: GraphEditor, node: fx.Node) -> bool:
    """Fold BatchNorm into the scales and the bias of a convolution, without new rounding.

    In eval mode BatchNorm is a scale and a shift per channel. The integer weight stays as it is.

    Before::

        codes -> Int8Conv(weight_scale, bias) -> BatchNorm(scale, shift) -> reader

    After::

        codes -> Int8Conv(weight_scale * scale, bias * scale + shift) -> reader
    """
    norm, conv = editor.module(node), match.input_node(node)
    is_norm = isinstance(norm, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d))
    layer = plain_layer(editor, conv)
    if not is_norm or conv is None or not isinstance(layer, Int8Conv) or len(conv.args) > 1:
        return False
    assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
    if norm.running_mean is None or norm.running_var is None:
        return False
    owned = editor.own_layer(conv)
    assert isinstance(owned, Int8Conv)
    _fold(owned, norm, norm.running_mean, norm.running_var)
    editor.bypass(node, conv)
    return True


def _fold(
    layer: Int8Conv, norm: nn.modules.batchnorm._BatchNorm, mean: torch.Tensor, var: torch.Tensor
) -> None:
    scale, shift = batch_norm_affine(mean, var, norm.weight, norm.bias, norm.eps)
    scale, shift = layer.per_row(scale), layer.per_row(shift)
    if layer.bias is not None:
        shift = shift + layer.bias.double() * scale
    layer.weight_scale = (layer.weight_scale.double() * scale).float().detach()
    layer.bias = shift.float().detach()

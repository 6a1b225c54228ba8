"""Pass that computes 1 x 1 convolutions of pooled images (squeeze-and-excitation) in float."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.modules.float_pointwise_conv import FloatPointwiseConv
from torchq.lowering.modules.qdq import Dequantize
from torchq.utils import set_submodule

__all__ = ["convolves_single_pixel", "use_float_pointwise_conv"]


def use_float_pointwise_conv(editor: GraphEditor, node: fx.Node) -> bool:
    """Compute a small convolution of one pixel in float: an integer kernel's call takes longer.

    Before::

        x -> global pooling -> Int8Conv (1 x 1) -> reader

    After::

        x -> global pooling -> FloatPointwiseConv -> reader
    """
    module = editor.module(node)
    if not convolves_single_pixel(editor, node) or not isinstance(module, Int8Conv):
        return False
    if isinstance(module, FloatPointwiseConv):
        return False
    editor.modules[str(node.target)] = pixel = FloatPointwiseConv(module)
    set_submodule(editor.root, str(node.target), pixel)
    return True


def convolves_single_pixel(editor: GraphEditor, node: fx.Node) -> bool:
    """Return True if ``node`` is a small 1 x 1 convolution of one pixel for each image."""
    source = match.input_node(node)
    if source is None or node.kwargs or not FloatPointwiseConv.fits(editor.module(node)):
        return False
    return _is_single_pixel(editor, source)


def _is_single_pixel(editor: GraphEditor, node: fx.Node | None) -> bool:
    """Return True if ``node`` gives one floating-point pixel for each image of any size."""
    if node is None:
        return False
    source = match.input_node(node)
    elementwise = (
        isinstance(editor.module(node), FloatPointwiseConv)
        or match.pointwise_function(node, editor.modules)
        or match.activation_of(node, editor.modules)
    )
    if elementwise:
        return _is_single_pixel(editor, source)
    # Pooling of codes is computed on integers, and hands codes to the layer.
    reads_codes = isinstance(editor.module(source), Dequantize)
    return _pools_whole_image(editor, node) and not reads_codes


def _pools_whole_image(editor: GraphEditor, node: fx.Node) -> bool:
    pool = match.average_pool_of(node, editor.modules)
    if isinstance(pool, nn.AdaptiveAvgPool2d):
        return pool.output_size in (1, (1, 1), [1, 1])
    keeps_dims = node.kwargs.get("keepdim", node.args[2:] == (True,))
    if node.target not in ("mean", torch.mean) or not keeps_dims:
        return False
    dims: Any = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    return isinstance(dims, (tuple, list)) and sorted(dims) in ([2, 3], [-2, -1])

"""Passes that let the kernel of a layer compute what follows it: its epilogue."""

from __future__ import annotations

import torch
from torch import fx, nn

from torchq.fusion.algebra import batch_norm_affine
from torchq.lowering.codes import Dequantize, Quantize
from torchq.lowering.kernel import ACTIVATIONS
from torchq.lowering.layer import Int8Conv, Int8Layer
from torchq.lowering.passes import match
from torchq.lowering.passes.editor import GraphEditor
from torchq.lowering.passes.move import meets_other_codes


def fold_batchnorm(editor: GraphEditor, node: fx.Node) -> bool:
    """Fold BatchNorm into the scales and the bias of a convolution, without new rounding.

    In eval mode BatchNorm is a scale and a shift per channel. The integer weight stays as it is.

    Before: ``codes -> Int8Conv(weight_scale, bias) -> BatchNorm(scale, shift)``.
    After: ``codes -> Int8Conv(weight_scale * scale, bias * scale + shift)``.
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


def plain_layer(editor: GraphEditor, node: fx.Node | None) -> Int8Layer | None:
    """Return the integer layer of a node with one reader and nothing fused behind it yet."""
    layer = editor.layer(node)
    if layer is None or node is None or len(node.users) != 1:
        return None
    plain = layer.output_qparams is None and layer.activation == "none"
    return layer if plain else None


def fuse_activation(editor: GraphEditor, node: fx.Node) -> bool:
    """Let the kernel of a layer apply the activation behind it.

    A clamp that only Quantize nodes read is left to them: it becomes part of their bounds.

    Before: ``codes -> Int8Conv -> SiLU``. After: ``codes -> Int8Conv(activation="silu")``.
    """
    found = match.activation_of(node, editor.modules)
    source = match.input_node(node)
    layer = plain_layer(editor, source)
    if found is None or source is None or layer is None:
        return False
    if isinstance(layer, Int8Conv) and not ACTIVATIONS[found[0]].on_conv:
        return False
    only_quantized = all(isinstance(editor.module(user), Quantize) for user in node.users)
    if only_quantized and match.clamp_bounds(found):
        return False
    layer = editor.own_layer(source)
    layer.activation, layer.arguments = found[0], list(found[1])
    editor.bypass(node, source)
    return True


def fuse_add(editor: GraphEditor, node: fx.Node) -> bool:
    """Let the kernel of a convolution add the other operand.

    Of two convolutions a pointwise one adds, whose kernel does so at no cost, or else the later
    one: the memory of its input may be free by then.

    Before: ``Int8Conv(codes) + residual``. After: ``Int8Conv(codes, residual)``.
    """
    pair = match.add_operands(node)
    found = [
        (layer.is_pointwise, conv, other)
        for conv, other in ((pair, pair[::-1]) if pair else ())
        if isinstance(layer := plain_layer(editor, conv), Int8Conv)
        and layer.adds
        and len(conv.args) == 1
    ]
    if not found:
        return False
    _, conv, other = max(found, key=lambda choice: choice[:2])
    editor.own_layer(conv)
    with editor.graph.inserting_before(node):
        new = editor.graph.call_module(str(conv.target), (conv.args[0], other))
    editor.bypass(node, new)
    editor.graph.erase_node(conv)
    return True


def fuse_requantize(editor: GraphEditor, node: fx.Node) -> bool:
    """Let the kernel of a layer round its result to the qparams of the only reader.

    A residual must be codes too: adding floats, the kernel returns floats.

    Before: ``codes, codes -> Dequantize(r) -> Int8Conv -> Quantize(q)``.
    After: ``codes, codes -> Int8Conv(residual_qparams=r, output_qparams=q)``.
    """
    layer = editor.layer(node)
    if layer is None or layer.output_qparams is not None or len(node.users) != 1:
        return False
    (user,) = node.users
    quantize, residual = editor.module(user), match.input_node(node, 1)
    values = editor.module(residual)
    if not isinstance(quantize, Quantize):
        return False
    if residual is not None and not isinstance(values, Dequantize):
        return False
    layer, qparams = editor.own_layer(node), quantize.qparams
    bounds = match.clamp_bounds((layer.activation, tuple(layer.arguments)))
    if bounds is not None:
        qparams = qparams.clamped(*bounds, keep_zero=meets_other_codes(editor, user))
    layer.output_qparams = qparams
    if residual is not None and isinstance(values, Dequantize):
        layer.residual_qparams = values.qparams
        node.args = (node.args[0], residual.args[0])
    elif bounds is not None and qparams.saturates_by_itself:
        layer.activation, layer.arguments = "none", []
    elif bounds is not None:
        layer.activation, layer.arguments = "clamp", list(qparams.bounds)
    editor.bypass(user, node)
    return True

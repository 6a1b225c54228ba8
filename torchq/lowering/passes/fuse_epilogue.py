"""Passes that let the kernel of a layer compute what follows it: its epilogue."""

from __future__ import annotations

from torch import fx

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.modules.qdq import Dequantize, Quantize
from torchq.lowering.ops.epilogues import ACTIVATIONS
from torchq.lowering.passes.hoist_quantize import meets_other_codes

__all__ = ["fuse_activation", "fuse_add", "fuse_requantize", "plain_layer"]


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

    Before::

        codes -> Int8Conv -> SiLU -> reader

    After::

        codes -> Int8Conv(activation="silu") -> reader
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

    Before::

        codes -> Int8Conv -+
                           +-> add -> reader
        residual ----------+

    After::

        codes, residual -> Int8Conv -> reader
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

    Before::

        codes, codes -> Dequantize(r) -> Int8Conv -> Quantize(q) -> reader

    After::

        codes, codes -> Int8Conv(residual_qparams=r, output_qparams=q) -> reader
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

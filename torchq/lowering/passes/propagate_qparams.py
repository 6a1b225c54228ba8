"""Passes over the finished graph: they tell modules which codes they read."""

from __future__ import annotations

from torch import fx

from torchq.graph import reads_shape
from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.modules.base import Int8Layer, IntegerModule
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.modules.qdq import Dequantize, Quantize

__all__ = ["propagate_qparams", "quantize_channels_last", "read_shape_of_codes"]


def read_shape_of_codes(editor: GraphEditor, node: fx.Node) -> bool:
    """Read the shape of codes instead of the values made from them, which then have no reader.

    Before::

        codes -> Dequantize -> x.size()

    After::

        codes -> codes.size()
    """
    values = match.input_node(node)
    codes = match.input_node(values)
    if values is None or codes is None or not reads_shape(node):
        return False
    if not isinstance(editor.module(values), Dequantize):
        return False
    node.replace_input_with(values, codes)
    return True


def propagate_qparams(editor: GraphEditor, node: fx.Node) -> bool:
    """Tell a node how to read its codes, and note how its own result is to be read.

    A clamp that became part of a Quantize may have moved the zero point of its codes, which every
    later reader must know. See :meth:`IntegerModule.propagate_qparams`.

    Before::

        codes(q') -> IntegerModule(q) -> codes

    After::

        codes(q') -> IntegerModule(q') -> codes(r), with r in editor.qparams
    """
    module = editor.module(node)
    if isinstance(module, Int8Layer):
        module = editor.own_layer(node)
    result = None
    if isinstance(module, IntegerModule):
        sources = [argument if isinstance(argument, fx.Node) else None for argument in node.args]
        result = module.propagate_qparams([editor.qparams.get(s) if s else None for s in sources])
    elif operands := match.concat_operands(node):
        result = editor.qparams.get(operands[0])
    elif source := match.view_source(node, editor.modules):
        result = editor.qparams.get(source)
    if result is None or editor.qparams.get(node) == result:
        return False
    editor.qparams[node] = result
    return True


def quantize_channels_last(editor: GraphEditor, node: fx.Node) -> bool:
    """Let a Quantize write codes in the memory layout that convolutions read.

    Before::

        x -> Quantize -> Int8Conv

    After::

        x -> Quantize(channels_last) -> Int8Conv
    """
    quantize = editor.module(node)
    if not isinstance(quantize, Quantize) or quantize.channels_last:
        return False
    if not any(isinstance(editor.module(user), Int8Conv) for user in node.users):
        return False
    quantize.channels_last = True
    return True

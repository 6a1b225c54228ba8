"""Passes that pool codes instead of values."""

from __future__ import annotations

from torch import fx

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.modules.pooling import CodesAvgPool2d, CodesMaxPool2d
from torchq.lowering.modules.qdq import Dequantize, Quantize

__all__ = ["average_codes", "pool_codes"]


def average_codes(editor: GraphEditor, node: fx.Node) -> bool:
    """Average codes between two quantizers on integers.

    Before::

        codes -> Dequantize(q) -> AvgPool2d -> Quantize(r) -> reader

    After::

        codes -> CodesAvgPool2d(q, r) -> reader
    """
    pool, values = match.average_pool_of(node, editor.modules), match.input_node(node)
    if pool is None or len(node.users) != 1:
        return False
    (end,) = node.users
    dequantize, codes = editor.module(values), match.input_node(values)
    quantize = editor.module(end)
    if codes is None or not isinstance(dequantize, Dequantize):
        return False
    if not isinstance(quantize, Quantize):
        return False
    average = CodesAvgPool2d(pool, dequantize.qparams, quantize.qparams)
    editor.replace(end, "codes", average, codes)
    return True


def pool_codes(editor: GraphEditor, node: fx.Node) -> fx.Node:
    """Replace max pooling of a node that reads codes by one for codes; return the new node.

    This is a step of passes that move quantization. Other nodes are returned as they are.

    Before::

        codes -> MaxPool2d -> reader

    After::

        codes -> CodesMaxPool2d -> reader
    """
    pool, codes = match.max_pool_of(node, editor.modules), match.input_node(node)
    if pool is None or codes is None:
        return node
    window = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    return editor.replace(node, "codes", CodesMaxPool2d(*window, False, pool.ceil_mode), codes)

"""Pass that computes GELU between two quantizers on codes."""

from __future__ import annotations

from torch import fx

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.modules.int8_gelu import Int8GELU
from torchq.lowering.modules.qdq import Dequantize, Quantize

__all__ = ["use_int8_gelu"]

#: The names of the activations that are GELU, with the argument of :class:`Int8GELU`.
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def use_int8_gelu(editor: GraphEditor, node: fx.Node) -> bool:
    """Compute GELU between two quantizers on codes.

    Before::

        codes -> Dequantize(q) -> GELU -> Quantize(r) -> reader

    After::

        codes -> Int8GELU(q, r) -> reader
    """
    found = match.activation_of(node, editor.modules)
    if found is None or found[0] not in _APPROXIMATE or len(node.users) != 1:
        return False
    (end,) = node.users
    values = match.input_node(node)
    dequantize, quantize = editor.module(values), editor.module(end)
    codes = match.input_node(values)
    if not isinstance(dequantize, Dequantize) or not isinstance(quantize, Quantize):
        return False
    if codes is None:
        return False
    qparams = (dequantize.qparams, quantize.qparams)
    editor.replace(end, "gelu", Int8GELU(*qparams, editor.dtype, _APPROXIMATE[found[0]]), codes)
    return True

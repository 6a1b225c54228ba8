"""Pass that replaces functions between two quantizers by tables of 256 codes."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, fx

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.modules.lookup_table import LookupTable
from torchq.lowering.modules.qdq import Dequantize, Quantize

__all__ = ["use_lookup_table"]


def use_lookup_table(editor: GraphEditor, node: fx.Node) -> bool:
    """Look up a function of single values between two quantizers; so is a change of qparams.

    The table is exact: its 256 results are computed as the float function would.

    Before::

        codes -> Dequantize(q) -> SiLU -> Quantize(r) -> reader
        codes -> Dequantize(q) ---------> Quantize(r) -> reader

    After::

        codes -> LookupTable(q, r) -> reader
    """
    values = match.input_node(node)
    dequantize, codes = editor.module(values), match.input_node(values)
    if not isinstance(dequantize, Dequantize) or codes is None:
        return False
    found = _function_before_quantize(editor, node)
    if found is None:
        return False
    function, end = found
    quantize = editor.module(end)
    assert isinstance(quantize, Quantize)
    table = LookupTable(function, dequantize.qparams, quantize.qparams, editor.dtype)
    editor.replace(end, "table", table, codes)
    return True


def _function_before_quantize(
    editor: GraphEditor, node: fx.Node
) -> tuple[Callable[[Tensor], Tensor], fx.Node] | None:
    """Return the function of single values that ends in a Quantize, and the Quantize."""
    if isinstance(editor.module(node), Quantize):
        return _identity, node
    function = match.pointwise_function(node, editor.modules)
    if function is None or len(node.users) != 1:
        return None
    (end,) = node.users
    return (function, end) if isinstance(editor.module(end), Quantize) else None


def _identity(x: Tensor) -> Tensor:
    return x

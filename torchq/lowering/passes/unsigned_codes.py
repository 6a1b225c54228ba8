"""Pass that lets codes of values which are never negative start at 0."""

from __future__ import annotations

from torch import fx

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor
from torchq.lowering.modules.qdq import Dequantize, Quantize
from torchq.lowering.passes.hoist_quantize import meets_other_codes

__all__ = ["use_unsigned_codes"]

_INF = float("inf")


def use_unsigned_codes(editor: GraphEditor, node: fx.Node) -> bool:
    """Drop the codes of negative numbers from a Quantize that never sees one.

    Kernels without a zero point are faster, and the bias keeps the bits that the correction for a
    zero point costs.

    Before::

        x >= 0 -> Quantize(zero_point=128, codes 0 .. 255)

    After::

        x >= 0 -> Quantize(zero_point=0, codes 0 .. 127)
    """
    quantize, source = editor.module(node), match.input_node(node)
    if not isinstance(quantize, Quantize) or source is None:
        return False
    done = quantize.qparams.quant_min == quantize.qparams.zero_point
    if done or not _is_nonnegative(editor, source):
        return False
    keep_zero = meets_other_codes(editor, node)
    quantize.qparams = quantize.qparams.clamped(0.0, _INF, keep_zero=keep_zero)
    return True


def _is_nonnegative(editor: GraphEditor, node: fx.Node) -> bool:
    """Return True if the result of ``node`` is known to hold no negative number."""
    layer, module = editor.layer(node), editor.module(node)
    if layer is not None:
        bounds = match.clamp_bounds((layer.activation, tuple(layer.arguments)))
        return bounds is not None and bounds[0] >= 0
    if isinstance(module, Dequantize):
        return module.qparams.quant_min >= module.qparams.zero_point
    bounds = match.clamp_bounds(match.activation_of(node, editor.modules))
    if bounds is not None:
        return bounds[0] >= 0
    sources = node.all_input_nodes
    return match.preserves_nonnegative(node, editor.modules) and all(
        _is_nonnegative(editor, source) for source in sources
    )

"""Passes that move a Quantize up and narrow its codes.

What a Quantize passes runs on codes; a clamp that it passes becomes bounds of its codes.
"""

from __future__ import annotations

from torch import fx

from torchq.lowering.graph import match
from torchq.lowering.graph.editor import GraphEditor, base_name
from torchq.lowering.modules.qdq import Dequantize, Quantize
from torchq.lowering.passes.int_pooling import pool_codes

__all__ = [
    "absorb_clamp",
    "hoist_quantize",
    "meets_other_codes",
    "tensors_to_rearrange",
    "use_unsigned_codes",
]


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


def absorb_clamp(editor: GraphEditor, node: fx.Node) -> bool:
    """Turn a clamp before Quantize into bounds of its codes: rounding and clamping keep order.

    Every reader of the clamp must be a Quantize; else it is computed anyway.

    Before::

        x -> ReLU -> Quantize(q)

    After::

        x -> Quantize(q, codes >= zero_point)
    """
    quantize, clamp = editor.module(node), match.input_node(node)
    source = match.input_node(clamp)
    if not isinstance(quantize, Quantize) or clamp is None or source is None:
        return False
    bounds = match.clamp_bounds(match.activation_of(clamp, editor.modules))
    if bounds is None or not all(isinstance(editor.module(u), Quantize) for u in clamp.users):
        return False
    qparams = quantize.qparams.clamped(*bounds, keep_zero=meets_other_codes(editor, node))
    editor.replace(node, "clamped", Quantize(qparams, quantize.dtype), source)
    return True


def hoist_quantize(editor: GraphEditor, node: fx.Node) -> bool:
    """Quantize before max pooling, concatenation or a view instead of after it.

    Before::

        x, y -> concat, max pooling or view -> Quantize(q) -> reader

    After::

        x -> Quantize(q) -+
                          +-> the same on codes -> reader
        y -> Quantize(q) -+
    """
    quantize, moved = editor.module(node), match.input_node(node)
    if not isinstance(quantize, Quantize) or moved is None or len(moved.users) > 1:
        return False
    tensors = tensors_to_rearrange(editor, moved)
    for tensor in tensors:
        with editor.graph.inserting_before(moved):
            name = f"{base_name(node)}_earlier"
            codes = editor.insert_call(name, Quantize(quantize.qparams, quantize.dtype), tensor)
        moved.replace_input_with(tensor, codes)
    if tensors:
        editor.bypass(node, moved)
        pool_codes(editor, moved)
    return bool(tensors)


def tensors_to_rearrange(editor: GraphEditor, node: fx.Node) -> list[fx.Node]:
    """Return the tensors of a node that commutes with rounding; an empty list for other nodes."""
    operands = match.concat_operands(node)
    if operands:
        return list(dict.fromkeys(operands))
    source = match.view_source(node, editor.modules)
    if source is None and match.max_pool_of(node, editor.modules) is not None:
        source = match.input_node(node)
    return [] if source is None else [source]


def meets_other_codes(editor: GraphEditor, node: fx.Node) -> bool:
    """Return True if these codes are concatenated with others, now or after further passes.

    Concatenated codes must have one zero point.
    """
    return any(
        bool(match.concat_operands(user))
        or (_will_pass_codes(editor, user) and meets_other_codes(editor, user))
        for user in node.users
    )


def _will_pass_codes(editor: GraphEditor, node: fx.Node) -> bool:
    pools = match.max_pool_of(node, editor.modules) is not None
    dequantizes = isinstance(editor.module(node), Dequantize)
    return pools or dequantizes or match.passes_codes(node, editor.modules)

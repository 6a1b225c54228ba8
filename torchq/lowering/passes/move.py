"""Passes that drop, narrow and move Quantize and Dequantize: what lies between reads codes."""

from __future__ import annotations

from torch import fx

from torchq.lowering.codes import CodesAvgPool2d, CodesMaxPool2d, Dequantize, Quantize
from torchq.lowering.passes import match
from torchq.lowering.passes.editor import GraphEditor, base_name
from torchq.lowering.qparams import QParams


def merge_quantize(editor: GraphEditor, node: fx.Node) -> bool:
    """Quantize one tensor once for all readers with the same qparams.

    Before: ``x -> Quantize(q)`` for each reader. After: ``x -> Quantize(q)`` for all of them.
    """
    changed = False
    first: dict[QParams, fx.Node] = {}
    for user in sorted(node.users):
        module = editor.module(user)
        if not isinstance(module, Quantize):
            continue
        if module.qparams in first:
            editor.bypass(user, first[module.qparams])
            changed = True
        else:
            first[module.qparams] = user
    return changed


def cancel_qdq(editor: GraphEditor, node: fx.Node) -> bool:
    """Cancel a Dequantize whose result is quantized to the same codes.

    Before: ``codes -> Dequantize(q) -> Quantize(q)``. After: ``codes``.
    """
    quantize, values = editor.module(node), match.input_node(node)
    dequantize, codes = editor.module(values), match.input_node(values)
    if not isinstance(quantize, Quantize) or not isinstance(dequantize, Dequantize):
        return False
    if codes is None or quantize.qparams != dequantize.qparams:
        return False
    editor.bypass(node, codes)
    return True


def average_codes(editor: GraphEditor, node: fx.Node) -> bool:
    """Average codes between two quantizers on integers.

    Before: ``codes -> Dequantize(q) -> AvgPool2d -> Quantize(r)``.
    After: ``codes -> CodesAvgPool2d(q, r)``.
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

    Before: ``codes -> MaxPool2d``. After: ``codes -> CodesMaxPool2d``.
    """
    pool, codes = match.max_pool_of(node, editor.modules), match.input_node(node)
    if pool is None or codes is None:
        return node
    return editor.replace(node, "codes", CodesMaxPool2d(pool), codes)


_INF = float("inf")


def use_unsigned_codes(editor: GraphEditor, node: fx.Node) -> bool:
    """Drop the codes of negative numbers from a Quantize that never sees one.

    Kernels without a zero point are faster, and the bias keeps the bits that the correction for a
    zero point costs.

    Before: ``x >= 0 -> Quantize(zero_point=128, codes 0 .. 255)``.
    After: ``x >= 0 -> Quantize(zero_point=0, codes 0 .. 127)``.
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

    Before: ``x -> ReLU -> Quantize(q)``. After: ``x -> Quantize(q, codes >= zero_point)``.
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

    Before: ``Quantize(cat([x, y]))``. After: ``cat([Quantize(x), Quantize(y)])``.
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


def sink_dequantize(editor: GraphEditor, node: fx.Node) -> bool:
    """Dequantize after max pooling, concatenation or a view instead of before it.

    All tensors must come from codes with the same qparams.

    Before: ``cat([Dequantize(x), Dequantize(y)])``. After: ``Dequantize(cat([x, y]))``.
    """
    values = tensors_to_rearrange(editor, node)
    modules = [editor.module(value) for value in values]
    found = [module for module in modules if isinstance(module, Dequantize)]
    if not found or len(found) < len(values) or len({m.qparams for m in found}) > 1:
        return False
    for value in values:
        node.replace_input_with(value, value.all_input_nodes[0])
    node = pool_codes(editor, node)
    dequantize = Dequantize(found[0].qparams, editor.dtype)
    with editor.graph.inserting_after(node):
        result = editor.insert_call(f"{base_name(node)}_values", dequantize, node)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
    return True

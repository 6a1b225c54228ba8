"""Passes that fuse a graph whose quantizations are nodes, until layers hand codes to layers.

The first ones drop, narrow and move Quantize and Dequantize, so that what lies between reads codes.
The next let the kernel of a layer compute what follows it. The last tell modules which codes they
read.
"""

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchq.graph import reads_shape
from torchq.lowering.codes import CodesAvgPool2d, CodesMaxPool2d, CodesModule, Dequantize, Quantize
from torchq.lowering.kernel import ACTIVATIONS
from torchq.lowering.layer import Int8Conv, Int8Layer
from torchq.lowering.passes import match
from torchq.lowering.passes.editor import GraphEditor, NodePass
from torchq.lowering.qparams import ByteQParams

#: Functions of finite numbers that are finite, in float32 and for values as large as codes stand
#: for, and how many of them may follow each other.
_FINITE_FUNCTIONS = (operator.mul, operator.add, torch.mul, torch.add, F.adaptive_avg_pool2d)
_FINITE_MODULES = (nn.Sigmoid, nn.Hardsigmoid, nn.SiLU, nn.Hardswish, nn.ReLU, nn.Hardtanh)
_LONGEST = 4
_INF = float("inf")


def merge_quantize(editor: GraphEditor, node: fx.Node) -> bool:
    """Quantize one tensor once for all readers with the same qparams.

    Before: ``x -> Quantize(q)`` for each reader. After: ``x -> Quantize(q)`` for all of them.
    """
    changed = False
    first: dict[ByteQParams, fx.Node] = {}
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


def _pool_codes(editor: GraphEditor, node: fx.Node) -> fx.Node:
    """Replace max pooling of a node that reads codes by one for codes; return the new node."""
    pool, codes = match.max_pool_of(node, editor.modules), match.input_node(node)
    if pool is None or codes is None:
        return node
    return editor.replace(node, "codes", CodesMaxPool2d(pool), codes)


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
        earlier = Quantize(quantize.qparams, quantize.dtype)
        codes = editor.insert_before(moved, "earlier", earlier, tensor)
        moved.replace_input_with(tensor, codes)
    if tensors:
        editor.bypass(node, moved)
        _pool_codes(editor, moved)
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
    for user in node.users:
        passes = (
            isinstance(editor.module(user), (CodesMaxPool2d, Dequantize))
            or match.max_pool_of(user, editor.modules) is not None
            or match.view_source(user, editor.modules) is not None
        )
        if match.concat_operands(user) or (passes and meets_other_codes(editor, user)):
            return True
    return False


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
    node = _pool_codes(editor, node)
    dequantize = Dequantize(found[0].qparams, editor.dtype)
    result = editor.insert_before(node.next, "values", dequantize, node)
    node.replace_all_uses_with(result, delete_user_cb=lambda user: user is not result)
    return True


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
    layer.activation, layer.arguments = found[0], list(found[1])
    editor.bypass(node, source)
    return True


def fuse_add(editor: GraphEditor, node: fx.Node) -> bool:
    """Let the kernel of a convolution add codes, and round the sum.

    Of floats it would have to copy one, which takes as long as adding them afterwards.

    Before: ``Int8Conv(codes) + Dequantize(r) -> Quantize(q)``.
    After: ``Int8Conv(codes, Dequantize(r)) -> Quantize(q)``.
    """
    pair, user = match.add_operands(node), next(iter(node.users), None)
    if pair is None or len(node.users) != 1 or not isinstance(editor.module(user), Quantize):
        return False
    conv, other = pair if isinstance(editor.module(pair[1]), Dequantize) else pair[::-1]
    layer = plain_layer(editor, conv)
    adds = isinstance(layer, Int8Conv) and len(layer.params.stride) < 3 and len(conv.args) == 1
    if not adds or not isinstance(editor.module(other), Dequantize):
        return False
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
    layer, user = editor.layer(node), next(iter(node.users), None)
    if layer is None or user is None or layer.output_qparams is not None or len(node.users) != 1:
        return False
    quantize, residual = editor.module(user), match.input_node(node, 1)
    values = editor.module(residual)
    if not isinstance(quantize, Quantize) or (residual and not isinstance(values, Dequantize)):
        return False
    qparams = quantize.qparams
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


def read_shape_of_codes(editor: GraphEditor, node: fx.Node) -> bool:
    """Read the shape of codes instead of the values made from them, which then have no reader.

    Before: ``codes -> Dequantize -> x.size()``. After: ``codes -> codes.size()``.
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
    later reader must know. See :meth:`CodesModule.propagate_qparams`.

    Before: ``codes(q') -> CodesModule(q) -> codes``.
    After: ``codes(q') -> CodesModule(q') -> codes(r), with r in editor.qparams``.
    """
    module = editor.module(node)
    result = None
    if isinstance(module, CodesModule):
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


def trust_finite_values(editor: GraphEditor, node: fx.Node) -> bool:
    """Quantize values that are made from codes without looking for NaN.

    Before: ``codes -> Int8Conv -> x * sigmoid(y) -> Quantize``.
    After: ``codes -> Int8Conv -> x * sigmoid(y) -> Quantize(finite)``.
    """
    quantize, source = editor.module(node), match.input_node(node)
    if not isinstance(quantize, Quantize) or quantize.finite or source is None:
        return False
    quantize.finite = _is_finite(editor, source, _LONGEST)
    return quantize.finite


def _is_finite(editor: GraphEditor, node: fx.Node, longest: int) -> bool:
    """Return True if a value is made from codes by few functions that keep it finite."""
    module = editor.module(node)
    if isinstance(module, (Quantize, Dequantize)):
        return True
    if isinstance(module, Int8Layer):  # the second operand is a residual
        return all(_is_finite(editor, x, longest - 1) for x in node.all_input_nodes[1:])
    known = isinstance(module, _FINITE_MODULES) or node.target in _FINITE_FUNCTIONS
    operands = node.all_input_nodes
    known = known and longest > 0 and bool(operands)
    return known and all(_is_finite(editor, operand, longest - 1) for operand in operands)


#: Fuse until nothing changes. The order matters: clamps become part of codes before kernels would
#: compute them, and kernels take what nothing else could.
FUSE: tuple[NodePass, ...] = (
    merge_quantize,
    cancel_qdq,
    use_unsigned_codes,
    absorb_clamp,
    hoist_quantize,
    sink_dequantize,
    fuse_activation,
    fuse_add,
    average_codes,
    fuse_requantize,
)

#: Decide what depends on the finished graph. Each pass runs once, in the order of the graph.
FINISH: tuple[NodePass, ...] = (
    read_shape_of_codes,
    propagate_qparams,
    trust_finite_values,
)

"""Passes that bring a trace into known forms and make every quantization a node of its own.

After them a layer with integers reads codes, and what quantized its inputs by itself is a float
operator between a Dequantize and a Quantize. The other passes cancel and move these pairs.
"""

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.node import Argument

from torchq.graph import forward_hook_kind, operator_name, trace_or_none
from torchq.lowering.codes import Dequantize, Quantize
from torchq.lowering.eligible import active
from torchq.lowering.passes import match
from torchq.lowering.passes.editor import GraphEditor, NodePass
from torchq.lowering.qparams import ByteQParams
from torchq.lowering.traced import nth_chunk
from torchq.nn import InputQuantized, QuantCat, QuantSiLU, TensorQuantizer, revert_
from torchq.nn.modules.operators import QuantBinary, function_of
from torchq.utils import copy_module

_IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


def drop_identity(editor: GraphEditor, node: fx.Node) -> bool:
    """Drop what does nothing in eval mode; it would only keep other nodes apart.

    Before: ``x -> Identity, Dropout or drop path``. After: ``x``.
    """
    source = match.input_node(node)
    does_nothing = (
        type(editor.module(node)) in _IDENTITIES
        or match.is_inactive_dropout(node)
        or (node.op == "call_module" and _returns_its_input(editor.modules[str(node.target)]))
    )
    if source is None or not does_nothing:
        return False
    editor.bypass(node, source)
    return True


def _returns_its_input(module: nn.Module) -> bool:
    """Return True for foreign code that does nothing in eval mode, as a drop path does."""
    if type(module).__module__.partition(".")[0] in ("torch", "torchq"):
        return False
    if forward_hook_kind(module) or "forward" in vars(module) or module.state_dict():
        return False
    found = trace_or_none(module, lambda part: False)
    if found is None:
        return False
    first, *_, last = found.graph.nodes
    value = match.input_node(last)
    while value is not None and match.is_inactive_dropout(value):
        value = match.input_node(value)
    return value is first


def view_to_reshape(editor: GraphEditor, node: fx.Node) -> bool:
    """Replace ``view`` by ``reshape``: deployed results are channels last, which view may refuse.

    Before: ``x.view(sizes)``. After: ``x.reshape(sizes)``.
    """
    if node.op != "call_method" or node.target != "view" or match.views_bits(node):
        return False
    node.target = "reshape"
    return True


def select_chunk(editor: GraphEditor, node: fx.Node) -> bool:
    """Turn one item of a split tensor into a view of that tensor, through which codes can pass.

    Before: ``x.chunk(2, 1)[0]``. After: ``nth_chunk(x, "chunk", 0, 2, 1)``.
    """
    if node.target is not operator.getitem or len(node.args) != 2:
        return False
    chunks, index = node.args
    source = match.input_node(chunks)
    if source is None or not isinstance(chunks, fx.Node) or not isinstance(index, int):
        return False
    method = operator_name(chunks.target)
    if method not in ("chunk", "split", "unbind") or not set(chunks.kwargs) <= {"dim"}:
        return False
    arguments = (source, method, index, *chunks.args[1:])
    return _call_instead(editor, node, nth_chunk, *arguments, **chunks.kwargs)


def open_quantized(editor: GraphEditor, node: fx.Node) -> bool:
    """Replace an operator with quantized operands by a float one of quantized values.

    Before: ``QuantAdd(x, y)`` or ``QuantCat([x, y])``.
    After: ``Dequantize(Quantize(x)) + Dequantize(Quantize(y))``, and ``cat`` likewise.
    """
    module, operands = editor.module(node), node.args
    if isinstance(module, QuantBinary) and not node.kwargs:
        quantizers = [module.input_quantizer, module.other_quantizer]
    elif isinstance(module, QuantCat) and operands and set(node.kwargs) <= {"dim"}:
        tensors = operands[0]
        if not isinstance(tensors, (list, tuple)):
            return False
        if not isinstance(module.input_quantizer, TensorQuantizer):
            return False
        operands = tuple(tensors)
        quantizers = [module.quantizer_of(index) for index in range(len(operands))]
    else:
        return False
    values = _quantized_values(editor, node, operands, quantizers)
    if values is None or isinstance(module, QuantBinary):
        return values is not None and _call_instead(editor, node, function_of(module), *values)
    dim: Any = (*node.args[1:], node.kwargs.get("dim"))[0]
    return _call_instead(editor, node, torch.cat, values, module.dim if dim is None else dim)


def _call_instead(
    editor: GraphEditor, node: fx.Node, function: Callable[..., Any], *args: Argument, **kwargs: Any
) -> bool:
    """Replace a node by the call of a function."""
    with editor.graph.inserting_before(node):
        new = editor.graph.call_function(function, args, kwargs)
    editor.bypass(node, new)
    return True


def _static_qparams(quantizer: nn.Module) -> ByteQParams | None:
    """Return the qparams of a quantizer with a fixed range per tensor; None for other ones."""
    found = active(quantizer)
    if found is None or found.descriptor.dynamic or not found.descriptor.fake_quant:
        return None
    qparams = None if found.pre_quant_scale is not None else ByteQParams.of(found)
    return qparams if isinstance(qparams, ByteQParams) else None


def _quantized_values(
    editor: GraphEditor,
    node: fx.Node,
    operands: Sequence[object],
    quantizers: Sequence[nn.Module],
) -> list[fx.Node] | None:
    """Return nodes for the quantized operands of ``node``; None if one of them is out of reach."""
    tensors = [operand for operand in operands if isinstance(operand, fx.Node)]
    static = all(active(q) is None or _static_qparams(q) is not None for q in quantizers)
    if len(tensors) != len(quantizers) or len(tensors) != len(operands) or not static:
        return None
    pairs = zip(tensors, map(_static_qparams, quantizers), strict=True)
    return [t if q is None else _insert_qdq(editor, node, t, q) for t, q in pairs]


def _insert_qdq(
    editor: GraphEditor, node: fx.Node, source: fx.Node, qparams: ByteQParams
) -> fx.Node:
    """Return ``source`` rounded to ``qparams``, by a Quantize and a Dequantize before ``node``."""
    codes = editor.insert_before(node, "input", Quantize(qparams), source)
    return editor.insert_before(node, "values", Dequantize(qparams, editor.dtype), codes)


def replace_quantizer(editor: GraphEditor, node: fx.Node) -> bool:
    """Replace a quantizer that the author of the model placed.

    Before: ``x -> TensorQuantizer``. After: ``x -> Quantize -> Dequantize``.
    """
    module, source = editor.module(node), match.input_node(node)
    if source is None or node.kwargs or not isinstance(module, TensorQuantizer):
        return False
    qparams = _static_qparams(module)
    if qparams is None:
        return False
    editor.bypass(node, _insert_qdq(editor, node, source, qparams))
    return True


def expose_input_quantizer(editor: GraphEditor, node: fx.Node) -> bool:
    """Take the input quantizer out of a module without weights.

    A SiLU with a quantized gate keeps simulating.

    Before: ``x -> QuantAvgPool2d``. After: ``x -> Quantize -> Dequantize -> AvgPool2d``.
    """
    module, source = editor.module(node), match.input_node(node)
    if source is None or node.kwargs or len(node.args) != 1:
        return False
    if not isinstance(module, InputQuantized):
        return False
    if isinstance(module, QuantSiLU) and active(module.gate_quantizer) is not None:
        return False
    qparams = _static_qparams(module.input_quantizer)
    if qparams is None:
        return False
    values = _insert_qdq(editor, node, source, qparams)
    plain = revert_(copy_module(module))
    vars(plain).pop("deploy_note", None)
    editor.replace(node, "float", plain, values)
    return True


def quantize_layer_input(editor: GraphEditor, node: fx.Node) -> bool:
    """Quantize the input of an integer layer by a node of its own.

    Before: ``x -> Int8Conv``. After: ``x -> Quantize -> Int8Conv``.
    """
    module, source = editor.layer(node), match.input_node(node)
    if source is None or node.kwargs or module is None or module.pre_quant_scale is not None:
        return False
    if isinstance(editor.module(source), Quantize):
        return False
    quantize = Quantize(module.input_qparams, module.dtype)
    node.replace_input_with(source, editor.insert_before(node, "input", quantize, source))
    return True


#: Bring the trace into known forms and make every quantization a node. Each pass runs once, in
#: the order of the graph.
INSERT_QDQ: tuple[NodePass, ...] = (
    drop_identity,
    view_to_reshape,
    select_chunk,
    open_quantized,
    replace_quantizer,
    expose_input_quantizer,
    quantize_layer_input,
)

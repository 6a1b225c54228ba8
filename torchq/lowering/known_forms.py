"""Passes that bring a trace into known forms, where every quantization is a node of its own.

A pass is a function ``(trace, node) -> bool`` that changes the graph around a node where it fits,
and returns whether it did. Its docstring shows the graph before and after. Each pass runs once, in
the order of the graph.
"""

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn

from torchq.graph import (
    forward_hook_kind,
    memory_of_nodes,
    operator_name,
    overwritten_values,
    trace_or_none,
    writes,
)
from torchq.graph.operators import DROPOUTS
from torchq.lowering import match
from torchq.lowering.eligible import active
from torchq.lowering.qparams import ByteQParams
from torchq.lowering.traced import nth_chunk
from torchq.nn import InputQuantized, QuantCat, QuantSiLU, TensorQuantizer, revert_
from torchq.nn.modules.operators import QuantBinary, function_of
from torchq.utils import copy_module

#: A node of torch.fx, whose arguments have a type of many alternatives.
Node: TypeAlias = Any
_IDENTITIES = (nn.Identity, *DROPOUTS)


def rounded(x: Tensor, qparams: ByteQParams) -> Tensor:
    """Return a tensor rounded to codes; it stands for a quantizer in a graph."""
    return qparams.dequantize(qparams.quantize(x))


def to_known_forms(trace: fx.GraphModule) -> None:
    """Run the passes on a trace, in place."""
    for known_form in KNOWN_FORMS:
        for node in list(trace.graph.nodes):
            known_form(trace, node)


def read_results_of_writes(trace: fx.GraphModule) -> bool:
    """Let what reads a tensor after it was overwritten read the result of the call that did it.

    Before: ``x.mul_(3)``, ``reader(x)``. After: ``y = x.mul_(3)``, ``reader(y)``, so that the order
    of calls follows from what they read.

    Returns:
        False where the memory is read later through a third name, as of a slice. No graph tells
        then in which order to compute, and nothing may be fused.
    """
    graph = trace.graph
    order = {node: number for number, node in enumerate(graph.nodes)}
    memory = memory_of_nodes(graph, trace)
    for node in order:
        called = (
            trace.get_submodule(str(node.target)) if node.op == "call_module" else None
        )
        if not writes(node, called):
            continue
        first = match.input_node(node)
        if first is None or "out" in node.kwargs:
            return False
        if any(value is not first for value in overwritten_values(node, order, memory)):
            return False
        for user in list(first.users):
            if order[user] > order[node]:
                user.replace_input_with(first, node)
    return True


def _module(trace: fx.GraphModule, node: Node) -> nn.Module | None:
    return match.module_of(node, trace)


def _replace(node: Node, new: Node) -> bool:
    node.replace_all_uses_with(new)
    node.graph.erase_node(node)
    return True


def _call_instead(
    node: Node, function: Callable[..., object], *args: object, **kwargs: object
) -> bool:
    """Replace a node by the call of a function."""
    with node.graph.inserting_before(node):
        return _replace(node, node.graph.call_function(function, args, kwargs))


def drop_identity(trace: fx.GraphModule, node: Node) -> bool:
    """Drop what does nothing in eval mode; it would only keep other nodes apart.

    Before: ``x -> Identity, Dropout or drop path``. After: ``x``.
    """
    source = match.input_node(node)
    does_nothing = (
        type(_module(trace, node)) in _IDENTITIES
        or match.is_inactive_dropout(node)
        or (
            node.op == "call_module"
            and _returns_its_input(trace.get_submodule(node.target))
        )
    )
    return source is not None and does_nothing and _replace(node, source)


def _returns_its_input(module: nn.Module) -> bool:
    """Return True for foreign code that does nothing in eval mode, as a drop path does."""
    if type(module).__module__.partition(".")[0] in ("torch", "torchq"):
        return False
    if forward_hook_kind(module) or "forward" in vars(module) or module.state_dict():
        return False
    traced = trace_or_none(module, lambda part: False)
    if traced is None:
        return False
    first, *_, last = traced.graph.nodes
    value = match.input_node(last)
    while value is not None and match.is_inactive_dropout(value):
        value = match.input_node(value)
    return value is first


def view_to_reshape(trace: fx.GraphModule, node: Node) -> bool:
    """Replace ``view`` by ``reshape``: deployed results are channels last, which view may refuse.

    Before: ``x.view(sizes)``. After: ``x.reshape(sizes)``.
    """
    if node.op != "call_method" or node.target != "view" or match.views_bits(node):
        return False
    node.target = "reshape"
    return True


def select_chunk(trace: fx.GraphModule, node: Node) -> bool:
    """Turn one item of a split tensor into a view of that tensor, through which codes can pass.

    Before: ``x.chunk(2, 1)[0]``. After: ``nth_chunk(x, "chunk", 0, 2, 1)``.
    """
    if node.target is not operator.getitem or len(node.args) != 2:
        return False
    chunks, index = node.args
    source = match.input_node(chunks)
    if source is None or not isinstance(index, int):
        return False
    method = operator_name(chunks.target)
    if method not in ("chunk", "split", "unbind") or not set(chunks.kwargs) <= {"dim"}:
        return False
    return _call_instead(
        node, nth_chunk, source, method, index, *chunks.args[1:], **chunks.kwargs
    )


def open_quantized(trace: fx.GraphModule, node: Node) -> bool:
    """Replace an operator with quantized operands by a float one of quantized values.

    Before: ``QuantAdd(x, y)`` or ``QuantCat([x, y])``.
    After: ``rounded(x) + rounded(y)``, and ``cat`` likewise.
    """
    module: Any = _module(trace, node)
    operands = node.args
    is_cat = isinstance(module, QuantCat) and isinstance(
        module.input_quantizer, TensorQuantizer
    )
    if isinstance(module, QuantBinary) and not node.kwargs:
        quantizers = [module.input_quantizer, module.other_quantizer]
    elif is_cat and operands and set(node.kwargs) <= {"dim"}:
        operands = operands[0] if isinstance(operands[0], (list, tuple)) else ()
        quantizers = [module.quantizer_of(index) for index in range(len(operands))]
    else:
        return False
    fits = len(operands) == len(quantizers) and all(
        isinstance(x, fx.Node) for x in operands
    )
    if not fits or not all(active(q) is None or _static_qparams(q) for q in quantizers):
        return False
    pairs = zip(operands, map(_static_qparams, quantizers), strict=True)
    values = [x if q is None else _rounded_before(node, x, q) for x, q in pairs]
    if not is_cat:
        return _call_instead(node, function_of(module), *values)
    dim: Any = (*node.args[1:], node.kwargs.get("dim"))[0]
    return _call_instead(node, torch.cat, values, module.dim if dim is None else dim)


def _static_qparams(quantizer: nn.Module) -> ByteQParams | None:
    """Return the qparams of a quantizer with a fixed range per tensor; None for other ones."""
    switched_on = active(quantizer)
    if (
        switched_on is None
        or switched_on.descriptor.dynamic
        or not switched_on.descriptor.fake_quant
    ):
        return None
    qparams = (
        None if switched_on.pre_quant_scale is not None else ByteQParams.of(switched_on)
    )
    return qparams if isinstance(qparams, ByteQParams) else None


def _rounded_before(node: Node, source: Node, qparams: ByteQParams) -> Node:
    with node.graph.inserting_before(node):
        return node.graph.call_function(rounded, (source, qparams))


def replace_quantizer(trace: fx.GraphModule, node: Node) -> bool:
    """Replace a quantizer that the author of the model placed.

    Before: ``x -> TensorQuantizer``. After: ``rounded(x)``.
    """
    module = _module(trace, node)
    source = match.input_node(node)
    if source is None or node.kwargs or not isinstance(module, TensorQuantizer):
        return False
    qparams = _static_qparams(module)
    return qparams is not None and _call_instead(node, rounded, source, qparams)


def expose_input_quantizer(trace: fx.GraphModule, node: Node) -> bool:
    """Take the input quantizer out of a module without weights.

    A SiLU with a quantized gate keeps simulating.

    Before: ``x -> QuantAvgPool2d``. After: ``rounded(x) -> AvgPool2d``.
    """
    module = _module(trace, node)
    source = match.input_node(node)
    if source is None or node.kwargs or len(node.args) != 1:
        return False
    if not isinstance(module, InputQuantized):
        return False
    if isinstance(module, QuantSiLU) and active(module.gate_quantizer) is not None:
        return False
    qparams = _static_qparams(module.input_quantizer)
    if qparams is None:
        return False
    plain = revert_(copy_module(module))
    vars(plain).pop("deploy_note", None)
    name = f"{node.target}_float"
    trace.add_submodule(name, plain)
    with node.graph.inserting_before(node):
        new = node.graph.call_module(name, (_rounded_before(node, source, qparams),))
    return _replace(node, new)


KNOWN_FORMS = (
    drop_identity,
    view_to_reshape,
    select_chunk,
    open_quantized,
    replace_quantizer,
    expose_input_quantizer,
)

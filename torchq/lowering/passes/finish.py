"""Passes over the finished graph: they tell modules which codes they read."""

from __future__ import annotations

import operator

import torch
import torch.nn.functional as F
from torch import fx, nn

from torchq.graph import reads_shape
from torchq.lowering.codes import CodesModule, Dequantize, Quantize
from torchq.lowering.layer import Int8Layer
from torchq.lowering.passes import match
from torchq.lowering.passes.editor import GraphEditor

#: Functions of finite numbers that are finite, in float32 and for values as large as codes stand
#: for, and how many of them may follow each other.
_FINITE_FUNCTIONS = (operator.mul, operator.add, torch.mul, torch.add, F.adaptive_avg_pool2d)
_FINITE_MODULES = (nn.Sigmoid, nn.Hardsigmoid, nn.SiLU, nn.Hardswish, nn.ReLU, nn.Hardtanh)
_LONGEST = 4


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
    if isinstance(module, Int8Layer):
        module = editor.own_layer(node)
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
    return (
        known
        and longest > 0
        and bool(operands)
        and all(_is_finite(editor, operand, longest - 1) for operand in operands)
    )

"""The optimizer of torch's exporter, kept from dropping arithmetic with small numbers."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torchq.onnx.ir import Graph, Model, Node, Value, onnx_ir
from torchq.utils.optional import import_optional

__all__ = ["optimize_"]

_NEUTRAL = {"Add": 0.0, "Sub": 0.0, "Mul": 1.0, "Div": 1.0}
#: Wider than the 1e-5 and 1e-8 of onnxscript's matcher, so that later releases may move a little.
_RELATIVE, _ABSOLUTE = 1e-4, 1e-6


def optimize_(program: Any) -> None:
    """Optimize what torch's exporter gave, in place.

    onnxscript takes a number near 0 or 1 for 0 or 1 itself (``math.isclose`` in its
    ``rewriter/_matcher.py``) and drops what is added or multiplied: ``log(x + 1e-10)`` would be
    infinite where x is 0. So such numbers are inputs of the graph while the optimizer runs.

    Args:
        program: a ``torch.onnx.ONNXProgram`` made with ``optimize=False``.
    """
    optimizer = import_optional("onnxscript.optimizer", "export_onnx(dynamo=True)")
    with _without_failed_folding():
        optimizer.inline(program.model)
        optimizer.fold_constants(program.model)
        with _small_numbers_as_inputs(program.model):
            program.optimize()


@contextmanager
def _without_failed_folding() -> Iterator[None]:
    """Keep what onnxscript could not compute beforehand out of the log: it leaves these nodes."""
    logger = logging.getLogger("onnxscript")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


@contextmanager
def _small_numbers_as_inputs(model: Model) -> Iterator[None]:
    graph = model.graph
    hidden = [_hide(graph, node, place, number) for node, place, number in _small_numbers(graph)]
    try:
        yield
    finally:
        for value, tensor in hidden:
            graph.inputs.remove(value)
            value.const_value = tensor
            if value.uses():
                graph.register_initializer(value)


def _small_numbers(graph: Graph) -> list[tuple[Node, int, Any]]:
    """Return the stored numbers that are nearly what changes nothing, with node and place."""
    found = []
    for node in onnx_ir.traversal.RecursiveGraphIterator(graph):
        if node.domain or node.op_type not in _NEUTRAL:
            continue
        neutral = _NEUTRAL[node.op_type]
        for place, value in enumerate(node.inputs):
            number = onnx_ir.convenience.get_const_tensor(value)
            if number is not None and number.size == 1 and _nearly(number, neutral):
                found.append((node, place, number))
    return found


def _nearly(number: Any, neutral: float) -> bool:
    value = float(number.numpy().reshape(()))
    close = math.isclose(value, neutral, rel_tol=_RELATIVE, abs_tol=_ABSOLUTE)
    return close and value != neutral


def _hide(graph: Graph, node: Node, place: int, number: Any) -> tuple[Value, Any]:
    """Let a node read a new input of the graph in the place of a stored number."""
    value = onnx_ir.Value(
        name=f"small_number_of_{node.outputs[0].name}_{place}",
        type=onnx_ir.TensorType(number.dtype),
        shape=onnx_ir.Shape(number.shape),
    )
    node.replace_input_with(place, value)
    graph.inputs.append(value)
    return value, number

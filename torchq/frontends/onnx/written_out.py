"""Activations that a file writes out in arithmetic, as files below opset 20 do with GELU.

One module in their place stays one operator: quantizers between its parts would cost accuracy, and
keep runtimes from running it as one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch import fx, nn

from torchq.frontends.onnx.context import GraphBuilder

#: The relative difference of constants: files in half precision round them.
_CLOSE = 1e-3


def merge_gelus_(builder: GraphBuilder, outputs: Sequence[fx.Node]) -> list[fx.Node]:
    """Put ``nn.GELU`` where a graph computes ``x * 0.5 * (1 + erf(x / sqrt(2)))``, in place.

    The factors may stand in any order. Nothing is done where something else reads a part.

    Args:
        builder: of the graph.
        outputs: the nodes that the graph returns.

    Returns:
        The outputs, of which some may be new nodes.
    """
    returned = list(outputs)
    for node in list(builder.graph.nodes):
        if node.op != "call_function" or node.target is not torch.erf:
            continue
        found = _written_gelu(builder, node, returned)
        if found is None:
            continue
        x, last = found
        name = last.meta.get("onnx_name") or last.name
        with builder.graph.inserting_after(last):
            path = builder.add_module(str(name), nn.GELU().eval(), "Mul")
            merged = builder.graph.call_module(path, (x,))
        merged.meta |= last.meta
        last.replace_all_uses_with(merged)
        returned = [merged if output is last else output for output in returned]
    return returned


def _written_gelu(
    builder: GraphBuilder, erf: fx.Node, returned: Sequence[fx.Node]
) -> tuple[fx.Node, fx.Node] | None:
    """Return what a GELU around an error function reads, and its last node; None for others."""

    def reader(node: fx.Node) -> fx.Node | None:
        """Return what alone reads a node."""
        is_alone = len(node.users) == 1 and node not in returned
        return next(iter(node.users)) if is_alone else None

    scaled = erf.args[0]
    if not isinstance(scaled, fx.Node) or reader(scaled) is not erf:
        return None
    x = _scaled(builder, scaled, math.sqrt(0.5))
    total = reader(erf)
    if x is None or total is None or total.target is not torch.add:
        return None
    if not _is(builder, _other(total, erf), 1.0):
        return None
    last, has_x, has_half = total, False, False
    while not (has_x and has_half):
        product = reader(last)
        if product is None:
            return None
        factor = _other(product, last) if product.target is torch.mul else None
        if not has_half and _is_half_of(builder, product, last):
            has_half = True
        elif not has_x and factor is x:
            has_x = True
        elif (
            not (has_x or has_half)
            and isinstance(factor, fx.Node)
            and reader(factor) is product
            and _scaled(builder, factor, 0.5) is x
        ):
            has_x = has_half = True
        else:
            return None
        last = product
    return x, last


def _is_half_of(builder: GraphBuilder, node: fx.Node, source: fx.Node) -> bool:
    return _scaled(builder, node, 0.5) is source


def _scaled(builder: GraphBuilder, node: fx.Node, factor: float) -> fx.Node | None:
    """Return what a node multiplies by a number, or divides by its inverse; None for others."""
    if node.target is torch.mul:
        for source in node.args:
            if isinstance(source, fx.Node) and _is(
                builder, _other(node, source), factor
            ):
                return source
    if node.target is torch.div and isinstance(node.args[0], fx.Node):
        return node.args[0] if _is(builder, node.args[1], 1 / factor) else None
    return None


def _other(node: fx.Node, source: fx.Node) -> object:
    """Return the second operand of two, of which ``source`` is one; None where both are."""
    others = [operand for operand in node.args if operand is not source]
    return others[0] if len(others) == 1 else None


def _is(builder: GraphBuilder, value: object, number: float) -> bool:
    """Return True for a number that is stored in a file, alone in its tensor or as itself."""
    if isinstance(value, fx.Node) and value.op == "get_attr":
        stored = operator.attrgetter(str(value.target))(builder.root)
        value = stored.item() if stored.numel() == 1 else None
    return isinstance(value, (int, float)) and math.isclose(
        value, number, rel_tol=_CLOSE
    )

"""Operators on bits, and arithmetic of the unsigned integers that torch has little of its own for.

torch stores uint16, uint32 and uint64, but adds, compares and shifts none of them. Here they are
computed in int64, which has the same bits: numbers of 64 bits above its largest are negative there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchq.frontends.building.graph import Value
from torchq.frontends.building.one_call import one_call
from torchq.frontends.onnx.context import NUMBERS, UNSIGNED, NodeContext, converter

_LOWEST = torch.iinfo(torch.int64).min


def _less(a: Tensor, b: Tensor) -> Tensor:
    """Return where bits in int64 are smaller as unsigned numbers."""
    return (a ^ _LOWEST) < (b ^ _LOWEST)


def _quotient(a: Tensor, b: Tensor) -> Tensor:
    """Return quotients of unsigned numbers of 64 bits, rounded down (Hacker's Delight, 9-3)."""
    is_large = b < 0
    divisor = torch.where(is_large, 1, b)
    half = (a >> 1) & ~_LOWEST
    quotient = torch.div(half, divisor, rounding_mode="floor") << 1
    remainder = a - quotient * divisor
    quotient = quotient + (~_less(remainder, divisor)).to(torch.int64)
    return torch.where(is_large, (~_less(a, b)).to(torch.int64), quotient)


_ON_BITS: dict[str, Callable[..., Tensor]] = {
    "Add": torch.add,
    "Sub": torch.sub,
    "Mul": torch.mul,
    "Div": _quotient,
    "Mod": lambda a, b: a - _quotient(a, b) * b,
    "Equal": torch.eq,
    "Less": _less,
    "LessOrEqual": lambda a, b: ~_less(b, a),
    "Greater": lambda a, b: _less(b, a),
    "GreaterOrEqual": lambda a, b: ~_less(a, b),
    "Max": lambda a, b: torch.where(_less(a, b), b, a),
    "Min": lambda a, b: torch.where(_less(a, b), a, b),
    "BitwiseNot": torch.bitwise_not,
}


@one_call
def unsigned(kind: str, *tensors: Tensor) -> Tensor:
    """Return an operator on unsigned integers, modulo 2 to the number of their bits."""
    result = _ON_BITS[kind](*(x.to(torch.int64) for x in tensors))
    return result if result.dtype is torch.bool else result.to(tensors[0].dtype)


@converter("BitShift", dtypes=NUMBERS | UNSIGNED)
def _bit_shift(node: NodeContext) -> Value:
    direction = node.attr("direction", str)
    if direction not in ("LEFT", "RIGHT"):
        node.refuse(f"its direction is {direction!r}; expected 'LEFT' or 'RIGHT'")
    return node.call(shifted, *node.inputs, direction == "LEFT")


@one_call
def shifted(x: Tensor, count: Tensor, left: bool) -> Tensor:
    """Return bits moved by ``count`` places; a count that ``x`` has no bits for moves all out."""
    bits, places = x.to(torch.int64), count.to(torch.int64)
    is_beyond = (places < 0) | (places >= 8 * x.dtype.itemsize)
    if left:
        return torch.where(is_beyond, 0, bits << places.clamp(0, 63)).to(x.dtype)
    places = torch.where(is_beyond, 64, places)
    moved = bits >> places.clamp(max=63)
    if x.dtype is torch.uint64:  # its first bit is no sign
        filled = ((bits >> 1) & ~_LOWEST) >> (places - 1).clamp(0, 63)
        moved = torch.where(places == 0, bits, filled)
    return moved.to(x.dtype)


_BITWISE: dict[str, Callable[..., Any]] = {
    "BitwiseAnd": torch.bitwise_and,
    "BitwiseOr": torch.bitwise_or,
    "BitwiseXor": torch.bitwise_xor,
    "BitwiseNot": torch.bitwise_not,
}


@converter(*_BITWISE, dtypes=NUMBERS | UNSIGNED)
def _bitwise(node: NodeContext) -> Value:
    if node.op_type == "BitwiseNot" and node.dtype(0) in UNSIGNED:
        return node.call(unsigned, node.op_type, *node.inputs)
    return node.call(_BITWISE[node.op_type], *node.inputs)

"""The operators that can be converted: an identity list, and a map of converters."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torchq.frontends.building import Value, entering
from torchq.frontends.mxnet.node import SymbolContext
from torchq.utils import Registry

Converter = Callable[[SymbolContext], "Value | Sequence[Value]"]

#: From the name of an operator to its converter.
CONVERTERS: Registry[str, Converter] = Registry("MXNet operator")


def converter(*op_types: str) -> Callable[[Converter], Converter]:
    """Enter the decorated function as the converter of operators.

    Args:
        op_types: names such as ``"Convolution"``.

    Raises:
        ConfigError: one of the operators has a converter already.
    """
    return entering(CONVERTERS, op_types)


def identity(function: Callable[..., object], *op_types: str) -> None:
    """Enter operators without attributes that one function of all inputs computes."""

    def convert(node: SymbolContext) -> Value:
        return node.call(function, *node.inputs)

    converter(*op_types)(convert)

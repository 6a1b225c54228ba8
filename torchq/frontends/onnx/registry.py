"""The operators that can be converted: an identity list, and a map of converters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from torchq.frontends.building import Value, entering
from torchq.utils import Registry

if TYPE_CHECKING:
    from torchq.frontends.onnx.context import NodeContext

Converter = Callable[["NodeContext"], "Value | Sequence[Value]"]

#: The element types that torch computes with on every device.
NUMBERS = frozenset(
    {
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
        torch.bool,
    }
)


@dataclass(frozen=True)
class Entry:
    """A converter and what it accepts.

    Attributes:
        convert: from one node of the file to its outputs.
        dtypes: element types of inputs and outputs that the operator can be converted for, None for
            any that torch has.
    """

    convert: Converter
    dtypes: frozenset[torch.dtype] | None = NUMBERS


#: From (domain, operator) to its entry. The domain of ONNX's own operators is "".
CONVERTERS: Registry[tuple[str, str], Entry] = Registry("ONNX operator")


def converter(
    *op_types: str, domain: str = "", dtypes: frozenset[torch.dtype] | None = NUMBERS
) -> Callable[[Converter], Converter]:
    """Enter the decorated function as the converter of operators.

    Args:
        op_types: names such as ``"Conv"``.
        domain: of the operators, ``""`` for ONNX's own.
        dtypes: element types of inputs and outputs that the converter can handle; None for any that
            torch has.

    Raises:
        ConfigError: one of the operators has a converter already.
    """
    keys = [(domain, op_type) for op_type in op_types]
    return entering(CONVERTERS, keys, lambda function: Entry(function, dtypes))


def identity(
    op_type: str,
    function: Callable[..., object],
    dtypes: frozenset[torch.dtype] | None = NUMBERS,
) -> None:
    """Enter an operator without attributes that one torch function computes."""

    def convert(node: NodeContext) -> Value:
        return node.call(function, *node.inputs)

    CONVERTERS.add(("", op_type), Entry(convert, dtypes))

"""The reader of ONNX files."""

from torchq.frontends.building.graph import Constant, Ints, Value
from torchq.frontends.onnx import converters
from torchq.frontends.onnx.context import CONVERTERS, NodeContext, converter, row
from torchq.frontends.onnx.importer import from_onnx

__all__ = [
    "CONVERTERS",
    "Constant",
    "Ints",
    "NodeContext",
    "Value",
    "converter",
    "converters",
    "from_onnx",
    "row",
]

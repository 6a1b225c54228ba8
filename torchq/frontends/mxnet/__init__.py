"""The reader of MXNet's files."""

from torchq.frontends.mxnet import converters
from torchq.frontends.mxnet.importer import from_mxnet
from torchq.frontends.mxnet.node import CONVERTERS, SymbolContext, converter, row

__all__ = [
    "CONVERTERS",
    "SymbolContext",
    "converter",
    "converters",
    "from_mxnet",
    "row",
]

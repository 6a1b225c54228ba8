"""The reader of Caffe's files."""

from torchq.frontends.caffe import converters
from torchq.frontends.caffe.importer import from_caffe
from torchq.frontends.caffe.node import CONVERTERS, CaffeLayer, converter, row

__all__ = ["CONVERTERS", "CaffeLayer", "converter", "converters", "from_caffe", "row"]

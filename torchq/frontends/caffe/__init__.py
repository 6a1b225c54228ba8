"""The reader of Caffe's files.

A reader of messages, an importer, converters of layers, and the functions that graphs call.
"""

from torchq.frontends.caffe import converters
from torchq.frontends.caffe.importer import from_caffe
from torchq.frontends.caffe.node import CONVERTERS, CaffeLayer, converter, row

__all__ = ["CONVERTERS", "CaffeLayer", "converter", "converters", "from_caffe", "row"]

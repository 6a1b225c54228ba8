"""Readers of other frameworks' model files: each returns a GraphModule of ordinary modules.

The result can be fused, quantized, calibrated, trained, deployed and exported like a model written
in PyTorch.
"""

from torchq.frontends.caffe import from_caffe
from torchq.frontends.mxnet import from_mxnet
from torchq.frontends.onnx import from_onnx

__all__ = ["from_caffe", "from_mxnet", "from_onnx"]

"""Readers of what others made: model files of other frameworks, and models that they quantized.

Each reader of files returns a GraphModule of ordinary modules, which can be fused, quantized,
calibrated, trained, deployed and exported like a model written in PyTorch.
"""

from torchq.frontends.caffe import from_caffe
from torchq.frontends.checkpoints import adopt_
from torchq.frontends.mxnet import from_mxnet
from torchq.frontends.onnx import from_onnx

__all__ = ["adopt_", "from_caffe", "from_mxnet", "from_onnx"]

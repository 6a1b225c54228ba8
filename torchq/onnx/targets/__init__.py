"""Runtimes, one file each. A new one is a file with an ``OnnxTarget``, and its name below."""

from torchq.onnx.targets.base import OnnxTarget, onnx_target
from torchq.onnx.targets.onnxruntime import ONNXRUNTIME
from torchq.onnx.targets.openvino import OPENVINO
from torchq.onnx.targets.qnn import QNN
from torchq.onnx.targets.tensorrt import TENSORRT
from torchq.swap import TARGETS

__all__ = ["OnnxTarget", "onnx_target"]

for _target in (ONNXRUNTIME, OPENVINO, QNN, TENSORRT):
    TARGETS.add(_target.name, _target)

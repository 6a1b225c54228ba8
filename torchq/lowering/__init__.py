"""Integer kernels inside PyTorch: the engine "torch" of :func:`torchq.deploy`, and its modules.

``torchq.onnx`` and this package do not know each other.
"""

from torchq.lowering.attention import DeployedMultiheadAttention
from torchq.lowering.eligible import LOWERINGS
from torchq.lowering.layer import DynamicInt8Linear, Int8Conv, Int8Layer, Int8Linear

__all__ = [
    "DeployedMultiheadAttention",
    "DynamicInt8Linear",
    "Int8Conv",
    "Int8Layer",
    "Int8Linear",
    "LOWERINGS",
]

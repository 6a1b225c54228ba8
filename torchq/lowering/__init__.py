"""Integer kernels inside PyTorch: the engine "torch" of :func:`torchq.deploy`, and its modules.

``torchq.onnx`` and this package do not know each other.
"""

from torchq.lowering.attention import DeployedMultiheadAttention
from torchq.lowering.conv import Int8Conv, Int8ConvTranspose
from torchq.lowering.layer import Int8Layer
from torchq.lowering.linear import DynamicInt8Linear, Int8Linear
from torchq.lowering.qparams import QParams
from torchq.lowering.registry import LOWERINGS
from torchq.lowering.release_weights import release_weights_, restore_weights_

__all__ = [
    "DeployedMultiheadAttention",
    "DynamicInt8Linear",
    "QParams",
    "Int8Conv",
    "Int8ConvTranspose",
    "Int8Layer",
    "Int8Linear",
    "LOWERINGS",
    "release_weights_",
    "restore_weights_",
]

"""Integer kernels inside PyTorch: the engine "torch" of :func:`torchq.deploy`, and its modules.

``torchq.onnx`` and this package do not know each other.
"""

from torchq.lowering.api import float_copy, lower_model, simulated_copy
from torchq.lowering.modules.attention import DeployedMultiheadAttention
from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.modules.conv_transpose import Int8ConvTranspose
from torchq.lowering.modules.dynamic_linear import DynamicInt8Linear
from torchq.lowering.modules.linear import Int8Linear
from torchq.lowering.modules.release_weights import release_weights_, restore_weights_
from torchq.lowering.ops.epilogues import ACTIVATIONS, Activation
from torchq.lowering.qparams import QParams
from torchq.lowering.reference_check import ReferenceCheck
from torchq.lowering.registry import LOWERINGS

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "DeployedMultiheadAttention",
    "DynamicInt8Linear",
    "QParams",
    "Int8Conv",
    "Int8ConvTranspose",
    "Int8Layer",
    "Int8Linear",
    "LOWERINGS",
    "ReferenceCheck",
    "float_copy",
    "lower_model",
    "release_weights_",
    "restore_weights_",
    "simulated_copy",
]

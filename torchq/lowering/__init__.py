"""Integer kernels inside PyTorch: :func:`torchq.deploy` and the modules that it inserts.

The function is called ``deploy`` and its package ``lowering``, because a module attribute cannot
be both. ``torchq.onnx`` and this package do not know each other.
"""

from torchq.lowering.api import deploy
from torchq.lowering.modules.attention import DeployedMultiheadAttention
from torchq.lowering.modules.base import Int8Layer
from torchq.lowering.modules.conv import Int8Conv
from torchq.lowering.modules.conv_transpose import Int8ConvTranspose
from torchq.lowering.modules.dynamic_linear import DynamicInt8Linear
from torchq.lowering.modules.fp8_linear import Fp8Linear
from torchq.lowering.modules.linear import Int8Linear
from torchq.lowering.modules.release_weights import release_weights_, restore_weights_
from torchq.lowering.modules.weight_only_linear import WeightOnlyLinear
from torchq.lowering.ops.epilogues import ACTIVATIONS, Activation
from torchq.lowering.qparams import QParams
from torchq.lowering.registry import LOWERINGS

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "DeployedMultiheadAttention",
    "DynamicInt8Linear",
    "Fp8Linear",
    "QParams",
    "Int8Conv",
    "Int8ConvTranspose",
    "Int8Layer",
    "Int8Linear",
    "LOWERINGS",
    "WeightOnlyLinear",
    "deploy",
    "release_weights_",
    "restore_weights_",
]

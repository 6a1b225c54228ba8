"""Integer kernels inside PyTorch: :func:`torchq.deploy` and the layers it puts in place.

The package is called ``deployment`` because ``torchq.deploy`` is the function. May import everything below but no sibling of its
layer: export and analysis do not know it, and it does not know them.
"""

from torchq.deployment.activations import ACTIVATIONS, Activation
from torchq.deployment.api import deploy
from torchq.deployment.attention import DeployedMultiheadAttention
from torchq.deployment.base import Int8Layer
from torchq.deployment.dynamic import DynamicInt8Linear
from torchq.deployment.fp8 import Fp8Linear
from torchq.deployment.grid import Grid
from torchq.deployment.layers import Int8Conv, Int8Linear
from torchq.deployment.lowering import LOWERINGS
from torchq.deployment.transposed import Int8ConvTranspose
from torchq.deployment.weight_only import WeightOnlyLinear

__all__ = [
    "ACTIVATIONS",
    "Activation",
    "DeployedMultiheadAttention",
    "DynamicInt8Linear",
    "Fp8Linear",
    "Grid",
    "Int8Conv",
    "Int8ConvTranspose",
    "Int8Layer",
    "Int8Linear",
    "LOWERINGS",
    "WeightOnlyLinear",
    "deploy",
]

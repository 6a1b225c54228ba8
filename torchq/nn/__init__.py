"""Quantized modules, and the conversion of float modules into them.

To add one: a class deriving from :class:`QuantModule` and the float class, decorated with :func:`register`. May import
everything below: calib, functional, descriptor, formats, utils.
"""

from torchq.nn.convert import (
    QUANTIZED,
    QuantModule,
    convert_,
    is_weight_quantizer,
    register,
    revert_,
)
from torchq.nn.modules.activation import (
    QuantELU,
    QuantHardsigmoid,
    QuantHardswish,
    QuantLeakyReLU,
    QuantMish,
    QuantSigmoid,
    QuantSiLU,
)
from torchq.nn.modules.attention import (
    QuantMultiheadAttention,
    QuantScaledDotProductAttention,
    ScaledDotProductAttention,
)
from torchq.nn.modules.conv import (
    QuantConv1d,
    QuantConv2d,
    QuantConv3d,
    QuantConvTranspose1d,
    QuantConvTranspose2d,
    QuantConvTranspose3d,
)
from torchq.nn.modules.elementwise import (
    Add,
    Cat,
    MatMul,
    Mul,
    QuantAdd,
    QuantCat,
    QuantMatMul,
    QuantMul,
    QuantTap,
    Tap,
)
from torchq.nn.modules.frozen_batchnorm import FROZEN_NORMS, freeze_norm_, unfreeze_norm_
from torchq.nn.modules.input_quantized import (
    QuantAdaptiveAvgPool1d,
    QuantAdaptiveAvgPool2d,
    QuantAdaptiveAvgPool3d,
    QuantAvgPool1d,
    QuantAvgPool2d,
    QuantAvgPool3d,
    QuantIdentity,
    QuantInstanceNorm1d,
    QuantInstanceNorm2d,
    QuantInstanceNorm3d,
    QuantMaxPool1d,
    QuantMaxPool2d,
    QuantMaxPool3d,
)
from torchq.nn.modules.linear import QuantEmbedding, QuantLinear
from torchq.nn.modules.reparam import Branches, QuantBranches
from torchq.nn.modules.transformer import QuantTransformerEncoder, QuantTransformerEncoderLayer
from torchq.nn.operator_modules import WiredModule, rewire_, trace_forward, wire_
from torchq.nn.shared_quantizers import share_quantizers_, shared_groups
from torchq.nn.tensor_quantizer import TensorQuantizer

__all__ = [
    "FROZEN_NORMS",
    "QUANTIZED",
    "Add",
    "Branches",
    "Cat",
    "MatMul",
    "Mul",
    "QuantAdaptiveAvgPool1d",
    "QuantAdaptiveAvgPool2d",
    "QuantAdaptiveAvgPool3d",
    "QuantAdd",
    "QuantAvgPool1d",
    "QuantAvgPool2d",
    "QuantAvgPool3d",
    "QuantBranches",
    "QuantCat",
    "QuantConv1d",
    "QuantConv2d",
    "QuantConv3d",
    "QuantConvTranspose1d",
    "QuantConvTranspose2d",
    "QuantConvTranspose3d",
    "QuantEmbedding",
    "QuantIdentity",
    "QuantInstanceNorm1d",
    "QuantInstanceNorm2d",
    "QuantInstanceNorm3d",
    "QuantLinear",
    "QuantMatMul",
    "QuantMaxPool1d",
    "QuantMaxPool2d",
    "QuantMaxPool3d",
    "QuantModule",
    "QuantMul",
    "QuantMultiheadAttention",
    "QuantScaledDotProductAttention",
    "QuantELU",
    "QuantHardsigmoid",
    "QuantHardswish",
    "QuantLeakyReLU",
    "QuantMish",
    "QuantSiLU",
    "QuantSigmoid",
    "QuantTap",
    "QuantTransformerEncoder",
    "QuantTransformerEncoderLayer",
    "ScaledDotProductAttention",
    "Tap",
    "TensorQuantizer",
    "WiredModule",
    "convert_",
    "freeze_norm_",
    "is_weight_quantizer",
    "register",
    "revert_",
    "rewire_",
    "share_quantizers_",
    "shared_groups",
    "trace_forward",
    "unfreeze_norm_",
    "wire_",
]

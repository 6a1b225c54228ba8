"""Quantized modules, and the conversion of float modules into them.

To add one: a class deriving from :class:`QuantModule` and the float class, decorated with :func:`register`. May import
everything below: calib, functional, descriptor, formats, utils.
"""

from torchq.nn.conv import QuantConv1d, QuantConv2d, QuantConv3d, QuantConvTranspose1d, QuantConvTranspose2d, QuantConvTranspose3d
from torchq.nn.convert import QUANTIZED, QuantModule, convert_, is_weight_quantizer, register, revert_
from torchq.nn.frozen_norm import FROZEN_NORMS, freeze_norm_, unfreeze_norm_
from torchq.nn.inputs import (
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
from torchq.nn.linear import QuantEmbedding, QuantLinear
from torchq.nn.tensor_quantizer import TensorQuantizer
from torchq.nn.transformer import QuantTransformerEncoderLayer

__all__ = [
    "FROZEN_NORMS",
    "QUANTIZED",
    "QuantAdaptiveAvgPool1d",
    "QuantAdaptiveAvgPool2d",
    "QuantAdaptiveAvgPool3d",
    "QuantAvgPool1d",
    "QuantAvgPool2d",
    "QuantAvgPool3d",
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
    "QuantMaxPool1d",
    "QuantMaxPool2d",
    "QuantMaxPool3d",
    "QuantModule",
    "QuantTransformerEncoderLayer",
    "TensorQuantizer",
    "convert_",
    "freeze_norm_",
    "is_weight_quantizer",
    "register",
    "revert_",
    "unfreeze_norm_",
]

"""Quantized modules, one file for each kind, as in the original."""

from torchq.compat.pytorch_quantization.nn.modules import (
    _utils,
    clip,
    quant_conv,
    quant_instancenorm,
    quant_linear,
    quant_pooling,
    quant_rnn,
    tensor_quantizer,
)

__all__ = [
    "_utils",
    "clip",
    "quant_conv",
    "quant_instancenorm",
    "quant_linear",
    "quant_pooling",
    "quant_rnn",
    "tensor_quantizer",
]

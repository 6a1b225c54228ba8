"""Quantized modules of pytorch-quantization."""

from torchq.compat.pytorch_quantization.nn import functional, modules
from torchq.compat.pytorch_quantization.nn.modules.clip import Clip
from torchq.compat.pytorch_quantization.nn.modules.quant_conv import LAYERS as _CONVOLUTIONS
from torchq.compat.pytorch_quantization.nn.modules.quant_instancenorm import LAYERS as _NORMS
from torchq.compat.pytorch_quantization.nn.modules.quant_linear import Linear, QuantLinear
from torchq.compat.pytorch_quantization.nn.modules.quant_pooling import LAYERS as _POOLING
from torchq.compat.pytorch_quantization.nn.modules.quant_rnn import (
    LSTM,
    LSTMCell,
    QuantLSTM,
    QuantLSTMCell,
)
from torchq.compat.pytorch_quantization.nn.modules.tensor_quantizer import TensorQuantizer

globals().update(_CONVOLUTIONS | _NORMS | _POOLING)

__all__ = [
    "Clip",
    "LSTM",
    "LSTMCell",
    "Linear",
    "QuantLSTM",
    "QuantLSTMCell",
    "QuantLinear",
    "TensorQuantizer",
    "functional",
    "modules",
    *_CONVOLUTIONS,
    *_NORMS,
    *_POOLING,
]

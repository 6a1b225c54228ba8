"""Quantized modules of pytorch-quantization."""

from torchq.compat.pytorch_quantization.clip import Clip
from torchq.compat.pytorch_quantization.layers import LAYERS
from torchq.compat.pytorch_quantization.recurrent import (
    LSTM,
    LSTMCell,
    QuantLSTM,
    QuantLSTMCell,
)
from torchq.compat.pytorch_quantization.tensor_quantizer import TensorQuantizer

globals().update(LAYERS)

__all__ = [
    "Clip",
    "LSTM",
    "LSTMCell",
    "QuantLSTM",
    "QuantLSTMCell",
    "TensorQuantizer",
    *LAYERS,
]

"""Functions behind the recurrent layers."""

from torchq.compat.pytorch_quantization.nn._functions import quant_rnn

__all__ = ["quant_rnn"]

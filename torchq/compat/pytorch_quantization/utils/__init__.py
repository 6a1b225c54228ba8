"""Helpers of pytorch-quantization."""

from torchq.compat.pytorch_quantization.utils.reduce_amax import reduce_amax

__all__ = ["reduce_amax"]

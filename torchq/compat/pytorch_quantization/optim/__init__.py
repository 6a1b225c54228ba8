"""Optimizer helpers of pytorch-quantization."""

from torchq.compat.pytorch_quantization.optim import helper

__all__ = ["helper"]

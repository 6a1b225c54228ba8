"""The functions of the original's compiled extension in plain torch, for any device."""

from typing import Any

from torch import Tensor

from torchq.compat.pytorch_quantization.tensor_quant import (
    fake_tensor_quant,
    scaled_e4m3,
)
from torchq.formats import PerAxis


def fake_tensor_quant_(
    inputs: Tensor, amax: Tensor, *args: Any, **kwargs: Any
) -> Tensor:
    """Do what :func:`fake_tensor_quant` does, in place."""
    return inputs.copy_(fake_tensor_quant(inputs, amax, *args, **kwargs))


def fake_tensor_quant_with_axis(
    inputs: Tensor, amax: Tensor, axis: int, *args: Any, **kwargs: Any
) -> Tensor:
    """Do what :func:`fake_tensor_quant` does, with one amax for each index of ``axis``."""
    amax = PerAxis((axis,)).align(amax.reshape(-1), inputs.shape)
    return fake_tensor_quant(inputs, amax, *args, **kwargs)


def fake_e4m3fy(inputs: Tensor) -> Tensor:
    """Round to FP8 E4M3, saturating, without a scale."""
    return scaled_e4m3(inputs)

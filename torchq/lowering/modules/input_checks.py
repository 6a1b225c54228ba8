"""Checks of the inputs of deployed layers."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from torchq.errors import QuantizationError
from torchq.utils import calls_are_recorded

__all__ = ["eager", "require_dtype", "smallest_value"]

#: The dtypes that float layers accept under autocast.
_AUTOCAST_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def eager(x: Tensor) -> bool:
    """Return True if a kernel may be called directly with its arguments bound.

    Going past torch's dispatcher saves half of a small layer's time. ``torch.jit.trace`` needs the
    dispatcher: it cannot write down the arguments of oneDNN's operators.
    """
    return not calls_are_recorded() and type(x) is Tensor and x.is_cpu


def require_dtype(x: Tensor, dtype: torch.dtype | None, where: str) -> None:
    """Refuse an input that the simulation, a float layer of ``dtype``, would refuse.

    Args:
        x: the input. Under autocast any floating dtype of at most 32 bits is accepted.
        dtype: of the layer; None accepts any floating dtype.
        where: the name of the layer, for the error.

    Raises:
        TypeError: ``x`` has another dtype.
    """
    if dtype is None:
        if not x.dtype.is_floating_point:
            raise TypeError(f"{where}: got a tensor of {x.dtype}; expected a floating-point tensor")
        return
    if x.dtype is dtype:
        return
    if x.dtype in _AUTOCAST_DTYPES and torch.is_autocast_enabled(x.device.type):
        return
    raise TypeError(
        f"{where}: got a tensor of {x.dtype}; expected {dtype}. Convert it with x.to({dtype})"
    )


def smallest_value(x: Tensor, dtype: torch.dtype | None, where: str) -> float:
    """Return the smallest value of an input that is to be quantized.

    Looking for it takes a quarter of the time of quantizing. It is not looked for where a program
    is compiled or exported, or on GPUs, which would have to be waited for; then it is -inf.

    Raises:
        TypeError: ``x`` has another dtype than ``dtype``, that of the layer; None accepts any.
        QuantizationError: ``x`` holds NaN. The simulation would return NaN, but no code stands
            for NaN, and any other would be a wrong result that looks right.
    """
    require_dtype(x, dtype, where)
    if not eager(x) or not x.numel():
        return -math.inf
    smallest = float((x.detach() if x.requires_grad else x).amin())
    if math.isnan(smallest):
        raise QuantizationError(
            f"{where}: got NaN; expected numbers, as no uint8 code stands for NaN. "
            "Look for the operation that makes it"
        )
    return smallest

"""Scaling a gradient without touching the value."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.formats import Format

__all__ = ["ScaleGradientFunction", "scale_gradient", "range_gradient_scale"]


class ScaleGradientFunction(torch.autograd.Function):
    """Identity; the gradient is multiplied by ``factor``."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float) -> Tensor:
        """Return a view of ``x``."""
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the factor."""
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the scaled gradient."""
        return grads[0] * ctx.factor, None


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return ``x``, any shape and dtype; its gradient is multiplied by ``factor``."""
    return ScaleGradientFunction.apply(x, factor)


def range_gradient_scale(elements: int, ranges: int, format: Format) -> float:
    """Return the factor that brings the gradient of a range to the size of a weight's gradient.

    LSQ multiplies the gradient of the *scale* by ``1 / sqrt(n * qmax)`` with ``n`` elements for
    each scale. The parameter here is ``amax = scale * qmax``; the factor ``qmax**1.5 / sqrt(n)``
    makes the same relative change of it.

    Args:
        elements: the number of elements of the tensor that is quantized.
        ranges: the number of its ranges, at least 1; ``n = elements / ranges``.
        format: the number format.

    Reference: Esser et al., Learned Step Size Quantization (ICLR 2020), section 2.2.

    Example:
        >>> range_gradient_scale(elements=400, ranges=4, format=torchq.formats.by_bits(3))
        0.5196152422706632
    """
    return format.qmax**1.5 / (elements / ranges) ** 0.5 if elements else 0.0

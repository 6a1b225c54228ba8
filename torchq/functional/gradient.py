"""Gradients that differ from those of the value: scaled ones, and those past a rounding."""

import inspect
from typing import Any, TypeVar

import torch
from torch import Tensor

from torchq.formats import Format

F = TypeVar("F", bound=type[torch.autograd.Function])


def with_signature(cls: F) -> F:
    """Keep the signature of ``forward``, a class decorator: each call asks for it.

    Making it takes as long as computing a small tensor (:func:`inspect.signature`, PEP 362).
    """
    cls.forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]
    return cls


@with_signature
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
    result: Tensor = ScaleGradientFunction.apply(x, factor)
    return result


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


@with_signature
class StraightThroughFunction(torch.autograd.Function):
    """The second argument; the gradient goes to the first unchanged."""

    generate_vmap_rule = True

    @staticmethod
    def forward(exact: Tensor, rounded: Tensor) -> Tensor:
        """Return a view of ``rounded``."""
        return rounded.view_as(rounded)

    @staticmethod
    def setup_context(ctx: object, inputs: tuple[object, ...], output: object) -> None:
        """Keep nothing."""

    @staticmethod
    def backward(ctx: object, *grads: Tensor) -> tuple[Tensor, None]:
        """Return the gradient as it is."""
        return grads[0], None


def straight_through(exact: Tensor, rounded: Tensor) -> Tensor:
    """Return ``rounded`` with the gradient of ``exact``, of the same shape and dtype.

    The bits are those of ``rounded``; ``exact + (rounded - exact).detach()`` would round again.

    Reference: Bengio et al., Estimating or Propagating Gradients Through Stochastic Neurons for
    Conditional Computation (2013), section 4.

    Args:
        exact: what the gradient belongs to.
        rounded: the value, without a gradient of its own.
    """
    if not (torch.is_grad_enabled() and exact.requires_grad) or torch.jit.is_tracing():
        return rounded
    result: Tensor = StraightThroughFunction.apply(exact, rounded)
    return result

"""The arithmetic of pytorch-quantization, which divides by the reciprocal of torchq's scale.

Its scale is ``qmax / amax``; codes are ``round(x * scale)`` and values ``code / scale``. torchq's
own functions compute ``round(x / scale)`` and ``code * scale`` with ``scale = amax / qmax``
(:func:`torchq.functional.fake_quantize`). The two differ by at most one rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.compat.errors import LegacyTypeError
from torchq.formats import Format, by_bits
from torchq.functional import compute_dtype
from torchq.functional.kernels import gradient_mask, mask_gradient

__all__ = [
    "TINY",
    "FakeTensorQuantFunction",
    "TensorQuantFunction",
    "fake_tensor_quant",
    "live_range",
    "tensor_quant",
]


#: The original treats a range up to here as dead; 2**-24 is the smallest float16 subnormal.
TINY = 2.0**-24


def live_range(amax: Tensor) -> Tensor:
    """Return ``amax`` with the ranges that are dead in the original set to 0."""
    return torch.where(amax <= TINY, 0.0, amax)


def _encode(x: Tensor, amax: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Return codes in the compute dtype, and the legacy scale (1 for dead ranges)."""
    is_dead = amax <= TINY
    # A number divided by a tensor would be computed as a reciprocal times the number, which
    # rounds twice.
    qmax = torch.full_like(amax, format.qmax)
    scale = torch.where(is_dead, 0.0, qmax / amax)
    codes = format.snap_(x.to(scale.dtype) * scale)
    return codes, torch.where(is_dead, 1.0, scale)


class _StraightThrough(torch.autograd.Function):
    """Base with the gradient 1 where ``|x| <= amax`` and 0 elsewhere; amax has no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the mask of elements within the range."""
        x, amax = inputs[:2]
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(gradient_mask(x, amax))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the first input."""
        if not ctx.needs_input_grad[0]:
            return None, None, None
        (mask,) = ctx.saved_tensors
        return mask_gradient("reference", grads[0], mask), None, None


class TensorQuantFunction(_StraightThrough):
    """``(codes, scale)``; see :func:`tensor_quant`."""

    @staticmethod
    def forward(x: Tensor, amax: Tensor, format: Format) -> tuple[Tensor, Tensor]:
        """Return codes in the dtype of ``x``, and the legacy scale."""
        codes, scale = _encode(x, amax, format)
        return codes.to(x.dtype), scale

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Mark the scale as constant."""
        ctx.mark_non_differentiable(output[1])
        _StraightThrough.setup_context(ctx, inputs, output)


class FakeTensorQuantFunction(_StraightThrough):
    """``codes / scale``; see :func:`fake_tensor_quant`."""

    @staticmethod
    def forward(x: Tensor, amax: Tensor, format: Format) -> Tensor:
        """Return dequantized values in the dtype of ``x``."""
        codes, scale = _encode(x, amax, format)
        return codes.div_(scale).to(x.dtype)


def _arguments(
    x: Tensor, amax: Tensor | float, num_bits: int, unsigned: bool, narrow_range: bool
) -> tuple[Tensor, Tensor, Format]:
    """Return the checked arguments of the functions above."""
    if not x.is_floating_point():
        raise LegacyTypeError(
            f"tensor_quant: got a tensor of {x.dtype}; expected a floating-point tensor. "
            "Convert it with x.float()"
        )
    amax = torch.as_tensor(amax, device=x.device).to(compute_dtype(x.dtype))
    return x, amax, by_bits(num_bits, unsigned=unsigned, narrow=narrow_range)


def tensor_quant(
    x: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return integer codes of ``x`` and their legacy scale.

    Args:
        x: floating point, any shape; computed in fp32 (fp64 for fp64).
        amax: >= 0, broadcastable to x; at most 2**-24 gives codes 0 and scale 1.
        num_bits: 2 to 16 (1 to 16 unsigned).
        unsigned: codes ``0 .. 2**num_bits - 1``; negative values become 0.
        narrow_range: codes ``-qmax .. qmax`` in place of ``-qmax-1 .. qmax``; ignored if unsigned.

    Returns:
        codes in the dtype and shape of x; the scale qmax / amax in the compute dtype, with the
        shape of amax.

    Raises:
        LegacyTypeError: ``x`` is not floating point.

    Example:
        >>> _ = torch.manual_seed(12345)
        >>> x = torch.rand(10)
        >>> x
        tensor([0.9817, 0.8796, 0.9921, 0.4611, 0.0832, 0.1784, 0.3674, 0.5676, 0.3376,
                0.2119])
        >>> codes, scale = tensor_quant(x, torch.max(torch.abs(x)))
        >>> codes
        tensor([126., 113., 127.,  59.,  11.,  23.,  47.,  73.,  43.,  27.])
        >>> scale
        tensor(128.0057)
    """
    return TensorQuantFunction.apply(*_arguments(x, amax, num_bits, unsigned, narrow_range))


def fake_tensor_quant(
    x: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = False,
) -> Tensor:
    """Return ``codes / scale`` of :func:`tensor_quant`, in the dtype of ``x``.

    Example:
        >>> _ = torch.manual_seed(12345)
        >>> x = torch.rand(10)
        >>> fake_tensor_quant(x, torch.max(torch.abs(x)))
        tensor([0.9843, 0.8828, 0.9921, 0.4609, 0.0859, 0.1797, 0.3672, 0.5703, 0.3359,
                0.2109])
    """
    return FakeTensorQuantFunction.apply(*_arguments(x, amax, num_bits, unsigned, narrow_range))

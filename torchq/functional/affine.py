"""Affine quantization: a scale and a zero point, so that a range need not be symmetric.

``y = clamp(round(x / scale), quant_min - zero_point, quant_max - zero_point) * scale`` is the same
as adding the zero point to the codes, clamping to the bounds of the format and subtracting it
again, with one rounding.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.errors import ConfigError
from torchq.formats import UINT8, Format, PerTensor
from torchq.formats.granularity import Granularity
from torchq.functional import onnx_ops
from torchq.functional.gradient import straight_through
from torchq.functional.kernels import affine_gradients, backend_for, kernels, mask_gradient
from torchq.functional.scale import compute_dtype, is_dead_range, scale_and_zero_point
from torchq.utils import constant_while_tracing

__all__ = [
    "AffineFakeQuantizeFunction",
    "affine_bounds",
    "fake_quantize_affine",
    "fake_quantize_range",
    "living_ends",
]

_PER_TENSOR = PerTensor()


#: The ends that a learned range has at least: no numbers that matter, but no dead range either, and
#: no end at exactly 0, where clamping passes no gradient.
_LEAST_LOW, _LEAST_HIGH = -1e-30, 1e-12


class AffineFakeQuantizeFunction(torch.autograd.Function):
    """Round to a grid with a zero point; gradients to the input, the scale and the zero point.

    With ``v = x / scale``, the gradient to x is 1 where ``low <= v <= high``, else 0. ``d y / d
    scale`` is ``round(v) - v`` inside and the bound outside; ``d y / d zero_point`` is 0 inside and
    ``-scale`` outside. If neither the scale nor the zero point needs a gradient, the backward keeps
    one byte per element, no copy of the input.

    Reference: Bhalgat et al., LSQ+ (CVPR Workshops 2020), section 3.1, written for a zero point in
    codes: its offset is ``-zero_point * scale``.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        scale: Tensor,
        zero_point: Tensor,
        low: Tensor,
        high: Tensor,
        format: Format,
        backend: str,
        with_mask: bool,
    ) -> Any:
        """Return the quantized tensor, with its mask if wanted."""
        function = kernels(backend).fake_quantize_between
        y, mask = function(x, scale, low, high, format, with_mask)
        return (y, mask) if with_mask else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the mask of the gradient, or what all gradients are computed from."""
        x, scale, _, low, high, ctx.format, ctx.backend, ctx.with_mask = inputs
        if ctx.with_mask:
            ctx.mark_non_differentiable(output[1])
            ctx.set_materialize_grads(False)  # Otherwise the mask would get a gradient of zeros.
            ctx.save_for_backward(output[1])
        else:
            ctx.save_for_backward(x, scale, low, high)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients to the input, the scale and the zero point."""
        nothing = (None,) * 5
        if grads[0] is None:
            return None, None, None, *nothing
        if ctx.with_mask:
            (mask,) = ctx.saved_tensors
            return mask_gradient(ctx.backend, grads[0], mask), None, None, *nothing
        x, scale, low, high = ctx.saved_tensors
        found = affine_gradients(grads[0], x, scale, low, high, ctx.format)
        needed = ctx.needs_input_grad
        wanted = [grad if need else None for grad, need in zip(found, needed[:3], strict=True)]
        return *wanted, *nothing


def fake_quantize_affine(
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | float,
    format: Format = UINT8,
    granularity: Granularity = _PER_TENSOR,
) -> Tensor:
    """Round ``x`` to the codes of an integer format with a zero point, and back.

    All three tensors get straight-through gradients; see :class:`AffineFakeQuantizeFunction`.
    Under ``torch.onnx.export`` the call becomes QuantizeLinear and DequantizeLinear.

    Args:
        x: float16, bfloat16, float32 or float64, any shape and strides, may be empty.
        scale: the distance of neighbouring codes, > 0: a float, or a tensor of shape
            ``granularity.amax_shape(x.shape)``, ``[]``, ``[1]`` or ``[C]``.
        zero_point: the code of 0, of the same shape. It is rounded to a whole number, ties to even,
            and clamped to the bounds of the format.
        format: an integer format.
        granularity: which elements share one scale.

    Returns:
        The shape, dtype and memory format of ``x``. NaN stays NaN; infinities saturate.

    Raises:
        TypeError: x is not floating point.
        ConfigError: a float format, or a shape that does not fit.

    Example:
        >>> fake_quantize_affine(torch.tensor([-9.0, -0.6, 0.0, 0.26, 99.0]), 0.5, 2.0)
        tensor([-1.0000, -0.5000,  0.0000,  0.5000, 99.0000])
    """
    _check(x, format)
    own = _aligned(x, scale, granularity)
    own, given = torch.broadcast_tensors(own, _aligned(x, zero_point, granularity))
    whole = given.detach().round().clamp(format.quant_min, format.quant_max)
    point = straight_through(given, whole)
    low, high = affine_bounds(point, format)
    return _fake_quantize(x, (own, point, low, high), format, granularity)


def fake_quantize_range(
    x: Tensor,
    amin: Tensor | float,
    amax: Tensor | float,
    format: Format = UINT8,
    granularity: Granularity = _PER_TENSOR,
    scale_format: Format | None = None,
) -> Tensor:
    """Round ``x`` to the codes of the range [amin, amax], and back, with gradients to both ends.

    The scale and zero point are those of :func:`scale_and_zero_point`. A dead range gives exact
    zeros; one that learns counts as a very small range, so that it gets a gradient and recovers.

    Args:
        x: see :func:`fake_quantize_affine`.
        amin: the lower end, <= 0: a float, or a tensor of the shapes of a scale.
        amax: the upper end, >= 0.
        format: an integer format.
        granularity: which elements share one range.
        scale_format: None, or :data:`torchq.formats.POWER_OF_TWO`.

    Returns:
        The shape, dtype and memory format of ``x``.

    Raises:
        TypeError: x is not floating point.
        ConfigError: a float format, or a shape that does not fit.
    """
    _check(x, format)
    ends = living_ends(_aligned(x, amin, granularity), _aligned(x, amax, granularity))
    scale, point = scale_and_zero_point(*ends, format, scale_format)
    low, high = affine_bounds(point, format, is_dead_range(*ends, format))
    return _fake_quantize(x, (scale, point, low, high), format, granularity)


def living_ends(amin: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return both ends of a range; those that learn are moved off 0, where no gradient passes.

    Args:
        amin: the lower ends, <= 0.
        amax: the upper ends, >= 0.
    """
    if torch.is_grad_enabled() and (amin.requires_grad or amax.requires_grad):
        amin = straight_through(amin, amin.detach().clamp_max(_LEAST_LOW))
        amax = straight_through(amax, amax.detach().clamp_min(_LEAST_HIGH))
    return amin, amax


def affine_bounds(
    zero_point: Tensor, format: Format, dead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest code less the zero point, without gradient.

    Args:
        zero_point: whole numbers.
        format: the number format.
        dead: where a range quantizes everything to 0, so that both bounds are 0; None is nowhere.
    """
    point = zero_point.detach()
    low, high = format.quant_min - point, format.quant_max - point
    if dead is None:
        return low, high
    return torch.where(dead, 0.0, low), torch.where(dead, 0.0, high)


def _check(x: Tensor, format: Format) -> None:
    if not x.is_floating_point():
        raise TypeError(
            f"fake_quantize: got a tensor of {x.dtype}; expected a floating-point tensor. "
            "Convert it with x.float()"
        )
    if not format.is_integer:
        raise ConfigError(
            f"fake_quantize: got a zero point for {format}; expected an integer format. "
            "Codes of a float format have none"
        )


def _aligned(x: Tensor, value: Tensor | float, granularity: Granularity) -> Tensor:
    """Return ``value`` in the compute dtype, so that it broadcasts against the split tensor."""
    dtype = compute_dtype(x.dtype)
    if not isinstance(value, Tensor):
        # The device fills it: there is no copy from the host.
        value = torch.full((), value, dtype=dtype, device=x.device)
    with constant_while_tracing():
        return granularity.align(value.to(dtype), x.shape)


def _fake_quantize(
    x: Tensor,
    grid: tuple[Tensor, Tensor, Tensor, Tensor],
    format: Format,
    granularity: Granularity,
) -> Tensor:
    """Quantize and dequantize ``x``; ``grid`` is scale, zero point and the bounds of codes."""
    scale, zero_point, low, high = grid
    if torch.onnx.is_in_onnx_export():
        return onnx_ops.quantize_dequantize_affine(x, scale, zero_point, format, granularity)
    parts = granularity.split(x)
    if torch.jit.is_tracing():
        with constant_while_tracing():
            y, _ = kernels("reference").fake_quantize_between(
                parts, scale, low, high, format, False
            )
            return granularity.join(y, x.shape)
    backend = backend_for(parts, scale, format, affine=True)
    learned = scale.requires_grad or zero_point.requires_grad
    with_mask = torch.is_grad_enabled() and parts.requires_grad and not learned
    result = AffineFakeQuantizeFunction.apply(
        parts, scale, zero_point, low, high, format, backend, with_mask
    )
    return granularity.join(result[0] if with_mask else result, x.shape)

"""Quantize, dequantize and fake-quantize any format at any granularity, with gradients.

An affine grid has a scale and a zero point, so that a range need not be symmetric.

``y = clamp(round(x / scale), quant_min - zero_point, quant_max - zero_point) * scale`` is the same
as adding the zero point to the codes, clamping to the bounds of the format and subtracting it
again, with one rounding.
"""

from typing import Any

import torch
from torch import Tensor

from torchq.errors import ConfigError
from torchq.formats import INT8, POWER_OF_TWO, UINT8, Format, PerTensor
from torchq.formats.granularity import Granularity
from torchq.functional import onnx_ops
from torchq.functional.gradient import straight_through, with_signature
from torchq.functional.kernels.dispatch import (
    backend_for,
    kernels,
    learned_gradients,
    mask_gradient,
)
from torchq.functional.kernels.reference import (
    affine_gradients,
    clamped_codes,
    gradient_mask,
    snap,
)
from torchq.functional.range import Range
from torchq.functional.scale import (
    compute_dtype,
    scale_and_zero_point,
    scale_from_amax,
    widened_to_power_of_two,
)
from torchq.utils import constant_while_tracing

_PER_TENSOR = PerTensor()

#: The ends that a learned range has at least: no numbers that matter, but no dead range either, and
#: no end at exactly 0, where clamping passes no gradient.
_LEAST_LOW = -1e-30
_LEAST_HIGH = 1e-12


@with_signature
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
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the mask of the gradient, or what all gradients are computed from."""
        x, scale, _, low, high, ctx.format, ctx.backend, ctx.with_mask = inputs
        if ctx.with_mask:
            ctx.mark_non_differentiable(output[1])
            # Otherwise the mask would get a gradient of zeros.
            ctx.set_materialize_grads(False)
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
        grad_x, grad_scale, grad_point = affine_gradients(
            grads[0], x, scale, low, high, ctx.format
        )
        needs_x, needs_scale, needs_point = ctx.needs_input_grad[:3]
        return (
            grad_x if needs_x else None,
            grad_scale if needs_scale else None,
            grad_point if needs_point else None,
            *nothing,
        )


def fake_quantize_affine(
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | float | None = None,
    format: Format = UINT8,
    granularity: Granularity = _PER_TENSOR,
) -> Tensor:
    """Round ``x`` to the codes that a scale and a zero point place, and back.

    All three tensors get straight-through gradients; see :class:`AffineFakeQuantizeFunction`.
    Under ``torch.onnx.export`` the call becomes QuantizeLinear and DequantizeLinear.

    Args:
        x: float16, bfloat16, float32 or float64, any shape and strides, may be empty.
        scale: the distance of neighbouring codes, > 0: a float, or a tensor of shape
            ``granularity.amax_shape(x.shape)``, ``[]``, ``[1]`` or ``[C]``.
        zero_point: the code of 0, of the same shape. It is rounded to a whole number, ties to even,
            and clamped to the bounds of the format. None: 0, for float formats too.
        format: the format of the codes; an integer format if they have a zero point.
        granularity: which elements share one scale.

    Returns:
        The shape, dtype and memory format of ``x``. NaN stays NaN; infinities saturate.

    Raises:
        TypeError: x is not floating point.
        ConfigError: a zero point for a float format, or a shape that does not fit.

    Example:
        >>> fake_quantize_affine(torch.tensor([-9.0, -0.6, 0.0, 0.26, 99.0]), 0.5, 2.0)
        tensor([-1.0000, -0.5000,  0.0000,  0.5000, 99.0000])
    """
    aligned_scale = _aligned("fake_quantize", x, scale, granularity)
    if zero_point is None:
        return _fake_quantize_scaled(x, aligned_scale, format, granularity)
    aligned_point = _aligned("fake_quantize", x, zero_point, granularity)
    # A scale for each channel may come with one zero point for all, and the reverse.
    aligned_scale, aligned_point = torch.broadcast_tensors(aligned_scale, aligned_point)
    whole_point = (
        aligned_point.detach().round().clamp(format.quant_min, format.quant_max)
    )
    point = straight_through(aligned_point, whole_point)
    low, high = affine_bounds(point, format)
    return _fake_quantize_affine(
        x, (aligned_scale, point, low, high), format, granularity
    )


def _fake_quantize_scaled(
    x: Tensor, scale: Tensor, format: Format, granularity: Granularity
) -> Tensor:
    """Quantize and dequantize ``x`` by an aligned scale without a zero point."""
    if torch.onnx.is_in_onnx_export():
        return onnx_ops.quantize_dequantize_affine(x, scale, None, format, granularity)
    if format.is_integer:
        point = torch.zeros_like(scale)
        grid = scale, point, *affine_bounds(point, format)
        return _fake_quantize_affine(x, grid, format, granularity)
    parts = granularity.split(x).to(scale.dtype)
    fixed_scale = scale.detach()
    codes = format.snap_(torch.div(parts.detach(), fixed_scale))
    rounded = codes.mul_(fixed_scale).to(x.dtype)
    # The values are those of ``rounded``; the gradients to x and scale are those of clipping.
    clipped = torch.clamp(parts / scale, format.quant_min, format.quant_max) * scale
    return granularity.join(straight_through(clipped.to(x.dtype), rounded), x.shape)


def fake_quantize_range(
    x: Tensor,
    amin: Tensor | float,
    amax: Tensor | float,
    format: Format = UINT8,
    granularity: Granularity = _PER_TENSOR,
    scale_format: Format | None = None,
) -> Tensor:
    """Round ``x`` to the codes of the range [amin, amax], and back, with gradients to both ends.

    The arguments are those of :func:`fake_quantize_affine`, but ``amin <= 0 <= amax`` in place of
    scale and zero point, which :func:`scale_and_zero_point` gives. A dead range gives exact
    zeros; one that learns counts as a very small range, so that it gets a gradient and recovers.
    """
    amin, amax = living_ends(
        _aligned("fake_quantize", x, amin, granularity),
        _aligned("fake_quantize", x, amax, granularity),
    )
    scale, point = scale_and_zero_point(amin, amax, format, scale_format)
    dead = Range(amax, amin).dead(format)
    low, high = affine_bounds(point, format, dead)
    return _fake_quantize_affine(x, (scale, point, low, high), format, granularity)


def living_ends(amin: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return both ends of a range; those that learn are moved off 0, where no gradient passes."""
    if torch.is_grad_enabled() and (amin.requires_grad or amax.requires_grad):
        amin = straight_through(amin, amin.detach().clamp_max(_LEAST_LOW))
        amax = straight_through(amax, amax.detach().clamp_min(_LEAST_HIGH))
    return amin, amax


def affine_bounds(
    zero_point: Tensor, format: Format, dead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the smallest and largest code less the zero point, 0 where ``dead``; no gradient."""
    point = zero_point.detach()
    low = format.quant_min - point
    high = format.quant_max - point
    if dead is None:
        return low, high
    return torch.where(dead, 0.0, low), torch.where(dead, 0.0, high)


def _aligned(
    name: str, x: Tensor, value: Tensor | float, granularity: Granularity
) -> Tensor:
    """Return ``value`` in the compute dtype, aligned with the split ``x``.

    ``name`` is that of the public function, for the error.
    """
    if not x.is_floating_point():
        raise TypeError(
            f"{name}: got a tensor of {x.dtype}; expected a floating-point tensor. "
            "Convert it with x.float()"
        )
    dtype = compute_dtype(x.dtype)
    if not isinstance(value, Tensor):
        # The device fills it: there is no copy from the host.
        value = torch.full((), value, dtype=dtype, device=x.device)
    with constant_while_tracing():
        return granularity.align(value.to(dtype), x.shape)


def _fake_quantize_affine(
    x: Tensor,
    grid: tuple[Tensor, Tensor, Tensor, Tensor],
    format: Format,
    granularity: Granularity,
) -> Tensor:
    """Quantize and dequantize ``x``; ``grid`` is scale, zero point and the bounds of codes."""
    if not format.is_integer:
        raise ConfigError(
            f"fake_quantize: got a zero point for {format}; expected an integer format. "
            "Codes of a float format have none"
        )
    scale, zero_point, low, high = grid
    if torch.onnx.is_in_onnx_export():
        return onnx_ops.quantize_dequantize_affine(
            x, scale, zero_point, format, granularity
        )
    parts = granularity.split(x)
    if torch.jit.is_tracing():  # torch.jit cannot store an autograd.Function.
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
    y = result[0] if with_mask else result
    return granularity.join(y, x.shape)


@with_signature
class FakeQuantizeFunction(torch.autograd.Function):
    """``snap(x / scale) * scale``; gradient 1 where ``|x| <= amax`` and 0 elsewhere, none to amax.

    The backward keeps one byte per element, no copy of the input. ``backend`` is a name that
    :func:`torchq.functional.kernels.backend_for` returned. With ``with_mask`` its kernel computes
    that byte in the same pass, as a second result.

    If the range is ``learned``, the input is kept and amax has a gradient: with ``v = x / scale``
    and ``q = snap(v)``, ``d y / d scale`` is ``q - v`` inside the grid and ``q`` (a bound) outside,
    and ``d scale / d amax`` is ``1 / qmax``. The gradient to x is 1 where ``quant_min <= v <=
    quant_max``, and 0 elsewhere.

    Reference: Esser et al., Learned Step Size Quantization (ICLR 2020), equations 3 and 5, written
    for amax and without the gradient scale of section 2.2 (see :func:`torchq.qat.param_groups` for
    learning rates).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        amax: Tensor,
        format: Format,
        scale_format: Format | None,
        backend: str,
        learned: bool,
        with_mask: bool,
    ) -> Any:
        """Return the quantized tensor, with its mask if wanted."""
        y, mask = kernels(backend).fake_quantize(
            x, amax, format, scale_format, with_mask
        )
        return (y, mask) if with_mask else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the mask of the gradient, or what all gradients are computed from."""
        x, amax, ctx.format, ctx.scale_format, ctx.backend, ctx.learned, with_mask = (
            inputs
        )
        if ctx.learned:
            ctx.save_for_backward(x, amax)
        elif with_mask:
            ctx.mark_non_differentiable(output[1])
            # Otherwise the mask would get a gradient of zeros.
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(output[1])
        elif ctx.needs_input_grad[0]:
            ctx.save_for_backward(gradient_mask(x, amax))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients to the input and, if it learns, to its range."""
        grad = grads[0]
        needs_x, needs_amax, *_ = ctx.needs_input_grad
        nothing = (None,) * 5
        if grad is None or not (needs_x or ctx.learned):
            return None, None, *nothing
        if not ctx.learned:
            (mask,) = ctx.saved_tensors
            return mask_gradient(ctx.backend, grad, mask), None, *nothing
        x, amax = ctx.saved_tensors
        grad_x, grad_amax = learned_gradients(
            ctx.backend, grad, x, amax, ctx.format, ctx.scale_format
        )
        return grad_x if needs_x else None, grad_amax if needs_amax else None, *nothing


def fake_quantize(
    x: Tensor,
    amax: Tensor | float,
    format: Format = INT8,
    granularity: Granularity = _PER_TENSOR,
    scale_format: Format | None = None,
    amin: Tensor | float | None = None,
) -> Tensor:
    """Round ``x`` onto the grid of ``format`` and back.

    The gradient is the straight-through one of :class:`FakeQuantizeFunction`. Under
    ``torch.onnx.export`` the call becomes QuantizeLinear and DequantizeLinear.

    Args:
        x: float16, bfloat16, float32 or float64, any shape and strides, may be empty. The
            arithmetic is float32, or float64 for float64.
        amax: the magnitude mapped to ``format.qmax``, >= 0: a float, or a tensor of shape
            ``granularity.amax_shape(x.shape)``, ``[]``, ``[1]`` or ``[C]``. A dead range (see
            :mod:`torchq.functional.scale`) gives exact zeros; infinity and NaN give NaN.
        format: see :mod:`torchq.formats`.
        granularity: which elements share one amax.
        scale_format: see :func:`torchq.functional.scale_from_amax`.
        amin: the lower end of an asymmetric range [amin, amax] that contains 0, <= 0, of the shapes
            of ``amax``; only for integer formats. None: the range is symmetric.

    Returns:
        The shape, dtype and memory format of ``x``. NaN stays NaN; infinities saturate, and give
        NaN in dead ranges.

    Raises:
        TypeError: x is not floating point.
        ConfigError: the shape of amax does not fit.

    Example:
        >>> int4 = torchq.formats.integer_format(4, narrow=True)
        >>> fake_quantize(torch.tensor([-1.0, -0.6, 0.26, 1.2]), 1.0, int4)
        tensor([-1.0000, -0.5714,  0.2857,  1.0000])
    """
    if amin is not None:
        fixed_low = amin.detach() if isinstance(amin, Tensor) else amin
        fixed_high = amax.detach() if isinstance(amax, Tensor) else amax
        return fake_quantize_range(
            x, fixed_low, fixed_high, format, granularity, scale_format
        )
    return _fake_quantize("fake_quantize", x, amax, format, granularity, scale_format)


def _fake_quantize(
    name: str,
    x: Tensor,
    amax: Tensor | float,
    format: Format,
    granularity: Granularity,
    scale_format: Format | None,
) -> Tensor:
    """Quantize and dequantize ``x`` symmetrically; ``name`` decides if the range learns."""
    amax = _aligned(name, x, amax, granularity)
    if torch.onnx.is_in_onnx_export():
        return onnx_ops.quantize_dequantize(x, amax, format, granularity, scale_format)
    if torch.jit.is_tracing():  # torch.jit cannot store an autograd.Function.
        with constant_while_tracing():
            parts = granularity.split(x)
            y, _ = kernels("reference").fake_quantize(
                parts, amax, format, scale_format, False
            )
            return granularity.join(y, x.shape)
    if scale_format is POWER_OF_TWO:
        # The widened range has a power of two as its scale, and passes a gradient to amax.
        amax = widened_to_power_of_two(amax, format)
        scale_format = None
    parts = granularity.split(x)
    backend = backend_for(parts, amax, format)
    learned = name == "learned_fake_quantize"
    needs_mask = torch.is_grad_enabled() and parts.requires_grad and not learned
    with_mask = needs_mask and backend != "reference"
    result = FakeQuantizeFunction.apply(
        parts, amax, format, scale_format, backend, learned, with_mask
    )
    y = result[0] if with_mask else result
    return granularity.join(y, x.shape)


def learned_fake_quantize(
    x: Tensor,
    amax: Tensor,
    format: Format = INT8,
    granularity: Granularity = _PER_TENSOR,
    scale_format: Format | None = None,
    amin: Tensor | float | None = None,
) -> Tensor:
    """Round ``x`` onto the grid of ``format`` and back, with a gradient to the range too.

    The arguments are those of :func:`fake_quantize`, except that ``amax`` is a tensor.
    :class:`FakeQuantizeFunction` has the formula, and for asymmetric ranges
    :class:`torchq.functional.AffineFakeQuantizeFunction`.
    """
    if amin is not None:
        return fake_quantize_range(x, amin, amax, format, granularity, scale_format)
    return _fake_quantize(
        "learned_fake_quantize", x, amax, format, granularity, scale_format
    )


def quantize(
    x: Tensor,
    amax: Tensor | float,
    format: Format = INT8,
    granularity: Granularity = _PER_TENSOR,
    scale_format: Format | None = None,
    amin: Tensor | float | None = None,
) -> Tensor:
    """Return the grid values of ``x``, which are the codes for integer formats, without gradient.

    The arguments are those of :func:`fake_quantize`, and ``dequantize(quantize(x, ...), ...)``
    equals ``fake_quantize(x, ...)``. With ``amin`` they are codes with their zero point. The result
    is float32, or float64 for float64.

    Example:
        >>> quantize(torch.tensor([0.5, 1.5, 2.5, -1.5, 200.0]), 127.0)
        tensor([  0.,   2.,   2.,  -2., 127.])
    """
    amax = _aligned("quantize", x, amax, granularity)
    parts = granularity.split(x.detach())
    if amin is None:
        scale = scale_from_amax(amax, format, scale_format)
        codes = snap(parts, amax, scale, format)
        return granularity.join(codes, x.shape)
    amin = _aligned("quantize", x, amin, granularity)
    scale, zero_point = scale_and_zero_point(amin, amax, format, scale_format)
    bounds = affine_bounds(zero_point, format, Range(amax, amin).dead(format))
    codes = clamped_codes(parts, scale, *bounds, format).add_(zero_point)
    return granularity.join(codes, x.shape)


def quantize_affine(
    x: Tensor,
    scale: Tensor | float,
    zero_point: Tensor | float | None = None,
    format: Format = UINT8,
    granularity: Granularity = _PER_TENSOR,
) -> Tensor:
    """Return the codes of ``x``; the arguments are those of :func:`fake_quantize_affine`.

    Example:
        >>> quantize_affine(torch.tensor([-9.0, 0.26]), 0.5, 2.0)
        tensor([0., 3.])
    """
    aligned_scale = _aligned("quantize", x, scale, granularity)
    parts = granularity.split(x.detach())
    if zero_point is None:
        codes = format.snap_(torch.div(parts.to(aligned_scale.dtype), aligned_scale))
        return granularity.join(codes, x.shape)
    point = _aligned("quantize", x, zero_point, granularity)
    low, high = affine_bounds(point, format)
    codes = clamped_codes(parts, aligned_scale, low, high, format).add_(point)
    return granularity.join(codes, x.shape)


def dequantize(
    codes: Tensor,
    amax: Tensor | float,
    format: Format = INT8,
    granularity: Granularity = _PER_TENSOR,
    scale_format: Format | None = None,
    amin: Tensor | float | None = None,
) -> Tensor:
    """Return ``(codes - zero_point) * scale``; the arguments are those of :func:`quantize`."""
    amax = _aligned("dequantize", codes, amax, granularity)
    if amin is None:
        values = granularity.split(codes) * scale_from_amax(amax, format, scale_format)
        return granularity.join(values, codes.shape)
    amin = _aligned("dequantize", codes, amin, granularity)
    scale, zero_point = scale_and_zero_point(amin, amax, format, scale_format)
    values = (granularity.split(codes) - zero_point) * scale
    return granularity.join(values, codes.shape)

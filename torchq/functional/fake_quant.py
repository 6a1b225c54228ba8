"""Quantize, dequantize and fake-quantize any format at any granularity, with gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.formats import INT8, POWER_OF_TWO, Format, PerTensor
from torchq.formats.granularity import Granularity
from torchq.functional import onnx_ops
from torchq.functional.affine import affine_bounds, fake_quantize_range
from torchq.functional.kernels import (
    backend_for,
    clamped_codes,
    gradient_mask,
    kernels,
    learned_gradients,
    mask_gradient,
    snap,
)
from torchq.functional.scale import (
    compute_dtype,
    is_dead_range,
    scale_and_zero_point,
    scale_from_amax,
    widened_to_power_of_two,
)
from torchq.utils import constant_while_tracing

__all__ = [
    "FakeQuantizeFunction",
    "LearnedFakeQuantizeFunction",
    "fake_quantize",
    "learned_fake_quantize",
    "quantize",
    "dequantize",
]

_PER_TENSOR = PerTensor()


class FakeQuantizeFunction(torch.autograd.Function):
    """``snap(x / scale) * scale``; gradient 1 where ``|x| <= amax`` and 0 elsewhere, none to amax.

    The backward keeps one byte per element, no copy of the input. ``backend`` is a name that
    :func:`torchq.functional.kernels.backend_for` returned. With ``with_mask`` its kernel computes
    that byte in the same pass, as a second result.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor,
        amax: Tensor,
        format: Format,
        scale_format: Format | None,
        backend: str,
        with_mask: bool,
    ) -> Any:
        """Return the quantized tensor, with its mask if wanted."""
        y, mask = kernels(backend).fake_quantize(x, amax, format, scale_format, with_mask)
        return (y, mask) if with_mask else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Keep the mask of the gradient."""
        x, amax, _, _, ctx.backend, with_mask = inputs
        if with_mask:
            ctx.mark_non_differentiable(output[1])
            ctx.set_materialize_grads(False)  # Otherwise the mask would get a gradient of zeros.
            ctx.save_for_backward(output[1])
        elif ctx.needs_input_grad[0]:
            ctx.save_for_backward(gradient_mask(x, amax))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradient where the mask is 1, else 0."""
        if not ctx.needs_input_grad[0] or grads[0] is None:
            return None, None, None, None, None, None
        (mask,) = ctx.saved_tensors
        return mask_gradient(ctx.backend, grads[0], mask), None, None, None, None, None


class LearnedFakeQuantizeFunction(torch.autograd.Function):
    """:class:`FakeQuantizeFunction` with a gradient to amax.

    With ``v = x / scale`` and ``q = snap(v)``, ``d y / d scale`` is ``q - v`` inside the grid and
    ``q`` (a bound) outside, and ``d scale / d amax`` is ``1 / qmax``. The gradient to x is 1 where
    ``quant_min <= v <= quant_max``, and 0 elsewhere.

    Reference: Esser et al., Learned Step Size Quantization (ICLR 2020), equations 3 and 5, written
    for amax and without the gradient scale of section 2.2 (see :func:`torchq.qat.param_groups` for
    learning rates).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, amax: Tensor, format: Format, scale_format: Format | None, backend: str
    ) -> Tensor:
        """Return the quantized tensor."""
        return kernels(backend).fake_quantize(x, amax, format, scale_format, with_mask=False)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Keep the input and its range."""
        x, amax, ctx.format, ctx.scale_format, ctx.backend = inputs
        ctx.save_for_backward(x, amax)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients to the input and its range."""
        x, amax = ctx.saved_tensors
        grad_x, grad_amax = learned_gradients(
            ctx.backend, grads[0], x, amax, ctx.format, ctx.scale_format
        )
        return (
            grad_x if ctx.needs_input_grad[0] else None,
            grad_amax if ctx.needs_input_grad[1] else None,
            None,
            None,
            None,
        )


def _prepare(name: str, x: Tensor, amax: Tensor | float, granularity: Granularity) -> Tensor:
    """Check the arguments of a public function; return amax aligned with ``granularity.split(x)``.

    The amax has the compute dtype.
    """
    if not x.is_floating_point():
        raise TypeError(
            f"{name}: got a tensor of {x.dtype}; expected a floating-point tensor. "
            "Convert it with x.float()"
        )
    dtype = compute_dtype(x.dtype)
    if not isinstance(amax, Tensor):
        # The device fills it: there is no copy from the host.
        amax = torch.full((), amax, dtype=dtype, device=x.device)
    with constant_while_tracing():
        return granularity.align(amax.to(dtype), x.shape)


def _traced(
    x: Tensor, amax: Tensor, format: Format, granularity: Granularity, scale_format: Format | None
) -> Tensor:
    """Compute the definition without an autograd.Function, which torch.jit cannot store."""
    with constant_while_tracing():
        parts, _ = kernels("reference").fake_quantize(
            granularity.split(x), amax, format, scale_format, False
        )
        return granularity.join(parts, x.shape)


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
        >>> int4 = torchq.formats.integer(4, narrow=True)
        >>> fake_quantize(torch.tensor([-1.0, -0.6, 0.26, 1.2]), 1.0, int4)
        tensor([-1.0000, -0.5714,  0.2857,  1.0000])
    """
    if amin is not None:
        low, high = (end.detach() if isinstance(end, Tensor) else end for end in (amin, amax))
        return fake_quantize_range(x, low, high, format, granularity, scale_format)
    amax = _prepare("fake_quantize", x, amax, granularity)
    if torch.onnx.is_in_onnx_export():
        return onnx_ops.quantize_dequantize(x, amax, format, granularity, scale_format)
    if torch.jit.is_tracing():
        return _traced(x, amax, format, granularity, scale_format)
    if scale_format is POWER_OF_TWO:
        amax, scale_format = widened_to_power_of_two(amax, format), None
    parts = granularity.split(x)
    backend = backend_for(parts, amax, format)
    with_mask = backend != "reference" and torch.is_grad_enabled() and parts.requires_grad
    result = FakeQuantizeFunction.apply(parts, amax, format, scale_format, backend, with_mask)
    return granularity.join(result[0] if with_mask else result, x.shape)


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
    :class:`LearnedFakeQuantizeFunction` has the formula, and for asymmetric ranges
    :class:`torchq.functional.AffineFakeQuantizeFunction`.
    """
    if amin is not None:
        return fake_quantize_range(x, amin, amax, format, granularity, scale_format)
    amax = _prepare("learned_fake_quantize", x, amax, granularity)
    if torch.onnx.is_in_onnx_export():
        return onnx_ops.quantize_dequantize(x, amax, format, granularity, scale_format)
    if torch.jit.is_tracing():
        return _traced(x, amax, format, granularity, scale_format)
    if scale_format is POWER_OF_TWO:
        amax, scale_format = widened_to_power_of_two(amax, format), None
    parts = granularity.split(x)
    result = LearnedFakeQuantizeFunction.apply(
        parts, amax, format, scale_format, backend_for(parts, amax, format)
    )
    return granularity.join(result, x.shape)


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
    amax = _prepare("quantize", x, amax, granularity)
    parts = granularity.split(x.detach())
    if amin is None:
        codes = snap(parts, amax, scale_from_amax(amax, format, scale_format), format)
        return granularity.join(codes, x.shape)
    amin = _prepare("quantize", x, amin, granularity)
    scale, zero_point = scale_and_zero_point(amin, amax, format, scale_format)
    bounds = affine_bounds(zero_point, format, is_dead_range(amin, amax, format))
    codes = clamped_codes(parts, scale, *bounds, format).add_(zero_point)
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
    amax = _prepare("dequantize", codes, amax, granularity)
    if amin is None:
        values = granularity.split(codes) * scale_from_amax(amax, format, scale_format)
        return granularity.join(values, codes.shape)
    amin = _prepare("dequantize", codes, amin, granularity)
    scale, zero_point = scale_and_zero_point(amin, amax, format, scale_format)
    return granularity.join((granularity.split(codes) - zero_point) * scale, codes.shape)

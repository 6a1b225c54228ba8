"""Quantize, dequantize and fake-quantize any format at any granularity, with straight-through gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.formats import INT8, Format, PerTensor
from torchq.formats.granularity import Granularity
from torchq.functional import onnx_ops
from torchq.functional.kernels import (
    backend_for,
    gradient_mask,
    kernels,
    learned_gradients,
    mask_gradient,
    snap,
)
from torchq.functional.scale import compute_dtype, scale_from_amax
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

    The backward keeps one byte per element, no copy of the input. ``backend`` is what
    :func:`torchq.functional.kernels.backend_for` says; ``with_mask`` asks its kernel for that byte in the same pass, as a
    second result.
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
        y, mask = kernels(backend).fake_quantize(x, amax, format, scale_format, with_mask)
        return (y, mask) if with_mask else y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        x, amax, _, _, ctx.backend, with_mask = inputs
        if with_mask:
            ctx.mark_non_differentiable(output[1])
            ctx.set_materialize_grads(False)  # or zeros would be made for the mask
            ctx.save_for_backward(output[1])
        elif ctx.needs_input_grad[0]:
            ctx.save_for_backward(gradient_mask(x, amax))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        if not ctx.needs_input_grad[0] or grads[0] is None:
            return None, None, None, None, None, None
        (mask,) = ctx.saved_tensors
        return mask_gradient(ctx.backend, grads[0], mask), None, None, None, None, None


class LearnedFakeQuantizeFunction(torch.autograd.Function):
    """As :class:`FakeQuantizeFunction`, with a gradient to amax.

    With ``v = x / scale`` and ``q = snap(v)``, ``d y / d scale = q - v`` inside the grid and ``q`` (a bound) outside, and
    ``d scale / d amax = 1 / qmax``. Gradient to x: 1 where ``lo <= v <= hi``, 0 elsewhere.

    Reference: Esser et al., Learned Step Size Quantization (ICLR 2020), equations 3 and 5, written for amax and without
    the gradient scale of section 2.2 (see :func:`torchq.qat.param_groups` for learning rates).
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, amax: Tensor, format: Format, scale_format: Format | None, backend: str
    ) -> Tensor:
        return kernels(backend).fake_quantize(x, amax, format, scale_format, with_mask=False)[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, amax, ctx.format, ctx.scale_format, ctx.backend = inputs
        ctx.save_for_backward(x, amax)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
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
    """amax in the compute dtype, aligned with ``granularity.split(x)``; the static checks of the public functions."""
    if not x.is_floating_point():
        raise TypeError(
            f"{name}: got a tensor of {x.dtype}; expected a floating-point tensor. Convert it with x.float()"
        )
    dtype = compute_dtype(x.dtype)
    if not isinstance(amax, Tensor):
        amax = torch.full(
            (), amax, dtype=dtype, device=x.device
        )  # filled there: no copy from the host
    with constant_while_tracing():
        return granularity.align(amax.to(dtype), x.shape)


def _traced(
    x: Tensor, amax: Tensor, format: Format, granularity: Granularity, scale_format: Format | None
) -> Tensor:
    """The definition, without an autograd.Function: ``torch.jit.save`` has no form for one."""
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
) -> Tensor:
    """Round ``x`` onto the grid of ``format`` and back, with the straight-through gradient of :class:`FakeQuantizeFunction`.

    Under ``torch.onnx.export`` it becomes QuantizeLinear / DequantizeLinear.

    Args:
        x: float16, bfloat16, float32 or float64, any shape and strides, may be empty. Computed in fp32 (fp64 for fp64).
        amax: the magnitude mapped to ``format.qmax``; a float, or a tensor of ``granularity.amax_shape(x.shape)`` (also
            ``[]``, ``[1]``, ``[C]``). >= 0; at most 2**-24 gives exact zeros; inf and NaN give NaN.
        format: see :mod:`torchq.formats`.
        granularity: which elements share one amax.
        scale_format: see :func:`torchq.functional.scale_from_amax`.

    Returns:
        x's shape, dtype and memory format. NaN stays NaN; infinities saturate, and give NaN where amax is at most 2**-24.

    Raises:
        TypeError: x is not floating point.
        ConfigError: the shape of amax does not fit.

    Example:
        >>> fake_quantize(torch.tensor([-1.0, -0.6, 0.26, 1.2]), 1.0, torchq.formats.integer(4, narrow=True))
        tensor([-1.0000, -0.5714,  0.2857,  1.0000])
    """
    amax = _prepare("fake_quantize", x, amax, granularity)
    if torch.onnx.is_in_onnx_export():
        return onnx_ops.quantize_dequantize(x, amax, format, granularity, scale_format)
    if torch.jit.is_tracing():
        return _traced(x, amax, format, granularity, scale_format)
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
) -> Tensor:
    """:func:`fake_quantize` with a gradient to ``amax`` too; see :class:`LearnedFakeQuantizeFunction` for the formula."""
    amax = _prepare("learned_fake_quantize", x, amax, granularity)
    if torch.onnx.is_in_onnx_export():
        return onnx_ops.quantize_dequantize(x, amax, format, granularity, scale_format)
    if torch.jit.is_tracing():
        return _traced(x, amax, format, granularity, scale_format)
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
) -> Tensor:
    """The grid values (integer codes for integer formats) of ``x``, as float32 (float64 for float64), without gradient.

    Arguments as :func:`fake_quantize`. ``dequantize(quantize(x, ...), ...)`` equals ``fake_quantize(x, ...)``.

    Example:
        >>> quantize(torch.tensor([0.5, 1.5, 2.5, -1.5, 200.0]), 127.0)
        tensor([  0.,   2.,   2.,  -2., 127.])
    """
    amax = _prepare("quantize", x, amax, granularity)
    codes = snap(
        granularity.split(x.detach()), amax, scale_from_amax(amax, format, scale_format), format
    )
    return granularity.join(codes, x.shape)


def dequantize(
    codes: Tensor,
    amax: Tensor | float,
    format: Format = INT8,
    granularity: Granularity = _PER_TENSOR,
    scale_format: Format | None = None,
) -> Tensor:
    """``codes * scale``. Arguments as :func:`quantize`; ``codes`` is what it returns."""
    amax = _prepare("dequantize", codes, amax, granularity)
    values = granularity.split(codes) * scale_from_amax(amax, format, scale_format)
    return granularity.join(values, codes.shape)

"""The definition that every kernel equals bit for bit, as whole-tensor torch operations.

It runs wherever torch does. ``torch.compile``, ``torch.export`` and ``torch.func`` see this form,
which Inductor fuses with its neighbours.
"""

import torch
from torch import Tensor

from torchq.formats import Format, round_
from torchq.functional.scale import divisor, scale_from_amax, slope_divisor


def snap(x: Tensor, amax: Tensor, scale: Tensor, format: Format) -> Tensor:
    """Return the grid values of ``x`` as a new tensor in the compute dtype.

    ``amax`` and ``scale`` broadcast against ``x``.
    """
    return format.snap_(torch.div(x.to(scale.dtype), divisor(amax, scale)))


def fake_quantize(
    x: Tensor,
    amax: Tensor,
    format: Format,
    scale_format: Format | None,
    with_mask: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return ``snap(x / scale) * scale`` in the dtype of ``x``, with its mask if wanted.

    ``amax`` is in the compute dtype; it has no dimension, or as many as ``x`` with sizes of 1 where
    it is shared.
    """
    scale = scale_from_amax(amax, format, scale_format)
    y = snap(x, amax, scale, format).mul_(scale).to(x.dtype)
    return y, gradient_mask(x, amax) if with_mask else None


def gradient_mask(x: Tensor, amax: Tensor) -> Tensor:
    """Return where the straight-through gradient passes, ``|x| <= amax``: int8, 1 or 0; 0 for NaN.

    The mask is computed in floats and is not bool: Inductor vectorises these conversions on CPUs,
    but stores booleans one by one, which is 15 times slower.
    """
    return torch.where(x.to(amax.dtype).abs() <= amax, 1.0, 0.0).to(torch.int8)


def mask_gradient(grad: Tensor, mask: Tensor) -> Tensor:
    """Return ``grad`` where the mask is 1, and 0 elsewhere whatever it is there; differentiable.

    The threshold lies between 0 and 1 for every gradient, NaN too. It depends on the gradient:
    with a constant, AOTAutograd would compare in the forward and save the booleans instead of the
    mask.
    """
    threshold = (grad == grad).to(torch.float32) * 0.5
    return torch.where(mask.to(torch.float32) > threshold, grad, 0.0)


def learned_gradients(
    grad: Tensor, x: Tensor, amax: Tensor, format: Format, scale_format: Format | None
) -> tuple[Tensor, Tensor]:
    """Return the gradients to x and amax; differentiable.

    :class:`torchq.functional.FakeQuantizeFunction` has the formula.
    """
    scale = scale_from_amax(amax, format, scale_format)
    v = torch.div(x.to(scale.dtype), slope_divisor(amax, scale))
    # An infinite value would make NaN of the 0 that is outside.
    v = v.clamp(format.quant_min - 1.0, format.quant_max + 1.0)
    inside = (x <= amax) & (x >= amax * (format.quant_min / format.qmax))
    upstream = grad.to(scale.dtype)
    slope = format.snap_(v.clone()) - v * inside
    grad_amax = (upstream * slope).sum_to_size(amax.shape) / format.qmax
    return (upstream * inside).to(x.dtype), grad_amax.to(amax.dtype)


def clamped_codes(
    x: Tensor, scale: Tensor, low: Tensor, high: Tensor, format: Format
) -> Tensor:
    """Return the codes of ``x`` less the zero point, as a new tensor in the compute dtype.

    Adding a whole zero point and clamping to the bounds of the format is the same as clamping to
    bounds less the zero point, and rounds nothing. ``scale`` is > 0 in the compute dtype; it,
    ``low`` and ``high`` have no dimension, or as many as ``x`` with sizes of 1 where they are
    shared. Of ``format`` the rounding is used, and no bound.
    """
    codes = round_(torch.div(x.to(scale.dtype), scale), format.rounding)
    return torch.minimum(torch.maximum(codes, low), high)


def fake_quantize_between(
    x: Tensor, scale: Tensor, low: Tensor, high: Tensor, format: Format, with_mask: bool
) -> tuple[Tensor, Tensor | None]:
    """Return :func:`clamped_codes` times the scale in the dtype of ``x``, and the mask if wanted.

    The mask of the gradient is int8: 1 where ``low <= x / scale <= high``, else 0, also for NaN.
    """
    y = clamped_codes(x, scale, low, high, format).mul_(scale).to(x.dtype)
    if not with_mask:
        return y, None
    v = torch.div(x.to(scale.dtype), scale)
    return y, torch.where((v >= low) & (v <= high), 1.0, 0.0).to(torch.int8)


def affine_gradients(
    grad: Tensor, x: Tensor, scale: Tensor, low: Tensor, high: Tensor, format: Format
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients to x, scale and zero point; differentiable.

    :class:`torchq.functional.AffineFakeQuantizeFunction` has the formulas. The arguments are those
    of :func:`fake_quantize_between`, and ``grad`` is the gradient of its result.
    """
    v = torch.div(x.to(scale.dtype), scale)
    below = v < low
    above = v > high
    inside = ~(below | above) & (v == v)
    upstream = grad.to(scale.dtype)
    slope = clamped_codes(x, scale, low, high, format) - torch.where(inside, v, 0.0)
    grad_scale = (upstream * slope).sum_to_size(scale.shape)
    grad_point = -(upstream * (below | above) * scale).sum_to_size(scale.shape)
    return torch.where(inside, upstream, 0.0).to(x.dtype), grad_scale, grad_point

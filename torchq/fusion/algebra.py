"""Exact algebra on pairs of kernel and bias, in float64 and differentiable.

Layouts are torch's; a linear weight ``(out, in)`` is a convolution without window. A bias of None
counts as zero. Formulas: Ding et al., "RepVGG" (2101.03697) section 3.3, and "Diverse Branch Block"
(2103.13425) section 3.2, transforms I to VI.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class KernelBias(NamedTuple):
    """A linear map: float64 kernel, and bias ``(out,)``."""

    kernel: Tensor
    bias: Tensor


def batch_norm_affine(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return scale and shift of a BatchNorm in eval mode.

    ``scale = weight / sqrt(var + eps)`` and ``shift = bias - mean * scale``.
    """
    inverse = torch.rsqrt(var.double() + eps)
    scale = inverse if weight is None else weight.double() * inverse
    shift = -mean.double() * scale
    return scale, shift if bias is None else shift + bias.double()


def _scaled(kernel: Tensor, scale: Tensor, groups: int, axis: int) -> Tensor:
    """Return a kernel with the channels of axis 0 scaled, or those of axis 1 of each group."""
    if axis == 0:
        return kernel * scale.reshape(-1, *[1] * (kernel.dim() - 1))
    grouped = kernel.reshape(groups, -1, *kernel.shape[1:])
    factor = scale.reshape(groups, 1, -1, *[1] * (kernel.dim() - 2))
    return (grouped * factor).reshape(kernel.shape)


def fold_affine_after(
    kernel: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    *,
    groups: int = 1,
    transposed: bool = False,
) -> KernelBias:
    """Return the layer that computes ``scale * layer(x) + shift``: a BatchNorm behind a layer."""
    scale, shift = scale.double(), shift.double()
    folded = _scaled(kernel.double(), scale, groups, axis=1 if transposed else 0)
    return KernelBias(folded, shift if bias is None else scale * bias.double() + shift)


def fold_affine_before(
    kernel: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    *,
    groups: int = 1,
    transposed: bool = False,
) -> KernelBias:
    """Return the layer that computes ``layer(scale * x + shift)``: a BatchNorm before a layer.

    The result is exact only where the layer sees no implicit zeros (no zero padding) or ``shift``
    is zero, which the caller checks. For a transposed convolution a shift other than zero is
    right only where every output position sees the whole window (a window of one).
    """
    kernel, scale, shift = kernel.double(), scale.double(), shift.double()
    taps = kernel.flatten(2).sum(-1) if kernel.dim() > 2 else kernel
    taps = taps.reshape(groups, -1, taps.shape[1])
    summed = "gij,gi->gj" if transposed else "goi,gi->go"
    extra = torch.einsum(summed, taps, shift.reshape(groups, -1)).flatten()
    folded = _scaled(kernel, scale, groups, axis=0 if transposed else 1)
    return KernelBias(folded, extra if bias is None else extra + bias.double())


def identity_kernel(
    channels: int,
    groups: int,
    window: Sequence[int],
    *,
    at: Sequence[int] | None = None,
) -> Tensor:
    """Return the kernel of ``x -> x``: a one in ``[i, i mod (channels / groups)]``."""
    position = tuple(size // 2 for size in window) if at is None else tuple(at)
    return _by_channel(channels, groups, window, position, 1.0)


def avg_pool_kernel(
    channels: int, groups: int, window: Sequence[int], divisor: int | None = None
) -> Tensor:
    """Return the kernel of an average pool that counts its padding."""
    return _by_channel(
        channels, groups, window, (), 1.0 / (divisor or math.prod(window))
    )


def _by_channel(
    channels: int,
    groups: int,
    window: Sequence[int],
    taps: tuple[int, ...],
    value: float,
) -> Tensor:
    """Return a kernel in which each channel reads itself alone, at one tap or at all."""
    per_group = channels // groups
    kernel = torch.zeros(
        channels, per_group, *window, dtype=torch.float64, device="cpu"
    )
    rows = torch.arange(channels, device="cpu")
    places: tuple[Any, ...] = (rows, rows % per_group, *taps)
    kernel[places] = value
    return kernel


def pad_kernel(kernel: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Return ``kernel`` with zero taps around its window, as many as paddings differ by."""
    pairs = zip(reversed(before), reversed(after), strict=True)
    flat = [amount for pair in pairs for amount in pair]
    return F.pad(kernel, flat) if flat else kernel


def dilate_kernel(kernel: Tensor, rate: Sequence[int]) -> Tensor:
    """Return the dense kernel of a dilated one, whose window is ``rate * (k - 1) + 1`` wide."""
    window = [r * (k - 1) + 1 for r, k in zip(rate, kernel.shape[2:], strict=True)]
    dense = kernel.new_zeros(*kernel.shape[:2], *window)
    taps = (slice(None), slice(None), *(slice(None, None, r) for r in rate))
    dense[taps] = kernel
    return dense


def regroup_kernel(kernel: Tensor, groups: int, new_groups: int) -> Tensor:
    """Return a kernel of ``groups`` groups written with fewer groups, filled up with zeros."""
    ratio = groups // new_groups
    if ratio == 1:
        return kernel
    out = kernel.shape[0] // groups
    per_group = kernel.shape[1]
    blocks = kernel.reshape(new_groups, ratio, out, per_group, *kernel.shape[2:])
    wide = kernel.new_zeros(new_groups, ratio, out, ratio, per_group, *kernel.shape[2:])
    index = torch.arange(ratio, device=kernel.device)
    wide[:, index, :, index] = blocks.transpose(0, 1)
    return wide.reshape(kernel.shape[0], ratio * per_group, *kernel.shape[2:])


def add_branches(branches: Sequence[KernelBias]) -> KernelBias:
    """Return the sum of branches of one shape."""
    kernels, biases = zip(*branches, strict=True)
    return KernelBias(sum(kernels[1:], kernels[0]), sum(biases[1:], biases[0]))


def compose(
    first: KernelBias,
    second: KernelBias,
    *,
    groups: int = 1,
    stride: Sequence[int] | None = None,
) -> KernelBias:
    """Return the one layer that computes ``second(first(x))``, where ``second`` has no padding.

    The kernels are convolved in full: the window is ``(k2 - 1) * stride + k1``.
    """
    dims = first.kernel.dim() - 2
    one, two = (k if dims else k[:, :, None] for k in (first.kernel, second.kernel))
    # A transposed convolution of the second kernel with the first one is their full convolution.
    # The output channels of a group stand in the place of images: (out, groups * mid, ...).
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[
        max(dims, 1) - 1
    ]
    out = two.shape[0] // groups
    mid = two.shape[1]
    by_group = two.reshape(groups, out, mid, *two.shape[2:])
    per_output = by_group.transpose(0, 1).reshape(out, groups * mid, *two.shape[2:])
    steps = tuple(stride or [1] * max(dims, 1))
    # (out, groups * per_group, ...), and then back to the layout of a kernel.
    full = convolve(per_output, one, stride=steps, groups=groups)
    window = full.shape[2:]
    per_group = one.shape[1]
    by_output = full.reshape(out, groups, per_group, *window)
    kernel = by_output.transpose(0, 1).reshape(out * groups, per_group, *window)
    ones = torch.ones_like(first.bias)
    passed = fold_affine_before(
        second.kernel, second.bias, ones, first.bias, groups=groups
    )
    return KernelBias(kernel if dims else kernel[:, :, 0], passed.bias)

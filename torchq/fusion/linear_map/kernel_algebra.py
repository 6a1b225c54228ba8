"""Exact algebra on ``(kernel, bias)`` pairs, in float64. No modules here.

Layouts are torch's: a convolution kernel is ``(out, in / groups, *window)``, a linear weight ``(out, in)`` (a convolution
without window), a transposed convolution kernel ``(in, out / groups, *window)``. A BatchNorm in eval mode is the
per-channel map ``scale * y + shift``. A bias of None counts as zero; every result has one. All of it is differentiable.

Formulas: Ding et al., "RepVGG" (2101.03697) section 3.3, "Diverse Branch Block" (2103.13425) section 3.2 (transforms I-VI).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.errors import FuseError

__all__ = [
    "KernelBias",
    "avg_pool_kernel",
    "batch_norm_affine",
    "compose",
    "dilate_kernel",
    "fold_affine_after",
    "fold_affine_before",
    "identity_kernel",
    "pad_kernel",
    "regroup_kernel",
    "add_branches",
]


class KernelBias(NamedTuple):
    """A linear map: ``kernel`` (see the module docstring for layouts) and ``bias`` of shape ``(out,)``, both float64."""

    kernel: Tensor
    bias: Tensor


def batch_norm_affine(
    mean: Tensor, var: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Scale and shift of a BatchNorm in eval mode, float64 ``(channels,)``: ``weight / sqrt(var + eps)``, ``bias - mean * scale``.

    ``weight`` None counts as one and ``bias`` None as zero (``affine=False``).
    """
    inverse = torch.rsqrt(var.double() + eps)
    scale = inverse if weight is None else weight.double() * inverse
    shift = -mean.double() * scale
    return scale, shift if bias is None else shift + bias.double()


def _per_output(vector: Tensor, kernel: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (kernel.dim() - 1))


def _bias(bias: Tensor | None, like: Tensor, channels: int) -> Tensor:
    return like.new_zeros(channels) if bias is None else bias.double()


def fold_affine_after(
    kernel: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    *,
    groups: int = 1,
    transposed: bool = False,
) -> KernelBias:
    """The layer that computes ``scale * layer(x) + shift`` (BatchNorm after a layer), for any groups and spatial_dims.

    Args:
        kernel: see the module docstring; ``transposed`` selects the layout of a transposed convolution.
        bias: ``(out,)`` or None.
        scale: ``(out,)``.
        shift: ``(out,)``.
        groups: only needed for transposed kernels, where the output channel of entry ``[i, j]`` depends on the group of ``i``.
    """
    kernel, scale, shift = kernel.double(), scale.double(), shift.double()
    out = kernel.shape[1] * groups if transposed else kernel.shape[0]
    if scale.numel() != out:
        raise FuseError(
            f"fold_affine_after: got {scale.numel()} scales for {out} output channels; expected one per channel"
        )
    if transposed:
        grouped = kernel.reshape(groups, -1, *kernel.shape[1:])
        factor = scale.reshape(groups, 1, -1, *[1] * (kernel.dim() - 2))
        folded = (grouped * factor).reshape(kernel.shape)
    else:
        folded = kernel * _per_output(scale, kernel)
    return KernelBias(folded, scale * _bias(bias, kernel, out) + shift)


def fold_affine_before(
    kernel: Tensor,
    bias: Tensor | None,
    scale: Tensor,
    shift: Tensor,
    *,
    groups: int = 1,
    transposed: bool = False,
) -> KernelBias:
    """The layer that computes ``layer(scale * x + shift)`` (BatchNorm, ImplicitA before a layer).

    Exact only where the layer sees no implicit zeros (no zero padding) or ``shift`` is zero: the caller checks. For a transposed
    convolution a non-zero shift is right only where every output position sees the whole window (window 1).
    """
    kernel, scale, shift = kernel.double(), scale.double(), shift.double()
    channels = kernel.shape[0] if transposed else kernel.shape[1] * groups
    if scale.numel() != channels:
        raise FuseError(
            f"fold_affine_before: got {scale.numel()} scales for {channels} input channels; expected one per channel"
        )
    summed = kernel.flatten(2).sum(-1) if kernel.dim() > 2 else kernel
    if transposed:
        extra = torch.einsum(
            "gij,gi->gj", summed.reshape(groups, -1, summed.shape[1]), shift.reshape(groups, -1)
        ).flatten()
        return KernelBias(
            kernel * _per_output(scale, kernel), extra + _bias(bias, kernel, extra.numel())
        )
    grouped = kernel.reshape(groups, -1, *kernel.shape[1:])
    factor = scale.reshape(groups, 1, -1, *[1] * (kernel.dim() - 2))
    extra = torch.einsum(
        "goi,gi->go", summed.reshape(groups, -1, summed.shape[1]), shift.reshape(groups, -1)
    ).flatten()
    return KernelBias(
        (grouped * factor).reshape(kernel.shape), extra + _bias(bias, kernel, extra.numel())
    )


def identity_kernel(
    channels: int,
    groups: int,
    window: Sequence[int],
    *,
    at: Sequence[int] | None = None,
    device: torch.device | None = None,
) -> Tensor:
    """The kernel of ``x -> x``: a one at window position ``at`` (default the centre) of ``[i, i mod (channels / groups)]``.

    Upstream converters fill a diagonal of the ``(channels, channels / groups)`` matrix instead, which is wrong for groups > 1.
    """
    per_group = channels // groups
    position = tuple(size // 2 for size in window) if at is None else tuple(at)
    kernel = torch.zeros(channels, per_group, *window, dtype=torch.float64, device=device)
    rows = torch.arange(channels, device=device)
    ones: tuple[Any, ...] = (rows, rows % per_group, *position)
    kernel[ones] = 1.0
    return kernel


def avg_pool_kernel(
    channels: int,
    groups: int,
    window: Sequence[int],
    divisor: int | None = None,
    *,
    device: torch.device | None = None,
) -> Tensor:
    """The kernel of an average pool that counts its padding: ``1 / divisor`` (default: the window's size) on the channel diagonal."""
    per_group = channels // groups
    kernel = torch.zeros(channels, per_group, *window, dtype=torch.float64, device=device)
    rows = torch.arange(channels, device=device)
    kernel[rows, rows % per_group] = 1.0 / (divisor or math.prod(window))
    return kernel


def pad_kernel(kernel: Tensor, before: Sequence[int], after: Sequence[int]) -> Tensor:
    """Put ``before`` / ``after`` zero taps around the window, one number per window axis.

    To align a branch of padding ``p1`` with one of padding ``p2`` put ``p2 - p1`` taps before.
    """
    flat = [
        amount for pair in zip(reversed(before), reversed(after), strict=True) for amount in pair
    ]
    return F.pad(kernel, flat) if flat else kernel


def dilate_kernel(kernel: Tensor, rate: Sequence[int]) -> Tensor:
    """The dense kernel of a dilated one: ``rate - 1`` zero taps between neighbours, so the window is ``rate * (k - 1) + 1`` wide."""
    window = [r * (k - 1) + 1 for r, k in zip(rate, kernel.shape[2:], strict=True)]
    dense = kernel.new_zeros(*kernel.shape[:2], *window)
    taps = (slice(None), slice(None), *(slice(None, None, r) for r in rate))
    dense[taps] = kernel
    return dense


def regroup_kernel(kernel: Tensor, groups: int, new_groups: int) -> Tensor:
    """Write a kernel of ``groups`` groups with fewer ones, filling with zeros. ``new_groups`` must divide ``groups``."""
    if groups % new_groups:
        raise FuseError(
            f"regroup_kernel: got {new_groups} groups for a kernel of {groups}; expected a divisor"
        )
    ratio = groups // new_groups
    if ratio == 1:
        return kernel
    out, per_group = kernel.shape[0] // groups, kernel.shape[1]
    blocks = kernel.reshape(new_groups, ratio, out, per_group, *kernel.shape[2:])
    wide = kernel.new_zeros(new_groups, ratio, out, ratio, per_group, *kernel.shape[2:])
    index = torch.arange(ratio, device=kernel.device)
    wide[:, index, :, index] = blocks.transpose(0, 1)
    return wide.reshape(kernel.shape[0], ratio * per_group, *kernel.shape[2:])


def add_branches(
    branches: Sequence[KernelBias], coefficients: Sequence[float | Tensor] | None = None
) -> KernelBias:
    """``sum(c * branch)`` of branches of one shape. A coefficient is a number or one value per output channel; zero is a legal one."""
    kernel = torch.zeros_like(branches[0].kernel)
    bias = torch.zeros_like(branches[0].bias)
    for branch, coefficient in zip(branches, coefficients or [1.0] * len(branches), strict=True):
        factor = torch.as_tensor(coefficient, dtype=torch.float64, device=kernel.device).reshape(-1)
        kernel = kernel + _per_output(factor, kernel) * branch.kernel
        bias = bias + factor * branch.bias
    return KernelBias(kernel, bias)


def compose(
    first: KernelBias, second: KernelBias, *, groups: int = 1, stride: Sequence[int] | None = None
) -> KernelBias:
    """The one layer that does ``second(first(x))``, where ``second`` sees no padding.

    Args:
        first: kernel ``(mid, in / groups, *window)``.
        second: kernel ``(out, mid / groups, *window)``; bring both to common groups with :func:`regroup_kernel`.
        groups: the common number of groups.
        stride: of ``first``; the taps of ``second`` lie this far apart on the input.

    The kernels are convolved in full: the window is ``(k2 - 1) * stride + k1``.
    """
    spatial_dims = first.kernel.dim() - 2
    one, two = (k if spatial_dims else k[:, :, None] for k in (first.kernel, second.kernel))
    convolve = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[
        max(spatial_dims, 1) - 1
    ]
    out, mid = two.shape[0] // groups, two.shape[1]
    per_output = (
        two.reshape(groups, out, mid, *two.shape[2:])
        .transpose(0, 1)
        .reshape(out, groups * mid, *two.shape[2:])
    )
    full = convolve(
        per_output, one, stride=tuple(stride or [1] * max(spatial_dims, 1)), groups=groups
    )
    kernel = (
        full.reshape(out, groups, one.shape[1], *full.shape[2:])
        .transpose(0, 1)
        .reshape(out * groups, one.shape[1], *full.shape[2:])
    )
    passed = fold_affine_before(
        second.kernel, second.bias, torch.ones_like(first.bias), first.bias, groups=groups
    ).bias
    return KernelBias(kernel if spatial_dims else kernel[:, :, 0], passed)

"""Finding the one kernel that a callable is, by affine collapse or from its gradients.

Both engines run on the CPU in float64. :func:`linear_map` tries collapse, then extraction, and
checks the result on random inputs, so nothing that is not exactly one convolution passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.fusion.linear_map.kernel_algebra import KernelBias
from torchq.fusion.linear_map.symbolic import Affine, Geometry, NotAffine
from torchq.fusion.linear_map.symbolic_ops import AffineTensor

__all__ = ["Function", "apply_map", "collapse", "extract", "linear_map", "relative_error"]

TOLERANCE = 1e-10  # float64, relative to the largest output
_CHUNK = 2**22  # input elements per gradient pass, which bounds the memory of extraction

Function = Callable[[Tensor], Tensor]


def apply_map(x: Tensor, geometry: Geometry, value: KernelBias) -> Tensor:
    """Run a map.

    Args:
        x: ``(N, in_channels, *spatial)``.
        geometry: a geometry of symmetric padding.
        value: the map's kernel and bias.
    """
    if geometry.spatial_dims == 0:
        return F.linear(x, value.kernel, value.bias)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[geometry.spatial_dims - 1]
    kernel, bias = value
    return convolve(x, kernel, bias, geometry.stride, geometry.before, 1, geometry.groups)


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference over the largest finite magnitude of ``want``.

    Infinities and NaN count as equal to themselves; elsewhere they, and differing shapes, give an
    infinite error.
    """
    if got.shape != want.shape:
        return math.inf
    if want.numel() == 0:
        return 0.0
    same = (got == want) | (got.isnan() & want.isnan())
    largest = torch.where(want.isfinite(), want.abs(), 0.0).max().item()
    error = torch.where(same, 0.0, (got - want).abs()).max().item() / max(largest, 1e-30)
    return error if math.isfinite(error) else math.inf


def collapse(
    function: Function, in_channels: int, spatial_dims: int
) -> tuple[Geometry, KernelBias]:
    """Run ``function`` on a symbolic input and return the map that comes out."""
    source: Any = AffineTensor.identity(in_channels, spatial_dims)
    with torch.no_grad():
        result: Any = function(source)
        if not isinstance(result, AffineTensor):
            raise NotAffine(f"the result is a {type(result).__name__}, not a map of the input")
        return result.symmetric()


def extract(function: Function, geometry: Geometry) -> tuple[Geometry, KernelBias]:
    """Read the kernel of a callable from its gradients, whatever is inside.

    The kernel of output channel ``c`` is the gradient of that channel, at a position whose window
    lies inside the input. What reaches further than ``geometry`` is for the caller to find out.
    """
    _check_additive(function, geometry)
    if geometry.spatial_dims == 0:
        with torch.no_grad():
            bias = function(_zeros(1, geometry.in_channels))
            columns = function(torch.eye(geometry.in_channels, dtype=torch.float64, device="cpu"))
        return geometry, KernelBias((columns - bias).T.contiguous(), bias[0])
    axes = list(zip(geometry.window, geometry.before, geometry.stride, strict=True))
    at = [-(-before // stride) for _, before, stride in axes]
    starts = [o * stride - before for o, (_, before, stride) in zip(at, axes, strict=True)]
    spatial = [start + window for start, (window, _, _) in zip(starts, axes, strict=True)]
    read = (..., *(slice(start, None) for start in starts))
    rows = []
    per_pass = max(1, _CHUNK // (geometry.in_channels * math.prod(spatial)))
    for channels in torch.arange(geometry.out_channels, device="cpu").split(per_pass):
        x = _zeros(len(channels), geometry.in_channels, *spatial).requires_grad_()
        seen = function(x)[(torch.arange(len(channels), device="cpu"), channels, *at)]
        rows.append(torch.autograd.grad(seen.sum(), x)[0][read])
    with torch.no_grad():
        bias = function(_zeros(1, geometry.in_channels, *spatial))[(0, slice(None), *at)]
    return geometry, KernelBias(_take_groups(torch.cat(rows), geometry.groups), bias)


def _zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64, device="cpu")


def _check_additive(function: Function, geometry: Geometry) -> None:
    """Raise :class:`NotAffine` for what is not linear; reading a wide kernel takes long."""
    x = _zeros(4, geometry.in_channels, *(size + 2 for size in geometry.window))
    x[1:3].normal_(generator=torch.Generator().manual_seed(0))
    x[3] = x[1] + x[2]
    with torch.no_grad():
        at_zero, one, two, both = function(x)
    if not relative_error(one + two, both + at_zero) <= TOLERANCE:
        raise NotAffine("the result for a sum is not the sum of the results")


def _take_groups(kernel: Tensor, groups: int) -> Tensor:
    """Return the diagonal blocks of a kernel of one group, as a kernel of ``groups`` groups."""
    out, channels = kernel.shape[:2]
    blocks = kernel.reshape(groups, out // groups, groups, channels // groups, *kernel.shape[2:])
    index = torch.arange(groups, device="cpu")
    return blocks[index, :, index].reshape(out, channels // groups, *kernel.shape[2:])


def linear_map(
    function: Function, in_channels: int, spatial_dims: int, hint: Geometry | None = None
) -> tuple[Geometry, KernelBias, float]:
    """Return the one convolution (or linear layer) that ``function`` is.

    Args:
        function: maps ``(N, in_channels, *spatial)`` in float64 on the CPU, in eval mode.
        in_channels: the channels of its input.
        spatial_dims: 0 for ``(N, in_channels)``.
        hint: the geometry of the block's main layer. The result is written with its window,
            padding and groups where that is exact.

    Returns:
        Geometry, kernel and bias, and the relative error on random inputs.

    Raises:
        NotAffine: ``function`` is not such a map; the text says why.
    """
    reasons = []
    engines = [lambda: collapse(function, in_channels, spatial_dims)]
    if hint is not None:
        engines.append(lambda: extract(function, hint))
    for engine in engines:
        try:
            # Extraction needs gradients, whatever the caller's mode.
            with torch.inference_mode(False), torch.enable_grad():
                geometry, value = engine()
            geometry, value = _like(geometry, value, hint)
            error = _check(function, geometry, value)
        except NotAffine as reason:
            reasons.append(str(reason))
        except Exception as reason:  # the user's forward may raise anything on a symbolic input
            reasons.append(f"{type(reason).__name__}: {reason}")
        else:
            if error <= TOLERANCE:
                return geometry, value, error
            reasons.append(f"off by {error:.1e} on random inputs")
    raise NotAffine("; ".join(dict.fromkeys(reasons)))


def _like(
    geometry: Geometry, value: KernelBias, hint: Geometry | None
) -> tuple[Geometry, KernelBias]:
    """Return the map written with the hint's window and groups, where it can be."""
    if hint is None or geometry.stride != hint.stride:
        return geometry, value
    if (geometry.in_channels, geometry.out_channels) != (hint.in_channels, hint.out_channels):
        return geometry, value
    groups = hint.groups if geometry.groups % hint.groups == 0 else geometry.groups
    window, padding = geometry.window, geometry.before
    axes = zip(hint.before, padding, hint.window, window, strict=True)
    room = [(h - b, hw - w - (h - b)) for h, b, hw, w in axes]
    if all(min(pair) >= 0 for pair in room):
        window, padding = hint.window, hint.before
    channels = (geometry.in_channels, geometry.out_channels)
    target = Geometry(*channels, groups, window, padding, padding, geometry.stride)
    return target, Affine(geometry, lambda: value).fit(target)


def _check(function: Function, geometry: Geometry, value: KernelBias) -> float:
    """Return the relative error on random inputs of two sizes, borders included."""
    generator = torch.Generator().manual_seed(0)
    error = 0.0
    reach = max(geometry.window, default=1)
    for extra in (1, 4):
        spatial = [reach + extra + axis for axis in range(geometry.spatial_dims)]
        shape = (2, geometry.in_channels, *spatial)
        x = torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")
        with torch.no_grad():
            error = max(error, relative_error(apply_map(x, geometry, value), function(x)))
    return error

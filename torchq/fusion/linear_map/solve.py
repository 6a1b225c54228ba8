"""The two engines that turn a callable into one kernel: affine collapse, and extraction from gradients.

Both run on the CPU in float64. :func:`linear_map` tries the first, then the second, and checks the result on random inputs, so
nothing that is not exactly one convolution gets through.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.fusion.linear_map.kernel_algebra import KernelBias
from torchq.fusion.linear_map.symbolic import Geometry, NotAffine
from torchq.fusion.linear_map.symbolic_ops import AffineTensor

__all__ = ["apply_map", "collapse", "extract", "linear_map", "relative_error"]

TOLERANCE = 1e-10  # float64, relative to the largest output
_CHUNK = 2**22  # input elements per gradient pass: bounds the memory of extraction
_WIDEST = 129  # no known block reaches further
_SMALLEST = 11  # input size to begin with

Function = Callable[[Tensor], Tensor]


def apply_map(x: Tensor, geometry: Geometry, value: KernelBias) -> Tensor:
    """Run a map of symmetric padding on ``x`` of shape ``(N, channels, *spatial)``."""
    if geometry.spatial_dims == 0:
        return F.linear(x, value.kernel, value.bias)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[geometry.spatial_dims - 1]
    return convolve(
        x, value.kernel, value.bias, geometry.stride, geometry.before, 1, geometry.groups
    )


def relative_error(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference over the largest finite magnitude of ``want``.

    Infinities and NaN count as equal to themselves; elsewhere they, and differing shapes, give an infinite error.
    """
    if got.shape != want.shape:
        return math.inf
    if want.numel() == 0:
        return 0.0
    same = (got == want) | (got.isnan() & want.isnan())
    largest = torch.where(want.isfinite(), want.abs(), 0.0).max().item()
    error = torch.where(same, 0.0, (got - want).abs()).max().item() / max(largest, 1e-30)
    return error if math.isfinite(error) else math.inf


def collapse(function: Function, channels: int, spatial_dims: int) -> tuple[Geometry, KernelBias]:
    """Engine A: run ``function`` on a symbolic input and read off the map.

    Raises:
        NotAffine: an operation is not linear, or not one that :mod:`torchq.fusion.linear_map.symbolic_ops` knows.
    """
    with torch.no_grad():
        result = function(AffineTensor.identity(object(), channels, spatial_dims))  # type: ignore[arg-type]
        if not isinstance(result, AffineTensor):
            raise NotAffine(f"the result is a {type(result).__name__}, not a map of the input")
        return result.symmetric()


def _taps_read(
    function: Function, channels: int, spatial_dims: int, size: int
) -> tuple[list[int], list[int], list[int], list[int]]:
    """For one size: output size, central output position, and first and last input position that it reads, per axis."""
    x = torch.zeros(1, channels, *[size] * spatial_dims, dtype=torch.float64, requires_grad=True)
    y = function(x)
    if y.dim() != spatial_dims + 2:
        raise NotAffine(f"the result has {y.dim()} dimensions, the input {spatial_dims + 2}")
    centre = [n // 2 for n in y.shape[2:]]
    at: tuple[Any, ...] = (slice(None), slice(None), *centre)
    # Random weights keep one channel's tap from cancelling another's.
    (grad,) = torch.autograd.grad((y[at] * torch.rand_like(y[at])).sum(), x)
    touched = (grad != 0).nonzero()[:, 2:]
    if not len(touched):
        return list(y.shape[2:]), centre, centre, centre
    return list(y.shape[2:]), centre, touched.amin(0).tolist(), touched.amax(0).tolist()


def _output_size(function: Function, channels: int, spatial_dims: int, size: int, axis: int) -> int:
    """Extent of the result along a spatial axis, or its channels (axis -1), for an input of ``size``."""
    with torch.no_grad():
        return function(
            torch.zeros(1, channels, *[size] * spatial_dims, dtype=torch.float64)
        ).shape[axis + 2]


def _check_additive(function: Function, channels: int, spatial_dims: int) -> None:
    """Turn away what is not linear at a small size: looking for the window of a wide block takes minutes."""
    x = torch.zeros(4, channels, *[_SMALLEST] * spatial_dims, dtype=torch.float64)
    x[1:3].normal_(generator=torch.Generator().manual_seed(0))
    x[3] = x[1] + x[2]
    with torch.no_grad():
        zero, one, two, both = function(x)
    if not relative_error(one + two, both + zero) <= TOLERANCE:
        raise NotAffine("the result for a sum is not the sum of the results")


def _find_geometry(function: Function, channels: int, spatial_dims: int) -> tuple[Geometry, int]:
    """The geometry with one group, and an input size at which the central output sees no border."""
    for size in (_SMALLEST, 23, 47, 95, 2 * _WIDEST):
        outs, centre, first, last = _taps_read(function, channels, spatial_dims, size)
        if all(f > 0 and last_ < size - 1 for f, last_ in zip(first, last, strict=True)):
            break
    else:
        raise NotAffine(f"the window is wider than {_WIDEST}")
    axes = []
    larger = _taps_read(function, channels, spatial_dims, 2 * size + 1)[0]
    for axis in range(spatial_dims):
        stride = max(1, round((size + 1) / max(1, larger[axis] - outs[axis])))
        before = centre[axis] * stride - first[axis]
        window = last[axis] - first[axis] + 1
        # A stride hides up to stride - 1 rows at the far end; the size at which none is hidden tells the padding.
        extent = max(
            (_output_size(function, channels, spatial_dims, size + n, axis) - 1) * stride - size - n
            for n in range(stride)
        )
        axes.append((window, before, extent + window - before, stride))
    out = _output_size(function, channels, spatial_dims, size, -1)
    windows, befores, afters, strides = zip(*axes, strict=True)
    return Geometry(channels, out, 1, windows, befores, afters, strides), size


def extract(function: Function, channels: int, spatial_dims: int) -> tuple[Geometry, KernelBias]:
    """Engine B: read the kernel of a callable off its gradients; nothing needs to be known about its insides.

    The kernel of output channel ``c`` is the gradient of that channel, at a position away from the border, with respect to the
    input. The padding at the far end follows from the output size; for a stride it is determined up to rows that are never read.

    Raises:
        NotAffine: the gradient depends on nothing finite, or the shapes are not those of a convolution.
    """
    if spatial_dims == 0:
        return _extract_linear(function, channels)
    _check_additive(function, channels, spatial_dims)
    geometry, size = _find_geometry(function, channels, spatial_dims)
    centre = [
        ((size + e) // s + 1) // 2 for e, s in zip(geometry.extent, geometry.stride, strict=True)
    ]
    first = [o * s - b for o, s, b in zip(centre, geometry.stride, geometry.before, strict=True)]
    seen = (
        slice(None),
        slice(None),
        *(slice(f, f + w) for f, w in zip(first, geometry.window, strict=True)),
    )
    rows = []
    per_pass = max(1, _CHUNK // (channels * size**spatial_dims))
    for start in range(0, geometry.out_channels, per_pass):
        count = min(per_pass, geometry.out_channels - start)
        x = torch.zeros(
            count, channels, *[size] * spatial_dims, dtype=torch.float64, requires_grad=True
        )
        at: tuple[Any, ...] = (torch.arange(count), torch.arange(start, start + count), *centre)
        (grad,) = torch.autograd.grad(function(x)[at].sum(), x)
        rows.append(grad[seen])
    kernel = torch.cat(rows)
    middle: tuple[Any, ...] = (0, slice(None), *centre)
    with torch.no_grad():
        bias = function(torch.zeros(1, channels, *[size] * spatial_dims, dtype=torch.float64))[
            middle
        ]
    groups = _finest_groups(kernel)
    merged = Geometry(
        channels,
        geometry.out_channels,
        groups,
        geometry.window,
        geometry.before,
        geometry.after,
        geometry.stride,
    )
    return _as_affine(merged, KernelBias(_take_groups(kernel, groups), bias)).symmetric()


def _as_affine(geometry: Geometry, value: KernelBias) -> AffineTensor:
    return AffineTensor(object(), geometry, lambda: value)


def _extract_linear(function: Function, channels: int) -> tuple[Geometry, KernelBias]:
    with torch.no_grad():
        bias = function(torch.zeros(1, channels, dtype=torch.float64))
        columns = function(torch.eye(channels, dtype=torch.float64))
    if columns.dim() != 2:
        raise NotAffine(f"the result has {columns.dim()} dimensions, the input 2")
    return Geometry(channels, columns.shape[1], 1, (), (), (), ()), KernelBias(
        (columns - bias).T.contiguous(), bias[0]
    )


def _finest_groups(kernel: Tensor) -> int:
    """The largest number of groups that the non-zero entries allow."""
    used = kernel.flatten(2).abs().amax(-1) > 0
    out, channels = used.shape
    common = math.gcd(out, channels)
    for groups in sorted((g for g in range(1, common + 1) if common % g == 0), reverse=True):
        blocks = used.reshape(groups, out // groups, groups, channels // groups).any(3).any(1)
        if not bool((blocks & ~torch.eye(groups, dtype=torch.bool)).any()):
            return groups
    return 1


def _take_groups(kernel: Tensor, groups: int) -> Tensor:
    out, channels = kernel.shape[:2]
    blocks = kernel.reshape(groups, out // groups, groups, channels // groups, *kernel.shape[2:])
    index = torch.arange(groups)
    return blocks[index, :, index].reshape(out, channels // groups, *kernel.shape[2:])


def linear_map(
    function: Function, channels: int, spatial_dims: int, hint: Geometry | None = None
) -> tuple[Geometry, KernelBias, float]:
    """The one convolution (or linear layer) that ``function`` is, with the relative error on random inputs.

    Args:
        function: of a float64 CPU tensor ``(N, channels, *spatial)``; eval mode.
        channels: of its input.
        spatial_dims: spatial dimensions; 0 for ``(N, channels)``.
        hint: the geometry of the block's main layer; the result is written with its window, padding and groups where that is exact.

    Raises:
        NotAffine: ``function`` is no such map; the text says why.
    """
    reasons = []
    for engine in (collapse, extract):
        try:
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
            ):  # whatever the caller's mode, extraction needs gradients
                geometry, value = engine(function, channels, spatial_dims)
            geometry, value = _like(geometry, value, hint)
            error = _check(function, geometry, value)
        except NotAffine as reason:
            reasons.append(str(reason))
        except Exception as reason:  # the forward is the user's: whatever it raises on a symbolic input means "not this way"
            reasons.append(f"{type(reason).__name__}: {reason}")
        else:
            if error <= TOLERANCE:
                return geometry, value, error
            reasons.append(f"off by {error:.1e} on random inputs")
    raise NotAffine("; ".join(dict.fromkeys(reasons)))


def _like(
    geometry: Geometry, value: KernelBias, hint: Geometry | None
) -> tuple[Geometry, KernelBias]:
    """Write the map with the hint's window and groups, where it fits in."""
    if hint is None or (geometry.in_channels, geometry.out_channels, geometry.stride) != (
        hint.in_channels,
        hint.out_channels,
        hint.stride,
    ):
        return geometry, value
    groups = hint.groups if geometry.groups % hint.groups == 0 else geometry.groups
    room = [
        (h - b, hw - w - (h - b))
        for h, b, hw, w in zip(
            hint.before, geometry.before, hint.window, geometry.window, strict=True
        )
    ]
    fits = all(min(pair) >= 0 for pair in room)
    window, pads = (hint.window, hint.before) if fits else (geometry.window, geometry.before)
    target = Geometry(
        geometry.in_channels, geometry.out_channels, groups, window, pads, pads, geometry.stride
    )
    return target, _as_affine(geometry, value).fitted(target)


def _check(function: Function, geometry: Geometry, value: KernelBias) -> float:
    """Compare on random inputs of two sizes, borders included."""
    generator = torch.Generator().manual_seed(0)
    error = 0.0
    reach = max((w for w in geometry.window), default=1)
    for batch, extra in itertools.product((2,), (1, 4)):
        spatial = [reach + extra + axis for axis in range(geometry.spatial_dims)]
        x = torch.randn(
            batch, geometry.in_channels, *spatial, dtype=torch.float64, generator=generator
        )
        with torch.no_grad():
            error = max(error, relative_error(apply_map(x, geometry, value), function(x)))
    return error

"""Finding the one kernel that a callable is, by affine collapse or from its gradients.

Both engines run on the CPU in float64. :func:`linear_map` tries collapse, then extraction, and
checks the result on random inputs, so nothing that is not exactly one convolution passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.fusion.linear_map.kernel_algebra import KernelBias
from torchq.fusion.linear_map.symbolic import Affine, Geometry, NotAffine
from torchq.fusion.linear_map.symbolic_ops import AffineTensor

__all__ = ["Function", "apply_map", "collapse", "extract", "linear_map", "relative_error"]

TOLERANCE = 1e-10  # float64, relative to the largest output
_CHUNK = 2**22  # input elements per gradient pass, which bounds the memory of extraction
_WIDEST = 129  # no known block reaches further
_SMALLEST = 11  # the input size to begin with

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
    """Run ``function`` on a symbolic input and return the map that comes out (engine A).

    Args:
        function: maps ``(N, in_channels, *spatial)`` in float64 on the CPU.
        in_channels: the channels of its input.
        spatial_dims: 0 for ``(N, in_channels)``.

    Raises:
        NotAffine: an operation is not linear, or is missing in
            :mod:`torchq.fusion.linear_map.symbolic_ops`.
    """
    source: Any = AffineTensor.identity(in_channels, spatial_dims)
    with torch.no_grad():
        result: Any = function(source)
        if not isinstance(result, AffineTensor):
            raise NotAffine(f"the result is a {type(result).__name__}, not a map of the input")
        return result.symmetric()


class _Taps(NamedTuple):
    """What the central output of a function reads, with one number per spatial axis."""

    out_size: list[int]
    centre: list[int]
    first: list[int]
    last: list[int]


def _taps_read(function: Function, in_channels: int, spatial_dims: int, size: int) -> _Taps:
    """Return the first and last input position that the central output reads, for one size."""
    shape = (1, in_channels, *[size] * spatial_dims)
    x = torch.zeros(shape, dtype=torch.float64, requires_grad=True, device="cpu")
    y = function(x)
    if y.dim() != len(shape):
        raise NotAffine(f"the result has {y.dim()} dimensions, the input {len(shape)}")
    out_size = list(y.shape[2:])
    centre = [n // 2 for n in out_size]
    at: tuple[Any, ...] = (slice(None), slice(None), *centre)
    # Random weights keep one channel's tap from cancelling another's.
    (grad,) = torch.autograd.grad((y[at] * torch.rand_like(y[at])).sum(), x)
    touched = (grad != 0).nonzero()[:, 2:]
    if not len(touched):
        return _Taps(out_size, centre, centre, centre)
    return _Taps(out_size, centre, touched.amin(0).tolist(), touched.amax(0).tolist())


def _output_shape(function: Function, in_channels: int, spatial_dims: int, size: int) -> torch.Size:
    with torch.no_grad():
        shape = (1, in_channels, *[size] * spatial_dims)
        return function(torch.zeros(shape, dtype=torch.float64, device="cpu")).shape


def _check_additive(function: Function, in_channels: int, spatial_dims: int) -> None:
    """Raise :class:`NotAffine` at a small size for what is not linear.

    Looking for the window of a wide block first would take minutes.
    """
    x = torch.zeros(4, in_channels, *[_SMALLEST] * spatial_dims, dtype=torch.float64, device="cpu")
    x[1:3].normal_(generator=torch.Generator().manual_seed(0))
    x[3] = x[1] + x[2]
    with torch.no_grad():
        at_zero, one, two, both = function(x)
    if not relative_error(one + two, both + at_zero) <= TOLERANCE:
        raise NotAffine("the result for a sum is not the sum of the results")


def _find_geometry(function: Function, in_channels: int, spatial_dims: int) -> tuple[Geometry, int]:
    """Return the geometry with one group, and an input size whose centre sees no border."""
    for size in (_SMALLEST, 23, 47, 95, 2 * _WIDEST):
        taps = _taps_read(function, in_channels, spatial_dims, size)
        if min(taps.first, default=1) > 0 and max(taps.last, default=0) < size - 1:
            break
    else:
        raise NotAffine(f"the window is wider than {_WIDEST}")
    larger = _taps_read(function, in_channels, spatial_dims, 2 * size + 1).out_size
    windows, befores, afters, strides = [], [], [], []
    for axis in range(spatial_dims):
        stride = max(1, round((size + 1) / max(1, larger[axis] - taps.out_size[axis])))
        before = taps.centre[axis] * stride - taps.first[axis]
        window = taps.last[axis] - taps.first[axis] + 1
        # A stride hides up to stride - 1 rows at the far end. The size at which none is hidden
        # tells the padding.
        sizes = range(size, size + stride)
        shapes = [_output_shape(function, in_channels, spatial_dims, n) for n in sizes]
        outs = [shape[axis + 2] for shape in shapes]
        extent = max((out - 1) * stride - n for out, n in zip(outs, sizes, strict=True))
        windows.append(window)
        befores.append(before)
        afters.append(extent + window - before)
        strides.append(stride)
    out_channels = _output_shape(function, in_channels, spatial_dims, size)[1]
    axes = (tuple(windows), tuple(befores), tuple(afters), tuple(strides))
    return Geometry(in_channels, out_channels, 1, *axes), size


def extract(function: Function, in_channels: int, spatial_dims: int) -> tuple[Geometry, KernelBias]:
    """Read the kernel of a callable from its gradients, whatever is inside (engine B).

    The kernel of output channel ``c`` is the gradient of that channel, at a position away from
    the border, with respect to the input. The padding at the far end follows from the output
    size; for a stride it is determined up to rows that are never read.

    Args:
        function: maps ``(N, in_channels, *spatial)`` in float64 on the CPU.
        in_channels: the channels of its input.
        spatial_dims: 0 for ``(N, in_channels)``.

    Raises:
        NotAffine: the gradient depends on nothing finite, or the shapes are not those of a
            convolution.
    """
    if spatial_dims == 0:
        return _extract_linear(function, in_channels)
    _check_additive(function, in_channels, spatial_dims)
    geometry, size = _find_geometry(function, in_channels, spatial_dims)
    ends = zip(geometry.extent, geometry.stride, strict=True)
    centre = [((size + extent) // stride + 1) // 2 for extent, stride in ends]
    kernel = _kernel_from_gradients(function, geometry, size, centre)
    middle: tuple[Any, ...] = (0, slice(None), *centre)
    with torch.no_grad():
        empty = torch.zeros(
            1, in_channels, *[size] * spatial_dims, dtype=torch.float64, device="cpu"
        )
        bias = function(empty)[middle]
    groups = _finest_groups(kernel)
    merged = replace(geometry, groups=groups)
    return _as_affine(merged, KernelBias(_take_groups(kernel, groups), bias)).symmetric()


def _kernel_from_gradients(
    function: Function, geometry: Geometry, size: int, centre: list[int]
) -> Tensor:
    """Return the kernel ``(out_channels, in_channels, *window)``, a few output channels a pass."""
    axes = zip(centre, geometry.stride, geometry.before, geometry.window, strict=True)
    window = [slice(o * s - b, o * s - b + w) for o, s, b, w in axes]
    seen = (slice(None), slice(None), *window)
    spatial = [size] * geometry.spatial_dims
    per_pass = max(1, _CHUNK // (geometry.in_channels * math.prod(spatial)))
    rows = []
    for start in range(0, geometry.out_channels, per_pass):
        count = min(per_pass, geometry.out_channels - start)
        shape = (count, geometry.in_channels, *spatial)
        x = torch.zeros(shape, dtype=torch.float64, requires_grad=True, device="cpu")
        at: tuple[Any, ...] = (
            torch.arange(count, device="cpu"),
            torch.arange(start, start + count, device="cpu"),
            *centre,
        )
        (grad,) = torch.autograd.grad(function(x)[at].sum(), x)
        rows.append(grad[seen])
    return torch.cat(rows)


def _as_affine(geometry: Geometry, value: KernelBias) -> Affine:
    return Affine(geometry, lambda: value)


def _extract_linear(function: Function, in_channels: int) -> tuple[Geometry, KernelBias]:
    with torch.no_grad():
        bias = function(torch.zeros(1, in_channels, dtype=torch.float64, device="cpu"))
        columns = function(torch.eye(in_channels, dtype=torch.float64, device="cpu"))
    if columns.dim() != 2:
        raise NotAffine(f"the result has {columns.dim()} dimensions, the input 2")
    geometry = Geometry(in_channels, columns.shape[1], 1, (), (), (), ())
    return geometry, KernelBias((columns - bias).T.contiguous(), bias[0])


def _finest_groups(kernel: Tensor) -> int:
    """Return the largest number of groups that the non-zero entries allow."""
    used = kernel.flatten(2).abs().amax(-1) > 0
    out, channels = used.shape
    common = math.gcd(out, channels)
    for groups in sorted((g for g in range(1, common + 1) if common % g == 0), reverse=True):
        blocks = used.reshape(groups, out // groups, groups, channels // groups).any(3).any(1)
        if not bool((blocks & ~torch.eye(groups, dtype=torch.bool, device="cpu")).any()):
            return groups
    return 1


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
    for engine in (collapse, extract):
        try:
            # Extraction needs gradients, whatever the caller's mode.
            with torch.inference_mode(False), torch.enable_grad():
                geometry, value = engine(function, in_channels, spatial_dims)
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
    return target, _as_affine(geometry, value).fit(target)


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

"""Linear, shift-invariant maps of one source tensor, as values.

Maps are scaled, convolved, padded and added into new maps; at the end there is one kernel, exact
in float64. Kernels are only computed when they are asked for. What is not such a map raises
:class:`NotAffine`. :mod:`torchq.fusion.linear_map.symbolic_ops` lets a map stand for a tensor in
a block's own ``forward``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from torchq.fusion.linear_map import kernel_algebra
from torchq.fusion.linear_map.kernel_algebra import KernelBias, regroup_kernel

__all__ = ["Affine", "Geometry", "NotAffine"]

Ints = tuple[int, ...]
A = TypeVar("A", bound="Affine")


class NotAffine(Exception):
    """The value is not a linear shift-invariant map; the text says which operation is in the way.

    No public function of torchq raises it.
    """


@dataclass(frozen=True)
class Geometry:
    """The positions that a map reads, with one number per spatial axis.

    Output ``o`` reads ``o * stride - before + tap`` for each tap of the window.

    Attributes:
        in_channels, out_channels: input and output channels.
        groups: groups of the kernel ``(out_channels, in_channels / groups, *window)``.
        window: the extent of the dense kernel (dilation written out).
        before, after: implicit zeros at either end; negative for a crop.
        stride: the step on the input.
    """

    in_channels: int
    out_channels: int
    groups: int
    window: Ints
    before: Ints
    after: Ints
    stride: Ints

    @property
    def spatial_dims(self) -> int:
        """The number of spatial dimensions; 0 for a linear layer on ``(N, features)``."""
        return len(self.window)

    @property
    def kernel_numel(self) -> int:
        """The number of multiplications per output position."""
        return self.out_channels * (self.in_channels // self.groups) * math.prod(self.window)

    @property
    def extent(self) -> Ints:
        """Padding minus window: maps of one stride agree in output size if they agree in this."""
        ends = zip(self.before, self.after, self.window, strict=True)
        return tuple(before + after - window for before, after, window in ends)

    @classmethod
    def pointwise(cls, channels: int, spatial_dims: int) -> Geometry:
        """Return the geometry of the identity."""
        ones, zeros = (1,) * spatial_dims, (0,) * spatial_dims
        return cls(channels, channels, channels, ones, zeros, zeros, ones)


class Affine:
    """A map of ``source``; immutable, evaluated by :attr:`value`.

    Attributes:
        geometry: see :class:`Geometry`.
        is_identity: it is the source itself.
    """

    def __init__(
        self,
        geometry: Geometry,
        build: Callable[[], KernelBias],
        *,
        is_identity: bool = False,
    ) -> None:
        self.geometry, self._build, self.is_identity = geometry, build, is_identity

    @classmethod
    def identity(cls: type[A], channels: int, spatial_dims: int) -> A:
        """Return the source itself, of this many channels and spatial dimensions."""
        geometry = Geometry.pointwise(channels, spatial_dims)

        def build() -> KernelBias:
            window = geometry.window
            kernel = kernel_algebra.identity_kernel(channels, channels, window)
            return KernelBias(kernel, kernel.new_zeros(channels))

        return cls(geometry, build, is_identity=True)

    @cached_property
    def value(self) -> KernelBias:
        """The dense kernel ``(out_channels, in_channels / groups, *window)`` and bias, float64."""
        return self._build()

    # -- maps of maps --------------------------------------------------------------------------

    def scale(self: A, scale: Tensor | None, shift: Tensor | None) -> A:
        """Return ``scale * self + shift``.

        Args:
            scale: one value per channel, or one for all; None for one.
            shift: one value per channel, or one for all; None for zero.
        """

        def build() -> KernelBias:
            kernel, bias = self.value
            factor = torch.ones_like(bias) if scale is None else self._per_channel(scale)
            term = torch.zeros_like(bias) if shift is None else self._per_channel(shift)
            return kernel_algebra.fold_affine_after(kernel, bias, factor, term)

        return type(self)(self.geometry, build)

    def _per_channel(self, value: Tensor) -> Tensor:
        value = value.to(torch.float64).reshape(-1)
        return value.expand(self.geometry.out_channels)

    def convolve(
        self: A,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        dilation: Ints | None = None,
    ) -> A:
        """Return a convolution of this map.

        Args:
            weight: ``(out_channels, in_channels / groups, *kernel_size)``.
            bias: ``(out_channels,)`` or None.
            geometry: that of the dense convolution.
            dilation: spreads ``weight`` over the window of ``geometry``; None: it is dense.

        Raises:
            NotAffine: the convolution pads this map with zeros where the map would not be zero.
        """
        first = self.geometry
        if (
            geometry.in_channels != first.out_channels
            or geometry.spatial_dims != first.spatial_dims
        ):
            raise NotAffine(
                f"a layer for {geometry.in_channels} channels follows {first.out_channels}"
            )

        def second() -> KernelBias:
            dense = weight.double()
            if dilation is not None:
                dense = kernel_algebra.dilate_kernel(dense, dilation)
            zeros = dense.new_zeros(geometry.out_channels)
            return KernelBias(dense, zeros if bias is None else bias.double())

        if self.is_identity:
            return type(self)(geometry, second)
        self.check_zero_padding(geometry.before, geometry.after)
        merged = _composed(first, geometry)

        def build() -> KernelBias:
            inner, outer = self.value, second()
            groups = merged.groups
            inner = inner._replace(kernel=regroup_kernel(inner.kernel, first.groups, groups))
            outer = outer._replace(kernel=regroup_kernel(outer.kernel, geometry.groups, groups))
            return kernel_algebra.compose(inner, outer, groups=groups, stride=first.stride)

        return type(self)(merged, build)

    def check_zero_padding(self, before: Ints, after: Ints) -> None:
        """Raise :class:`NotAffine` unless zeros around this map are zeros around the source.

        Args:
            before: the number of zeros at the low end of each spatial axis.
            after: the number of zeros at the high end of each spatial axis.
        """
        inner = self.geometry
        for axis, pads in enumerate(zip(before, after, strict=True)):
            plain = inner.window[axis] == 1 and min(inner.before[axis], inner.after[axis]) >= 0
            if max(pads) > 0 and not plain:
                raise NotAffine("zero padding between two windows is not one convolution")
        if max((*before, *after), default=0) <= 0 or self.is_identity:
            return
        if bool(self.value.bias.any()):
            raise NotAffine("zero padding after a bias is not one convolution")

    def pad(self: A, before: Ints, after: Ints) -> A:
        """Return this map with zeros around it, or with negative numbers a crop of it.

        Args:
            before: the number of zeros at the low end of each spatial axis.
            after: the number of zeros at the high end of each spatial axis.

        Raises:
            NotAffine: zeros around this map are not zeros around the source.
        """
        self.check_zero_padding(before, after)
        g = self.geometry
        wide = replace(
            g,
            before=tuple(b + n * s for b, n, s in zip(g.before, before, g.stride, strict=True)),
            after=tuple(a + n * s for a, n, s in zip(g.after, after, g.stride, strict=True)),
        )
        return type(self)(wide, lambda: self.value)

    def add_map(self: A, other: Affine) -> A:
        """Return the sum of two maps of one source.

        Raises:
            NotAffine: the maps differ in channels, stride or output size.
        """
        a, b = self.geometry, other.geometry
        channels = (a.in_channels, a.out_channels)
        if (channels, a.stride, a.extent) != (
            (b.in_channels, b.out_channels),
            b.stride,
            b.extent,
        ):
            raise NotAffine("a sum of branches of different shape or stride")
        merged = _covering(a, b)

        def build() -> KernelBias:
            return kernel_algebra.add_branches([self.fit(merged), other.fit(merged)])

        return type(self)(merged, build)

    def fit(self, target: Geometry) -> KernelBias:
        """Return the kernel written with the window, padding and groups of ``target``."""
        g = self.geometry
        before = [t - b for t, b in zip(target.before, g.before, strict=True)]
        after = [t - w - n for t, w, n in zip(target.window, g.window, before, strict=True)]
        kernel = regroup_kernel(self.value.kernel, g.groups, target.groups)
        return KernelBias(kernel_algebra.pad_kernel(kernel, before, after), self.value.bias)

    def symmetric(self) -> tuple[Geometry, KernelBias]:
        """Return the map with equal padding at both ends, as torch's layers have it."""
        g = self.geometry
        padding = tuple(max(b, a, 0) for b, a in zip(g.before, g.after, strict=True))
        ends = zip(g.window, padding, g.before, g.after, strict=True)
        window = tuple(w + 2 * p - b - a for w, p, b, a in ends)
        target = replace(g, window=window, before=padding, after=padding)
        return target, self.fit(target)


def _composed(first: Geometry, second: Geometry) -> Geometry:
    """Return the geometry of ``second`` behind ``first``."""

    def spread(one: Ints, two: Ints) -> Ints:
        """Return ``one + two``, where ``two`` counts positions of the first result."""
        return tuple(x + y * s for x, y, s in zip(one, two, first.stride, strict=True))

    return Geometry(
        first.in_channels,
        second.out_channels,
        math.gcd(first.groups, second.groups),
        spread(first.window, tuple(size - 1 for size in second.window)),
        spread(first.before, second.before),
        spread(first.after, second.after),
        tuple(s1 * s2 for s1, s2 in zip(first.stride, second.stride, strict=True)),
    )


def _covering(a: Geometry, b: Geometry) -> Geometry:
    """Return the smallest geometry that both maps can be written with."""
    before = tuple(map(max, a.before, b.before))
    ends = zip(before, a.before, a.window, b.before, b.window, strict=True)
    window = tuple(max(s - a0 + aw, s - b0 + bw) for s, a0, aw, b0, bw in ends)
    after = tuple(e + w - p for e, w, p in zip(a.extent, window, before, strict=True))
    groups = math.gcd(a.groups, b.groups)
    return replace(a, groups=groups, window=window, before=before, after=after)

"""Linear, shift-invariant maps of one source tensor, as values.

Maps are scaled, convolved, padded and added into new maps; at the end there is one kernel, exact in float64. Kernels are only
computed when asked for. What is not such a map raises :class:`NotAffine`. :mod:`torchq.fusion.linear_map.symbolic_ops` lets a map take the
place of a tensor in a block's own ``forward``.
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
from torchq.fusion.linear_map.kernel_algebra import KernelBias

__all__ = ["Affine", "Geometry", "NotAffine"]

Ints = tuple[int, ...]
A = TypeVar("A", bound="Affine")


class NotAffine(Exception):
    """The value is not a linear shift-invariant map; the text says which operation broke it. Internal to fuse."""


@dataclass(frozen=True)
class Geometry:
    """Where a map looks: one number per spatial axis. Output ``o`` reads ``o * stride - before + tap`` for each tap of the window.

    Attributes:
        channels, out: input and output channels.
        groups: of the kernel ``(out, channels / groups, *window)``.
        window: extent of the dense kernel (dilation written out).
        before, after: implicit zeros at either end; negative for a crop.
        stride: step on the input.
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
        """Spatial dimensions; 0 for a linear layer on ``(N, features)``."""
        return len(self.window)

    @property
    def kernel_numel(self) -> int:
        """Multiplications per output position."""
        return self.out_channels * (self.in_channels // self.groups) * math.prod(self.window)

    @property
    def extent(self) -> Ints:
        """Padding minus window: maps of one stride give outputs of one size exactly if these agree."""
        return tuple(
            b + a - w for b, a, w in zip(self.before, self.after, self.window, strict=True)
        )

    @classmethod
    def pointwise(cls, channels: int, spatial_dims: int) -> Geometry:
        """The geometry of the identity."""
        return cls(
            channels,
            channels,
            channels,
            (1,) * spatial_dims,
            (0,) * spatial_dims,
            (0,) * spatial_dims,
            (1,) * spatial_dims,
        )


class Affine:
    """A map of ``source``; immutable, evaluated by :attr:`value`.

    Attributes:
        source: token of the tensor it is a map of; only maps of one source can be added.
        geometry: see :class:`Geometry`.
        layers: how many convolutions, BatchNorms and pools it absorbs.
        additions: how many sums of maps.
        cost: multiplications per output position of the layers that it replaces.
        is_identity: it is the source itself.
        device: where kernels are computed; the CPU by default.
    """

    def __init__(
        self,
        source: object,
        geometry: Geometry,
        build: Callable[[], KernelBias],
        layers: int = 0,
        additions: int = 0,
        cost: int = 0,
        is_identity: bool = False,
        device: torch.device | None = None,
    ) -> None:
        self.source, self.geometry, self._build = source, geometry, build
        self.layers, self.additions, self.cost, self.is_identity, self.device = (
            layers,
            additions,
            cost,
            is_identity,
            device,
        )

    @classmethod
    def identity(
        cls: type[A],
        source: object,
        channels: int,
        spatial_dims: int,
        device: torch.device | None = None,
    ) -> A:
        """The source itself; ``device`` is where kernels are computed."""
        geometry = Geometry.pointwise(channels, spatial_dims)

        def build() -> KernelBias:
            kernel = kernel_algebra.identity_kernel(
                channels, channels, geometry.window, device=device
            )
            return KernelBias(kernel, kernel.new_zeros(channels))

        return cls(source, geometry, build, is_identity=True, device=device)

    @cached_property
    def value(self) -> KernelBias:
        """The dense kernel ``(out, channels / groups, *window)`` and the bias, float64."""
        return self._build()

    def derive(
        self: A,
        geometry: Geometry,
        build: Callable[[], KernelBias],
        *,
        layers: int = 0,
        additions: int = 0,
        cost: int = 0,
    ) -> A:
        """A map that absorbs this one and so many more layers."""
        return type(self)(
            self.source,
            geometry,
            build,
            self.layers + layers,
            self.additions + additions,
            self.cost + cost,
            device=self.device,
        )

    # -- maps of maps --------------------------------------------------------------------------------------------------------

    def scaled(self: A, scale: Tensor | None, shift: Tensor | None, *, layers: int = 0) -> A:
        """``scale * self + shift`` with one value per channel (or one for all)."""
        out = self.geometry.out_channels
        scale, shift = (
            None
            if v is None
            else v.to(device=self.device, dtype=torch.float64).reshape(-1).expand(out)
            for v in (scale, shift)
        )

        def build() -> KernelBias:
            kernel, bias = self.value
            factor = torch.ones_like(bias) if scale is None else scale
            return kernel_algebra.fold_affine_after(
                kernel, bias, factor, torch.zeros_like(bias) if shift is None else shift
            )

        return self.derive(self.geometry, build, layers=layers)

    def convolved(
        self: A,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        dilation: Ints | None = None,
    ) -> A:
        """A convolution of this map, by ``weight``, which ``dilation`` spreads over the window of ``geometry``.

        Raises:
            NotAffine: the convolution pads this map with zeros where the map itself would not be zero.
        """
        if (
            geometry.in_channels != self.geometry.out_channels
            or geometry.spatial_dims != self.geometry.spatial_dims
        ):
            raise NotAffine(
                f"a layer for {geometry.in_channels} channels follows {self.geometry.out_channels}"
            )

        def second() -> KernelBias:
            dense = (
                weight.double()
                if dilation is None
                else kernel_algebra.dilate_kernel(weight.double(), dilation)
            )
            return KernelBias(
                dense, dense.new_zeros(geometry.out_channels) if bias is None else bias.double()
            )

        if self.is_identity:
            return self.derive(geometry, second, layers=1, cost=weight.numel())
        self.check_zero_padding(geometry.before, geometry.after)
        first = self.geometry
        groups = math.gcd(first.groups, geometry.groups)
        window = tuple(
            (k2 - 1) * s + k1
            for k1, k2, s in zip(first.window, geometry.window, first.stride, strict=True)
        )
        before = tuple(
            b1 + b2 * s
            for b1, b2, s in zip(first.before, geometry.before, first.stride, strict=True)
        )
        after = tuple(
            a1 + a2 * s for a1, a2, s in zip(first.after, geometry.after, first.stride, strict=True)
        )
        stride = tuple(s1 * s2 for s1, s2 in zip(first.stride, geometry.stride, strict=True))

        def build() -> KernelBias:
            inner = KernelBias(
                kernel_algebra.regroup_kernel(self.value.kernel, first.groups, groups),
                self.value.bias,
            )
            kernel, shift = second()
            outer = KernelBias(
                kernel_algebra.regroup_kernel(kernel, geometry.groups, groups), shift
            )
            return kernel_algebra.compose(inner, outer, groups=groups, stride=first.stride)

        merged = Geometry(
            first.in_channels, geometry.out_channels, groups, window, before, after, stride
        )
        return self.derive(merged, build, layers=1, cost=weight.numel())

    def check_zero_padding(self, before: Ints, after: Ints) -> None:
        """Raise :class:`NotAffine` unless zeros put around this map are what the map gives on zeros put around the source."""
        inner = self.geometry
        for axis, pads in enumerate(zip(before, after, strict=True)):
            if max(pads) > 0 and not (
                inner.window[axis] == 1 and inner.before[axis] >= 0 and inner.after[axis] >= 0
            ):
                raise NotAffine("zero padding between two windows is not one convolution")
        if (
            max((*before, *after), default=0) > 0
            and not self.is_identity
            and bool(self.value.bias.any())
        ):
            raise NotAffine("zero padding after a bias is not one convolution")

    def padded(self: A, before: Ints, after: Ints) -> A:
        """Zeros around this map, or with negative numbers a crop."""
        self.check_zero_padding(before, after)
        g = self.geometry
        wide = replace(
            g,
            before=tuple(b + n * s for b, n, s in zip(g.before, before, g.stride, strict=True)),
            after=tuple(a + n * s for a, n, s in zip(g.after, after, g.stride, strict=True)),
        )
        return self.derive(wide, lambda: self.value)

    def add(self: A, other: Affine) -> A:
        """The sum of two maps of one source.

        Raises:
            NotAffine: other source, channels, stride or output size.
        """
        a, b = self.geometry, other.geometry
        if other.source is not self.source:
            raise NotAffine("a sum of maps of two different tensors")
        if (a.in_channels, a.out_channels, a.stride, a.extent) != (
            b.in_channels,
            b.out_channels,
            b.stride,
            b.extent,
        ):
            raise NotAffine("a sum of branches of different shape or stride")
        before = tuple(map(max, a.before, b.before))
        window = tuple(
            max(s - ga + wa, s - gb + wb)
            for s, ga, wa, gb, wb in zip(
                before, a.before, a.window, b.before, b.window, strict=True
            )
        )
        after = tuple(e + w - p for e, w, p in zip(a.extent, window, before, strict=True))
        merged = Geometry(
            a.in_channels,
            a.out_channels,
            math.gcd(a.groups, b.groups),
            window,
            before,
            after,
            a.stride,
        )

        def build() -> KernelBias:
            return kernel_algebra.add_branches([self.fitted(merged), other.fitted(merged)])

        layers, additions, cost = (
            self.layers + other.layers,
            self.additions + other.additions + 1,
            self.cost + other.cost,
        )
        return type(self)(self.source, merged, build, layers, additions, cost, device=self.device)

    def fitted(self, target: Geometry) -> KernelBias:
        """The kernel written with the window, padding and groups of ``target``."""
        g = self.geometry
        before = [t - b for t, b in zip(target.before, g.before, strict=True)]
        after = [t - w - n for t, w, n in zip(target.window, g.window, before, strict=True)]
        return KernelBias(
            kernel_algebra.pad_kernel(
                kernel_algebra.regroup_kernel(self.value.kernel, g.groups, target.groups),
                before,
                after,
            ),
            self.value.bias,
        )

    def symmetric(self) -> tuple[Geometry, KernelBias]:
        """The same map with equal, non-negative padding at both ends, as torch's convolutions have it."""
        g = self.geometry
        padding = tuple(max(b, a, 0) for b, a in zip(g.before, g.after, strict=True))
        window = tuple(
            w + 2 * p - b - a
            for w, p, b, a in zip(g.window, padding, g.before, g.after, strict=True)
        )
        target = replace(g, window=window, before=padding, after=padding)
        return target, self.fitted(target)

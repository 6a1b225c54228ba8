"""Finding the one convolution that a callable is: symbolically, or from its gradients.

Both engines run on the CPU in float64. :func:`linear_map` tries them in turn and checks the result
on random inputs, so nothing that is not exactly one convolution passes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.fusion.algebra import (
    KernelBias,
    add_branches,
    avg_pool_kernel,
    batch_norm_affine,
    compose,
    dilate_kernel,
    fold_affine_after,
    identity_kernel,
    pad_kernel,
    regroup_kernel,
)

TOLERANCE = 1e-10  # float64, relative to the largest output
# Input elements per gradient pass, which bounds the memory of extraction.
_CHUNK = 2**22

Function = Callable[[Tensor], Tensor]
Ints = tuple[int, ...]


class NotAffine(Exception):
    """The value is no linear shift-invariant map; the text says which operation is in the way."""


@dataclass(frozen=True)
class Geometry:
    """The positions that a map reads, with one number per spatial axis.

    Output ``o`` reads ``o * stride - before + tap`` for each tap of the window of the dense kernel
    ``(out_channels, in_channels / groups, *window)``; ``before`` and ``after`` are implicit zeros,
    negative for a crop.
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
        return (
            self.out_channels
            * (self.in_channels // self.groups)
            * math.prod(self.window)
        )

    @property
    def extent(self) -> Ints:
        """Padding minus window: maps of one stride agree in output size if they agree in this."""
        ends = zip(self.before, self.after, self.window, strict=True)
        return tuple(before + after - window for before, after, window in ends)


class Affine:
    """A linear, shift-invariant map of one source tensor, which stands for its result.

    A block's own ``forward`` is run on it: torch functions and methods are looked up by name in
    ``_OPERATORS``. Kernels are computed when they are asked for, in float64.
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
    def identity(cls, channels: int, spatial_dims: int) -> Affine:
        """Return the source itself, of this many channels and spatial dimensions."""
        ones = (1,) * spatial_dims
        zeros = (0,) * spatial_dims

        def build() -> KernelBias:
            kernel = identity_kernel(channels, channels, ones)
            return KernelBias(kernel, kernel.new_zeros(channels))

        geometry = Geometry(channels, channels, channels, ones, zeros, zeros, ones)
        return cls(geometry, build, is_identity=True)

    @cached_property
    def value(self) -> KernelBias:
        """The dense kernel ``(out_channels, in_channels / groups, *window)`` and bias, float64."""
        return self._build()

    # -- as a tensor -----------------------------------------------------------------------------

    @classmethod
    def __torch_function__(
        cls,
        func: object,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
    ) -> Any:
        return _operator_named(getattr(func, "__name__", str(func)))(
            *args, **(kwargs or {})
        )

    def __getattr__(self, name: str) -> Any:
        return partial(
            _operator_named("" if name.startswith("_") else name, name), self
        )

    def dim(self) -> int:
        """Return the dimensions of the tensor that this stands for, with the batch."""
        return self.geometry.spatial_dims + 2

    ndim = property(dim)

    def size(self, axis: int | None = None) -> int:
        """Return the number of channels; no other size is known."""
        if axis != 1:
            raise NotAffine("the forward looks at the size of the input")
        return self.geometry.out_channels

    # -- maps of maps ----------------------------------------------------------------------------

    def scale(self, scale: Tensor | None, shift: Tensor | None) -> Affine:
        """Return ``scale * self + shift``, each one value per channel, one for all, or none."""

        def build() -> KernelBias:
            kernel, bias = self.value
            factor = (
                torch.ones_like(bias)
                if scale is None
                else scale.double().expand_as(bias)
            )
            term = (
                torch.zeros_like(bias)
                if shift is None
                else shift.double().expand_as(bias)
            )
            return fold_affine_after(kernel, bias, factor, term)

        return Affine(self.geometry, build)

    def convolve(
        self,
        weight: Tensor,
        bias: Tensor | None,
        geometry: Geometry,
        dilation: Ints = (),
    ) -> Affine:
        """Return a convolution of this map; ``geometry`` is that of its dense kernel."""
        first = self.geometry
        expected = (first.out_channels, first.spatial_dims)
        if (geometry.in_channels, geometry.spatial_dims) != expected:
            raise NotAffine(
                f"a layer for {geometry.in_channels} channels follows {first.out_channels}"
            )

        def second() -> KernelBias:
            dense = (
                dilate_kernel(weight.double(), dilation)
                if dilation
                else weight.double()
            )
            zeros = dense.new_zeros(geometry.out_channels)
            return KernelBias(dense, zeros if bias is None else bias.double())

        if self.is_identity:
            return Affine(geometry, second)
        self._check_zero_padding(geometry.before, geometry.after)
        merged = _composed(first, geometry)

        def build() -> KernelBias:
            inner = self.value
            outer = second()
            groups = merged.groups
            inner = inner._replace(
                kernel=regroup_kernel(inner.kernel, first.groups, groups)
            )
            outer = outer._replace(
                kernel=regroup_kernel(outer.kernel, geometry.groups, groups)
            )
            return compose(inner, outer, groups=groups, stride=first.stride)

        return Affine(merged, build)

    def _check_zero_padding(self, before: Ints, after: Ints) -> None:
        """Raise :class:`NotAffine` unless zeros around this map are zeros around the source."""
        inner = self.geometry
        for axis, pads in enumerate(zip(before, after, strict=True)):
            plain = (
                inner.window[axis] == 1
                and min(inner.before[axis], inner.after[axis]) >= 0
            )
            if max(pads) > 0 and not plain:
                raise NotAffine(
                    "zero padding between two windows is not one convolution"
                )
        if max((*before, *after), default=0) <= 0 or self.is_identity:
            return
        if bool(self.value.bias.any()):
            raise NotAffine("zero padding after a bias is not one convolution")

    def padded(self, before: Ints, after: Ints) -> Affine:
        """Return this map with zeros around it, or with negative numbers a crop of it."""
        self._check_zero_padding(before, after)
        g = self.geometry
        wide = replace(
            g,
            before=tuple(
                b + n * s for b, n, s in zip(g.before, before, g.stride, strict=True)
            ),
            after=tuple(
                a + n * s for a, n, s in zip(g.after, after, g.stride, strict=True)
            ),
        )
        return Affine(wide, lambda: self.value)

    def plus(self, other: Affine) -> Affine:
        """Return the sum of two maps of one source."""
        a, b = self.geometry, other.geometry
        shapes = [(g.in_channels, g.out_channels, g.stride, g.extent) for g in (a, b)]
        if shapes[0] != shapes[1]:
            raise NotAffine("a sum of branches of different shape or stride")
        merged = _covering(a, b)
        return Affine(
            merged, lambda: add_branches([self.fit(merged), other.fit(merged)])
        )

    def fit(self, target: Geometry) -> KernelBias:
        """Return the kernel written with the window, padding and groups of ``target``."""
        g = self.geometry
        before = [t - b for t, b in zip(target.before, g.before, strict=True)]
        after = [
            t - w - n for t, w, n in zip(target.window, g.window, before, strict=True)
        ]
        kernel = regroup_kernel(self.value.kernel, g.groups, target.groups)
        return KernelBias(pad_kernel(kernel, before, after), self.value.bias)

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
    window = []
    # Both windows start ``before`` pixels in front of the image; the longer one covers both.
    starts = zip(before, a.before, a.window, b.before, b.window, strict=True)
    for start, before_a, window_a, before_b, window_b in starts:
        end_a = start - before_a + window_a
        end_b = start - before_b + window_b
        window.append(max(end_a, end_b))
    after = tuple(e + w - p for e, w, p in zip(a.extent, window, before, strict=True))
    groups = math.gcd(a.groups, b.groups)
    return replace(a, groups=groups, window=tuple(window), before=before, after=after)


#: Name of a torch function -> the same function of maps. Its first argument is a map or (for
#: commuted operators) a constant.
_OPERATORS: dict[str, Callable[..., object]] = {}


def _operator_named(name: str, shown: str = "") -> Callable[..., object]:
    if name not in _OPERATORS:
        raise NotAffine(
            f"{shown or name} is not linear and shift-invariant, or not known to be"
        )
    return _OPERATORS[name]


def _operator(names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that enters a function under the names of torch functions."""

    def enter(function: Callable[..., object]) -> Callable[..., object]:
        _OPERATORS.update(dict.fromkeys(names.split(), function))
        return function

    return enter


def _constant(value: object, like: Affine) -> Tensor:
    """Return a constant that broadcasts against ``(N, C, *spatial)`` as ``(1,)`` or ``(C,)``."""
    tensor = torch.as_tensor(value).double()
    if tensor.numel() == 1:
        return tensor.reshape(1)
    dims = like.geometry.spatial_dims
    channels = like.geometry.out_channels
    aligned = (1,) * (dims + 2 - tensor.dim()) + tuple(tensor.shape)
    if aligned != (1, channels, *(1,) * dims):
        raise NotAffine(
            f"a constant of shape {tuple(tensor.shape)} is not one value per channel"
        )
    return tensor.reshape(-1)


@_operator("add add_ __add__ __radd__ __iadd__")
def _add(a: Any, b: Any, *, alpha: float = 1.0) -> Affine:
    b = b if alpha == 1 else b * alpha
    if isinstance(a, Affine) and isinstance(b, Affine):
        return a.plus(b)
    value, constant = (a, b) if isinstance(a, Affine) else (b, a)
    if isinstance(constant, (int, float)) and constant == 0:  # sum([...]) starts at 0
        return value
    return value.scale(None, _constant(constant, value))


@_operator("sub sub_ __sub__ __isub__")
def _sub(a: object, b: object, *, alpha: float = 1.0) -> Affine:
    return _add(a, b, alpha=-alpha)


@_operator("mul mul_ __mul__ __rmul__ __imul__ multiply")
def _mul(a: Any, b: Any) -> Affine:
    if isinstance(a, Affine) and isinstance(b, Affine):
        raise NotAffine("a product of two maps")
    value, constant = (a, b) if isinstance(a, Affine) else (b, a)
    return value.scale(_constant(constant, value), None)


@_operator("div div_ __truediv__ __itruediv__ true_divide")
def _div(a: Any, b: Any) -> Affine:
    if isinstance(b, Affine):
        raise NotAffine("a division by a map")
    return a.scale(1.0 / _constant(b, a), None)


_operator("rsub __rsub__")(lambda a, b: _sub(b, a))
_operator("neg __neg__ negative")(lambda a: _mul(a, -1.0))
_operator("contiguous clone detach requires_grad_")(lambda a, *args, **kwargs: a)


@_operator("dropout dropout1d dropout2d dropout3d alpha_dropout feature_alpha_dropout")
def _dropout(
    a: Affine, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Affine:
    if training and p > 0:
        raise NotAffine("dropout in training mode")
    return a


@_operator("leaky_relu leaky_relu_")
def _leaky_relu(
    a: Affine, negative_slope: float = 0.01, inplace: bool = False
) -> Affine:
    if float(negative_slope) != 1.0:  # VanillaNet anneals the slope to 1
        raise NotAffine(f"leaky_relu of slope {float(negative_slope):g}")
    return a


@_operator("batch_norm")
def _batch_norm(
    a: Affine,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Affine:
    if training or running_mean is None or running_var is None:
        raise NotAffine("BatchNorm uses the statistics of the batch")
    channels = a.geometry.out_channels
    if running_mean.numel() != channels:
        raise NotAffine(f"BatchNorm of {running_mean.numel()} channels on {channels}")
    affine = batch_norm_affine(running_mean, running_var, weight, bias, eps)
    return a.scale(*affine)


def _ints(value: Any, spatial_dims: int) -> Ints:
    """Return one number per spatial axis."""
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * spatial_dims if len(numbers) == 1 else numbers


@_operator("conv1d conv2d conv3d")
def _conv(
    a: Tensor,
    weight: Tensor,
    bias: Any = None,
    stride: object = 1,
    padding: object = 0,
    dilation: object = 1,
    groups: int = 1,
) -> Affine:
    if not isinstance(a, Affine) or isinstance(weight, Affine):
        raise NotAffine("a convolution whose weight depends on the input")
    dims = weight.dim() - 2
    rate = _ints(dilation, dims)
    window = tuple(r * (k - 1) + 1 for r, k in zip(rate, weight.shape[2:], strict=True))
    if padding == "same":
        before = tuple((w - 1) // 2 for w in window)
        after = tuple(w - 1 - b for w, b in zip(window, before, strict=True))
    elif isinstance(padding, str):
        before = after = (0,) * dims
    else:
        before = after = _ints(padding, dims)
    sizes = (weight.shape[1] * groups, weight.shape[0], groups)
    geometry = Geometry(*sizes, window, before, after, _ints(stride, dims))
    return a.convolve(weight, bias, geometry, rate)


@_operator("linear")
def _linear(a: Affine, weight: Tensor, bias: Tensor | None = None) -> Affine:
    if a.geometry.spatial_dims:
        raise NotAffine("a linear layer on feature maps")
    return a.convolve(
        weight, bias, Geometry(weight.shape[1], weight.shape[0], 1, (), (), (), ())
    )


@_operator("avg_pool1d avg_pool2d avg_pool3d")
def _avg_pool(
    a: Affine,
    kernel_size: object,
    stride: object = None,
    padding: object = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Affine:
    dims = a.geometry.spatial_dims
    channels = a.geometry.out_channels
    window = _ints(kernel_size, dims)
    pads = _ints(padding, dims)
    if ceil_mode or (any(pads) and not count_include_pad):
        raise NotAffine("an average pool whose divisor varies with the position")
    steps = window if stride is None or stride == [] else _ints(stride, dims)
    kernel = avg_pool_kernel(channels, channels, window, divisor_override)
    geometry = Geometry(channels, channels, channels, window, pads, pads, steps)
    return a.convolve(kernel, None, geometry)


@_operator("pad")
def _pad(
    a: Affine, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> Affine:
    dims = a.geometry.spatial_dims
    if mode != "constant" or value or len(pad) > 2 * dims:
        raise NotAffine(f"padding by {mode} {value or ''}".rstrip())
    full = list(pad) + [0] * (2 * dims - len(pad))
    return a.padded(tuple(reversed(full[0::2])), tuple(reversed(full[1::2])))


@_operator("__getitem__ getitem")
def _crop(a: Affine, index: object) -> Affine:
    slices = index if isinstance(index, tuple) else (index,)
    plain = all(isinstance(part, slice) and part.step in (None, 1) for part in slices)
    everything = slice(None)
    if not plain or slices[:2] != (everything, everything) or len(slices) != a.dim():
        raise NotAffine("an index that is not a crop")
    before = []
    after = []
    for part in slices[2:]:
        start = part.start or 0
        # A stop of 0 leaves nothing; taken for a positive one, it is refused below.
        stop = 0 if part.stop is None else part.stop or 1
        is_whole = isinstance(start, int) and isinstance(stop, int)
        if not is_whole or start < 0 or stop > 0:
            raise NotAffine("a crop that depends on the size of the input")
        before.append(-start)
        after.append(stop)
    return a.padded(tuple(before), tuple(after))


# Python looks the operators of expressions up on the class.
for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "neg", "getitem"):
    setattr(Affine, f"__{_name}__", _OPERATORS[f"__{_name}__"])


def apply_map(x: Tensor, geometry: Geometry, value: KernelBias) -> Tensor:
    """Run a map of symmetric padding on ``(N, in_channels, *spatial)``."""
    if geometry.spatial_dims == 0:
        return F.linear(x, value.kernel, value.bias)
    convolve = (F.conv1d, F.conv2d, F.conv3d)[geometry.spatial_dims - 1]
    kernel, bias = value
    return convolve(
        x, kernel, bias, geometry.stride, geometry.before, 1, geometry.groups
    )


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return the largest absolute difference over the largest finite magnitude of ``want``."""
    if got.shape != want.shape:
        return math.inf
    if want.numel() == 0:
        return 0.0
    same = (got == want) | (got.isnan() & want.isnan())
    largest = torch.where(want.isfinite(), want.abs(), 0.0).max().item()
    error = torch.where(same, 0.0, (got - want).abs()).max().item() / max(
        largest, 1e-30
    )
    return error if math.isfinite(error) else math.inf


def collapse(
    function: Function, in_channels: int, spatial_dims: int
) -> tuple[Geometry, KernelBias]:
    """Run ``function`` on a symbolic input and return the map that comes out."""
    source: Any = Affine.identity(in_channels, spatial_dims)
    with torch.no_grad():
        result: Any = function(source)
        if not isinstance(result, Affine):
            raise NotAffine(
                f"the result is a {type(result).__name__}, not a map of the input"
            )
        return result.symmetric()


def extract(function: Function, geometry: Geometry) -> tuple[Geometry, KernelBias]:
    """Read the kernel of a callable from its gradients, as far as ``geometry`` reaches."""
    _check_additive(function, geometry)
    if geometry.spatial_dims == 0:
        with torch.no_grad():
            bias = function(_zeros(1, geometry.in_channels))
            columns = function(
                torch.eye(geometry.in_channels, dtype=torch.float64, device="cpu")
            )
        return geometry, KernelBias((columns - bias).T.contiguous(), bias[0])
    # The first position of the output whose window lies inside the image, on each axis; where
    # that window starts; and the size of the image that ends with it.
    at = []
    starts = []
    spatial = []
    axes = zip(geometry.window, geometry.before, geometry.stride, strict=True)
    for window, before, stride in axes:
        position_on_axis = -(-before // stride)
        start = position_on_axis * stride - before
        at.append(position_on_axis)
        starts.append(start)
        spatial.append(start + window)
    read: tuple[Any, ...] = (..., *(slice(start, None) for start in starts))
    # One image for each output channel: the gradient of that channel is a row of the kernel.
    rows = []
    per_pass = max(1, _CHUNK // (geometry.in_channels * math.prod(spatial)))
    for channels in torch.arange(geometry.out_channels, device="cpu").split(per_pass):
        x = _zeros(len(channels), geometry.in_channels, *spatial).requires_grad_()
        places: tuple[Any, ...] = (
            torch.arange(len(channels), device="cpu"),
            channels,
            *at,
        )
        rows.append(torch.autograd.grad(function(x)[places].sum(), x)[0][read])
    position: tuple[Any, ...] = (0, slice(None), *at)
    with torch.no_grad():
        bias = function(_zeros(1, geometry.in_channels, *spatial))[position]
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
    blocks = kernel.reshape(
        groups, out // groups, groups, channels // groups, *kernel.shape[2:]
    )
    index = torch.arange(groups, device="cpu")
    return blocks[index, :, index].reshape(out, channels // groups, *kernel.shape[2:])


def linear_map(
    function: Function,
    in_channels: int,
    spatial_dims: int,
    hint: Geometry | None = None,
) -> tuple[Geometry, KernelBias, float]:
    """Return geometry and kernel of the one layer that ``function`` is, and the relative error.

    The result is written with window, padding and groups of ``hint`` where that is exact.
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
        # The user's forward may raise anything on a symbolic input.
        except Exception as reason:
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
    if hint is None or any(
        getattr(geometry, name) != getattr(hint, name)
        for name in ("stride", "in_channels", "out_channels")
    ):
        return geometry, value
    groups = hint.groups if geometry.groups % hint.groups == 0 else geometry.groups
    window, padding = geometry.window, geometry.before
    axes = zip(hint.before, padding, hint.window, window, strict=True)
    room = [(h - b, hw - w - (h - b)) for h, b, hw, w in axes]
    if all(min(pair) >= 0 for pair in room):
        window, padding = hint.window, hint.before
    target = replace(
        geometry, groups=groups, window=window, before=padding, after=padding
    )
    return target, Affine(geometry, lambda: value).fit(target)


def random_inputs(geometry: Geometry, beyond: Sequence[int]) -> Iterator[Tensor]:
    """Yield random inputs of a map, larger than its window by so many positions."""
    generator = torch.Generator().manual_seed(0)
    for extra in beyond:
        spatial = [size + extra + axis for axis, size in enumerate(geometry.window)]
        shape = (2, geometry.in_channels, *spatial)
        yield torch.randn(shape, dtype=torch.float64, generator=generator, device="cpu")


def _check(function: Function, geometry: Geometry, value: KernelBias) -> float:
    """Return the relative error on random inputs of two sizes, borders included."""
    with torch.no_grad():
        return max(
            relative_error(apply_map(x, geometry, value), function(x))
            for x in random_inputs(geometry, (1, 4))
        )

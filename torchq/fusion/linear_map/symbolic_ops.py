"""Operators on maps: what torch functions return for a map that stands for a tensor.

A block's own ``forward`` is run on an :class:`AffineTensor`. Its Python control flow is followed
for real; its convolutions, BatchNorms, additions, scalings, crops and average pools build up one
map, and everything else raises :class:`NotAffine`. Operators are found by the name of the
function, so ``a + b``, ``torch.add(a, b)`` and ``a.add_(b)`` are one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torchq.fusion.linear_map import kernel_algebra
from torchq.fusion.linear_map.symbolic import Affine, Geometry, Ints, NotAffine
from torchq.utils import Registry

__all__ = ["OPERATORS", "AffineTensor"]

#: Name of a torch function -> the same function of maps. Its first argument is a map or (for
#: commuted operators) a constant.
OPERATORS: Registry[str, Callable[..., Any]] = Registry("operator on maps")


class AffineTensor(Affine):
    """An :class:`Affine` that can be passed to torch functions and modules."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the operator that has the name of ``func``."""
        name = getattr(func, "__name__", str(func))
        operator = OPERATORS.get(name)
        if operator is None:
            raise NotAffine(f"{name} is not linear and shift-invariant, or not known to be")
        return operator(*args, **(kwargs or {}))

    def __getattr__(self, name: str) -> Any:
        operator = None if name.startswith("_") else OPERATORS.get(name)
        if operator is None:
            raise NotAffine(f"Tensor.{name} is not linear and shift-invariant, or not known to be")
        return lambda *args, **kwargs: operator(self, *args, **kwargs)

    def dim(self) -> int:
        """Return the dimensions of the tensor that this stands for, with the batch."""
        return self.geometry.spatial_dims + 2

    @property
    def ndim(self) -> int:
        """The same as :meth:`dim`."""
        return self.dim()

    def size(self, axis: int | None = None) -> int:
        """Return the number of channels; no other size is known.

        Raises:
            NotAffine: another axis was asked for.
        """
        if axis != 1:
            raise NotAffine("the forward looks at the size of the input")
        return self.geometry.out_channels

    def __add__(self, other: Any) -> AffineTensor:
        return _add(self, other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> AffineTensor:
        return _sub(self, other)

    def __rsub__(self, other: Any) -> AffineTensor:
        return _sub(other, self)

    def __mul__(self, other: Any) -> AffineTensor:
        return _mul(self, other)

    __rmul__ = __mul__

    def __truediv__(self, other: Any) -> AffineTensor:
        return _div(self, other)

    def __neg__(self) -> AffineTensor:
        return _mul(self, -1.0)

    def __getitem__(self, index: Any) -> AffineTensor:
        return _crop(self, index)


def _operator(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that enters a function under the names of torch functions."""

    def enter(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            OPERATORS.add(name, function)
        return function

    return enter


def _constant(value: Any, like: AffineTensor) -> Tensor:
    """Return a constant that broadcasts against ``(N, C, *spatial)`` as ``(1,)`` or ``(C,)``."""
    tensor = torch.as_tensor(value).double()
    if tensor.numel() == 1:
        return tensor.reshape(1)
    dims, channels = like.geometry.spatial_dims, like.geometry.out_channels
    aligned = (1,) * (dims + 2 - tensor.dim()) + tuple(tensor.shape)
    if aligned != (1, channels, *(1,) * dims):
        raise NotAffine(f"a constant of shape {tuple(tensor.shape)} is not one value per channel")
    return tensor.reshape(-1)


@_operator("add", "add_", "__add__", "__radd__", "__iadd__")
def _add(a: Any, b: Any, *, alpha: float = 1.0) -> AffineTensor:
    if isinstance(b, AffineTensor) and alpha != 1:
        b = _mul(b, alpha)
    elif alpha != 1:
        b = b * alpha
    if isinstance(a, AffineTensor) and isinstance(b, AffineTensor):
        return a.add_map(b)
    value, constant = (a, b) if isinstance(a, AffineTensor) else (b, a)
    if isinstance(constant, (int, float)) and constant == 0:  # sum([...]) starts at 0
        return value
    return value.scale(None, _constant(constant, value))


@_operator("sub", "sub_", "__sub__", "__isub__")
def _sub(a: Any, b: Any, *, alpha: float = 1.0) -> AffineTensor:
    return _add(a, _mul(b, -alpha) if isinstance(b, AffineTensor) else -alpha * b)


@_operator("rsub", "__rsub__")
def _rsub(a: Any, b: Any) -> AffineTensor:
    return _sub(b, a)


@_operator("mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply")
def _mul(a: Any, b: Any) -> AffineTensor:
    if isinstance(a, AffineTensor) and isinstance(b, AffineTensor):
        raise NotAffine("a product of two maps")
    value, constant = (a, b) if isinstance(a, AffineTensor) else (b, a)
    return value.scale(_constant(constant, value), None)


@_operator("div", "div_", "__truediv__", "__itruediv__", "true_divide")
def _div(a: Any, b: Any) -> AffineTensor:
    if isinstance(b, AffineTensor):
        raise NotAffine("a division by a map")
    return a.scale(1.0 / _constant(b, a), None)


@_operator("neg", "__neg__", "negative")
def _neg(a: AffineTensor) -> AffineTensor:
    return _mul(a, -1.0)


@_operator("contiguous", "clone", "detach", "requires_grad_")
def _same(a: AffineTensor, *args: Any, **kwargs: Any) -> AffineTensor:
    return a


@_operator(
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"
)
def _dropout(
    a: AffineTensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> AffineTensor:
    if training and p > 0:
        raise NotAffine("dropout in training mode")
    return a


@_operator("leaky_relu", "leaky_relu_")
def _leaky_relu(
    a: AffineTensor, negative_slope: float = 0.01, inplace: bool = False
) -> AffineTensor:
    if float(negative_slope) != 1.0:  # VanillaNet anneals the slope to 1
        raise NotAffine(f"leaky_relu of slope {float(negative_slope):g}")
    return a


@_operator("batch_norm")
def _batch_norm(
    a: AffineTensor,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> AffineTensor:
    if training or running_mean is None or running_var is None:
        raise NotAffine("BatchNorm uses the statistics of the batch")
    channels = a.geometry.out_channels
    if running_mean.numel() != channels:
        raise NotAffine(f"BatchNorm of {running_mean.numel()} channels on {channels}")
    affine = kernel_algebra.batch_norm_affine(running_mean, running_var, weight, bias, eps)
    return a.scale(*affine)


def _ints(value: Any, spatial_dims: int) -> Ints:
    """Return one number per spatial axis."""
    given = (value,) if isinstance(value, int) else tuple(value)
    return given * spatial_dims if len(given) == 1 else given


@_operator("conv1d", "conv2d", "conv3d")
def _conv(
    a: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> AffineTensor:
    if not isinstance(a, AffineTensor) or isinstance(weight, Affine):
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
    channels, out = weight.shape[1] * groups, weight.shape[0]
    steps = _ints(stride, dims)
    return a.convolve(
        weight, bias, Geometry(channels, out, groups, window, before, after, steps), rate
    )


@_operator("linear")
def _linear(a: AffineTensor, weight: Tensor, bias: Tensor | None = None) -> AffineTensor:
    if a.geometry.spatial_dims:
        raise NotAffine("a linear layer on feature maps")
    return a.convolve(weight, bias, Geometry(weight.shape[1], weight.shape[0], 1, (), (), (), ()))


@_operator("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(
    a: AffineTensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> AffineTensor:
    dims, channels = a.geometry.spatial_dims, a.geometry.out_channels
    window, pads = _ints(kernel_size, dims), _ints(padding, dims)
    if ceil_mode or (any(pads) and not count_include_pad):
        raise NotAffine("an average pool whose divisor varies with the position")
    steps = window if stride is None or stride == [] else _ints(stride, dims)
    kernel = kernel_algebra.avg_pool_kernel(channels, channels, window, divisor_override)
    geometry = Geometry(channels, channels, channels, window, pads, pads, steps)
    return a.convolve(kernel, None, geometry)


@_operator("pad")
def _pad(
    a: AffineTensor, pad: Sequence[int], mode: str = "constant", value: float | None = None
) -> AffineTensor:
    dims = a.geometry.spatial_dims
    if mode != "constant" or value or len(pad) > 2 * dims:
        raise NotAffine(f"padding by {mode} {value or ''}".rstrip())
    full = list(pad) + [0] * (2 * dims - len(pad))
    return a.pad(tuple(reversed(full[0::2])), tuple(reversed(full[1::2])))


@_operator("__getitem__", "getitem")
def _crop(a: AffineTensor, index: Any) -> AffineTensor:
    slices = index if isinstance(index, tuple) else (index,)
    plain = all(isinstance(part, slice) and part.step in (None, 1) for part in slices)
    everything = slice(None)
    if not plain or slices[:2] != (everything, everything) or len(slices) != a.dim():
        raise NotAffine("an index that is not a crop")
    before, after = [], []
    for part in slices[2:]:
        start, stop = part.start or 0, part.stop
        from_start = isinstance(start, int) and start >= 0
        to_end = stop is None or (isinstance(stop, int) and stop < 0)
        if not (from_start and to_end):
            raise NotAffine("a crop that depends on the size of the input")
        before.append(-start)
        after.append(stop or 0)
    return a.pad(tuple(before), tuple(after))

"""The integer operators on oneDNN's kernels, as torch ships them for x86 CPUs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.lowering.ops.epilogues import ACTIVATIONS
from torchq.lowering.ops.prepack import PackCache
from torchq.lowering.ops.reference import finish

__all__ = [
    "PACKED",
    "Run",
    "available",
    "bind_conv",
    "bind_linear",
    "conv",
    "forget",
    "linear",
    "saturates",
]

PACKED = PackCache()
#: Bound kernels of the operators, which compiled and exported models call; layers keep their own.
_RUNS = PackCache()

_OPERATORS = (
    "qconv_prepack",
    "qconv2d_pointwise",
    "qconv3d_pointwise",
    "qlinear_prepack",
    "qlinear_pointwise",
)
#: What the 3-d kernel applies to its result, and what a kernel that adds does.
_KNOWN_3D, _KNOWN_ADDING = ("none",), ("none", "relu")


@lru_cache
def available() -> bool:
    """Whether this build of torch has the operators."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.onednn, name) for name in _OPERATORS
    )


@dataclass(frozen=True)
class _Packed:
    weight: Tensor
    scale: Tensor
    zero_point: Tensor
    bias: Tensor | None


def _pack(
    packed: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None,
    x_scale: float,
    x_zero_point: int,
) -> _Packed:
    """Fold the zero point of the input into the bias: sum (x - z) w = sum x w - z sum w. Kernels without one are much faster."""
    scale = scale.expand(weight.shape[0]).contiguous()
    zero = torch.zeros(weight.shape[0], dtype=torch.int64)
    if x_zero_point:
        shift = (
            weight.flatten(1).sum(1, dtype=torch.int64).double()
            * scale.double()
            * (x_scale * x_zero_point)
        )
        bias = (-shift if bias is None else bias.double() - shift).float()
    return _Packed(packed, scale, zero, None if bias is None else bias.float())


def forget(weight: Tensor) -> None:
    """Drop what was made of ``weight``: its values have changed."""
    for cache in (PACKED, _RUNS):
        cache.forget(weight)


Run = Callable[..., Tensor]


def conv(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, name: str, arguments: Sequence[float],
    residual: Tensor | None, residual_scale: float, residual_zero_point: int,
) -> Tensor:  # fmt: skip
    """One convolution; see ``torchq::int8_conv``."""
    settings: tuple[Any, ...] = (
        x_scale, x_zero_point, tuple(stride), tuple(padding), tuple(dilation), groups,
        out_scale, out_zero_point, out_dtype, name, tuple(arguments), residual_scale, residual_zero_point,
    )  # fmt: skip
    added = (None, None) if residual is None else (residual.shape, residual.dtype)
    run: Run = _RUNS.get(
        weight,
        (x.shape, *added, *settings),
        (weight_scale, bias),
        lambda: bind_conv(x.shape, residual, weight, weight_scale, bias, *settings),
    )
    return run(x) if residual is None else run(x, residual)


def bind_conv(
    shape: Sequence[int], residual: Tensor | None, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, name: str, arguments: Sequence[float],
    residual_scale: float, residual_zero_point: int, overwrite: bool = False,
) -> Run:  # fmt: skip
    """The convolution as a function of the codes alone, for inputs of ``shape`` and residuals like ``residual``.

    In networks of small layers, finding arguments takes longer than computing; this is done once. With ``overwrite`` the result may take
    the place of the residual.
    """
    inputs = (
        shape,
        weight,
        weight_scale,
        bias,
        x_scale,
        x_zero_point,
        stride,
        padding,
        dilation,
        groups,
    )
    out = (out_scale, out_zero_point, out_dtype, name, arguments)
    if residual is None and (weight.dim() < 5 or name in _KNOWN_3D):
        return _bind(*inputs, *out)
    # The kernel adds tensors of the same shape, and codes to codes.
    fits = residual is not None and (residual.dtype is torch.uint8) == (out_dtype is torch.uint8)
    if (
        fits
        and name in _KNOWN_ADDING
        and weight.dim() < 5
        and residual.shape == _shape(shape, weight, stride, padding, dilation)
    ):  # type: ignore[union-attr]
        return _bind(*inputs, *out, (residual_scale, residual_zero_point, overwrite))
    plain = _bind(*inputs, 1.0, 0, torch.float32, "none", [])

    def run(x: Tensor, residual: Tensor | None = None) -> Tensor:
        if residual is not None and residual.dtype is torch.uint8:
            residual = (residual.float() - residual_zero_point) * residual_scale
        return finish(plain(x), *out, residual)

    return run


def _shape(
    shape: Sequence[int],
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> tuple[int, ...]:
    sizes = zip(shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return (
        shape[0],
        weight.shape[0],
        *((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes),
    )


def _bind(
    shape: Sequence[int], weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, name: str, arguments: Sequence[float],
    added: tuple[float, int, bool] | None = None,
) -> Run:  # fmt: skip
    post: tuple[Any, ...] = (out_scale, out_zero_point, out_dtype, name, arguments, added)
    if (
        len(shape) == 3
    ):  # the 1-d operator knows fewer activations than the 2-d one, and calls the same kernels
        wide, raised = ([1, *stride], [0, *padding], [1, *dilation]), (*shape[:2], 1, shape[2])
        run = _bind(raised, weight, weight_scale, bias, x_scale, x_zero_point, *wide, groups, *post)
        return lambda *tensors: run(*(x.unsqueeze(2) for x in tensors)).squeeze(2)
    if x_zero_point and any(padding):
        # Zero padding of codes must add the code of zero, which a kernel without zero point does not know.
        border = [p for p in reversed(padding) for _ in range(2)]
        larger = (*shape[:2], *(size + 2 * p for size, p in zip(shape[2:], padding, strict=True)))
        inner = _bind(
            larger,
            weight,
            weight_scale,
            bias,
            x_scale,
            x_zero_point,
            stride,
            [0] * len(padding),
            dilation,
            groups,
            *post,
        )
        return lambda x, *rest: inner(F.pad(x, border, value=float(x_zero_point)), *rest)
    static = (list(stride), list(padding), list(dilation), groups)

    def build() -> _Packed:
        plain = weight if weight.dim() == len(shape) else weight.unsqueeze(2)
        packed = torch.ops.onednn.qconv_prepack(
            plain,
            weight_scale.expand(weight.shape[0]).contiguous(),
            x_scale,
            0,
            *static,
            list(shape),
        )
        return _pack(packed, weight, weight_scale, bias, x_scale, x_zero_point)

    # The layout depends on the size of the image, not on the batch: weights in another one are converted at every call, which
    # takes a hundred times longer than the convolution.
    p: _Packed = PACKED.get(
        weight,
        (x_scale, x_zero_point, *stride, *padding, *dilation, *shape[2:]),
        (weight_scale, bias),
        build,
    )
    fixed = (x_scale, 0, p.weight, p.scale, p.zero_point)
    if added is not None:
        return _adding(fixed, p.bias, static, out_scale, out_zero_point, out_dtype, name, added)
    act = ACTIVATIONS[name]
    rest = (
        p.bias,
        *static,
        out_scale,
        out_zero_point,
        out_dtype,
        act.onednn,
        list(arguments),
        act.algorithm,
    )
    operator = (
        torch.ops.onednn.qconv2d_pointwise.default
        if len(shape) == 4
        else torch.ops.onednn.qconv3d_pointwise.default
    )
    return lambda x: operator(x, *fixed, *rest)


def _adding(
    fixed: tuple[object, ...], bias: Tensor | None, static: tuple[object, ...], out_scale: float, out_zero_point: int, out_dtype: torch.dtype,
    name: str, added: tuple[float, int, bool],
) -> Run:  # fmt: skip
    *qparams, overwrite = added
    rest = (
        bias,
        *static,
        out_scale,
        out_zero_point,
        out_dtype,
        *qparams,
        "sum",
        1.0,
        "relu" if name == "relu" else None,
        [],
        "",
    )
    operator = torch.ops.onednn.qconv2d_pointwise.binary

    def run(x: Tensor, residual: Tensor) -> Tensor:
        # The kernel adds in place, and interprets what it finds as being of the output's type.
        if not (
            overwrite
            and residual.dtype is out_dtype
            and residual.is_contiguous(memory_format=torch.channels_last)
        ):
            residual = residual.to(out_dtype, memory_format=torch.channels_last, copy=True)
        return operator(x, *fixed, residual, *rest)

    return run


def linear(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, name: str, arguments: Sequence[float],
) -> Tensor:  # fmt: skip
    """One linear layer; see ``torchq::int8_linear``."""
    settings = (x_scale, x_zero_point, out_scale, out_zero_point, out_dtype, name, tuple(arguments))
    run: Run = _RUNS.get(
        weight,
        settings,
        (weight_scale, bias),
        lambda: bind_linear(weight, weight_scale, bias, *settings),
    )
    return run(x)


def bind_linear(
    weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, name: str, arguments: Sequence[float],
) -> Run:  # fmt: skip
    """The linear layer as a function of the codes alone."""

    def build() -> _Packed:
        return _pack(
            torch.ops.onednn.qlinear_prepack(weight, None),
            weight,
            weight_scale,
            bias,
            x_scale,
            x_zero_point,
        )

    p: _Packed = PACKED.get(weight, (x_scale, x_zero_point), (weight_scale, bias), build)
    act, operator = ACTIVATIONS[name], torch.ops.onednn.qlinear_pointwise.default
    fixed = (
        x_scale,
        0,
        p.weight,
        p.scale,
        p.zero_point,
        p.bias,
        out_scale,
        out_zero_point,
        out_dtype,
        act.onednn,
        list(arguments),
        act.algorithm,
    )
    return lambda x: operator(x, *fixed)


@lru_cache
def saturates() -> bool:
    """Whether the kernels add two products in 16 bits, as CPUs without VNNI do: 255 * 127 * 2 does not fit.

    Found by computing such a sum, so whatever limits oneDNN (``ONEDNN_MAX_CPU_ISA``, an emulator) is seen.
    """
    if not available():
        return False
    x = torch.full((16, 64), 255, dtype=torch.uint8)
    weight = torch.full((64, 64), 127, dtype=torch.int8)
    y = linear(x, weight, torch.ones(1), None, 1.0, 0, 1.0, 0, torch.float32, "none", [])
    image, kernel = x.view(1, 64, 4, 4), weight.view(64, 64, 1, 1)
    plain = ([1, 1], [0, 0], [1, 1], 1)
    z = conv(
        image,
        kernel,
        torch.ones(1),
        None,
        1.0,
        0,
        *plain,
        1.0,
        0,
        torch.float32,
        "none",
        [],
        None,
        1.0,
        0,
    )
    exact = 64 * 255.0 * 127.0
    return bool((y != exact).any() or (z != exact).any())

"""The integer operators on oneDNN's kernels, as torch ships them for x86 CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.deployment.activations import ACTIVATIONS
from torchq.deployment.packing import PackCache
from torchq.deployment.reference import finish

__all__ = ["PACKED", "available", "conv", "linear", "saturates"]

PACKED = PackCache()

_OPERATORS = ("qconv_prepack", "qconv2d_pointwise", "qconv3d_pointwise", "qlinear_prepack", "qlinear_pointwise")
_FORMATS = {2: torch.channels_last, 3: torch.channels_last_3d}


@lru_cache
def available() -> bool:
    """Whether this build of torch has the operators."""
    return torch.backends.mkldnn.is_available() and all(hasattr(torch.ops.onednn, name) for name in _OPERATORS)


@dataclass(frozen=True)
class _Packed:
    weight: Tensor
    step: Tensor
    zero: Tensor
    bias: Tensor | None


def _pack(packed: Tensor, weight: Tensor, step: Tensor, bias: Tensor | None, x_step: float, x_zero: int) -> _Packed:
    """Fold the zero point of the input into the bias: sum (x - z) w = sum x w - z sum w. Kernels without one are much faster."""
    step = step.expand(weight.shape[0]).contiguous()
    zero = torch.zeros(weight.shape[0], dtype=torch.int64)
    if x_zero:
        shift = weight.flatten(1).sum(1, dtype=torch.int64).double() * step.double() * (x_step * x_zero)
        bias = (-shift if bias is None else bias.double() - shift).float()
    return _Packed(packed, step, zero, None if bias is None else bias.float())


def conv(
    x: Tensor, weight: Tensor, weight_step: Tensor, bias: Tensor | None, x_step: float, x_zero: int,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    out_step: float, out_zero: int, out_dtype: torch.dtype, name: str, arguments: Sequence[float],
    residual: Tensor | None, residual_step: float, residual_zero: int,
) -> Tensor:  # fmt: skip
    """One convolution; see ``torchq::int8_conv``."""
    inputs = (x, weight, weight_step, bias, x_step, x_zero, stride, padding, dilation, groups)
    kernel = ACTIVATIONS[name].onednn
    # The kernel adds tensors of the same shape, and codes to codes.
    fits = residual is None or (residual.dtype is torch.uint8) == (out_dtype is torch.uint8)
    fits = fits and (residual is None or residual.shape == _shape(x, weight, stride, padding, dilation))
    known = [kernel] if weight.dim() < 5 and residual is None else ["none"] if residual is None else ["none", "relu"]
    if fits and kernel in known and not (weight.dim() == 5 and residual is not None):
        return _conv(*inputs, out_step, out_zero, out_dtype, name, arguments, residual, residual_step, residual_zero)
    y = _conv(*inputs, 1.0, 0, torch.float32, "none", [], None, 1.0, 0)
    if residual is not None and residual.dtype is torch.uint8:
        residual = (residual.float() - residual_zero) * residual_step
    return finish(y, out_step, out_zero, out_dtype, name, arguments, residual)


def _shape(x: Tensor, weight: Tensor, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]) -> tuple[int, ...]:
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    return (x.shape[0], weight.shape[0], *((size + 2 * p - d * (k - 1) - 1) // s + 1 for size, k, s, p, d in sizes))


def _conv(
    x: Tensor, weight: Tensor, weight_step: Tensor, bias: Tensor | None, x_step: float, x_zero: int,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    out_step: float, out_zero: int, out_dtype: torch.dtype, name: str, arguments: Sequence[float],
    residual: Tensor | None, residual_step: float, residual_zero: int,
) -> Tensor:  # fmt: skip
    if x.dim() == 3:  # the 1-d operator knows fewer activations than the 2-d one, and calls the same kernels
        one = (x.unsqueeze(2), weight, weight_step, bias, x_step, x_zero, [1, *stride], [0, *padding], [1, *dilation], groups)
        raised = None if residual is None else residual.unsqueeze(2)
        return _conv(*one, out_step, out_zero, out_dtype, name, arguments, raised, residual_step, residual_zero).squeeze(2)
    spatial = x.dim() - 2
    if x_zero and any(padding):
        # Zero padding of codes must add the code of zero, which a kernel without zero point does not know.
        x = F.pad(x, [p for p in reversed(padding) for _ in range(2)], value=float(x_zero))
        padding = [0] * spatial
    x = x.contiguous(memory_format=_FORMATS[spatial])
    static = (stride, padding, dilation, groups)

    def build() -> _Packed:
        plain = weight.view(weight.shape[0], weight.shape[1], *[1] * (x.dim() - weight.dim()), *weight.shape[2:])
        packed = torch.ops.onednn.qconv_prepack(plain, weight_step.expand(weight.shape[0]).contiguous(), x_step, 0, *static, list(x.shape))
        return _pack(packed, weight, weight_step, bias, x_step, x_zero)

    # The layout depends on the size of the image, not on the batch: weights in another one are converted at every call, which
    # takes a hundred times longer than the convolution.
    p: _Packed = PACKED.get(weight, (x_step, x_zero, *stride, *padding, *dilation, *x.shape[2:]), bias, build)
    act = ACTIVATIONS[name]
    inputs = (x, x_step, 0, p.weight, p.step, p.zero)
    if residual is None:
        operator = torch.ops.onednn.qconv2d_pointwise if spatial == 2 else torch.ops.onednn.qconv3d_pointwise
        return operator(*inputs, p.bias, *static, out_step, out_zero, out_dtype, act.onednn, arguments, act.algorithm)
    # The kernel adds in place, and interprets what it finds as being of the output's type.
    into = residual.to(out_dtype).contiguous(memory_format=_FORMATS[spatial])
    into = into.clone() if into is residual or into.data_ptr() == residual.data_ptr() else into
    out = (out_step, out_zero, out_dtype, residual_step, residual_zero)
    post: tuple[object, ...] = ("sum", 1.0, "relu" if name == "relu" else None, [], "")
    return torch.ops.onednn.qconv2d_pointwise.binary(*inputs, into, p.bias, *static, *out, *post)


def linear(
    x: Tensor, weight: Tensor, weight_step: Tensor, bias: Tensor | None, x_step: float, x_zero: int,
    out_step: float, out_zero: int, out_dtype: torch.dtype, name: str, arguments: Sequence[float],
) -> Tensor:  # fmt: skip
    """One linear layer; see ``torchq::int8_linear``."""

    def build() -> _Packed:
        return _pack(torch.ops.onednn.qlinear_prepack(weight, None), weight, weight_step, bias, x_step, x_zero)

    p: _Packed = PACKED.get(weight, (x_step, x_zero), bias, build)
    act = ACTIVATIONS[name]
    return torch.ops.onednn.qlinear_pointwise(
        x.contiguous(), x_step, 0, p.weight, p.step, p.zero, p.bias, out_step, out_zero, out_dtype, act.onednn, arguments, act.algorithm
    )


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
    z = conv(image, kernel, torch.ones(1), None, 1.0, 0, *plain, 1.0, 0, torch.float32, "none", [], None, 1.0, 0)
    exact = 64 * 255.0 * 127.0
    return bool((y != exact).any() or (z != exact).any())

"""The operators of deployed models, in torch's own registry: ``torch.ops.torchq.int8_conv`` and ``int8_linear``.

They take plain tensors and numbers, so ``torch.compile``, ``torch.export`` with save and load, and copies of models all work. Which
kernel runs is decided inside: oneDNN's on a CPU that has it, plain torch otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.lowering.ops import cuda_int8, onednn, reference

__all__ = ["conv_any", "conv_cpu", "kernel", "linear_any", "linear_cpu", "linear_cuda"]

# A fragment: other parts of torchq may define operators in the same namespace.
_LIBRARY = torch.library.Library("torchq", "FRAGMENT")

_LIBRARY.define(
    "int8_conv(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, float x_scale, int x_zero_point, SymInt[] stride, SymInt[] padding,"
    " SymInt[] dilation, int groups, float out_scale, int out_zero_point, ScalarType out_dtype, str activation, float[] arguments,"
    " Tensor? residual=None, float residual_scale=1.0, int residual_zero_point=0) -> Tensor"
)
_LIBRARY.define(
    "int8_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, float x_scale, int x_zero_point, float out_scale, int out_zero_point,"
    " ScalarType out_dtype, str activation, float[] arguments) -> Tensor"
)


def kernel(device: torch.device, kind: str = "conv") -> tuple[str, str]:
    """What an operator of ``kind`` (conv or linear) runs on ``device``, and why nothing faster where that is the reference.

    ``"onednn"``, ``"int_mm"`` (linear on GPUs) or ``"reference"``.
    """
    if device.type == "cpu":
        return (
            ("onednn", "")
            if onednn.available()
            else ("reference", "this torch has no oneDNN operators")
        )
    problem = (
        cuda_int8.obstacle(device)
        if kind == "linear"
        else f"integer convolutions run on CPUs, not on {device.type}"
    )
    return ("reference", problem) if problem else ("int_mm", "")


def conv_any(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, activation: str, arguments: Sequence[float],
    residual: Tensor | None = None, residual_scale: float = 1.0, residual_zero_point: int = 0,
) -> Tensor:  # fmt: skip
    """``torchq::int8_conv`` anywhere."""
    y = reference.conv(
        x, weight, weight_scale, bias, x_scale, x_zero_point, stride, padding, dilation, groups
    )
    if residual is not None and residual.dtype is torch.uint8:
        residual = (residual.float() - residual_zero_point) * residual_scale
    return reference.finish(
        y, out_scale, out_zero_point, out_dtype, activation, arguments, residual
    )


def conv_cpu(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, activation: str, arguments: Sequence[float],
    residual: Tensor | None = None, residual_scale: float = 1.0, residual_zero_point: int = 0,
) -> Tensor:  # fmt: skip
    """``torchq::int8_conv`` on the CPU."""
    run = onednn.conv if onednn.available() and x.numel() else conv_any
    return run(
        x, weight, weight_scale, bias, x_scale, x_zero_point, stride, padding, dilation, groups,
        out_scale, out_zero_point, out_dtype, activation, arguments, residual, residual_scale, residual_zero_point,
    )  # fmt: skip


def _conv_fake(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], groups: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, activation: str, arguments: Sequence[float],
    residual: Tensor | None = None, residual_scale: float = 1.0, residual_zero_point: int = 0,
) -> Tensor:  # fmt: skip
    sizes = [
        (size + 2 * p - d * (k - 1) - 1) // s + 1
        for size, k, s, p, d in zip(
            x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True
        )
    ]
    shape = torch.Size((x.shape[0], weight.shape[0], *sizes))
    if residual is not None:
        shape = torch.broadcast_shapes(shape, residual.shape)
    out = x.new_empty(shape, dtype=out_dtype)
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    return (
        out.to(memory_format=formats[x.dim()])
        if x.dim() in formats and x.device.type == "cpu" and onednn.available()
        else out
    )


def linear_any(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, activation: str, arguments: Sequence[float],
) -> Tensor:  # fmt: skip
    """``torchq::int8_linear`` anywhere."""
    y = reference.linear(x, weight, weight_scale, bias, x_scale, x_zero_point)
    return reference.finish(y, out_scale, out_zero_point, out_dtype, activation, arguments, None)


def linear_cpu(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, activation: str, arguments: Sequence[float],
) -> Tensor:  # fmt: skip
    """``torchq::int8_linear`` on the CPU."""
    run = onednn.linear if onednn.available() and x.numel() else linear_any
    return run(
        x,
        weight,
        weight_scale,
        bias,
        x_scale,
        x_zero_point,
        out_scale,
        out_zero_point,
        out_dtype,
        activation,
        arguments,
    )


def linear_cuda(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, activation: str, arguments: Sequence[float],
) -> Tensor:  # fmt: skip
    """``torchq::int8_linear`` on a GPU."""
    run = linear_any if cuda_int8.obstacle(x.device) or not x.numel() else cuda_int8.linear
    return run(
        x,
        weight,
        weight_scale,
        bias,
        x_scale,
        x_zero_point,
        out_scale,
        out_zero_point,
        out_dtype,
        activation,
        arguments,
    )


def _linear_fake(
    x: Tensor, weight: Tensor, weight_scale: Tensor, bias: Tensor | None, x_scale: float, x_zero_point: int,
    out_scale: float, out_zero_point: int, out_dtype: torch.dtype, *rest: object,
) -> Tensor:  # fmt: skip
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=out_dtype)


for _name, _any, _cpu, _fake in (
    ("int8_conv", conv_any, conv_cpu, _conv_fake),
    ("int8_linear", linear_any, linear_cpu, _linear_fake),
):
    _LIBRARY.impl(_name, _any, "CompositeExplicitAutograd")
    _LIBRARY.impl(_name, _cpu, "CPU")
    torch.library.register_fake(f"torchq::{_name}", _fake, lib=_LIBRARY)
_LIBRARY.impl("int8_linear", linear_cuda, "CUDA")


def _max_pool_any(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    return F.max_pool2d(
        x.float(), tuple(kernel), tuple(stride), tuple(padding), tuple(dilation), ceil_mode
    ).to(torch.uint8)


def _max_pool_cpu(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    # torch's own max_pool2d refuses uint8 images that are channels last; this operator takes plain tensors and is ten times faster.
    if x.numel() and x.dim() == 4 and hasattr(torch.ops.quantized, "max_pool2d"):
        return torch.ops.quantized.max_pool2d(x, kernel, stride, padding, dilation, ceil_mode)
    return _max_pool_any(x, kernel, stride, padding, dilation, ceil_mode)


_LIBRARY.define(
    "max_pool2d(Tensor x, int[] kernel, int[] stride, int[] padding, int[] dilation, bool ceil_mode) -> Tensor"
)
_LIBRARY.impl("max_pool2d", _max_pool_any, "CompositeExplicitAutograd")
_LIBRARY.impl("max_pool2d", _max_pool_cpu, "CPU")
torch.library.register_fake("torchq::max_pool2d", _max_pool_any, lib=_LIBRARY)

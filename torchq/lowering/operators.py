"""The integer operators in torch's registry, for compiled and exported programs.

They take plain tensors and numbers, and run what :mod:`.kernel` has for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchq.lowering.kernel import (
    ConvParams,
    Epilogue,
    Int8Weights,
    Kernel,
    Run,
    available,
    reference,
)

#: How many input shapes kernels are kept for. oneDNN itself keeps a thousand compiled kernels: as
#: many as a network of 30 layers needs for this number of shapes.
MOST_SHAPES = 32
#: What recorded programs have bound, for each weight: a program keeps its weights and no kernels.
_BOUND = WeakTensorKeyDictionary()


def drop_oldest(entries: dict[Any, Any], most: int) -> None:
    """Make room for one more entry in a dictionary, by dropping its oldest ones in place."""
    for key in list(entries)[: max(0, len(entries) + 1 - most)]:
        entries.pop(key, None)


def recorded_product(
    x: Tensor,
    weights: Int8Weights,
    params: ConvParams,
    epilogue: Epilogue,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the product of a layer by ``torch.ops.torchq.int8_product``."""
    codes, scale, bias, x_scale, x_zero_point = weights
    stride, padding, dilation, groups = params
    return int8_product(
        x,
        codes,
        scale,
        bias,
        residual,
        [*stride, *padding, *dilation, groups],
        [x_scale, epilogue.scale, epilogue.residual_scale],
        [x_zero_point, epilogue.zero_point, epilogue.residual_zero_point],
        epilogue.dtype is torch.uint8,
        epilogue.activation,
        list(epilogue.arguments),
    )


def _params(geometry: Sequence[int]) -> ConvParams:
    dims = len(geometry) // 3
    stride, padding, dilation = (tuple(geometry[i * dims : (i + 1) * dims]) for i in range(3))
    return ConvParams(stride, padding, dilation, geometry[-1])


@torch.library.custom_op("torchq::int8_product", mutates_args=())
def int8_product(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Sequence[int],
    scales: Sequence[float],
    zero_points: Sequence[int],
    codes: bool,
    activation: str,
    arguments: Sequence[float],
) -> Tensor:
    """Return a convolution of uint8 codes, or a linear layer where ``geometry`` has one number.

    ``geometry`` is stride, padding and dilation, then groups; scales and zero points are those of
    the input, the result and the residual.
    """
    weights = Int8Weights(weight, weight_scale, bias, scales[0], zero_points[0])
    params, dtype = _params(geometry), torch.uint8 if codes else torch.float32
    out = (scales[1], zero_points[1], dtype, activation, tuple(arguments))
    epilogue = Epilogue(*out, scales[2], zero_points[2])
    if not (x.is_cpu and x.numel() and available()):
        return reference(x, weights, params, epilogue, residual)
    if weight not in _BOUND:
        _BOUND[weight] = Kernel(weight), {}
    kernel, bound = _BOUND[weight]
    like = None if residual is None else (residual.shape, residual.dtype)
    key = (x.shape, like, weights[3:], params, epilogue)
    scale, shift, run = bound.get(key, (None, None, None))
    if run is None or scale is not weight_scale or shift is not bias:
        drop_oldest(bound, MOST_SHAPES)
        run = kernel.bind(x.shape, weights, params, epilogue, residual)
        bound[key] = weight_scale, bias, run
    found: Run = run
    return found(x) if residual is None else found(x, residual)


@int8_product.register_fake
def _(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    geometry: Sequence[int],
    scales: Sequence[float],
    zero_points: Sequence[int],
    codes: bool,
    *rest: Any,
) -> Tensor:
    params = _params(geometry)
    shape = torch.Size(params.output_shape(x.shape, weight.shape))
    if residual is not None:
        shape = torch.broadcast_shapes(shape, residual.shape)
    out = x.new_empty(shape, dtype=torch.uint8 if codes else torch.float32)
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    if len(params.stride) in formats and x.device.type == "cpu" and available():
        return out.to(memory_format=formats[len(params.stride)])
    return out


def max_pool(
    x: Tensor,
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Tensor:
    """Return the largest code of each window of images."""
    # torch's own max_pool2d refuses uint8 images that are channels last. This operator for
    # quantized tensors takes plain ones as well and is ten times faster.
    window = (kernel, stride, padding, dilation, ceil_mode)
    quantized = x.is_cpu and x.numel() and x.dim() == 4
    if not quantized or not hasattr(torch.ops.quantized, "max_pool2d"):
        return _float_max_pool(x, *window)
    channels, last = x.shape[1], torch.channels_last
    missing = -channels % 32  # the channels that the kernel computes at once
    if not missing or not x.is_contiguous(memory_format=last):
        return torch.ops.quantized.max_pool2d(x, *window)
    # The channels that are left over are computed one by one: five times slower than padding.
    pooled = torch.ops.quantized.max_pool2d(F.pad(x, [0, 0, 0, 0, 0, missing]), *window)
    return pooled[:, :channels].contiguous(memory_format=last)


#: :func:`max_pool` for what records calls.
recorded_max_pool = torch.library.custom_op("torchq::max_pool2d", max_pool, mutates_args=())


@recorded_max_pool.register_fake
def _float_max_pool(x: Tensor, *window: Any) -> Tensor:
    kernel, stride, padding, dilation = map(tuple, window[:4])
    return F.max_pool2d(x.float(), kernel, stride, padding, dilation, window[4]).to(torch.uint8)

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
    out = (*epilogue[:2], epilogue.dtype is torch.uint8, *epilogue[3:])
    return int8_product(x, *weights, *params, *out, residual)


@torch.library.custom_op("torchq::int8_product", mutates_args=())
def int8_product(
    x: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    bias: Tensor | None,
    x_scale: float,
    x_zero_point: int,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    out_scale: float,
    out_zero_point: int,
    codes: bool,
    activation: str,
    arguments: Sequence[float],
    residual_scale: float,
    residual_zero_point: int,
    residual: Tensor | None,
) -> Tensor:
    """Return a convolution, or a linear layer where ``stride`` is empty, of uint8 codes.

    The arguments are those of :class:`Int8Weights`, :class:`ConvParams` and :class:`Epilogue`.
    """
    weights = Int8Weights(weight, weight_scale, bias, x_scale, x_zero_point)
    params = ConvParams(tuple(stride), tuple(padding), tuple(dilation), groups)
    dtype, added = torch.uint8 if codes else torch.float32, (residual_scale, residual_zero_point)
    last = (activation, tuple(arguments), *added)
    epilogue = Epilogue(out_scale, out_zero_point, dtype, *last)
    if not (x.is_cpu and x.numel() and available()):
        return reference(x, weights, params, epilogue, residual)
    kernel, bound = _BOUND.setdefault(weight, (Kernel(weight), {}))
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
def _(x: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    params, codes, residual = ConvParams(*rest[4:8]), rest[10], rest[15]
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

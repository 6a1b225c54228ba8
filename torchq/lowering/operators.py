"""The integer product in torch's registry, for compiled and exported programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from torchq.lowering.kernel import (
    MOST_SHAPES,
    ConvParams,
    Epilogue,
    Int8Weights,
    Kernel,
    Run,
    available,
    reference,
)
from torchq.lowering.qparams import ByteQParams

#: What recorded programs have bound, for each weight: a program keeps its weights and no kernels.
_BOUND = WeakTensorKeyDictionary()


def recorded_product(
    x: Tensor,
    weights: Int8Weights,
    params: ConvParams,
    epilogue: Epilogue,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the product of a layer by ``torch.ops.torchq.int8_product``."""
    codes, scale, bias, *own = weights
    geometry = [*params.stride, *params.padding, *params.dilation, params.groups]
    grids = [own, *([] if q is None else astuple(q) for q in (epilogue.out, epilogue.residual))]
    grid, out, of = ([float(number) for number in numbers] for numbers in grids)
    post_op = epilogue.activation, list(epilogue.arguments)
    return int8_product(x, codes, scale, bias, residual, geometry, grid, out, of, *post_op)


def _qparams(numbers: Sequence[float]) -> ByteQParams | None:
    return ByteQParams(numbers[0], *map(int, numbers[1:])) if numbers else None


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
    grid: Sequence[float],
    out: Sequence[float],
    of_residual: Sequence[float],
    activation: str,
    arguments: Sequence[float],
) -> Tensor:
    """Return a convolution of uint8 codes, or a linear layer where ``geometry`` has one number.

    ``geometry`` is stride, padding and dilation, then groups; ``grid`` has scale and zero point of
    the input, ``out`` and ``of_residual`` those of other codes with their bounds.
    """
    weights, params = (
        Int8Weights(weight, weight_scale, bias, grid[0], int(grid[1])),
        _params(geometry),
    )
    epilogue = Epilogue(_qparams(out), activation, tuple(arguments), _qparams(of_residual))
    if not (x.is_cpu and x.numel() and available()):
        return reference(x, weights, params, epilogue, residual)
    if weight not in _BOUND:
        _BOUND[weight] = Kernel(weight), {}
    kernel, bound = _BOUND[weight]
    like = None if residual is None else (residual.shape, residual.dtype)
    key = (x.shape, like, weights[3:], params, epilogue)
    scale, shift, run = bound.get(key, (None, None, None))
    if run is None or scale is not weight_scale or shift is not bias:
        if len(bound) >= MOST_SHAPES:
            bound.clear()
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
    grid: Sequence[float],
    out: Sequence[float],
    of_residual: Sequence[float],
    *rest: Any,
) -> Tensor:
    params = _params(geometry)
    shape = torch.Size(params.output_shape(x.shape, weight.shape))
    if residual is not None:
        shape = torch.broadcast_shapes(shape, residual.shape)
    y = x.new_empty(shape, dtype=torch.uint8 if out else torch.float32)
    formats = {2: torch.channels_last, 3: torch.channels_last_3d}
    if len(params.stride) in formats and x.device.type == "cpu" and available():
        return y.to(memory_format=formats[len(params.stride)])
    return y

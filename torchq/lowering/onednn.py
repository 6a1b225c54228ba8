"""The integer operators on the oneDNN kernels that torch ships for x86 CPUs.

A kernel is bound once: all but the codes is looked up, converted and packed before, as collecting
arguments takes longer than computing in small layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.errors import InputError
from torchq.lowering.definition import ACTIVATIONS, ConvParams, Epilogue, Int8Weights, finish
from torchq.lowering.packed import (
    KERNELS,
    PackedLayer,
    as_lists,
    packed_conv,
    packed_linear,
)

#: A bound kernel: codes, and a residual where it adds one, to the result.
Run = Callable[..., Tensor]

_OPERATORS = (
    "qconv_prepack",
    "qconv2d_pointwise",
    "qconv3d_pointwise",
    "qlinear_prepack",
    "qlinear_pointwise",
)
#: The activations that torch's 3-d convolution applies.
_ACTIVATIONS_3D = ("none",)
#: The activations that the convolution applies behind a residual.
_ACTIVATIONS_AFTER_ADD = ("none", "relu")


@lru_cache
def available() -> bool:
    """Return True if this build of torch has the operators."""
    return torch.backends.mkldnn.is_available() and all(
        hasattr(torch.ops.onednn, name) for name in _OPERATORS
    )


def conv(
    x: Tensor,
    weights: Int8Weights,
    params: ConvParams,
    epilogue: Epilogue,
    residual: Tensor | None = None,
) -> Tensor:
    """Return the convolution of ``x`` (uint8 codes); see ``torchq::int8_conv``."""
    codes, scale, bias, x_scale, x_zero_point = weights
    added = None if residual is None else (residual.shape, residual.dtype)
    run: Run = KERNELS.get(
        codes,
        ("conv", (x.shape, added, x_scale, x_zero_point, params, epilogue)),
        (scale, bias),
        lambda: bind_conv(x.shape, weights, params, epilogue, residual),
    )
    return run(x) if residual is None else run(x, residual)


def bind_conv(
    shape: Sequence[int],
    weights: Int8Weights,
    params: ConvParams,
    epilogue: Epilogue,
    residual: Tensor | None = None,
) -> Run:
    """Return the convolution as a function of the codes, and of a residual where one is given."""
    ndim, activation = weights.codes.dim(), epilogue.activation
    result = params.output_shape(shape, weights.codes.shape)
    if min(result) < 1:
        kernel, padding = tuple(weights.codes.shape[2:]), tuple(params.padding)
        raise InputError(
            f"Int8Conv: got an image of size {tuple(shape[2:])} with padding {padding}; expected "
            f"one as large as the kernel of size {kernel} with dilation {tuple(params.dilation)}"
        )
    if residual is None and (ndim < 5 or activation in _ACTIVATIONS_3D):
        return _bind(shape, weights, params, lambda s, w, p: _plain(s, w, p, epilogue))
    # The kernel adds tensors of the same shape, codes to codes and floats to floats.
    adds = (
        residual is not None
        and (residual.dtype is torch.uint8) == (epilogue.dtype is torch.uint8)
        and activation in _ACTIVATIONS_AFTER_ADD
        and ndim < 5
        and residual.shape == result
    )
    if adds:
        return _bind(shape, weights, params, lambda s, w, p: _adding(s, w, p, epilogue))
    run = _bind(shape, weights, params, lambda s, w, p: _plain(s, w, p, Epilogue()))
    return lambda x, residual=None: finish(run(x), epilogue, residual)


def _bind(
    shape: Sequence[int],
    weights: Int8Weights,
    params: ConvParams,
    make: Callable[[Sequence[int], Int8Weights, ConvParams], Run],
) -> Run:
    """Return the function that ``make`` returns, for images of ``shape``.

    What ``make`` gets is the same convolution in a form that the kernels compute: in two or three
    dimensions, and with padding only where the zero point of the input is 0.
    """
    if len(shape) == 3:
        # The 1-d operator knows fewer activations than the 2-d one, and calls the same kernels.
        flat = _bind((*shape[:2], 1, shape[2]), weights, params.widened(), make)
        return lambda *tensors: flat(*(x.unsqueeze(2) for x in tensors)).squeeze(2)
    if weights.x_zero_point and any(params.padding):
        # Zeros of the image are codes of x_zero_point, which a kernel without one does not know.
        border_code = float(weights.x_zero_point)
        border = [p for p in reversed(params.padding) for _ in range(2)]
        image = [size + 2 * p for size, p in zip(shape[2:], params.padding, strict=True)]
        inner = _bind((*shape[:2], *image), weights, params.unpadded(), make)
        return lambda x, *residual: inner(F.pad(x, border, value=border_code), *residual)
    return make(shape, weights, params)


def _plain(
    shape: Sequence[int], weights: Int8Weights, params: ConvParams, epilogue: Epilogue
) -> Run:
    """Return the convolution without a residual."""
    operator: Any = (
        torch.ops.onednn.qconv2d_pointwise.default
        if len(params.stride) == 2
        else torch.ops.onednn.qconv3d_pointwise.default
    )
    packed, epilogue = _in_codes(packed_conv(shape, weights, params), epilogue)
    arguments = (*packed, *as_lists(params), *_post_op(epilogue))
    return lambda x: operator(x, *arguments)


def _adding(
    shape: Sequence[int], weights: Int8Weights, params: ConvParams, epilogue: Epilogue
) -> Run:
    """Return the convolution that adds a residual in its kernel.

    The kernel adds in place, to a copy of the residual in the dtype of the output.
    """
    operator: Any = torch.ops.onednn.qconv2d_pointwise.binary
    packed, dtype, last = packed_conv(shape, weights, params), epilogue.dtype, torch.channels_last
    before, after = packed[:-1], (packed.bias, *as_lists(params), *_sum_post_op(epilogue))

    def add(x: Tensor, residual: Tensor) -> Tensor:
        target = residual.to(dtype, memory_format=last, copy=True)
        result: Tensor = operator(x, *before, target, *after)
        return result

    return add


def _sum_post_op(epilogue: Epilogue) -> tuple[Any, ...]:
    """Return the arguments of the operators that add, behind those of the layer."""
    added = (epilogue.residual_scale, epilogue.residual_zero_point)
    return (*epilogue[:3], *added, "sum", 1.0, epilogue.activation, [], "")


def linear(x: Tensor, weights: Int8Weights, epilogue: Epilogue) -> Tensor:
    """Return ``x @ weight.T + bias`` for uint8 codes; see ``torchq::int8_linear``."""
    codes, scale, bias, x_scale, x_zero_point = weights
    run: Run = KERNELS.get(
        codes,
        ("linear", (x_scale, x_zero_point, epilogue)),
        (scale, bias),
        lambda: bind_linear(weights, epilogue),
    )
    return run(x)


def bind_linear(weights: Int8Weights, epilogue: Epilogue) -> Run:
    """Return the linear layer as a function of the codes."""
    operator: Any = torch.ops.onednn.qlinear_pointwise.default
    packed, epilogue = _in_codes(packed_linear(weights), epilogue)
    arguments = (*packed, *_post_op(epilogue))
    return lambda x: operator(x, *arguments)


def _in_codes(packed: PackedLayer, epilogue: Epilogue) -> tuple[PackedLayer, Epilogue]:
    """Return arguments that compute in units of the resulting codes, where the epilogue can.

    oneDNN compiles and keeps a kernel for each set of numbers in its post-ops. Bounds in codes are
    the same numbers in most layers, bounds of values in none. One scale in place of three is also
    rounded once in place of three times.
    """
    simple = epilogue.in_codes()
    if simple is None:
        return packed, epilogue
    scale = (packed.scale.double() * packed.x_scale / epilogue.scale).float()
    bias = None if packed.bias is None else (packed.bias.double() / epilogue.scale).float()
    return packed._replace(x_scale=1.0, scale=scale, bias=bias), simple


def _post_op(epilogue: Epilogue) -> tuple[Any, ...]:
    """Return output scale, zero point, dtype and activation as the operators take them."""
    act, arguments = ACTIVATIONS[epilogue.activation], list(epilogue.arguments)
    return (*epilogue[:3], act.onednn, arguments, act.algorithm)


@lru_cache
def saturates() -> bool:
    """Return True if the kernels add two products in 16 bits, as CPUs without VNNI do.

    ``255 * 127 * 2`` does not fit 16 bits. Found by computing such a sum, so that whatever limits
    oneDNN (``ONEDNN_MAX_CPU_ISA``, an emulator) is seen.
    """
    if not available():
        return False
    x = torch.full((16, 64), 255, dtype=torch.uint8, device="cpu")
    codes = torch.full((64, 64), 127, dtype=torch.int8, device="cpu")
    scale = torch.ones(1, dtype=torch.float32, device="cpu")
    weights = Int8Weights(codes, scale, None, 1.0, 0)
    kernel = weights._replace(codes=codes.view(64, 64, 1, 1))
    plain = ConvParams((1, 1), (0, 0), (1, 1))
    y = linear(x, weights, Epilogue())
    z = conv(x.view(1, 64, 4, 4), kernel, plain, Epilogue())
    exact = 64 * 255.0 * 127.0
    return bool((y != exact).any() or (z != exact).any())

"""The backends that torchq ships: integer LeakyReLU, integer pooling, fixed-point layers."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from torchq.backends.backend import Backend
from torchq.backends.call import Call
from torchq.backends.fixed_point import GEMMLOWP, FixedPoint
from torchq.errors import ConfigError, QuantizationError
from torchq.formats import round_
from torchq.nn import TensorQuantizer

__all__ = ["fixed_point", "integer_average_pooling", "shift_leaky_relu"]

_INT32 = (-(2**31), 2**31 - 1)


def shift_leaky_relu(shift: int = 3) -> Backend:
    """Return a backend whose LeakyReLU shifts negative codes right, whatever its slope.

    ``x >> 3`` is ``x / 8`` rounded down; chips without multipliers compute it in place of a slope
    of 0.1. Only calls whose input is quantized to integers are treated; quantize it with
    ``Rule("type:LeakyReLU", input=...)``.

    Args:
        shift: the number of bits, 1 to 15.

    Raises:
        ConfigError: another number.
    """
    if type(shift) is not int or not 1 <= shift <= 15:
        raise ConfigError(f"shift_leaky_relu: got shift={shift!r}; expected 1 to 15")

    def handler(call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        quantizer = call.quantizer_of(0)
        if quantizer is None or quantizer.amax.numel() != 1:
            return call.default(x, *args, **kwargs)
        codes, scale = _centered(x, quantizer)
        return ((torch.where(codes >= 0, codes, codes >> shift)) * scale).to(x.dtype)

    return Backend().register("leaky_relu", handler)


def integer_average_pooling() -> Backend:
    """Return a backend whose average pooling divides integer sums, half away from zero.

    The result has the scale and zero point of the input, as in TensorFlow Lite. Only calls whose
    input is quantized to integers are treated, with one range for the tensor.
    """

    def handler(call: Call, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        quantizer = call.quantizer_of(0)
        if quantizer is None or quantizer.amax.numel() != 1:
            return call.default(x, *args, **kwargs)
        codes, scale = _centered(x, quantizer)
        zero_point = int(quantizer.calculate_qparams()[1])
        # A sum of codes over its count is exact in float64 where it is a tie.
        means = call.default(codes.double(), *args, **kwargs) + zero_point
        return ((round_(means, "half_away") - zero_point) * scale).to(x.dtype)

    backend = Backend()
    for operation in ("avg_pool1d", "avg_pool2d", "avg_pool3d"):
        backend.register(operation, handler).register(f"adaptive_{operation}", handler)
    return backend


def fixed_point(arithmetic: FixedPoint = GEMMLOWP) -> Backend:
    """Return a backend that computes layers, products and additions as integer chips do.

    Sums of products of codes are int32, the bias is rounded to the product of the scales of input
    and weight, and the result is brought to the codes of the next quantizer by an integer
    multiplier and a shift. An addition brings both operands to one scale first, as the kernel ADD
    of TensorFlow Lite does. The values between the nodes are the codes times their scale.

    A convolution, transposed or not, or a linear layer is treated if its input and its weight are
    quantized to integers, the input with one range, and the weight with one range or one for each
    output channel; a matmul if both operands have one range. If no quantizer, or several, read the
    result, it is the int32 sum times the scales, in floating point. An addition is treated if both
    operands and its result have one range.

    Args:
        arithmetic: multiplier and rounding; :data:`torchq.backends.GEMMLOWP` is that of TensorFlow
            Lite.

    Raises:
        QuantizationError: while running: a sum leaves int32.
    """
    backend = Backend()
    for operation in _LAYERS:
        backend.register(operation, partial(_layer, arithmetic))
    for operation in ("matmul", "bmm"):
        backend.register(operation, partial(_matmul, arithmetic))
    return backend.register("add", partial(_add, arithmetic))


_LAYERS = (
    *("conv1d", "conv2d", "conv3d", "linear"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"),
)


def _layer(arithmetic: FixedPoint, call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Return the result of a convolution or linear layer; see :func:`fixed_point`."""
    quantizers = call.quantizer_of(0), call.quantizer_of(1, "weight")
    if len(args) < 2 or call.module is not None or None in quantizers:
        return call.default(*args, **kwargs)
    given, weight, bias = args[0], args[1], args[2] if len(args) > 2 else kwargs.get("bias")
    x_codes, x_scale = _centered(given, quantizers[0])  # type: ignore[arg-type]
    w_codes, w_scale = _centered(weight, quantizers[1])  # type: ignore[arg-type]
    rest = {name: value for name, value in kwargs.items() if name != "bias"}
    # Products of codes and their sums are whole numbers below 2**53, so float64 is exact.
    sums = call.default(x_codes.double(), w_codes.double(), None, *args[3:], **rest)
    place = -1 if weight.dim() == 2 else given.dim() - weight.dim() + 1
    scales = _channel_scales(x_scale, w_scale, sums.shape[place])
    if scales is None:
        return call.default(*args, **kwargs)
    channels = [1] * sums.dim()
    channels[place] = -1
    if bias is not None:
        sums = sums + round_(bias.double() / scales, "half_away").view(channels)
    scales = scales.view(channels) if scales.numel() > 1 else scales
    return _scaled(call, sums, scales, arithmetic).to(given.dtype)


def _channel_scales(x_scale: Tensor, w_scale: Tensor, channels: int) -> Tensor | None:
    """Return the scales of sums, one or one for each output channel; None for other ranges.

    Weights of transposed convolutions in groups have scales for the channels of one group.
    """
    own = max(w_scale.shape, default=1)
    if x_scale.numel() != 1 or w_scale.numel() != own or channels % own:
        return None
    scales = x_scale.reshape(()) * w_scale.flatten()
    return scales if own == 1 else scales.repeat(channels // own)


def _matmul(arithmetic: FixedPoint, call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Return a product of two quantized tensors; see :func:`fixed_point`."""
    quantizers = call.quantizer_of(0), call.quantizer_of(1, "other")
    if len(args) != 2 or kwargs or any(q is None or q.amax.numel() != 1 for q in quantizers):
        return call.default(*args, **kwargs)
    (a, a_scale), (b, b_scale) = map(_centered, args, quantizers)  # type: ignore[arg-type]
    scale = (a_scale * b_scale).reshape(())
    return _scaled(call, call.default(a.double(), b.double()), scale, arithmetic).to(args[0].dtype)


def _add(arithmetic: FixedPoint, call: Call, *args: Any, **kwargs: Any) -> Tensor:
    """Return a sum of two quantized tensors in the codes of the next quantizer.

    Reference: ``AddElementwise`` of TensorFlow Lite (kernels/internal/reference/add.h).
    """
    quantizers = call.quantizer_of(0), call.quantizer_of(1, "other")
    reader = call.output_quantizer()
    ranges = [q is not None and q.amax.numel() == 1 for q in quantizers]
    if len(args) != 2 or kwargs or not all(ranges) or reader is None:
        return call.default(*args, **kwargs)
    parts = [_centered(x, q) for x, q in zip(args, quantizers, strict=True)]  # type: ignore[arg-type]
    widest = 2 * torch.maximum(*(scale.reshape(()) for _, scale in parts))
    shifted = [
        arithmetic.multiply(codes << _HEADROOM, scale.reshape(()) / widest)
        for codes, scale in parts
    ]
    total = shifted[0] + shifted[1]
    return _requantized(total, widest / 2**_HEADROOM, reader, arithmetic).to(args[0].dtype)


#: Bits below the codes that the kernel ADD of TensorFlow Lite computes with.
_HEADROOM = 20


def _scaled(call: Call, sums: Tensor, scales: Tensor, arithmetic: FixedPoint) -> Tensor:
    """Return sums of products of codes as the next quantizer reads them."""
    accumulator = sums.to(torch.int64)
    if accumulator.numel() and not _INT32[0] <= accumulator.min() <= accumulator.max() <= _INT32[1]:
        raise QuantizationError(
            f"fixed_point: {call.node.name}: got a sum of {int(accumulator.abs().max())}; expected "
            "sums within int32. Use fewer bits, or a layer with fewer inputs"
        )
    reader = call.output_quantizer()
    if reader is None:
        return accumulator * scales
    return _requantized(accumulator, scales, reader, arithmetic)


def _requantized(
    accumulator: Tensor, scales: Tensor, reader: TensorQuantizer, arithmetic: FixedPoint
) -> Tensor:
    """Return the values of the codes that a quantizer would read; ``scales`` are of the sums."""
    scale, zero_point = (t.double().reshape(()) for t in reader.calculate_qparams())
    codes = arithmetic.multiply(accumulator, scales / scale) + zero_point.to(torch.int64)
    format = reader.descriptor.format
    codes = codes.clamp(int(format.quant_min), int(format.quant_max))
    # One rounding in float32, as the quantizer computes its own values.
    return (codes - zero_point.to(torch.int64)).float() * scale.float()


def _centered(x: Tensor, quantizer: TensorQuantizer) -> tuple[Tensor, Tensor]:
    """Return the codes of quantized values less the zero point, int64, and the scale, float64."""
    scale = quantizer.calculate_qparams()[0].double()
    aligned = quantizer.descriptor.granularity.align(scale, x.shape)
    return (x.double() / aligned).round().to(torch.int64), scale

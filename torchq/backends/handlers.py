"""The backends that torchq ships: integer LeakyReLU, integer pooling, fixed-point layers.

A chip multiplies by an integer and shifts, in place of a floating-point scale. Everything here is
exact on integers in int64.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from torchq.backends.backend import Backend, NodeCall
from torchq.errors import ConfigError, QuantizationError
from torchq.formats import check_rounding, round_
from torchq.nn import TensorQuantizer

# A multiplier that is shifted further is taken for 0.
_LARGEST_SHIFT = 31


@dataclass(frozen=True)
class FixedPoint:
    """How a chip multiplies an int32 accumulator by a real number.

    Attributes:
        scheme: "doubling": the product with a multiplier of 31 bits is rounded to its high half,
            half away from zero, and shifted right, half away from zero again. "single": the exact
            product is rounded once.
        bits: the bits of the multiplier without its sign, 1 to 31; "doubling" has 31.
        rounding: the policy of "single", one of :data:`torchq.formats.ROUNDINGS`.

    Raises:
        ConfigError: values outside these rules.
    """

    scheme: Literal["doubling", "single"] = "doubling"
    bits: int = 31
    rounding: str = "half_away"

    def __post_init__(self) -> None:
        check_rounding(self.rounding)
        if self.scheme not in ("doubling", "single"):
            raise ConfigError(
                f"FixedPoint: got scheme {self.scheme!r}; expected 'doubling' or 'single'"
            )
        if type(self.bits) is not int or not 1 <= self.bits <= 31:
            raise ConfigError(f"FixedPoint: got bits={self.bits!r}; expected 1 to 31")
        if self.scheme == "doubling" and (self.bits, self.rounding) != (31, "half_away"):
            raise ConfigError(
                f"FixedPoint: got bits={self.bits}, rounding={self.rounding!r} for 'doubling'; "
                "expected 31 bits and 'half_away'. Use scheme='single' for others"
            )

    def multiply(self, accumulator: Tensor, real: Tensor) -> Tensor:
        """Return ``accumulator * real`` as the chip rounds it.

        Args:
            accumulator: int64 with values of int32, any shape.
            real: float64 > 0 that broadcasts against it.

        Returns:
            int64, the shape of ``accumulator``.

        Example:
            >>> scale = torch.tensor(0.0049, dtype=torch.float64)
            >>> GEMMLOWP.multiply(torch.tensor([1000, -12345]), scale)
            tensor([  5, -60])
        """
        multiplier, shift = quantize_multiplier(real, self.bits)
        if self.scheme == "single":
            return shift_right(accumulator * multiplier, self.bits - shift, self.rounding)
        left, right = shift.clamp(min=0), (-shift).clamp(min=0)
        high = _doubling_high_multiply(accumulator << left, multiplier)
        return shift_right(high, right, "half_away")


#: gemmlowp, and the reference kernels of TensorFlow Lite.
GEMMLOWP = FixedPoint()
#: TensorFlow Lite built with single rounding: one shift, half up.
SINGLE_ROUNDING = FixedPoint("single", 31, "half_up")


def quantize_multiplier(real: Tensor, bits: int = 31) -> tuple[Tensor, Tensor]:
    """Return integers with ``real = multiplier * 2**(shift - bits)``, as near as the bits allow.

    Reference: ``QuantizeMultiplier`` of TensorFlow Lite, for 31 bits.

    Args:
        real: float64, >= 0 and finite, any shape.
        bits: 1 to 31.

    Returns:
        multiplier: int64 from ``2**(bits - 1)`` to ``2**bits - 1``; 0 for numbers below ``2**-32``.
        shift: int64, at least -31.

    Example:
        >>> quantize_multiplier(torch.tensor(0.75, dtype=torch.float64))
        (tensor(1610612736), tensor(0))
    """
    mantissa, exponent = torch.frexp(real)
    exponent = exponent.to(torch.int64)
    multiplier = (mantissa * 2.0**bits + 0.5).floor().to(torch.int64)  # Exact: 53 bits suffice.
    carried = multiplier == 1 << bits
    multiplier = torch.where(carried, multiplier >> 1, multiplier)
    exponent = exponent + carried.to(torch.int64)
    lost = exponent < -_LARGEST_SHIFT
    return torch.where(lost, 0, multiplier), torch.where(lost, 0, exponent)


def _doubling_high_multiply(a: Tensor, b: Tensor) -> Tensor:
    """Return the high half of twice the product of int32 numbers, rounded half away from zero.

    Reference: ``SaturatingRoundingDoublingHighMul`` of gemmlowp, for b >= 0.
    """
    product = a * b
    nudge = torch.where(product >= 0, 1 << 30, 1 - (1 << 30))
    return torch.div(product + nudge, 1 << 31, rounding_mode="trunc")


def shift_right(number: Tensor, bits: Tensor | int, rounding: str) -> Tensor:
    """Return ``number / 2**bits`` rounded to integers; fewer than 0 bits shift left.

    Args:
        number: int64, any shape.
        bits: int64 that broadcasts against it.
        rounding: one of :data:`torchq.formats.ROUNDINGS`.

    Example:
        >>> shift_right(torch.tensor([-12, -4, 4, 12]), 3, "half_up")
        tensor([-1,  0,  1,  2])
    """
    check_rounding(rounding)
    bits = torch.as_tensor(bits, dtype=torch.int64)
    # A shift by 63 bits or more is undefined; the result is the same from 62 on.
    right = bits.clamp(0, 62)
    floor = number >> right
    rest = number - (floor << right)
    half = torch.where(right > 0, 1 << (right - 1).clamp(min=0), 1)  # Without a shift rest is 0.
    above, tie = rest > half, rest == half
    up = {
        "down": torch.zeros_like(above),
        "up": rest > 0,
        "half_up": above | tie,
        "half_down": above,
        "half_even": above | (tie & (floor % 2 == 1)),
        "half_away": above | (tie & (number >= 0)),
        "half_toward_zero": above | (tie & (number < 0)),
    }[rounding]
    return torch.where(bits < 0, number << (-bits).clamp(0, 62), floor + up.to(torch.int64))


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

    def handler(call: NodeCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
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

    def handler(call: NodeCall, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
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


def _layer(arithmetic: FixedPoint, call: NodeCall, *args: Any, **kwargs: Any) -> Tensor:
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


def _matmul(arithmetic: FixedPoint, call: NodeCall, *args: Any, **kwargs: Any) -> Tensor:
    """Return a product of two quantized tensors; see :func:`fixed_point`."""
    quantizers = call.quantizer_of(0), call.quantizer_of(1, "other")
    if len(args) != 2 or kwargs or any(q is None or q.amax.numel() != 1 for q in quantizers):
        return call.default(*args, **kwargs)
    (a, a_scale), (b, b_scale) = map(_centered, args, quantizers)  # type: ignore[arg-type]
    scale = (a_scale * b_scale).reshape(())
    return _scaled(call, call.default(a.double(), b.double()), scale, arithmetic).to(args[0].dtype)


def _add(arithmetic: FixedPoint, call: NodeCall, *args: Any, **kwargs: Any) -> Tensor:
    """Return a sum of two quantized tensors in the codes of the next quantizer.

    Reference: ``AddElementwise`` of TensorFlow Lite (kernels/internal/reference/add.h).
    """
    quantizers = call.quantizer_of(0), call.quantizer_of(1, "other")
    reader = call.output_quantizer()
    ranges = [q is not None and q.amax.numel() == 1 for q in quantizers]
    if len(args) != 2 or kwargs or not all(ranges) or reader is None:
        return call.default(*args, **kwargs)
    pairs = zip(args, quantizers, strict=True)
    parts = [_centered(x, q) for x, q in pairs]  # type: ignore[arg-type]
    widest = 2 * torch.maximum(*(scale.reshape(()) for _, scale in parts))
    shifted = [
        arithmetic.multiply(codes << _HEADROOM, scale.reshape(()) / widest)
        for codes, scale in parts
    ]
    total = shifted[0] + shifted[1]
    return _requantized(total, widest / 2**_HEADROOM, reader, arithmetic).to(args[0].dtype)


#: Bits below the codes that the kernel ADD of TensorFlow Lite computes with.
_HEADROOM = 20


def _scaled(call: NodeCall, sums: Tensor, scales: Tensor, arithmetic: FixedPoint) -> Tensor:
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

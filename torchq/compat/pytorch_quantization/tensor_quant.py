"""Quantization functions of pytorch-quantization, and its ready-made descriptors.

The original divides by the reciprocal of torchq's scale: its scale is ``qmax / amax``, codes are
``round(x * scale)`` and values ``code / scale``. torchq's own functions compute
``round(x / scale)`` and ``code * scale`` with ``scale = amax / qmax``
(:func:`torchq.functional.fake_quantize`). The two differ by at most one rounding.

Everything is computed in fp32 for fp16, bf16 and fp32 tensors and rounded to their dtype once:
what the original's CUDA kernels did. As in the original, ``narrow_range`` is True by default in
these functions, and False in descriptors.

Under ``torch.onnx.export`` the fake quantization functions become QuantizeLinear and
DequantizeLinear.
"""

from typing import Any

import torch
from torch import Tensor

from torchq.compat.errors import LegacyTypeError, UnsupportedError
from torchq.compat.pytorch_quantization.descriptor import NumBits, ScaledQuantDescriptor
from torchq.compat.traces import applied
from torchq.errors import ConfigError, ExportError
from torchq.formats import E4M3, Format, PerAxis, PerTensor, by_bits
from torchq.functional import compute_dtype, fake_quantize, scale_from_amax
from torchq.functional.kernels.reference import gradient_mask
from torchq.utils import constant_while_tracing

QuantDescriptor = ScaledQuantDescriptor

QUANT_DESC_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8)
QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR = QuantDescriptor(num_bits=8, unsigned=True)
QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=0)
QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW = QuantDescriptor(num_bits=8, axis=0)
# The weight of a transposed convolution is (in, out / groups, ...): its output channels are on
# axis 1. TensorRT takes only axis 0.
QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)

_MAX_FP16 = 65504.0
#: The original treats a range up to here as dead; 2**-24 is the smallest float16 subnormal.
TINY = 2.0**-24


def live_range(amax: Tensor | float) -> Tensor:
    """Return ``amax`` with the ranges that are dead in the original set to 0."""
    amax = torch.as_tensor(amax)
    return torch.where(amax <= TINY, 0.0, amax)


def _range(inputs: Tensor, amax: Tensor | float) -> Tensor:
    """Return ``amax`` on the device of ``inputs``, in the dtype that is computed in."""
    if not inputs.is_floating_point():
        raise LegacyTypeError(
            f"tensor_quant: got a tensor of {inputs.dtype}; expected a floating-point tensor. "
            "Convert it with x.float()"
        )
    amax = torch.as_tensor(amax, device=inputs.device).detach()
    return amax.to(compute_dtype(inputs.dtype))


def _check_range(where: str, amax: Tensor) -> None:
    """Raise an error for a negative range."""
    if bool((amax < 0).any()):
        raise ConfigError(
            f"{where}: Negative values in amax; expected values >= 0. Take the absolute maximum"
        )


def _encode(inputs: Tensor, amax: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Return codes in the compute dtype, and the legacy scale (1 for dead ranges)."""
    is_dead = amax <= TINY
    # A number divided by a tensor would be computed as a reciprocal times the number, which
    # rounds twice.
    qmax = torch.full_like(amax, format.qmax)
    scale = torch.where(is_dead, 0.0, qmax / amax)
    codes = format.snap_(inputs.to(scale.dtype) * scale)
    return codes, torch.where(is_dead, 1.0, scale)


def _format(
    num_bits: int = 8, unsigned: bool = False, narrow_range: bool = True
) -> Format | None:
    """Return the format of integers; None for 0 bits, which quantize everything to 0."""
    return (
        by_bits(num_bits, unsigned=unsigned, narrow=narrow_range) if num_bits else None
    )


class _StraightThrough(torch.autograd.Function):
    """Base with the gradient 1 where ``|x| <= amax`` and 0 elsewhere; amax has no gradient."""

    generate_vmap_rule = True

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the mask of elements within the range."""
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(gradient_mask(inputs[0], _range(*inputs[:2])))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of the first input."""
        gradient = grads[0] * ctx.saved_tensors[0] if ctx.needs_input_grad[0] else None
        return gradient, None, None, None, None


class FakeTensorQuantFunction(_StraightThrough):
    """``apply(inputs, amax, num_bits, unsigned, narrow_range)``; see :func:`fake_tensor_quant`."""

    @staticmethod
    def forward(inputs: Tensor, amax: Tensor | float, *options: Any) -> Tensor:
        """Return dequantized values in the dtype of ``inputs``."""
        format = _format(*options)
        if format is None:
            return torch.zeros_like(inputs)
        codes, scale = _encode(inputs, _range(inputs, amax), format)
        return codes.div_(scale).to(inputs.dtype)


#: The CPU form of the original; here there is one form.
LegacyFakeTensorQuantFunction = FakeTensorQuantFunction


class TensorQuantFunction(_StraightThrough):
    """``apply(inputs, amax, num_bits, unsigned, narrow_range)``; see :func:`tensor_quant`."""

    @staticmethod
    def forward(
        inputs: Tensor, amax: Tensor | float, *options: Any
    ) -> tuple[Tensor, Tensor]:
        """Return codes and scale in the dtype of ``inputs``."""
        codes, scale = _tensor_quant(inputs, amax, *options)
        if inputs.dtype is torch.float16 and bool((scale > _MAX_FP16).any()):
            amax = torch.as_tensor(amax)
            raise ConfigError(
                f"tensor_quant: scale is too large for FP16 with amax={amax.tolist()}; "
                f"expected at most {_MAX_FP16}. Use fp32"
            )
        return codes, scale.to(inputs.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the mask of elements within the range; the scale has no gradient."""
        ctx.mark_non_differentiable(output[1])
        _StraightThrough.setup_context(ctx, inputs, output)


def _tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return codes and an unrounded scale; scripts call this private name of the original."""
    amax = _range(inputs, amax)
    if unsigned and bool((inputs < 0).any()):
        raise LegacyTypeError(
            "tensor_quant: Negative values encountered in unsigned quantization; "
            "expected values >= 0. Clamp them, or quantize signed"
        )
    _check_range("tensor_quant", amax)
    format = _format(num_bits, unsigned, narrow_range)
    if format is None:
        return torch.zeros_like(inputs), torch.ones_like(amax)
    codes, scale = _encode(inputs, amax, format)
    return codes.to(inputs.dtype), scale


class ScaledE4M3Function(_StraightThrough):
    """``apply(inputs, amax, E, M)``; see :func:`scaled_e4m3`."""

    @staticmethod
    def forward(
        inputs: Tensor, amax: Tensor | float | None = None, E: int = 4, M: int = 3
    ) -> Tensor:
        """Return dequantized values in the dtype of ``inputs``."""
        if (E, M) != (4, 3):
            raise UnsupportedError(f"scaled_e4m3: got E={E}, M={M}; expected E=4, M=3")
        if torch.onnx.is_in_onnx_export() and torch.jit.is_tracing():
            # The TorchScript exporter calls ``symbolic`` for this node.
            return inputs.clone()
        codes, scale = _encode(
            inputs, _range(inputs, E4M3.qmax if amax is None else amax), E4M3
        )
        return codes.div_(scale).to(inputs.dtype).masked_fill_(inputs.abs() < TINY, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the mask of elements within the range, 448 if none is given."""
        amax = inputs[1] if len(inputs) > 1 and inputs[1] is not None else E4M3.qmax
        _StraightThrough.setup_context(ctx, (inputs[0], amax), output)

    @staticmethod
    def symbolic(g: Any, inputs: Any, amax: Any = None, E: int = 4, M: int = 3) -> Any:
        """Write FP8 operators for the TorchScript exporter; the range must be a constant."""
        if amax is None:
            return _write_float8(g, inputs, 1.0)
        if not isinstance(amax, float):
            if amax.node().kind() != "onnx::Constant":
                raise ExportError(
                    "ScaledE4M3Function: got a range that is no constant of the graph; "
                    "expected a number. Call scaled_e4m3(), which writes one"
                )
            amax = amax.node().t("value").float()
        return _write_float8(g, inputs, float(scale_from_amax(live_range(amax), E4M3)))


class FakeAffineTensorQuantFunction(torch.autograd.Function):
    """``apply(inputs, min_range, max_range, num_bits)``; see :func:`fake_affine_tensor_quant`."""

    @staticmethod
    def forward(
        inputs: Tensor,
        min_range: Tensor | float,
        max_range: Tensor | float,
        num_bits: int = 8,
    ) -> Tensor:
        """Return dequantized values in the dtype of ``inputs``."""
        minimum = _range(inputs, min_range)
        maximum = _range(inputs, max_range)
        scale = (maximum - minimum) / (2.0**num_bits - 1)
        scale = torch.where(scale == 0, 1.0, scale)
        quant_min = -(2.0 ** (num_bits - 1))
        quant_max = 2.0 ** (num_bits - 1) - 1
        offset = torch.round(minimum / scale) - quant_min
        codes = torch.round(inputs.to(scale.dtype) / scale) - offset
        return ((codes.clamp(quant_min, quant_max) + offset) * scale).to(inputs.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the mask of elements between the bounds."""
        x, minimum, maximum = inputs[:3]
        ctx.save_for_backward((x <= maximum) & (x >= minimum))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of ``inputs``."""
        (mask,) = ctx.saved_tensors
        return grads[0] * mask, None, None, None


def tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return integer codes and their scale, both in the dtype of ``inputs``.

    The data is read on the host to check it.

    Args:
        inputs: floating point, any shape.
        amax: >= 0, broadcastable to ``inputs``; at most 2**-24 gives codes 0 and scale 1.
        num_bits: 0 (all codes 0), or 2 to 16 (1 to 16 unsigned).
        unsigned: codes ``0 .. 2**num_bits - 1``.
        narrow_range: codes ``-qmax .. qmax`` in place of ``-qmax-1 .. qmax``.

    Raises:
        LegacyTypeError: negative values with ``unsigned``.
        ConfigError: a negative amax, or a scale beyond fp16 for fp16 inputs.
    """
    options = (num_bits, unsigned, narrow_range)
    return applied(TensorQuantFunction, inputs, _range(inputs, amax), *options)


def fake_tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> Tensor:
    """Return ``codes / scale`` of :func:`tensor_quant`, in the dtype of ``inputs``.

    The gradient is 1 where ``|x| <= amax``. Negative values become 0 if unsigned.

    Raises:
        ConfigError: a negative amax; compiled code does not look.

    Example:
        >>> fake_tensor_quant(torch.tensor([-1.01, -0.5, 0.3]), torch.tensor(1.0), 4)
        tensor([-1.0000, -0.5714,  0.2857])
    """
    amax = _range(inputs, amax)
    if torch.onnx.is_in_onnx_export():
        return _export_quantize_dequantize(
            inputs, amax, num_bits, unsigned, narrow_range
        )
    if not torch.compiler.is_compiling():
        with constant_while_tracing():
            _check_range("fake_tensor_quant", amax)
    return applied(
        FakeTensorQuantFunction, inputs, amax, num_bits, unsigned, narrow_range
    )


legacy_fake_tensor_quant = fake_tensor_quant


def scaled_e4m3(
    inputs: Tensor, amax: Tensor | float | None = None, E: int = 4, M: int = 3
) -> Tensor:
    """Return ``inputs`` rounded to FP8 E4M3, saturating.

    Values are scaled so that ``amax`` becomes 448, or not at all if ``amax`` is None. Magnitudes
    below 2**-24 become 0. The gradient is 1 where ``|x| <= amax`` (448 without amax).

    Raises:
        UnsupportedError: other than E=4, M=3.
    """
    if torch.onnx.is_in_onnx_export() and (E, M) == (4, 3):
        amax = _range(inputs, E4M3.qmax if amax is None else amax)
        return _export_quantize_dequantize(inputs, amax, (4, 3))
    amax = None if amax is None else _range(inputs, amax)
    return applied(ScaledE4M3Function, inputs, amax, E, M)


def fake_affine_tensor_quant(
    inputs: Tensor,
    min_range: Tensor | float,
    max_range: Tensor | float,
    num_bits: int = 8,
) -> Tensor:
    """Quantize between two bounds with a zero point, per tensor, and dequantize.

    The gradient is 1 between the bounds, inclusive.
    """
    bounds = (_range(inputs, min_range), _range(inputs, max_range))
    return applied(FakeAffineTensorQuantFunction, inputs, *bounds, num_bits)


def _export_quantize_dequantize(
    inputs: Tensor,
    amax: Tensor,
    num_bits: NumBits,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> Tensor:
    """Write Q and DQ in an export; TorchScript makes a range computed from the input constant."""
    amax = live_range(amax)
    axes = tuple(d for d in range(amax.dim()) if amax.shape[d] != 1)
    if isinstance(num_bits, tuple):
        if axes:
            raise ExportError(
                f"FP8 export: got amax of shape {tuple(amax.shape)}; "
                "expected a scalar. Quantize per tensor"
            )
        return _export_float8(inputs, amax.reshape(()))
    format = _format(num_bits, unsigned, narrow_range)
    if format is None:
        return torch.zeros_like(inputs)
    if axes:
        return fake_quantize(inputs, amax, format, PerAxis(axes))
    return fake_quantize(inputs, amax.reshape(()), format, PerTensor())


def _export_float8(inputs: Tensor, amax: Tensor) -> Tensor:
    """Quantize to FP8 E4M3 and back, with one range."""
    if not torch.jit.is_tracing():
        return fake_quantize(inputs, amax, E4M3)
    with constant_while_tracing():
        constant = float(amax)
    if inputs.dtype is torch.float32:
        return ScaledE4M3Function.apply(inputs, constant)
    return ScaledE4M3Function.apply(inputs.float(), constant).to(inputs.dtype)


def _write_float8(g: Any, inputs: Any, scale: float) -> object:
    """Write FP8 and back with scale amax / 448; before opset 19 by TensorRT's own operators."""
    constant = g.op("Constant", value_t=torch.tensor(scale, dtype=torch.float32))
    if g.opset >= 19:
        zero = g.op("Constant", value_t=torch.zeros((), dtype=torch.float8_e4m3fn))
        codes = g.op("QuantizeLinear", inputs, constant, zero)
        result = g.op("DequantizeLinear", codes, constant, zero)
    else:
        codes = g.op("trt::TRT_FP8QuantizeLinear", inputs, constant)
        codes.setType(inputs.type().with_dtype(torch.uint8))
        result = g.op("trt::TRT_FP8DequantizeLinear", codes, constant)
    result.setType(inputs.type())
    return result

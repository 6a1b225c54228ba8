"""Quantization functions of pytorch-quantization, and its ready-made descriptors.

The arithmetic is that of :mod:`torchq.compat.pytorch_quantization.legacy_scale`, in fp32 for fp16,
bf16 and fp32 tensors, rounded to their dtype once: what the original's CUDA kernels did. As in the
original, ``narrow_range`` is True by default in these functions, and False in descriptors.

Under ``torch.onnx.export`` the fake quantization functions become QuantizeLinear and
DequantizeLinear.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq import functional
from torchq.compat.errors import LegacyTypeError, UnsupportedError
from torchq.compat.pytorch_quantization import legacy_scale
from torchq.compat.pytorch_quantization.descriptor import NumBits, ScaledQuantDescriptor
from torchq.compat.pytorch_quantization.onnx_form import (
    export_quantize_dequantize,
    write_float8,
    write_int8,
)
from torchq.errors import ConfigError, ExportError
from torchq.formats import E4M3, by_bits
from torchq.functional.scale import scale_from_amax

__all__ = [
    "QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW",
    "QUANT_DESC_8BIT_PER_TENSOR",
    "QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR",
    "FakeAffineTensorQuantFunction",
    "FakeTensorQuantFunction",
    "LegacyFakeTensorQuantFunction",
    "NumBits",
    "QuantDescriptor",
    "ScaledE4M3Function",
    "ScaledQuantDescriptor",
    "TensorQuantFunction",
    "fake_affine_tensor_quant",
    "fake_tensor_quant",
    "legacy_fake_tensor_quant",
    "scaled_e4m3",
    "tensor_quant",
]

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

#: The name by which the ``symbolic`` methods of scripts call :func:`write_int8`.
_onnx_int8_helper = write_int8


def _range(inputs: Tensor, amax: Tensor | float) -> Tensor:
    """Return ``amax`` on the device of ``inputs``, in the dtype that is computed in."""
    amax = torch.as_tensor(amax, device=inputs.device).detach()
    return amax.to(functional.compute_dtype(inputs.dtype))


def _check_range(where: str, amax: Tensor) -> None:
    """Raise an error for a negative range."""
    if bool((amax < 0).any()):
        raise ConfigError(
            f"{where}: Negative values in amax; expected values >= 0. Take the absolute maximum"
        )


def _input_gradient(ctx: Any, grad: Tensor) -> Tensor | None:
    """Return the gradient through the saved mask."""
    return grad * ctx.saved_tensors[0] if ctx.needs_input_grad[0] else None


class FakeTensorQuantFunction(legacy_scale.FakeTensorQuantFunction):
    """``apply(inputs, amax, num_bits, unsigned, narrow_range)``; see :func:`fake_tensor_quant`."""

    @staticmethod
    def forward(  # type: ignore[override]
        inputs: Tensor,
        amax: Tensor | float,
        num_bits: int = 8,
        unsigned: bool = False,
        narrow_range: bool = True,
    ) -> Tensor:
        """Return dequantized values in the dtype of ``inputs``."""
        if num_bits == 0:
            return torch.zeros_like(inputs)
        format = by_bits(num_bits, unsigned=unsigned, narrow=narrow_range)
        return legacy_scale.FakeTensorQuantFunction.forward(inputs, _range(inputs, amax), format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the mask of elements within the range."""
        legacy_scale.FakeTensorQuantFunction.setup_context(
            ctx, (inputs[0], _range(*inputs[:2])), output
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of ``inputs``."""
        return _input_gradient(ctx, grads[0]), None, None, None, None


#: The CPU form of the original; here there is one form.
LegacyFakeTensorQuantFunction = FakeTensorQuantFunction


class TensorQuantFunction(legacy_scale.TensorQuantFunction):
    """``apply(inputs, amax, num_bits, unsigned, narrow_range)``; see :func:`tensor_quant`."""

    @staticmethod
    def forward(  # type: ignore[override]
        inputs: Tensor,
        amax: Tensor | float,
        num_bits: int = 8,
        unsigned: bool = False,
        narrow_range: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return codes and scale in the dtype of ``inputs``."""
        codes, scale = _tensor_quant(inputs, amax, num_bits, unsigned, narrow_range)
        if inputs.dtype is torch.float16 and bool((scale > _MAX_FP16).any()):
            amax = torch.as_tensor(amax)
            raise ConfigError(
                f"tensor_quant: scale is too large for FP16 with amax={amax.tolist()}; "
                f"expected at most {_MAX_FP16}. Use fp32"
            )
        return codes, scale.to(inputs.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        """Save the mask of elements within the range."""
        legacy_scale.TensorQuantFunction.setup_context(
            ctx, (inputs[0], _range(*inputs[:2])), output
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of ``inputs``."""
        return _input_gradient(ctx, grads[0]), None, None, None, None


def _tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> tuple[Tensor, Tensor]:
    """Return codes in the dtype of ``inputs`` and their scale in the dtype of the computation.

    Scripts call this function of the original by its private name.

    Raises:
        LegacyTypeError: negative values with ``unsigned``.
        ConfigError: a negative amax.
    """
    amax = _range(inputs, amax)
    if unsigned and bool((inputs < 0).any()):
        raise LegacyTypeError(
            "tensor_quant: Negative values encountered in unsigned quantization; "
            "expected values >= 0. Clamp them, or quantize signed"
        )
    _check_range("tensor_quant", amax)
    if num_bits == 0:
        return torch.zeros_like(inputs), torch.ones_like(amax)
    format = by_bits(num_bits, unsigned=unsigned, narrow=narrow_range)
    return legacy_scale.TensorQuantFunction.forward(inputs, amax, format)


class ScaledE4M3Function(legacy_scale.FakeTensorQuantFunction):
    """``apply(inputs, amax, E, M)``; see :func:`scaled_e4m3`."""

    @staticmethod
    def forward(  # type: ignore[override]
        inputs: Tensor, amax: Tensor | float | None = None, E: int = 4, M: int = 3
    ) -> Tensor:
        """Return dequantized values in the dtype of ``inputs``."""
        if (E, M) != (4, 3):
            raise UnsupportedError(f"scaled_e4m3: got E={E}, M={M}; expected E=4, M=3")
        if torch.onnx.is_in_onnx_export() and torch.jit.is_tracing():
            return inputs.clone()  # The TorchScript exporter calls ``symbolic`` for this node.
        amax = _range(inputs, E4M3.qmax if amax is None else amax)
        outputs = legacy_scale.FakeTensorQuantFunction.forward(inputs, amax, E4M3)
        return outputs.masked_fill_(inputs.abs() < legacy_scale.TINY, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """Save the mask of elements within the range."""
        amax = inputs[1] if len(inputs) > 1 and inputs[1] is not None else E4M3.qmax
        legacy_scale.FakeTensorQuantFunction.setup_context(
            ctx, (inputs[0], _range(inputs[0], amax)), output
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of ``inputs``."""
        return _input_gradient(ctx, grads[0]), None, None, None

    @staticmethod
    def symbolic(g: Any, inputs: Any, amax: Any = None, E: int = 4, M: int = 3) -> Any:
        """Write FP8 operators for the TorchScript exporter; the range must be a constant."""
        if amax is None:
            return write_float8(g, inputs, 1.0)
        if amax.node().kind() != "onnx::Constant":
            raise ExportError(
                "ScaledE4M3Function: got a range that is no constant of the graph; "
                "expected a number. Call scaled_e4m3(), which writes one"
            )
        constant = amax.node().t("value").float()
        return write_float8(
            g, inputs, float(scale_from_amax(legacy_scale.live_range(constant), E4M3))
        )


class FakeAffineTensorQuantFunction(torch.autograd.Function):
    """``apply(inputs, min_range, max_range, num_bits)``; see :func:`fake_affine_tensor_quant`."""

    @staticmethod
    def forward(
        inputs: Tensor, min_range: Tensor | float, max_range: Tensor | float, num_bits: int = 8
    ) -> Tensor:
        """Return dequantized values in the dtype of ``inputs``."""
        minimum, maximum = _range(inputs, min_range), _range(inputs, max_range)
        scale = (maximum - minimum) / (2.0**num_bits - 1)
        scale = torch.where(scale == 0, 1.0, scale)
        quant_min, quant_max = -(2.0 ** (num_bits - 1)), 2.0 ** (num_bits - 1) - 1
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
    return TensorQuantFunction.apply(inputs, _range(inputs, amax), num_bits, unsigned, narrow_range)


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
        return export_quantize_dequantize(inputs, amax, num_bits, unsigned, narrow_range)
    if not torch.compiler.is_compiling():
        _check_range("fake_tensor_quant", amax)
    return FakeTensorQuantFunction.apply(inputs, amax, num_bits, unsigned, narrow_range)


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
        return export_quantize_dequantize(inputs, amax, (4, 3))
    return ScaledE4M3Function.apply(inputs, None if amax is None else _range(inputs, amax), E, M)


def fake_affine_tensor_quant(
    inputs: Tensor, min_range: Tensor | float, max_range: Tensor | float, num_bits: int = 8
) -> Tensor:
    """Quantize between two bounds with a zero point, per tensor, and dequantize.

    The gradient is 1 between the bounds, inclusive.
    """
    return FakeAffineTensorQuantFunction.apply(
        inputs, _range(inputs, min_range), _range(inputs, max_range), num_bits
    )

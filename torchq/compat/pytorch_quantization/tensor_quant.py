"""Quantization functions of pytorch-quantization, and its ready-made descriptors.

The arithmetic is the multiplier form of :mod:`torchq.compat.pytorch_quantization.legacy_scale` (``scale = qmax / amax``, ``q = round(x * scale)``,
``q / scale``), in fp32 for fp16, bf16 and fp32 tensors, rounded to their dtype once: what the original's CUDA kernels did.
``narrow_range`` is True by default here, and False in descriptors, as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq import functional
from torchq.compat.errors import LegacyTypeError, UnsupportedError
from torchq.compat.pytorch_quantization import legacy_scale
from torchq.compat.pytorch_quantization.descriptor import NumBits, ScaledQuantDescriptor
from torchq.errors import ConfigError
from torchq.formats import E4M3, by_bits

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
QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL = QuantDescriptor(num_bits=8, axis=1)

_MAX_FP16 = 65504.0


def _range(inputs: Tensor, amax: Tensor | float) -> Tensor:
    """``amax`` on the device of ``inputs``, in the dtype that is computed in."""
    return (
        torch.as_tensor(amax, device=inputs.device)
        .detach()
        .to(functional.compute_dtype(inputs.dtype))
    )


def _input_gradient(ctx: Any, grad: Tensor) -> Tensor | None:
    """Through the saved mask. A function, since torch 2.6 does not trace the ``backward`` of another Function."""
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
        if num_bits == 0:
            return torch.zeros_like(inputs)
        format = by_bits(num_bits, unsigned=unsigned, narrow=narrow_range)
        return legacy_scale.FakeTensorQuantFunction.forward(inputs, _range(inputs, amax), format)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        legacy_scale.FakeTensorQuantFunction.setup_context(
            ctx, (inputs[0], _range(*inputs[:2])), output
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
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
        amax = _range(inputs, amax)
        if unsigned and bool((inputs < 0).any()):
            raise LegacyTypeError(
                "tensor_quant: Negative values encountered in unsigned quantization; expected values >= 0. Clamp them, or quantize signed"
            )
        if bool((amax < 0).any()):
            raise ConfigError(
                "tensor_quant: Negative values in amax; expected values >= 0. Take the absolute maximum"
            )
        if num_bits == 0:
            return torch.zeros_like(inputs), torch.ones_like(amax, dtype=inputs.dtype)
        format = by_bits(num_bits, unsigned=unsigned, narrow=narrow_range)
        codes, scale = legacy_scale.TensorQuantFunction.forward(inputs, amax, format)
        if inputs.dtype is torch.float16 and bool((scale > _MAX_FP16).any()):
            raise ConfigError(
                f"tensor_quant: scale is too large for FP16 with amax={amax.tolist()}; expected at most {_MAX_FP16}. Use fp32"
            )
        return codes, scale.to(inputs.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        legacy_scale.TensorQuantFunction.setup_context(
            ctx, (inputs[0], _range(*inputs[:2])), output
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _input_gradient(ctx, grads[0]), None, None, None, None


class ScaledE4M3Function(legacy_scale.FakeTensorQuantFunction):
    """``apply(inputs, amax, E, M)``; see :func:`scaled_e4m3`."""

    @staticmethod
    def forward(
        inputs: Tensor, amax: Tensor | float | None = None, E: int = 4, M: int = 3
    ) -> Tensor:  # type: ignore[override]
        if (E, M) != (4, 3):
            raise UnsupportedError(f"scaled_e4m3: got E={E}, M={M}; expected E=4, M=3")
        outputs = legacy_scale.FakeTensorQuantFunction.forward(
            inputs, _range(inputs, E4M3.qmax if amax is None else amax), E4M3
        )
        return outputs.masked_fill_(inputs.abs() < functional.TINY, 0.0)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        amax = inputs[1] if len(inputs) > 1 and inputs[1] is not None else E4M3.qmax
        legacy_scale.FakeTensorQuantFunction.setup_context(
            ctx, (inputs[0], _range(inputs[0], amax)), output
        )

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _input_gradient(ctx, grads[0]), None, None, None


class FakeAffineTensorQuantFunction(torch.autograd.Function):
    """``apply(inputs, min_range, max_range, num_bits)``; see :func:`fake_affine_tensor_quant`."""

    @staticmethod
    def forward(
        inputs: Tensor, min_range: Tensor | float, max_range: Tensor | float, num_bits: int = 8
    ) -> Tensor:
        low, high = _range(inputs, min_range), _range(inputs, max_range)
        step = (high - low) / (2.0**num_bits - 1)
        step = torch.where(step == 0, 1.0, step)
        least, most = -(2.0 ** (num_bits - 1)), 2.0 ** (num_bits - 1) - 1
        zero = torch.round(low / step) - least
        codes = (torch.round(inputs.to(step.dtype) / step) - zero).clamp(least, most)
        return ((codes + zero) * step).to(inputs.dtype)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, low, high = inputs[:3]
        ctx.save_for_backward((x <= high) & (x >= low))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (mask,) = ctx.saved_tensors
        return grads[0] * mask, None, None, None


def tensor_quant(
    inputs: Tensor,
    amax: Tensor | float,
    num_bits: int = 8,
    unsigned: bool = False,
    narrow_range: bool = True,
) -> tuple[Tensor, Tensor]:
    """Integer codes and their scale, both in the dtype of ``inputs``. Reads the data on the host, to check it.

    Args:
        inputs: floating point, any shape.
        amax: >= 0, broadcastable to ``inputs``; at most 2**-24 gives codes 0 and scale 1.
        num_bits: 0 (all codes 0), or 2 to 16 (1 to 16 unsigned).
        unsigned: codes ``0 .. 2**num_bits - 1``.
        narrow_range: codes ``-qmax .. qmax`` instead of ``-qmax-1 .. qmax``.

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
    """``codes / scale`` of :func:`tensor_quant` with the gradient 1 where ``|x| <= amax``; negative values become 0 when unsigned.

    Example:
        >>> fake_tensor_quant(torch.tensor([-1.01, -0.5, 0.3]), torch.tensor(1.0), 4)
        tensor([-1.0000, -0.5714,  0.2857])
    """
    return FakeTensorQuantFunction.apply(
        inputs, _range(inputs, amax), num_bits, unsigned, narrow_range
    )


legacy_fake_tensor_quant = fake_tensor_quant


def scaled_e4m3(
    inputs: Tensor, amax: Tensor | float | None = None, E: int = 4, M: int = 3
) -> Tensor:
    """Rounded to FP8 E4M3 after scaling ``amax`` to 448, or as it is where ``amax`` is None; saturating.

    Magnitudes below 2**-24 become 0. Gradient 1 where ``|x| <= amax`` (448 without amax).

    Raises:
        UnsupportedError: other than E=4, M=3.
    """
    return ScaledE4M3Function.apply(inputs, None if amax is None else _range(inputs, amax), E, M)


def fake_affine_tensor_quant(
    inputs: Tensor, min_range: Tensor | float, max_range: Tensor | float, num_bits: int = 8
) -> Tensor:
    """Quantized between two bounds with a zero point and back, per tensor; gradient 1 between the bounds, inclusive."""
    return FakeAffineTensorQuantFunction.apply(
        inputs, _range(inputs, min_range), _range(inputs, max_range), num_bits
    )

"""Linear layers of 8-bit floating-point numbers: ``torch.ops.torchq.fp8_linear``.

On GPUs that have it, the product is ``torch._scaled_mm``; elsewhere float32 products of FP8
numbers, which are exact. The operands are tested against the rules of CUDA's product.

Reference: OCP 8-bit Floating Point Specification 1.0 for the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.formats import E4M3, E5M2, Format
from torchq.lowering.ops.cuda import missing, padded
from torchq.lowering.ops.kernel_cache import KERNELS

__all__ = [
    "Fp8Input",
    "Fp8Weights",
    "fp8_codes",
    "fp8_linear",
    "fp8_values",
    "linear_any",
    "linear_cuda",
    "obstacle",
    "product_obstacle",
]

_DTYPES = MappingProxyType({E4M3.name: torch.float8_e4m3fn, E5M2.name: torch.float8_e5m2})

#: The inner and outer sizes of CUDA's product are multiples of it.
_MULTIPLE = 16
#: The number of weights that stay in a CPU's cache as float32 until they have been multiplied.
_AT_ONCE = 2**18

_LIBRARY = torch.library.Library("torchq", "FRAGMENT")
# Weights are passed as bytes and formats by name because torch cannot pickle float8 tensors.
_LIBRARY.define(
    "fp8_linear(Tensor x, Tensor x_divisor, Tensor x_scale, str x_format,"
    " Tensor weight, Tensor weight_scale, str weight_format, Tensor? bias) -> Tensor"
)


class Fp8Input(NamedTuple):
    """The rounding of a layer's input to FP8 numbers.

    Attributes:
        divisor: float32, () or (..., 1): the input is divided by it before it is rounded.
        scale: float32, of the same shape: real input = FP8 number * scale.
        format: ``"e4m3"`` or ``"e5m2"``.
    """

    divisor: Tensor
    scale: Tensor
    format: str


class Fp8Weights(NamedTuple):
    """The weights of a layer.

    Attributes:
        codes: uint8, (out, in): the bytes of FP8 numbers.
        scale: float32, (out,): real weight = FP8 number * scale.
        format: ``"e4m3"`` or ``"e5m2"``.
        bias: float32, (out,), or None.
    """

    codes: Tensor
    scale: Tensor
    format: str
    bias: Tensor | None


def obstacle(device: torch.device) -> str:
    """Return why ``device`` does not multiply FP8 matrices; empty if it does."""
    return missing(device, "torch._scaled_mm", (8, 9))


def product_obstacle(x: Format, weight: Format) -> str:
    """Return why numbers of these formats are not multiplied; empty if they are."""
    if x.name not in _DTYPES or weight.name not in _DTYPES:
        return f"no product of {x} by {weight} numbers; FP8 is {' or '.join(_DTYPES)}"
    if x == weight == E5M2:
        return f"torch._scaled_mm does not multiply {x} by {weight} numbers"
    return ""


def fp8_codes(x: Tensor, format: str) -> Tensor:
    """Return the bytes of the nearest FP8 numbers, ties to even.

    Values beyond the format saturate as in the simulation, where torch's own conversion makes NaN
    of them.

    Args:
        x: floating point.
        format: ``"e4m3"`` or ``"e5m2"``.

    Returns:
        uint8, the shape of ``x``.
    """
    dtype = _DTYPES[format]
    largest = torch.finfo(dtype).max
    return torch.clamp(x, -largest, largest).to(dtype).view(torch.uint8)


def fp8_values(codes: Tensor, format: str) -> Tensor:
    """Return the FP8 numbers with the given bytes, float32, of the same shape."""
    if codes.device.type != "cpu":
        return codes.view(_DTYPES[format]).to(torch.float32)
    # Reading a table is five times faster than torch's conversion on CPUs.
    table = (
        torch.arange(256, dtype=torch.uint8, device="cpu").view(_DTYPES[format]).to(torch.float32)
    )
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def fp8_linear(x: Tensor, input: Fp8Input, weights: Fp8Weights) -> Tensor:
    """Return the linear layer by ``torch.ops.torchq.fp8_linear``.

    Args:
        x: (..., in), floating point.
        input: how ``x`` is rounded.
        weights: of the layer.

    Returns:
        (..., out), float32.
    """
    return torch.ops.torchq.fp8_linear(x, *input, *weights)


def linear_any(x: Tensor, input: Fp8Input, weights: Fp8Weights) -> Tensor:
    """Return the linear layer on any device: exact products in float32, whose sums are rounded."""
    codes = fp8_codes(x.to(torch.float32) / input.divisor, input.format)
    values = fp8_values(codes, input.format)
    outputs, inner = weights.codes.shape
    rows = max(1, _AT_ONCE // inner) if x.device.type == "cpu" else outputs
    with torch.autocast(x.device.type, enabled=False):
        parts = [
            F.linear(values, fp8_values(part, weights.format)) for part in weights.codes.split(rows)
        ]
    return _scale(torch.cat(parts, -1), input, weights)


def linear_cuda(x: Tensor, input: Fp8Input, weights: Fp8Weights) -> Tensor:
    """Return the linear layer on a GPU."""
    run = linear_any if obstacle(x.device) or not x.numel() else _scaled_mm
    return run(x, input, weights)


def _scaled_mm(x: Tensor, input: Fp8Input, weights: Fp8Weights) -> Tensor:
    """Return the linear layer by torch's product, whose own scales stay 1.

    Its scales for each row and column differ between GPUs, versions and result dtypes.
    """
    plain = weights.codes

    def build() -> tuple[Tensor | None, Tensor]:
        full = padded(plain, _MULTIPLE)
        # Not the weight itself: what is kept must not keep its key alive.
        return None if full is plain else full, torch.ones(
            (), dtype=torch.float32, device=plain.device
        )

    full, one = KERNELS.get(plain, ("scaled_mm", None), (), build)
    full = plain if full is None else full
    codes = fp8_codes(x.to(torch.float32) / input.divisor, input.format).reshape(-1, x.shape[-1])
    left = padded(codes, _MULTIPLE).view(_DTYPES[input.format])
    right = full.view(_DTYPES[weights.format]).t()
    sums = torch.ops.aten._scaled_mm(left, right, one, one, out_dtype=torch.float32)
    sums = sums[: len(codes), : len(plain)].reshape(*x.shape[:-1], len(plain))
    return _scale(sums, input, weights)


def _scale(sums: Tensor, input: Fp8Input, weights: Fp8Weights) -> Tensor:
    """Multiply sums of products by the scales, and add the bias."""
    if input.scale.dim():  # a scale for each token
        sums, scale = sums * input.scale, weights.scale
    else:
        scale = weights.scale * input.scale
    return sums * scale if weights.bias is None else torch.addcmul(weights.bias, sums, scale)


def _fake(x: Tensor, input: Fp8Input, weights: Fp8Weights) -> Tensor:
    return x.new_empty((*x.shape[:-1], weights.codes.shape[0]), dtype=torch.float32)


def _operator(run: Callable[[Tensor, Fp8Input, Fp8Weights], Tensor]) -> Callable[..., Tensor]:
    """Return ``run``, which takes parameter objects, as a function of the operator's arguments."""
    return lambda x, *flat: run(x, Fp8Input(*flat[:3]), Fp8Weights(*flat[3:]))


_LIBRARY.impl("fp8_linear", _operator(linear_any), "CompositeExplicitAutograd")
_LIBRARY.impl("fp8_linear", _operator(linear_cuda), "CUDA")
torch.library.register_fake("torchq::fp8_linear", _operator(_fake), lib=_LIBRARY)

"""Linear layers with integer weights: ``torch.ops.torchq.weight_only_linear``.

For decoding: with a few rows of floating-point input, reading the weights is what takes time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.formats.nibbles import pack_nibbles, unpack_nibbles
from torchq.lowering.ops import onednn
from torchq.lowering.ops.kernel_cache import KERNELS
from torchq.lowering.ops.onednn import Run
from torchq.lowering.ops.params import Epilogue, Int8Weights
from torchq.lowering.qparams import SIGNED_ZERO_POINT

__all__ = ["MAX_ROWS", "BlockWeights", "pack_int4", "unpack_int4", "weight_only_linear"]

#: The number of rows up to which the integer kernels win on CPUs. Above it the weights are made
#: float once per call and multiplied as usual.
MAX_ROWS = 16

_GROUPS = (256, 128, 64, 32)
#: Digits of a row of floats, and what one is worth of the next: 254 halves reach from -127 to 127.
_DIGITS, _BASE = 3, 254
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LIBRARY = torch.library.Library("torchq", "FRAGMENT")
_LIBRARY.define(
    "weight_only_linear(Tensor x, Tensor weight, Tensor weight_scale, Tensor? bias, int bits)"
    " -> Tensor"
)


class BlockWeights(NamedTuple):
    """The weights of a layer, whose scales belong to blocks of inputs.

    Attributes:
        codes: int8, (out, in); or uint8, (out, in / 2), see :func:`pack_int4`.
        scale: float32, (out, blocks): one for each run of ``in / blocks`` inputs.
        bias: (out,) or None.
        bits: 8 or 4, the width of the stored codes.
    """

    codes: Tensor
    scale: Tensor
    bias: Tensor | None
    bits: int

    def values(self) -> Tensor:
        """Return the real weight, float32, (out, in)."""
        codes = unpack_int4(self.codes) if self.bits == 4 else self.codes
        blocks = codes.unflatten(-1, (self.scale.shape[1], -1)) * self.scale.unsqueeze(-1)
        return blocks.flatten(1)


def pack_int4(codes: Tensor) -> Tensor:
    """Return codes of -8 to 7 two in a byte, each as code + 8.

    Args:
        codes: int8, (..., n) with an even n.

    Returns:
        uint8, (..., n / 2), the first code of a pair in the low half.
    """
    return pack_nibbles((codes + 8).to(torch.uint8))


def unpack_int4(packed: Tensor) -> Tensor:
    """Return what :func:`pack_int4` packed, int8."""
    return unpack_nibbles(packed).to(torch.int8) - 8


def weight_only_linear(x: Tensor, weights: BlockWeights) -> Tensor:
    """Return ``x @ weight.T + bias`` by ``torch.ops.torchq.weight_only_linear``.

    Args:
        x: (..., in), floating point.
        weights: of the layer.

    Returns:
        (..., out), of the dtype of ``x``.
    """
    return torch.ops.torchq.weight_only_linear(x, *weights)


def _anywhere(x: Tensor, weights: BlockWeights) -> Tensor:
    bias = None if weights.bias is None else weights.bias.to(x.dtype)
    # The result has the dtype of x, for few rows and for many.
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x, weights.values().to(x.dtype), bias)


def _cpu(x: Tensor, weights: BlockWeights) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    run = None
    if 0 < rows.shape[0] <= MAX_ROWS and x.dtype in _DTYPES:
        bind = _bind_int4 if weights.bits == 4 else _bind_int8
        run = bind(x, weights)
    if run is None:
        return _anywhere(x, weights)
    y = run(rows.contiguous()).view(*x.shape[:-1], -1)
    return y if weights.bias is None else y + weights.bias.to(x.dtype)


def _bind_int8(x: Tensor, weights: BlockWeights) -> Callable[[Tensor], Tensor] | None:
    """Return torch's product of rows like ``x`` and 8-bit weights, or None where it has none.

    Its kernel for weights of 8 bits is a fast one for bfloat16 alone. Other rows are written as
    digits, and multiplied by the integer kernel of deployed linear layers.
    """
    codes, scale, _, _ = weights
    if scale.shape[1] != 1 or codes.shape[0] % 16 or codes.shape[1] % 16:
        return None
    if x.dtype is not torch.bfloat16:
        return _bind_digits(weights)
    key = ("weight-only int8", x.dtype)
    cast = KERNELS.get(codes, key, (scale,), lambda: scale.flatten().to(x.dtype))
    return lambda rows: torch.ops.aten._weight_int8pack_mm(rows, codes, cast)


def _bind_digits(weights: BlockWeights) -> Callable[[Tensor], Tensor] | None:
    """Return the product of rows and 8-bit weights in integers, as exact as one in float32.

    A row is ``unit * (d0 + d1 / 254 + d2 / 254**2)``, with digits of -127 to 127 and a unit of its
    largest magnitude over 127: 24 bits. Reading the weights takes the time, so three rows of
    digits cost little more than one.
    """
    if not onednn.available() or onednn.saturates():
        return None
    codes, scale, _, _ = weights

    def build() -> Run:
        layer = Int8Weights(codes, scale.flatten(), None, 1.0, SIGNED_ZERO_POINT)
        return onednn.bind_linear(layer, Epilogue())

    multiply: Run = KERNELS.get(codes, ("weight-only digits", ()), (scale,), build)

    def product(rows: Tensor) -> Tensor:
        smallest = torch.finfo(torch.float32).tiny
        unit = (rows.float().abs().amax(1, keepdim=True) / 127).clamp_min(smallest)
        rest, digits = rows / unit, []
        for _ in range(_DIGITS):
            digits.append(rest.round())
            rest = (rest - digits[-1]) * _BASE
        codes = (torch.stack(digits) + SIGNED_ZERO_POINT).to(torch.uint8).flatten(0, 1)
        first, second, third = multiply(codes).unflatten(0, (_DIGITS, -1))
        return ((first + (second + third / _BASE) / _BASE) * unit).to(rows.dtype)

    return product


def _bind_int4(x: Tensor, weights: BlockWeights) -> Callable[[Tensor], Tensor] | None:
    """Return torch's product of rows like ``x`` and 4-bit weights, or None where it has none.

    Rows, scales and results are bfloat16 in it, whose 8 bits are far finer than weights of 4. For
    other dtypes torch's kernel computes one number at a time: 20 times slower than float32.
    """
    codes, scale, _, _ = weights
    size = x.shape[-1] // scale.shape[1]
    group = next((g for g in _GROUPS if size % g == 0), 0)
    if not group or codes.shape[0] % 16:
        return None

    def build() -> tuple[Tensor, Tensor]:
        plain = unpack_nibbles(codes).to(torch.int32)
        scales = scale.repeat_interleave(size // group, 1).t().to(torch.bfloat16)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(plain, 1)
        return packed, torch.stack([scales, torch.zeros_like(scales)], -1).contiguous()

    packed, scales = KERNELS.get(codes, ("weight-only int4", (group,)), (scale,), build)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu
    return lambda rows: product(rows.to(torch.bfloat16), packed, group, scales).to(rows.dtype)


def _fake(x: Tensor, weights: BlockWeights) -> Tensor:
    return x.new_empty((*x.shape[:-1], weights.codes.shape[0]))


def _operator(run: Callable[[Tensor, BlockWeights], Tensor]) -> Callable[..., Tensor]:
    """Return ``run``, which takes parameter objects, as a function of the operator's arguments."""
    return lambda x, *flat: run(x, BlockWeights(*flat))


_LIBRARY.impl("weight_only_linear", _operator(_anywhere), "CompositeExplicitAutograd")
_LIBRARY.impl("weight_only_linear", _operator(_cpu), "CPU")
torch.library.register_fake("torchq::weight_only_linear", _operator(_fake), lib=_LIBRARY)

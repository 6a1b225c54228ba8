"""Linear layers in FP8: weights of a byte, and on GPUs that have it the product of 8-bit floating-point numbers, ``torch._scaled_mm``.

The arithmetic is tested on CPUs, and the operands are tested against the rules of CUDA's product; no GPU has run it yet.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.descriptor import QuantDescriptor
from torchq.formats import E4M3, E5M2, Format
from torchq.functional.scale import divisor, scale_from_amax
from torchq.lowering.modules.base import Float32ParamsMixin, dequantized
from torchq.lowering.modules.dynamic_linear import range_of_call
from torchq.lowering.ops.cuda import missing, padded
from torchq.lowering.ops.prepack import PackCache

__all__ = ["Fp8Linear", "fp8_codes", "linear_any", "linear_cuda", "obstacle", "product_obstacle"]

_DTYPES = MappingProxyType({E4M3.name: torch.float8_e4m3fn, E5M2.name: torch.float8_e5m2})

#: The inner and outer size of a product must be multiples of it.
_MULTIPLE = 16
#: So many numbers of a weight stay in a CPU's cache as float32 until they have been multiplied.
_AT_ONCE = 2**18
_PACKED = PackCache()

_LIBRARY = torch.library.Library("torchq", "FRAGMENT")
# Weights are bytes and formats names: torch does not pickle float8 tensors, and 2.6 has no word for them in files of exported programs.
_LIBRARY.define(
    "fp8_linear(Tensor x, Tensor x_divisor, Tensor x_scale, str x_format,"
    " Tensor weight, Tensor weight_scale, str weight_format, Tensor? bias) -> Tensor"
)


def obstacle(device: torch.device) -> str:
    """Why ``device`` does not multiply FP8 matrices; empty if it does."""
    return missing(device, "torch._scaled_mm", (8, 9))


def product_obstacle(x: Format, weight: Format) -> str:
    """Why numbers of these formats are not multiplied; empty if they are."""
    if x.name not in _DTYPES or weight.name not in _DTYPES:
        return f"no product of {x} by {weight} numbers; FP8 is {' or '.join(_DTYPES)}"
    return (
        f"torch._scaled_mm does not multiply {x} by {weight} numbers" if x == weight == E5M2 else ""
    )


def fp8_codes(x: Tensor, format: str) -> Tensor:
    """The bytes of FP8 numbers: uint8, x's shape.

    Numbers between those of the format are rounded to the nearest, ties to even, and those beyond saturate as in the simulation;
    torch's conversion alone makes NaN of them.
    """
    dtype = _DTYPES[format]
    high = torch.finfo(dtype).max
    return torch.clamp(x, -high, high).to(dtype).view(torch.uint8)


def _values(codes: Tensor, format: str) -> Tensor:
    """Bytes as float32 numbers."""
    if codes.device.type != "cpu":
        return codes.view(_DTYPES[format]).to(torch.float32)
    # Reading a table is five times faster than torch's conversion on CPUs.
    table = torch.arange(256, dtype=torch.uint8).view(_DTYPES[format]).to(torch.float32)
    return table.index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def _finish(sums: Tensor, x_scale: Tensor, weight_scale: Tensor, bias: Tensor | None) -> Tensor:
    """Scale sums of products, and add the bias."""
    if x_scale.dim():  # a scale for each token
        sums, scale = sums * x_scale, weight_scale
    else:
        scale = weight_scale * x_scale
    return sums * scale if bias is None else torch.addcmul(bias, sums, scale)


def linear_any(
    x: Tensor, x_divisor: Tensor, x_scale: Tensor, x_format: str,
    weight: Tensor, weight_scale: Tensor, weight_format: str, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """``torchq::fp8_linear`` anywhere: products of FP8 numbers are exact in float32, sums are rounded."""
    values = _values(fp8_codes(x.to(torch.float32) / x_divisor, x_format), x_format)
    outputs = max(1, _AT_ONCE // weight.shape[1]) if x.device.type == "cpu" else weight.shape[0]
    with torch.autocast(x.device.type, enabled=False):
        sums = torch.cat(
            [F.linear(values, _values(part, weight_format)) for part in weight.split(outputs)], -1
        )
    return _finish(sums, x_scale, weight_scale, bias)


def linear_cuda(
    x: Tensor, x_divisor: Tensor, x_scale: Tensor, x_format: str,
    weight: Tensor, weight_scale: Tensor, weight_format: str, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """``torchq::fp8_linear`` on a GPU."""
    run = linear_any if obstacle(x.device) or not x.numel() else _scaled_mm
    return run(x, x_divisor, x_scale, x_format, weight, weight_scale, weight_format, bias)


def _scaled_mm(
    x: Tensor, x_divisor: Tensor, x_scale: Tensor, x_format: str,
    weight: Tensor, weight_scale: Tensor, weight_format: str, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    """By torch's product, whose own scales stay 1: those for each row and column differ between GPUs, versions and result dtypes."""

    def build() -> tuple[Tensor | None, Tensor]:
        full = padded(weight, _MULTIPLE)
        # Not the weight itself: what is kept must not keep its key alive.
        return None if full is weight else full, torch.ones((), device=weight.device)

    full, one = _PACKED.get(weight, (), (), build)
    full = weight if full is None else full
    codes = fp8_codes(x.to(torch.float32) / x_divisor, x_format).reshape(-1, x.shape[-1])
    operands = (
        padded(codes, _MULTIPLE).view(_DTYPES[x_format]),
        full.view(_DTYPES[weight_format]).t(),
    )
    sums = torch.ops.aten._scaled_mm(*operands, one, one, out_dtype=torch.float32)
    sums = sums[: codes.shape[0], : weight.shape[0]].reshape(*x.shape[:-1], weight.shape[0])
    return _finish(sums, x_scale, weight_scale, bias)


def _fake(
    x: Tensor, x_divisor: Tensor, x_scale: Tensor, x_format: str, weight: Tensor, *rest: object
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]), dtype=torch.float32)


_LIBRARY.impl("fp8_linear", linear_any, "CompositeExplicitAutograd")
_LIBRARY.impl("fp8_linear", linear_cuda, "CUDA")
torch.library.register_fake("torchq::fp8_linear", _fake, lib=_LIBRARY)


class Fp8Linear(Float32ParamsMixin):
    """A linear layer whose weight and input are FP8 numbers times float32 scales.

    Args:
        weight: the bytes of FP8 numbers, uint8, (out, in); see :func:`fp8_codes`.
        weight_scale: float32, (out,).
        weight_format: ``"e4m3"`` or ``"e5m2"``.
        bias: (out,) or None.
        descriptor: of the input: one of the same formats, not both E5M2; one range per tensor, or per slice of leading axes (a token)
            where it is dynamic.
        amax: the input's range, float32 without dimensions; None takes that of each call.
        dtype: of :attr:`weight`.
        pre_quant_scale: multiplies the input first, (in,), or None.

    Shape:
        (..., in) floating point -> (..., out), same dtype. Sums are float32.

    Reference: OCP 8-bit Floating Point Specification 1.0 for the numbers.
    """

    weight_codes: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    input_step: Tensor | None
    input_divisor: Tensor | None
    pre_quant_scale: Tensor | None

    def __init__(
        self, weight: Tensor, weight_scale: Tensor, weight_format: str, bias: Tensor | None, descriptor: QuantDescriptor,
        amax: Tensor | None, dtype: torch.dtype, pre_quant_scale: Tensor | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        scale = None if amax is None else scale_from_amax(amax, descriptor.format)
        self.register_buffer("weight_codes", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32))
        self.register_buffer("input_step", scale)
        self.register_buffer(
            "input_divisor", None if amax is None or scale is None else divisor(amax, scale)
        )
        self.register_buffer("pre_quant_scale", pre_quant_scale)
        self.descriptor = descriptor
        self.weight_format = weight_format
        self.dtype = dtype

    def forward(self, x: Tensor) -> Tensor:
        """Round the input to FP8, multiply, scale back.

        Raises:
            ExportError: ranges of the call run along the features.
        """
        y = x if self.pre_quant_scale is None else x * self.pre_quant_scale.to(x.dtype)
        by, scale = self.input_divisor, self.input_step
        if by is None or scale is None:
            amax = range_of_call(y, self.descriptor, "Fp8Linear")
            scale = scale_from_amax(amax, self.descriptor.format)
            by = divisor(amax, scale)
        weight = self.weight_codes, self.weight_scale, self.weight_format
        return torch.ops.torchq.fp8_linear(
            y, by, scale, self.descriptor.format.name, *weight, self.bias
        ).to(x.dtype)

    @property
    def weight(self) -> Tensor:
        """The weight as floating point, made anew: for code that reads a layer's weight, or its dtype or device."""
        return dequantized(_values(self.weight_codes, self.weight_format), self.weight_scale).to(
            self.dtype
        )

    def _load_from_state_dict(self, *args: Any) -> None:
        _PACKED.forget(self.weight_codes)  # copied into in place
        super()._load_from_state_dict(*args)

    def summary_row(self) -> tuple[str, int, str]:
        """For :func:`torchq.summary`."""
        size = sum(b.numel() * b.element_size() for b in self.buffers())
        problem = obstacle(self.weight_codes.device)
        note = "the input's range is that of each call" if self.input_step is None else ""
        kernel = f"{'reference' if problem else 'scaled_mm'} {self.descriptor.format} x {self.weight_format} -> float"
        return kernel, size, "; ".join(filter(None, (note, problem)))

    def extra_repr(self) -> str:
        out, inner = self.weight_codes.shape
        return f"in={inner}, out={out}, {self.weight_format}, input={self.descriptor}"

"""Linear layers whose weights alone are integers, for decoding: with a few rows of input, reading the weights is what takes time."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from torchq.lowering.modules.base import Float32ParamsMixin
from torchq.lowering.ops.prepack import PackCache

__all__ = ["MAX_ROWS", "WeightOnlyLinear", "pack_nibbles", "unpack_nibbles"]

#: Up to so many rows the integer kernels win on CPUs; above, weights are made float once per call and multiplied as usual.
MAX_ROWS = 16

_PACKED = PackCache()
_GROUPS = (256, 128, 64, 32)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)

_LIBRARY = torch.library.Library("torchq", "FRAGMENT")
_LIBRARY.define(
    "weight_only_linear(Tensor x, Tensor weight, Tensor step, Tensor? bias, int bits) -> Tensor"
)


def pack_nibbles(codes: Tensor) -> Tensor:
    """Codes -8 .. 7 in the last dimension (even) as uint8, two in a byte, the first one low; each stored as code + 8."""
    shifted = (codes + 8).to(torch.uint8)
    return shifted[..., ::2] | (shifted[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of :func:`pack_nibbles`, int8."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2).to(torch.int8) - 8


def _values(weight: Tensor, step: Tensor, bits: int, dtype: torch.dtype) -> Tensor:
    codes = unpack_nibbles(weight) if bits == 4 else weight
    blocks = codes.unflatten(-1, (step.shape[1], -1)) * step.unsqueeze(-1)
    return blocks.flatten(1).to(dtype)


def _any(x: Tensor, weight: Tensor, step: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    with torch.autocast(
        x.device.type, enabled=False
    ):  # the result has the dtype of x, for few rows and for many
        return F.linear(
            x, _values(weight, step, bits, x.dtype), None if bias is None else bias.to(x.dtype)
        )


def _cpu(x: Tensor, weight: Tensor, step: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    rows = x.reshape(-1, x.shape[-1])
    run = None
    if 0 < rows.shape[0] <= MAX_ROWS and x.dtype in _DTYPES:
        run = _int4(weight, step, x) if bits == 4 else _int8(weight, step, x)
    if run is None:
        return _any(x, weight, step, bias, bits)
    y = run(rows.contiguous()).view(*x.shape[:-1], -1)
    return y if bias is None else y + bias.to(x.dtype)


def _int8(weight: Tensor, step: Tensor, x: Tensor) -> Any:
    if step.shape[1] != 1 or weight.shape[0] % 16 or weight.shape[1] % 16:
        return None
    scale = _PACKED.get(weight, x.dtype, (step,), lambda: step.flatten().to(x.dtype))
    return lambda rows: torch.ops.aten._weight_int8pack_mm(rows, weight, scale)


def _int4(weight: Tensor, step: Tensor, x: Tensor) -> Any:
    size = x.shape[-1] // step.shape[1]
    group = next((g for g in _GROUPS if size % g == 0), 0)
    if (
        not group
        or weight.shape[0] % 16
        or not hasattr(torch.ops.aten, "_weight_int4pack_mm_for_cpu")
    ):
        return None

    def build() -> tuple[Tensor, Tensor]:
        codes = (unpack_nibbles(weight) + 8).to(torch.int32)
        scale = step.repeat_interleave(size // group, 1).t().to(x.dtype)
        return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1), torch.stack(
            [scale, torch.zeros_like(scale)], -1
        ).contiguous()

    packed, scales = _PACKED.get(weight, (x.dtype, group), (step,), build)
    return lambda rows: torch.ops.aten._weight_int4pack_mm_for_cpu(rows, packed, group, scales)


def _fake(x: Tensor, weight: Tensor, step: Tensor, bias: Tensor | None, bits: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_LIBRARY.impl("weight_only_linear", _any, "CompositeExplicitAutograd")
_LIBRARY.impl("weight_only_linear", _cpu, "CPU")
torch.library.register_fake("torchq::weight_only_linear", _fake, lib=_LIBRARY)


class WeightOnlyLinear(Float32ParamsMixin):
    """``x @ (codes * step).T + bias`` with int8 codes, or int4 ones two in a byte.

    Args:
        codes: int8, (out, in).
        step: float32, (out, blocks): one for each run of ``in / blocks`` inputs.
        bias: (out,) or None.
        bits: width of the codes; up to 4 they are stored in nibbles.
        dtype: of :attr:`weight`.

    Shape:
        (..., in) floating point -> (..., out), same dtype. On a CPU up to :data:`MAX_ROWS` rows run on torch's weight-only kernels,
        which read the integers; these multiply in x's dtype with float32 sums.
    """

    weight_codes: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    def __init__(
        self, codes: Tensor, step: Tensor, bias: Tensor | None, bits: int, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.bits = 4 if bits <= 4 and codes.shape[1] % 2 == 0 else 8
        self.register_buffer("weight_codes", pack_nibbles(codes) if self.bits == 4 else codes)
        self.register_buffer("weight_scale", step)
        self.register_buffer("bias", None if bias is None else bias.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """The linear layer."""
        return torch.ops.torchq.weight_only_linear(
            x, self.weight_codes, self.weight_scale, self.bias, self.bits
        )

    @property
    def weight(self) -> Tensor:
        """The weight as floating point, made anew: for code that reads a layer's weight, or its dtype or device."""
        return _values(self.weight_codes, self.weight_scale, self.bits, self.dtype)

    def _load_from_state_dict(self, *args: Any) -> None:
        _PACKED.forget(self.weight_codes)  # copied into in place
        super()._load_from_state_dict(*args)

    def summary_row(self) -> tuple[str, int, str]:
        """For :func:`torchq.summary`."""
        size = sum(b.numel() * b.element_size() for b in self.buffers())
        return f"weight-only int{self.bits}", size, f"integers are read for up to {MAX_ROWS} rows"

    def extra_repr(self) -> str:
        return (
            f"out={self.weight_codes.shape[0]}, int{self.bits}, blocks={self.weight_scale.shape[1]}"
        )

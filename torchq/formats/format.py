"""What a number format is: a frozen set of facts, and the rounding onto its grid that follows from them.

Every format maps a range to its codes the same way: ``amax`` goes to :attr:`Format.qmax`, so one *scale* is
``amax / qmax``, and a value in scales is rounded to the nearest grid point, ties to even, saturating at ``[lo, hi]``.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import hardtanh_  # clamp_ under the name that torch.vmap has a rule for

from torchq.errors import ConfigError

__all__ = ["Format", "IntFormat", "FloatFormat", "power_of_two_below"]

_EXPONENT_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


def power_of_two_below(x: Tensor) -> Tensor:
    """``2 ** floor(log2(|x|))`` elementwise, exactly; 0 for zero and subnormals, inf for inf and NaN.

    Args:
        x: float32 or float64, any shape.
    """
    integer, mask = _EXPONENT_BITS[x.dtype]
    return (x.view(integer) & mask).view(x.dtype)


@dataclass(frozen=True)
class Format:
    """A finite set of representable values, symmetric around zero unless ``signed`` is False.

    Attributes:
        name: the catalogue name, ``"int8"``.
        signed: whether negative values exist.
    """

    name: str
    signed: bool

    @property
    def bits(self) -> int:
        """Storage bits of one code."""
        raise NotImplementedError

    @property
    def qmax(self) -> float:
        """The grid value that amax is mapped to."""
        raise NotImplementedError

    @property
    def quant_min(self) -> float:
        """The smallest grid value."""
        raise NotImplementedError

    @property
    def quant_max(self) -> float:
        """The largest grid value; equals :attr:`qmax`."""
        return self.qmax

    @property
    def is_integer(self) -> bool:
        """Whether the grid is evenly spaced integers."""
        return False

    def snap_(self, x: Tensor) -> Tensor:
        """Round ``x`` (in scales; float32 or float64) to the nearest grid value, ties to even, saturating. In place.

        NaN stays NaN; infinities saturate.
        """
        raise NotImplementedError

    @cached_property
    def values(self) -> tuple[float, ...]:
        """Every distinct finite grid value, ascending (at most 2**bits of them)."""
        raise NotImplementedError

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True)
class IntFormat(Format):
    """Integers of ``width`` bits.

    ``narrow`` drops the code ``-2**(width-1)`` so that the grid is symmetric; it means nothing for unsigned formats.
    The scale is ``amax / qmax`` with ``qmax = 2**(width-1) - 1`` (``2**width - 1`` unsigned) in either case.

    Raises:
        ConfigError: width outside 2..16 (1..16 unsigned).
    """

    width: int
    narrow: bool = False

    def __post_init__(self) -> None:
        low = 2 if self.signed else 1
        if not low <= self.width <= 16:
            raise ConfigError(
                f"format {self.name}: got {self.width} bits; expected {low} to 16 for {'signed' if self.signed else 'unsigned'} integers"
            )

    @property
    def bits(self) -> int:
        return self.width

    @property
    def qmax(self) -> float:
        return float(2 ** (self.width - self.signed) - 1)

    @property
    def quant_min(self) -> float:
        if not self.signed:
            return 0.0
        return -self.qmax if self.narrow else -self.qmax - 1.0

    @property
    def is_integer(self) -> bool:
        return True

    def snap_(self, x: Tensor) -> Tensor:
        return hardtanh_(x.round_(), self.quant_min, self.quant_max)

    @cached_property
    def values(self) -> tuple[float, ...]:
        return tuple(float(v) for v in range(int(self.quant_min), int(self.quant_max) + 1))


@dataclass(frozen=True)
class FloatFormat(Format):
    """A small binary floating-point format with subnormals.

    Attributes:
        exponent_bits, mantissa_bits: the widths, sign bit apart.
        bias: exponent bias; a normal number is ``2**(e - bias) * (1 + m / 2**mantissa_bits)``.
        reserved: codes at the top of each sign that are not finite numbers (E4M3FN 1: NaN; E5M2 4: inf and NaNs; FP4, FP6 0).
        has_zero: False for pure exponent formats (E8M0), where code 0 is ``2**-bias``.

    Reference: OCP 8-bit Floating Point Specification 1.0, table 1; OCP Microscaling Formats 1.0, tables 1, 2 and 7.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    reserved: int = 0
    has_zero: bool = True

    @property
    def bits(self) -> int:
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def qmax(self) -> float:
        return self._decode(2 ** (self.exponent_bits + self.mantissa_bits) - 1 - self.reserved)

    @property
    def quant_min(self) -> float:
        if self.signed:
            return -self.qmax
        return 0.0 if self.has_zero else self._decode(0)

    @property
    def smallest_normal(self) -> float:
        """``2 ** min_exponent``."""
        return 2.0**self.min_exponent

    @property
    def smallest_subnormal(self) -> float:
        """The distance of grid values next to zero."""
        return 2.0 ** (self.min_exponent - self.mantissa_bits)

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias if self.has_zero else -self.bias

    @property
    def max_exponent(self) -> int:
        """Exponent of the largest finite number."""
        return _exponent(self.qmax)

    def snap_(self, x: Tensor) -> Tensor:
        x = hardtanh_(x, self.quant_min, self.quant_max)
        spacing = (
            power_of_two_below(x).clamp_min_(self.smallest_normal).mul_(2.0**-self.mantissa_bits)
        )
        return x.div_(spacing).round_().mul_(spacing)

    def _decode(self, code: int) -> float:
        """The value of a code without its sign bit (independent of :meth:`snap_`, straight from the definition)."""
        exponent, mantissa = divmod(code, 2**self.mantissa_bits)
        fraction = mantissa / 2**self.mantissa_bits
        if exponent == 0 and self.has_zero:
            return fraction * self.smallest_normal
        return (1.0 + fraction) * 2.0 ** (exponent - self.bias)

    @cached_property
    def values(self) -> tuple[float, ...]:
        positive = [
            self._decode(c)
            for c in range(2 ** (self.exponent_bits + self.mantissa_bits) - self.reserved)
        ]
        negative = [-v for v in positive if v != 0.0] if self.signed else []
        return tuple(sorted(negative + positive))


def _exponent(value: float) -> int:
    return ((struct.unpack("<Q", struct.pack("<d", value))[0] >> 52) & 0x7FF) - 1023

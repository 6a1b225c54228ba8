"""Number formats: a frozen set of facts, and the rounding onto the grid that follows from them.

Every format maps a range to its codes in the same way. The amax becomes :attr:`Format.qmax`, so the
scale is ``amax / qmax``. A value over the scale is rounded to the nearest grid value, ties to even
unless :attr:`Format.rounding` says otherwise, and saturates at :attr:`Format.quant_min` and
:attr:`Format.quant_max`.
"""

import dataclasses
import warnings
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

# clamp_ under the name that torch.vmap has a rule for.
from torch.nn.functional import hardtanh_

from torchq.errors import ConfigError
from torchq.formats.rounding import check_rounding, round_
from torchq.utils import Registry

_EXPONENT_BITS = {
    torch.float32: (torch.int32, 0x7F800000),
    torch.float64: (torch.int64, 0x7FF0000000000000),
}


def power_of_two_below(x: Tensor) -> Tensor:
    """Return ``2 ** floor(log2(|x|))`` of each element, exactly.

    Args:
        x: float32 or float64, any shape.

    Returns:
        The shape and dtype of ``x``; 0 for zero and subnormals, infinity for infinity and NaN.
    """
    integer, mask = _EXPONENT_BITS[x.dtype]
    return (x.view(integer) & mask).view(x.dtype)


@dataclass(frozen=True)
class Format:
    """A finite set of representable values, symmetric around zero unless ``signed`` is False.

    Attributes:
        name: the catalogue name, ``"int8"``.
        signed: whether negative values exist.
        rounding: the policy for values between two grid values, one of
            :data:`torchq.formats.ROUNDINGS`.
    """

    name: str
    signed: bool
    rounding: str = field(default="half_even", kw_only=True)

    def __post_init__(self) -> None:
        check_rounding(self.rounding)

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
        """True if the grid is evenly spaced integers."""
        return isinstance(self, IntFormat)

    def snap_(self, x: Tensor) -> Tensor:
        """Round to the nearest grid value in place, ties as the rounding says, and saturate.

        Args:
            x: values over the scale, float32 or float64. NaN stays NaN; infinities saturate.

        Returns:
            ``x``.
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

    The scale is ``amax / qmax``, where ``qmax`` is ``2**(width - 1) - 1``, or ``2**width - 1`` if
    unsigned.

    Attributes:
        width: the number of bits.
        narrow: the code ``-2**(width - 1)`` is left out, so that the grid is symmetric; it means
            nothing for unsigned formats.

    Raises:
        ConfigError: width outside 2..16 (1..16 unsigned), or an unknown rounding.
    """

    width: int
    narrow: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        low = 2 if self.signed else 1
        if not low <= self.width <= 16:
            kind = "signed" if self.signed else "unsigned"
            raise ConfigError(
                f"format {self.name}: got {self.width} bits; expected {low} to 16 for {kind} "
                "integers"
            )

    @property
    def bits(self) -> int:
        """Storage bits of one code."""
        return self.width

    @property
    def qmax(self) -> float:
        """The grid value that amax is mapped to."""
        return float(2 ** (self.width - self.signed) - 1)

    @property
    def quant_min(self) -> float:
        """The smallest grid value."""
        if not self.signed:
            return 0.0
        return -self.qmax if self.narrow else -self.qmax - 1.0

    def snap_(self, x: Tensor) -> Tensor:
        """Round to the grid in place; see :meth:`Format.snap_`."""
        return hardtanh_(round_(x, self.rounding), self.quant_min, self.quant_max)

    @cached_property
    def values(self) -> tuple[float, ...]:
        """Every distinct finite grid value, ascending."""
        return tuple(
            float(v) for v in range(int(self.quant_min), int(self.quant_max) + 1)
        )


@dataclass(frozen=True)
class FloatFormat(Format):
    """A small binary floating-point format with subnormals; a tie goes to an even mantissa.

    Attributes:
        exponent_bits: the width of the exponent.
        mantissa_bits: the width of the mantissa.
        bias: of the exponent; a normal number is ``2**(e - bias) * (1 + m / 2**mantissa_bits)``.
        reserved: the number of codes at the top of each sign that are no finite numbers: 1 in
            E4M3FN (NaN), 4 in E5M2 (infinity and NaNs), 0 in FP4 and FP6.
        has_zero: False for pure exponent formats (E8M0), where code 0 is ``2**-bias``.

    References: OCP 8-bit Floating Point Specification 1.0, table 1; OCP Microscaling Formats 1.0,
    tables 1, 2 and 7.
    """

    exponent_bits: int
    mantissa_bits: int
    bias: int
    reserved: int = 0
    has_zero: bool = True

    @property
    def bits(self) -> int:
        """Storage bits of one code."""
        return self.signed + self.exponent_bits + self.mantissa_bits

    @property
    def qmax(self) -> float:
        """The grid value that amax is mapped to."""
        return self._decode(
            2 ** (self.exponent_bits + self.mantissa_bits) - 1 - self.reserved
        )

    @property
    def quant_min(self) -> float:
        """The smallest grid value."""
        if self.signed:
            return -self.qmax
        return 0.0 if self.has_zero else self._decode(0)

    @property
    def smallest_normal(self) -> float:
        """``2 ** min_exponent``."""
        return 2.0**self.min_exponent

    @property
    def min_exponent(self) -> int:
        """Exponent of the smallest normal number."""
        return 1 - self.bias if self.has_zero else -self.bias

    def snap_(self, x: Tensor) -> Tensor:
        """Round to the grid in place; see :meth:`Format.snap_`."""
        x = hardtanh_(x, self.quant_min, self.quant_max)
        # The distance of neighbours is that of the binade; subnormal numbers share the smallest.
        binade = power_of_two_below(x).clamp_min_(self.smallest_normal)
        spacing = binade.mul_(2.0**-self.mantissa_bits)
        return round_(x.div_(spacing), self.rounding).mul_(spacing)

    def _decode(self, code: int) -> float:
        """Return the value of a code without its sign bit, by the definition of the format."""
        exponent, mantissa = divmod(code, 2**self.mantissa_bits)
        fraction = mantissa / 2**self.mantissa_bits
        value: float
        if exponent == 0 and self.has_zero:
            value = fraction * self.smallest_normal
        else:
            value = (1.0 + fraction) * 2.0 ** (exponent - self.bias)
        return value

    @cached_property
    def values(self) -> tuple[float, ...]:
        """Every distinct finite grid value, ascending."""
        codes = 2 ** (self.exponent_bits + self.mantissa_bits) - self.reserved
        positive = [self._decode(code) for code in range(codes)]
        negative = [-value for value in positive if value != 0.0] if self.signed else []
        return tuple(sorted(negative + positive))


@dataclass(frozen=True)
class PowersOfTwo(Format):
    """All powers of two: a format of scales, so that chips multiply by shifting.

    A scale is rounded *up*, to the smallest power of two that is not below it. The range then
    holds what it held before, and at most half of the codes stay unused.
    """

    name: str = "power_of_two"
    signed: bool = False
    rounding: str = field(default="up", kw_only=True)

    def snap_(self, x: Tensor) -> Tensor:
        """Round up to powers of two in place.

        Args:
            x: float32 or float64, >= 0. NaN and infinity stay; subnormal numbers become 0.
        """
        if torch.onnx.is_in_onnx_export():
            return x.copy_(_power_from_table(x))
        below = power_of_two_below(x)
        largest = 2.0 ** (126 if x.dtype is torch.float32 else 1022)
        stays = (below == x) | (below > largest)  # Twice as much would be infinite.
        rounded_up = below.mul(2 - stays.to(x.dtype))
        return x.copy_(torch.where(x.isfinite(), rounded_up, x))


def _power_from_table(x: Tensor) -> Tensor:
    """Return what :meth:`PowersOfTwo.snap_` does, by operators that ONNX has."""
    with warnings.catch_warnings():
        # A tracer says that this becomes a constant of the graph, as it shall.
        warnings.filterwarnings("ignore", message="torch.tensor results are registered")
        powers = torch.tensor(
            [2.0**k for k in range(-126, 128)], dtype=x.dtype, device=x.device
        )
    wide = x.unsqueeze(-1)
    above = torch.where(powers >= wide, powers, torch.inf).amin(-1)
    return torch.where(x < powers[0], 0.0, above)


POWER_OF_TWO = PowersOfTwo()


@dataclass(frozen=True)
class ScaleType(FloatFormat):
    """A type of torch that scales are stored in, so that a file has them to the last bit.

    Scales become the nearest numbers of the type, and ``least`` at least: smaller ones would lose
    digits or become 0, and a scale of 0 is none. Larger ones than the type has stay as they are,
    for tensors that the type cannot hold either.

    Attributes:
        dtype: the type.
        least: the smallest scale, a normal number of the type.
    """

    dtype: torch.dtype = torch.float32
    least: float = 0.0

    def snap_(self, x: Tensor) -> Tensor:
        """Round to numbers of the type in place.

        Args:
            x: float32 or float64, >= 0. NaN and infinity stay.
        """
        if torch.onnx.is_in_onnx_export():
            near = x.clamp_min(self.least).to(self.dtype).to(x.dtype)
        else:
            near = super().snap_(x.clamp_min(self.least))
        return x.copy_(torch.where(x > self.qmax, x, near))


_HALF = ScaleType("float16", False, 5, 10, bias=15, reserved=1024, dtype=torch.float16)
_BRAIN = ScaleType(
    "bfloat16", False, 8, 7, bias=127, reserved=128, dtype=torch.bfloat16
)
#: The types of scales in files that are float16 or bfloat16 throughout, by name. The second one
#: ends where rounding to it would need subnormal numbers of float32.
SCALE_TYPES: dict[str, ScaleType] = {
    "float16": dataclasses.replace(_HALF, least=2.0**-14),
    "bfloat16": dataclasses.replace(_BRAIN, least=2.0**-110),
}


CATALOG: Registry[str, Format] = Registry("format")


def integer_format(
    bits: int,
    *,
    unsigned: bool = False,
    narrow: bool = False,
    rounding: str = "half_even",
) -> IntFormat:
    """Return the integer format of a width.

    Args:
        bits: 2 to 16, or 1 to 16 if unsigned.
        unsigned: the codes start at 0.
        narrow: leave out the lowest code, so that the grid is symmetric; ignored if unsigned.
        rounding: one of :data:`torchq.formats.ROUNDINGS`.

    Example:
        >>> integer_format(4).quant_min, integer_format(4).quant_max
        (-8.0, 7.0)
        >>> integer_format(4, narrow=True).quant_min, integer_format(4, unsigned=True).quant_max
        (-7.0, 15.0)
    """
    narrow = narrow and not unsigned
    name = f"{'u' if unsigned else ''}int{bits}{'_narrow' if narrow else ''}"
    # Dynamo of torch 2.9 cannot build a format in compiled code; the usual ones are there already.
    in_catalog = CATALOG.get(name) if rounding == "half_even" else None
    if isinstance(in_catalog, IntFormat):
        return in_catalog
    return IntFormat(name, not unsigned, bits, narrow, rounding=rounding)


for _bits in range(2, 17):
    for _narrow, _unsigned in ((False, False), (True, False), (False, True)):
        _format = integer_format(_bits, narrow=_narrow, unsigned=_unsigned)
        CATALOG.add(_format.name, _format)

INT4 = CATALOG["int4"]
INT8 = CATALOG["int8"]
INT16 = CATALOG["int16"]
UINT4 = CATALOG["uint4"]
UINT8 = CATALOG["uint8"]

E4M3 = CATALOG.add("e4m3", FloatFormat("e4m3", True, 4, 3, bias=7, reserved=1))
E5M2 = CATALOG.add("e5m2", FloatFormat("e5m2", True, 5, 2, bias=15, reserved=4))
E3M2 = CATALOG.add("e3m2", FloatFormat("e3m2", True, 3, 2, bias=3))
E2M3 = CATALOG.add("e2m3", FloatFormat("e2m3", True, 2, 3, bias=1))
E2M1 = CATALOG.add("e2m1", FloatFormat("e2m1", True, 2, 1, bias=1))
E8M0 = CATALOG.add(
    "e8m0", FloatFormat("e8m0", False, 8, 0, bias=127, reserved=1, has_zero=False)
)


def format_by_name(name: str) -> Format:
    """Return the format called ``name``.

    Raises:
        ConfigError: an unknown name; the text lists the known ones.

    Example:
        >>> format_by_name("e4m3").qmax
        448.0
    """
    return CATALOG[name]


def scale_format_by_name(name: str) -> Format:
    """Return the format of scales called ``name``: a type that files store, or another format.

    Raises:
        ConfigError: an unknown name.

    Example:
        >>> float(scale_format_by_name("float16").snap_(torch.tensor(0.1)))
        0.0999755859375
    """
    return SCALE_TYPES[name] if name in SCALE_TYPES else CATALOG[name]


def by_bits(
    num_bits: int | tuple[int, int],
    *,
    unsigned: bool = False,
    narrow: bool = False,
    rounding: str = "half_even",
) -> Format:
    """Return the format that the ``num_bits`` of a descriptor means.

    Args:
        num_bits: the width of an integer, or the ``(exponent, mantissa)`` bits of a signed float.
        unsigned: as for :func:`integer_format`; no float is unsigned.
        narrow: as for :func:`integer_format`; no float is narrow.
        rounding: one of :data:`torchq.formats.ROUNDINGS`.

    Raises:
        ConfigError: a width outside 2 to 16, a float that is not in the catalogue, or an unsigned
            or narrow float.

    Example:
        >>> by_bits(8).name, by_bits((4, 3)).name, by_bits(4, unsigned=True).name
        ('int8', 'e4m3', 'uint4')
    """
    if isinstance(num_bits, int):
        return integer_format(
            num_bits, unsigned=unsigned, narrow=narrow, rounding=rounding
        )
    if unsigned or narrow:
        raise ConfigError(
            f"num_bits={num_bits}: got unsigned={unsigned}, narrow_range={narrow}; "
            "expected neither for a floating-point format"
        )
    format = format_by_name("e{}m{}".format(*num_bits))
    assert isinstance(format, FloatFormat)
    return dataclasses.replace(format, rounding=rounding)

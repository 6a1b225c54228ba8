"""The formats that torchq knows, by name.

A new format is one line here, and its definition in the exhaustive tests of tests/contracts/.
"""

from __future__ import annotations

import dataclasses

from torchq.errors import ConfigError
from torchq.formats.format import FloatFormat, Format, IntFormat
from torchq.utils import Registry

__all__ = [
    "CATALOG",
    "INT8",
    "UINT8",
    "INT4",
    "UINT4",
    "INT16",
    "E4M3",
    "E5M2",
    "E3M2",
    "E2M3",
    "E2M1",
    "E8M0",
    "by_name",
    "by_bits",
    "integer",
]

CATALOG: Registry[str, Format] = Registry("format")


def integer(
    bits: int, *, unsigned: bool = False, narrow: bool = False, rounding: str = "half_even"
) -> IntFormat:
    """Return the integer format of a width.

    Args:
        bits: 2 to 16, or 1 to 16 if unsigned.
        unsigned: the codes start at 0.
        narrow: leave out the lowest code, so that the grid is symmetric; ignored if unsigned.
        rounding: one of :data:`torchq.formats.ROUNDINGS`.

    Example:
        >>> integer(4).quant_min, integer(4).quant_max
        (-8.0, 7.0)
        >>> integer(4, narrow=True).quant_min, integer(4, unsigned=True).quant_max
        (-7.0, 15.0)
    """
    narrow = narrow and not unsigned
    name = f"{'u' if unsigned else ''}int{bits}{'_narrow' if narrow else ''}"
    return IntFormat(name, not unsigned, bits, narrow, rounding)


for _bits in range(2, 17):
    for _fmt in (integer(_bits), integer(_bits, narrow=True), integer(_bits, unsigned=True)):
        CATALOG.add(_fmt.name, _fmt)

INT4, INT8, INT16 = CATALOG["int4"], CATALOG["int8"], CATALOG["int16"]
UINT4, UINT8 = CATALOG["uint4"], CATALOG["uint8"]

E4M3 = CATALOG.add("e4m3", FloatFormat("e4m3", True, 4, 3, bias=7, reserved=1))
E5M2 = CATALOG.add("e5m2", FloatFormat("e5m2", True, 5, 2, bias=15, reserved=4))
E3M2 = CATALOG.add("e3m2", FloatFormat("e3m2", True, 3, 2, bias=3))
E2M3 = CATALOG.add("e2m3", FloatFormat("e2m3", True, 2, 3, bias=1))
E2M1 = CATALOG.add("e2m1", FloatFormat("e2m1", True, 2, 1, bias=1))
E8M0 = CATALOG.add("e8m0", FloatFormat("e8m0", False, 8, 0, bias=127, reserved=1, has_zero=False))


def by_name(name: str) -> Format:
    """Return the format called ``name``.

    Raises:
        ConfigError: an unknown name; the text lists the known ones.

    Example:
        >>> by_name("e4m3").qmax
        448.0
    """
    return CATALOG[name]


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
        unsigned: as for :func:`integer`; no float is unsigned.
        narrow: as for :func:`integer`; no float is narrow.
        rounding: one of :data:`torchq.formats.ROUNDINGS`.

    Raises:
        ConfigError: a width outside 2 to 16, a float that is not in the catalogue, or an unsigned
            or narrow float.

    Example:
        >>> by_bits(8).name, by_bits((4, 3)).name, by_bits(4, unsigned=True).name
        ('int8', 'e4m3', 'uint4')
    """
    if isinstance(num_bits, int):
        return integer(num_bits, unsigned=unsigned, narrow=narrow, rounding=rounding)
    if unsigned or narrow:
        raise ConfigError(
            f"num_bits={num_bits}: got unsigned={unsigned}, narrow_range={narrow}; "
            "expected neither for a floating-point format"
        )
    format = by_name("e{}m{}".format(*num_bits))
    assert isinstance(format, FloatFormat)
    return dataclasses.replace(format, rounding=rounding)

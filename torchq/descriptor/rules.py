"""What the fields of a descriptor may be, and which of them exclude each other.

The functions take a :class:`~torchq.QuantDescriptor`, which is defined above this file.
"""

from __future__ import annotations

from typing import Any

from torchq.descriptor.fields import FLOAT32_MAX, finite_float, largest, shape_of
from torchq.errors import ConfigError
from torchq.formats import by_name, check_rounding
from torchq.utils import short_repr

__all__ = ["check_rules", "check_types"]

_MAX_BLOCK = 1 << 16


_TYPES: dict[str, tuple[type, ...]] = {
    "name": (str, type(None)),
    "calib_method": (str,),
    "scale_format": (str, type(None)),
    "fake_quant": (bool,),
    "learn_amax": (bool,),
    "scale_range_grad": (bool,),
    "narrow_range": (bool,),
    "dynamic": (bool,),
    "symmetric": (bool,),
    "power_of_two": (bool,),
    "rounding": (str,),
    "block_size": (int, type(None)),
    "block_axis": (int,),
}


def check_types(d: Any) -> None:
    """Raise an error for a field of the wrong type."""
    for field, types in _TYPES.items():
        value = getattr(d, field)
        is_bool_for_int = isinstance(value, bool) and bool not in types
        if not isinstance(value, types) or is_bool_for_int:
            expected = " or ".join(t.__name__ for t in types)
            raise ConfigError(f"{field}: got {short_repr(value)}; expected {expected}")


def check_rules(d: Any) -> None:
    """Raise an error for fields that are out of range or exclude each other."""
    if d.scale_amax is not None:
        _check_scale_amax(d)
    if d.block_size is not None and not 1 <= d.block_size <= _MAX_BLOCK:
        raise ConfigError(
            f"block_size: got {short_repr(d.block_size)}; expected at least 1 and at most "
            f"{_MAX_BLOCK}"
        )
    if d.block_size is not None and d.axis is not None:
        raise ConfigError(
            f"block_size={d.block_size} with axis={d.axis}: expected one of them. "
            "Blocks keep all other axes apart already"
        )
    if d.dynamic and (d.amax is not None or d.learn_amax):
        raise ConfigError(
            "dynamic: got amax or learn_amax too; "
            "expected neither, the range is taken from each call's data"
        )
    if not isinstance(d.unsigned, bool):
        _check_auto_unsigned(d)
    check_rounding(d.rounding)
    _check_scale_format(d)
    if d.symmetric and d.amin is not None:
        raise ConfigError(
            "amin: got symmetric=True; expected symmetric=False, the range is [-amax, amax] "
            "otherwise"
        )
    if not d.symmetric:
        _check_asymmetric(d)
    if d.scale_range_grad and not d.learn_amax:
        raise ConfigError(
            "scale_range_grad: got learn_amax=False; "
            "expected learn_amax=True, there is no gradient to scale otherwise"
        )


def _check_scale_format(d: Any) -> None:
    """Raise an error for scales that cannot be rounded as the fields say."""
    if d.scale_format is not None and d.block_size is None:
        raise ConfigError(
            f"scale_format={d.scale_format!r} without block_size: expected a block_size, such as 32"
        )
    if d.scale_format is not None:
        by_name(d.scale_format)
    if d.power_of_two and d.scale_format is not None:
        raise ConfigError(
            f"power_of_two: got scale_format={d.scale_format!r} too; "
            "expected one of them, both round the scales"
        )


def _check_asymmetric(d: Any) -> None:
    """Raise an error for fields that a range with two ends cannot have."""
    if not isinstance(d.num_bits, int):
        raise ConfigError(
            f"symmetric=False: got the float format {d.num_bits}; expected an integer format, "
            "a float format has no zero point"
        )
    if d.unsigned == "auto":
        raise ConfigError(
            "symmetric=False: got unsigned='auto'; expected True or False, "
            "the zero point fits either sign to the data"
        )
    if d.scale_format is not None:
        raise ConfigError(
            f"symmetric=False: got scale_format={d.scale_format!r}; expected None, "
            "block formats with rounded scales are symmetric"
        )
    if (d.amin is None) != (d.amax is None):
        given, lacking = ("amax", "amin") if d.amin is None else ("amin", "amax")
        raise ConfigError(
            f"{lacking}: got {given} alone; expected both ends of an asymmetric range, or neither"
        )
    if d.amin is not None and shape_of(d.amin) != shape_of(d.amax):
        raise ConfigError(
            f"amin: got shape {shape_of(d.amin)} for amax of shape {shape_of(d.amax)}; "
            "expected equal shapes"
        )


def _check_auto_unsigned(d: Any) -> None:
    """Raise an error unless calibration can choose between signed and unsigned codes."""
    if d.unsigned != "auto":
        raise ConfigError(f"unsigned: got {short_repr(d.unsigned)}; expected bool or 'auto'")
    if d.dynamic or d.amax is not None or not isinstance(d.num_bits, int):
        raise ConfigError(
            "unsigned='auto': got dynamic, a fixed amax or a float format too; "
            "expected an integer format whose range is calibrated"
        )


def _check_scale_amax(d: Any) -> None:
    """Raise an error for a factor that is no positive number, or makes a fixed range infinite."""
    factor = finite_float("scale_amax", d.scale_amax)
    if factor == 0.0:
        raise ConfigError("scale_amax: got 0; expected a finite number > 0")
    if d.amax is not None and not largest(d.amax) * factor <= FLOAT32_MAX:
        raise ConfigError(
            f"scale_amax: got {factor:g} for amax up to {largest(d.amax):g}; "
            "expected a product that float32 can hold"
        )

"""The quantization of one tensor as a frozen value.

A :class:`QuantDescriptor` holds no state and does nothing; :class:`torchq.nn.TensorQuantizer`
reads it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torchq.errors import ConfigError
from torchq.formats import (
    CATALOG,
    POWER_OF_TWO,
    SCALE_TYPES,
    Format,
    Granularity,
    PerAxis,
    PerBlock,
    PerTensor,
    by_bits,
    check_rounding,
    scale_format_by_name,
)
from torchq.utils import check_fields, short_repr

__all__ = ["QuantDescriptor"]


@dataclass(frozen=True)
class QuantDescriptor:
    """The quantization of one tensor: format, granularity, range and calibration.

    Args:
        num_bits: the integer width 2 to 16 (1 to 16 if unsigned), or ``(exponent, mantissa)``
            bits of a float format: (4, 3), (5, 2), (3, 2), (2, 3) or (2, 1).
        name: a label for reports.
        fake_quant: False returns integer codes in place of dequantized values.
        axis: the axis or axes that keep their own amax; None is per tensor. The output channels
            of a weight are axis 0 for Conv and Linear, axis 1 for ConvTranspose.
        amax: a fixed range, finite float32 >= 0: a number, or a (nested) sequence, array or
            tensor of numbers. None: the range is calibrated, and taken from the data of each
            call until then.
        learn_amax: make amax a parameter with a gradient.
        scale_range_grad: with ``learn_amax``, scale the gradient of the range as LSQ does
            (:func:`torchq.functional.range_gradient_scale`). Plain SGD needs it; Adam does not.
        scale_amax: a factor > 0 on the range, applied at each use (not cumulative).
        calib_method: a name in :func:`torchq.calib.methods`.
        calib_options: keyword arguments for that method, such as ``{"percentile": 99.99}``.
        unsigned: True: codes start at 0, and negative values become 0. "auto": calibration
            decides, and chooses unsigned codes if and only if it sees no negative value. Until
            then the codes are signed.
        narrow_range: leave out the lowest code of a signed integer format.
        block_size: one amax for each run of ``block_size`` elements along ``block_axis``, at
            most 65536; excludes ``axis``.
        block_axis: the axis of the blocks.
        scale_format: the name of the format that block scales are rounded to: "e8m0" (MX) or
            "e4m3" (NVFP4); or, of any granularity, "float16" or "bfloat16", the type that a
            strongly typed file stores scales in. None keeps float32 scales.
        dynamic: always take the range from the data of the call; never calibrate.
        symmetric: False: the range is [amin, amax] and contains 0, which the codes represent by a
            zero point; for activations with a short negative side, as behind GELU and SiLU. An
            integer format is needed. With ``learn_amax`` both ends are parameters.
        amin: the lower end of a fixed asymmetric range, finite float32 <= 0, of the shape of
            ``amax``.
        power_of_two: round scales up to powers of two, for chips that multiply by shifting.
        rounding: what values between two codes become, one of :data:`torchq.formats.ROUNDINGS`:
            half_even (as ONNX and PyTorch), half_up, half_down, half_toward_zero, half_away, up,
            down.

    Raises:
        ConfigError: a value outside these rules; the text names the field.

    Example:
        >>> QuantDescriptor(num_bits=4, axis=0)
        QuantDescriptor(num_bits=4, axis=(0,))
        >>> QuantDescriptor.from_dict(QuantDescriptor(amax=[1, 2], axis=0).to_dict()).amax
        (1.0, 2.0)
    """

    num_bits: int | tuple[int, int] = 8
    name: str | None = None
    _: dataclasses.KW_ONLY
    fake_quant: bool = True
    axis: int | tuple[int, ...] | None = None
    amax: Any = None
    learn_amax: bool = False
    scale_range_grad: bool = False
    scale_amax: float | None = None
    calib_method: str = "max"
    calib_options: Any = ()
    unsigned: bool | Literal["auto"] = False
    narrow_range: bool = False
    block_size: int | None = None
    block_axis: int = -1
    scale_format: str | None = None
    dynamic: bool = False
    symmetric: bool = True
    amin: Any = None
    power_of_two: bool = False
    rounding: str = "half_even"

    def __post_init__(self) -> None:
        normalized: dict[str, object] = {
            "num_bits": normalize_bits(self.num_bits),
            "axis": normalize_axes(self.axis),
            "calib_options": normalize_options(self.calib_options),
        }
        for end, low, high in (("amin", -FLOAT32_MAX, 0.0), ("amax", 0.0, FLOAT32_MAX)):
            if (given := getattr(self, end)) is not None:
                normalized[end] = normalize_range(end, given, minimum=low, maximum=high)
        for field, value in normalized.items():
            object.__setattr__(self, field, value)
        check_types(self)
        check_rules(self)
        self.format  # noqa: B018  # An invalid combination is an error now.

    @property
    def format(self) -> Format:
        """The number format; the signed one while calibration has not decided."""
        is_unsigned = self.unsigned is True
        return by_bits(
            self.num_bits,
            unsigned=is_unsigned,
            narrow=self.narrow_range,
            rounding=self.rounding,
        )

    @property
    def granularity(self) -> Granularity:
        """The elements that share one amax."""
        if self.block_size is not None:
            return PerBlock(self.block_size, self.block_axis)
        if self.axis is None:
            return PerTensor()
        assert isinstance(self.axis, tuple)  # __post_init__ made it one.
        return PerAxis(self.axis)

    @property
    def block_scale_format(self) -> Format | None:
        """The format that scales are rounded to, or None for float32 scales.

        It is the one called :attr:`scale_format`, also of scales without blocks, or the powers of
        two.
        """
        if self.power_of_two:
            return POWER_OF_TWO
        return (
            None
            if self.scale_format is None
            else scale_format_by_name(self.scale_format)
        )

    def replace(self, **changes: Any) -> QuantDescriptor:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON and YAML data."""
        out = {}
        for name, value in self._changed_fields():
            out[name] = (
                dict(value) if name == "calib_options" else tuples_to_lists(value)
            )
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> QuantDescriptor:
        """Return the descriptor that :meth:`to_dict` was called on.

        Raises:
            ConfigError: not a mapping, an unknown key, or an invalid value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        return cls(**check_fields(data, "QuantDescriptor", known=known))

    def _changed_fields(self) -> list[tuple[str, Any]]:
        """Return the names and values of the fields that differ from their defaults."""
        pairs = [
            (field, getattr(self, field.name)) for field in dataclasses.fields(self)
        ]
        return [(field.name, value) for field, value in pairs if value != field.default]

    def __repr__(self) -> str:
        fields = ", ".join(
            f"{name}={value!r}" for name, value in self._changed_fields()
        )
        return f"QuantDescriptor({fields})"

    def __str__(self) -> str:
        parts = [str(self.format)]
        if self.block_size is not None:
            scales = f" scales={self.scale_format}" if self.scale_format else ""
            parts.append(f"block={self.block_size}{scales}")
        elif self.axis is not None:
            assert isinstance(self.axis, tuple)
            parts.append("axis=" + ",".join(map(str, self.axis)))
        else:
            parts.append("per-tensor")
        flags = {
            f"scales={self.scale_format}": bool(self.scale_format)
            and self.block_size is None,
            "or unsigned": self.unsigned == "auto",
            "dynamic": self.dynamic,
            "asymmetric": not self.symmetric,
            "power-of-two": self.power_of_two,
            self.rounding: self.rounding != "half_even",
            "learned": self.learn_amax,
            "codes": not self.fake_quant,
            self.calib_method: not self.dynamic,
        }
        parts += [flag for flag, on in flags.items() if on]
        if self.scale_amax is not None:
            parts.append(f"scale_amax={self.scale_amax:g}")
        return " ".join(parts)


Range = float | tuple[Any, ...]

FLOAT32_MAX = 3.4028234663852886e38
_MAX_DIMS = 8


def _is_sequence(value: object) -> bool:
    """Return True for a list, tuple or the like, False for a string."""
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes))


def normalize_bits(value: Any) -> int | tuple[int, int]:
    """Return an integer width, or a pair of exponent and mantissa bits that is a format."""
    if type(value) is int:
        return value
    if not _is_sequence(value):
        raise ConfigError(
            f"num_bits: got {short_repr(value)} ({type(value).__name__}); "
            "expected an integer or (exponent, mantissa) bits"
        )
    pair = tuple(value[:3])
    is_pair = len(pair) == 2 and all(
        type(bits) is int and 0 <= bits < 16 for bits in pair
    )
    if not is_pair or "e{}m{}".format(*pair) not in CATALOG:
        raise ConfigError(
            f"num_bits: got {short_repr(tuple(value))}; "
            "expected (4, 3), (5, 2), (3, 2), (2, 3) or (2, 1) for a float format"
        )
    return pair[0], pair[1]


def normalize_axes(value: Any) -> tuple[int, ...] | None:
    """Return the axes as a tuple of distinct integers, or None."""
    if value is None:
        return None
    axes = tuple(value) if _is_sequence(value) else (value,)
    if (
        not axes
        or any(type(axis) is not int for axis in axes)
        or len(set(axes)) != len(axes)
    ):
        raise ConfigError(
            f"axis: got {short_repr(value)}; expected None, an integer or distinct integers: "
            "the axes that keep their own amax"
        )
    return axes


def normalize_range(
    field: str,
    value: Any,
    *,
    minimum: float = 0.0,
    maximum: float = FLOAT32_MAX,
    depth: int = 0,
) -> Range:
    """Return a float, or nested tuples of floats with equal lengths."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if not _is_sequence(value):
        return finite_float(field, value, minimum=minimum, maximum=maximum)
    if depth == _MAX_DIMS or not len(value):
        what = (
            "an empty sequence"
            if depth < _MAX_DIMS
            else f"more than {_MAX_DIMS} dimensions"
        )
        raise ConfigError(
            f"{field}: got {what}; expected a number or a sequence of numbers"
        )
    items = tuple(
        normalize_range(field, item, minimum=minimum, maximum=maximum, depth=depth + 1)
        for item in value
    )
    if len({shape_of(item) for item in items}) > 1:
        raise ConfigError(
            f"{field}: got rows of different lengths in {short_repr(value)}; expected equal lengths"
        )
    return items


def shape_of(value: Range) -> tuple[int, ...]:
    """Return the shape of nested tuples."""
    return (len(value), *shape_of(value[0])) if isinstance(value, tuple) else ()


def largest(value: Range) -> float:
    """Return the largest magnitude of nested tuples."""
    return max(map(largest, value)) if isinstance(value, tuple) else abs(value)


def finite_float(
    field: str, value: object, *, minimum: float = 0.0, maximum: float = FLOAT32_MAX
) -> float:
    """Return ``value`` as a float that float32 can hold."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(
            f"{field}: got {short_repr(value)} ({type(value).__name__}); "
            "expected a number, a sequence, an array or a tensor"
        )
    if not minimum <= value <= maximum:
        bound = f">= {minimum:g}" if maximum == FLOAT32_MAX else f"<= {maximum:g}"
        raise ConfigError(
            f"{field}: got {short_repr(value)}; "
            f"expected a finite number {bound} that float32 can hold"
        )
    return float(value)


def normalize_options(value: Any) -> tuple[tuple[str, Any], ...]:
    """Return the options as sorted pairs, which can be hashed and saved."""
    pairs = tuple(value.items()) if isinstance(value, Mapping) else value
    is_valid = _is_sequence(pairs) and all(
        _is_sequence(pair)
        and len(pair) == 2
        and isinstance(pair[0], str)
        and isinstance(pair[1], (int, float, str, type(None)))
        for pair in pairs
    )
    if not is_valid or len({pair[0] for pair in pairs}) != len(pairs):
        raise ConfigError(
            f"calib_options: got {short_repr(value)}; "
            "expected a mapping of keyword arguments to numbers or strings"
        )
    return tuple(sorted((str(name), option) for name, option in pairs))


def tuples_to_lists(value: object) -> Any:
    """Return ``value`` with lists in place of tuples."""
    return (
        [tuples_to_lists(item) for item in value] if isinstance(value, tuple) else value
    )


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


def check_types(d: object) -> None:
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
    check_rounding(d.rounding)
    if d.scale_format is not None:
        scale_format_by_name(d.scale_format)
    for text, is_wrong in (_mistakes(d) | _asymmetric_mistakes(d)).items():
        if is_wrong:
            raise ConfigError(text)


def _mistakes(d: Any) -> dict[str, bool]:
    """Return what may be wrong with fields -> it is."""
    is_float = not isinstance(d.num_bits, int)
    is_auto = not isinstance(d.unsigned, bool)
    block, scales = d.block_size, d.scale_format
    return {
        f"block_size: got {short_repr(block)}; expected at least 1 and at most {_MAX_BLOCK}": (
            block is not None and not 1 <= block <= _MAX_BLOCK
        ),
        f"block_size={block} with axis={d.axis}: expected one of them. "
        "Blocks keep all other axes apart already": block is not None
        and d.axis is not None,
        "dynamic: got amax or learn_amax too; expected neither, the range is taken from each "
        "call's data": d.dynamic and (d.amax is not None or d.learn_amax),
        f"unsigned: got {short_repr(d.unsigned)}; expected bool or 'auto'": (
            is_auto and d.unsigned != "auto"
        ),
        "unsigned='auto': got dynamic, a fixed amax or a float format too; "
        "expected an integer format whose range is calibrated": (
            is_auto and (d.dynamic or d.amax is not None or is_float)
        ),
        f"scale_format={scales!r} without block_size: expected a block_size, such as 32": (
            scales not in (None, *SCALE_TYPES) and block is None
        ),
        f"power_of_two: got scale_format={scales!r} too; expected one of them, both round the "
        "scales": d.power_of_two and scales is not None,
        "amin: got symmetric=True; expected symmetric=False, the range is [-amax, amax] "
        "otherwise": d.symmetric and d.amin is not None,
        "scale_range_grad: got learn_amax=False; expected learn_amax=True, there is no gradient "
        "to scale otherwise": d.scale_range_grad and not d.learn_amax,
    }


def _asymmetric_mistakes(d: Any) -> dict[str, bool]:
    """Return what may be wrong with a range of two ends -> it is."""
    given, lacking = ("amax", "amin") if d.amin is None else ("amin", "amax")
    is_asymmetric = not d.symmetric
    scales = d.scale_format
    return {
        f"symmetric=False: got the float format {d.num_bits}; expected an integer format, "
        "a float format has no zero point": is_asymmetric
        and not isinstance(d.num_bits, int),
        "symmetric=False: got unsigned='auto'; expected True or False, "
        "the zero point fits either sign to the data": is_asymmetric
        and not isinstance(d.unsigned, bool),
        f"symmetric=False: got scale_format={scales!r}; expected None, "
        "block formats with rounded scales are symmetric": is_asymmetric
        and scales not in (None, *SCALE_TYPES),
        f"{lacking}: got {given} alone; expected both ends of an asymmetric range, or neither": (
            is_asymmetric and (d.amin is None) != (d.amax is None)
        ),
        f"amin: got shape {shape_of(d.amin)} for amax of shape {shape_of(d.amax)}; "
        "expected equal shapes": d.amin is not None
        and shape_of(d.amin) != shape_of(d.amax),
    }


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

"""How one tensor is quantized, as a frozen value.

A :class:`QuantDescriptor` holds no state and does nothing; :class:`torchq.nn.TensorQuantizer` reads it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchq.errors import ConfigError
from torchq.formats import (
    CATALOG,
    Format,
    Granularity,
    PerAxis,
    PerBlock,
    PerTensor,
    by_bits,
    by_name,
)

__all__ = [
    "QuantDescriptor",
    "QUANT_DESC_8BIT_PER_TENSOR",
    "QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR",
    "QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW",
    "QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL",
    "QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL",
]

Amax = float | tuple[Any, ...]


@dataclass(frozen=True)
class QuantDescriptor:
    """How one tensor is quantized.

    Args:
        num_bits: integer width 2 to 16, or ``(exponent, mantissa)`` bits: (4, 3), (5, 2), (3, 2), (2, 3), (2, 1).
        name: a label for reports.
        fake_quant: False returns grid values (integer codes) instead of dequantized ones.
        axis: the axes that keep their own amax; None is per tensor. Weights of Conv and Linear: 0; of ConvTranspose: 1.
        amax: a fixed range: a number, or a (nested) sequence, array or tensor of them. None: calibrated, or taken from the
            data at each call as long as nothing was calibrated.
        learn_amax: make amax a parameter with a gradient.
        scale_range_grad: with ``learn_amax``, bring that gradient to the size of a weight's as LSQ does
            (:func:`torchq.functional.range_gradient_scale`). Plain SGD needs it; Adam does not care.
        scale_amax: multiplies the range whenever it is used (not cumulative), > 0.
        calib_method: a name in :func:`torchq.calib.methods`.
        calib_options: keyword arguments for that calibrator, such as ``{"percentile": 99.99}``.
        unsigned: codes from 0 up; negative values become 0.
        narrow_range: leave out the lowest code of a signed integer format.
        block_size: one amax for each run of so many elements along ``block_axis``; excludes ``axis``.
        scale_format: name of the format that block scales are rounded to: "e8m0" (MX), "e4m3" (NVFP4).
        dynamic: always take the range from the data of the call, never calibrate.

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
    unsigned: bool = False
    narrow_range: bool = False
    block_size: int | None = None
    block_axis: int = -1
    scale_format: str | None = None
    dynamic: bool = False

    def __post_init__(self) -> None:
        normalized = {
            "num_bits": _bits(self.num_bits),
            "axis": _axes(self.axis),
            "amax": _amax(self.amax),
            "calib_options": _options(self.calib_options),
        }
        for field, value in normalized.items():
            object.__setattr__(self, field, value)
        _check_types(self)
        _check_rules(self)
        by_bits(self.num_bits, unsigned=self.unsigned, narrow=self.narrow_range)

    @property
    def format(self) -> Format:
        """The number format."""
        return by_bits(self.num_bits, unsigned=self.unsigned, narrow=self.narrow_range)

    @property
    def granularity(self) -> Granularity:
        """Which elements share one amax."""
        if self.block_size is not None:
            return PerBlock(self.block_size, self.block_axis)
        return PerTensor() if self.axis is None else PerAxis(self.axis)  # type: ignore[arg-type]  # normalised to a tuple

    @property
    def block_scale_format(self) -> Format | None:
        """The format of the scales, or None for fp32."""
        return None if self.scale_format is None else by_name(self.scale_format)

    def replace(self, **changes: Any) -> QuantDescriptor:
        """A copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """The fields that differ from the defaults, as JSON and YAML data (lists, numbers, strings, booleans)."""
        out = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value != field.default:
                out[field.name] = dict(value) if field.name == "calib_options" else _plain(value)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QuantDescriptor:
        """Inverse of :meth:`to_dict`, exact. Unknown keys are a :class:`ConfigError`."""
        if not isinstance(data, Mapping):
            raise ConfigError(
                f"QuantDescriptor: got a {type(data).__name__}; expected a mapping of fields"
            )
        known = {field.name for field in dataclasses.fields(cls)}
        if unknown := sorted(set(data) - known):
            raise ConfigError(
                f"QuantDescriptor: got unknown keys {unknown}; expected some of {sorted(known)}"
            )
        return cls(**data)

    def to_json(self) -> str:
        """:meth:`to_dict` as JSON."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> QuantDescriptor:
        """Inverse of :meth:`to_json`."""
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"QuantDescriptor: not JSON ({error})") from None
        return cls.from_dict(data)

    def __repr__(self) -> str:
        changed = [
            (f.name, getattr(self, f.name))
            for f in dataclasses.fields(self)
            if getattr(self, f.name) != f.default
        ]
        return f"QuantDescriptor({', '.join(f'{name}={value!r}' for name, value in changed)})"

    def __str__(self) -> str:
        parts = [str(self.format)]
        if self.block_size is not None:
            parts.append(
                f"block={self.block_size}"
                + (f" scales={self.scale_format}" if self.scale_format else "")
            )
        elif self.axis is not None:
            parts.append("axis=" + ",".join(map(str, self.axis)))  # type: ignore[arg-type]
        else:
            parts.append("per-tensor")
        flags = {
            "dynamic": self.dynamic,
            "learned": self.learn_amax,
            "codes": not self.fake_quant,
            self.calib_method: not self.dynamic,
        }
        parts += [flag for flag, on in flags.items() if on]
        if self.scale_amax is not None:
            parts.append(f"scale_amax={self.scale_amax:g}")
        return " ".join(parts)


def _bits(value: Any) -> int | tuple[int, int]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        value = tuple(value)
        if (
            len(value) == 2
            and all(type(v) is int for v in value)
            and "e{}m{}".format(*value) in CATALOG
        ):
            return value
        raise ConfigError(
            f"num_bits: got {value}; expected (4, 3), (5, 2), (3, 2), (2, 3) or (2, 1) for a float format"
        )
    if type(value) is not int:
        raise ConfigError(
            f"num_bits: got {value!r} ({type(value).__name__}); expected an integer or (exponent, mantissa) bits"
        )
    return value


def _axes(value: Any) -> tuple[int, ...] | None:
    if value is None:
        return None
    axes = (
        (value,)
        if isinstance(value, int)
        else tuple(value)
        if isinstance(value, Sequence) and not isinstance(value, str)
        else (value,)
    )
    if not axes or any(type(a) is not int for a in axes) or len(set(axes)) != len(axes):
        raise ConfigError(
            f"axis: got {value!r}; expected None, an integer or distinct integers: the axes that keep their own amax"
        )
    return axes


def _amax(value: Any) -> Amax | None:
    """A float or nested tuples of floats, from anything with ``tolist`` or from nested sequences."""
    if value is None:
        return None
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Sequence) and not isinstance(value, str):
        return tuple(_amax(v) for v in value)
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(
            f"amax: got {value!r} ({type(value).__name__}); expected a number, a sequence, an array or a tensor"
        )
    if not 0 <= value < float("inf"):
        raise ConfigError(f"amax: got {value}; expected a finite number >= 0")
    return float(value)


def _options(value: Any) -> tuple[tuple[str, Any], ...]:
    wrong = ConfigError(
        f"calib_options: got {value!r}; expected a mapping of keyword arguments to numbers or strings"
    )
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        options = tuple(sorted((str(key), option) for key, option in pairs))
    except (TypeError, ValueError):
        raise wrong from None
    if any(not isinstance(option, (int, float, str, type(None))) for _, option in options):
        raise wrong  # such a descriptor could not be hashed or saved
    return options


def _plain(value: Any) -> Any:
    return [_plain(v) for v in value] if isinstance(value, tuple) else value


def _check_types(d: QuantDescriptor) -> None:
    expected: dict[str, tuple[type, ...]] = {
        "name": (str, type(None)),
        "calib_method": (str,),
        "scale_format": (str, type(None)),
    }
    expected |= dict.fromkeys(
        ("fake_quant", "learn_amax", "scale_range_grad", "unsigned", "narrow_range", "dynamic"),
        (bool,),
    )
    for field, types in expected.items():
        if not isinstance(getattr(d, field), types):
            raise ConfigError(
                f"{field}: got {getattr(d, field)!r}; expected {' or '.join(t.__name__ for t in types)}"
            )
    for field in ("block_size", "block_axis"):
        if type(getattr(d, field)) is not int and not (
            field == "block_size" and d.block_size is None
        ):
            raise ConfigError(f"{field}: got {getattr(d, field)!r}; expected an integer")


def _check_rules(d: QuantDescriptor) -> None:
    if d.scale_amax is not None and not (
        isinstance(d.scale_amax, (int, float)) and 0 < d.scale_amax < float("inf")
    ):
        raise ConfigError(f"scale_amax: got {d.scale_amax!r}; expected a finite number > 0")
    if d.block_size is not None and d.block_size < 1:
        raise ConfigError(f"block_size: got {d.block_size}; expected at least 1")
    if d.block_size is not None and d.axis is not None:
        raise ConfigError(
            f"block_size={d.block_size} with axis={d.axis}: expected one of them. Blocks keep all other axes apart already"
        )
    if d.scale_format is not None and d.block_size is None:
        raise ConfigError(
            f"scale_format={d.scale_format!r} without block_size: expected a block_size, such as 32"
        )
    if d.scale_format is not None:
        by_name(d.scale_format)
    if d.dynamic and (d.amax is not None or d.learn_amax):
        raise ConfigError(
            "dynamic: got amax or learn_amax too; expected neither, the range is taken from each call's data"
        )
    if d.scale_range_grad and not d.learn_amax:
        raise ConfigError(
            "scale_range_grad: got learn_amax=False; expected learn_amax=True, there is no gradient to scale otherwise"
        )


QUANT_DESC_8BIT_PER_TENSOR = QuantDescriptor(8)
QUANT_DESC_UNSIGNED_8BIT_PER_TENSOR = QuantDescriptor(8, unsigned=True)
QUANT_DESC_8BIT_CONV1D_WEIGHT_PER_CHANNEL = QuantDescriptor(8, axis=0)
QUANT_DESC_8BIT_CONV2D_WEIGHT_PER_CHANNEL = QuantDescriptor(8, axis=0)
QUANT_DESC_8BIT_CONV3D_WEIGHT_PER_CHANNEL = QuantDescriptor(8, axis=0)
QUANT_DESC_8BIT_LINEAR_WEIGHT_PER_ROW = QuantDescriptor(8, axis=0)
# A transposed convolution's weight is (in, out / groups, ...): its output channels are on axis 1. (TensorRT only takes axis 0.)
QUANT_DESC_8BIT_CONVTRANSPOSE1D_WEIGHT_PER_CHANNEL = QuantDescriptor(8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE2D_WEIGHT_PER_CHANNEL = QuantDescriptor(8, axis=1)
QUANT_DESC_8BIT_CONVTRANSPOSE3D_WEIGHT_PER_CHANNEL = QuantDescriptor(8, axis=1)

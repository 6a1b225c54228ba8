"""The quantization of one tensor as a frozen value.

A :class:`QuantDescriptor` holds no state and does nothing; :class:`torchq.nn.TensorQuantizer`
reads it.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torchq.descriptor.fields import (
    normalize_amin,
    normalize_axes,
    normalize_bits,
    normalize_options,
    normalize_range,
    tuples_to_lists,
)
from torchq.descriptor.rules import check_rules, check_types
from torchq.formats import (
    POWER_OF_TWO,
    Format,
    Granularity,
    PerAxis,
    PerBlock,
    PerTensor,
    by_bits,
    by_name,
)
from torchq.utils import check_fields, parse_json

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
            "e4m3" (NVFP4). None keeps float32 scales.
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
        normalized = {
            "num_bits": normalize_bits(self.num_bits),
            "axis": normalize_axes(self.axis),
            "amax": None if self.amax is None else normalize_range("amax", self.amax),
            "amin": None if self.amin is None else normalize_amin(self.amin),
            "calib_options": normalize_options(self.calib_options),
        }
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

        It is the one called :attr:`scale_format`, or the powers of two.
        """
        if self.power_of_two:
            return POWER_OF_TWO
        return None if self.scale_format is None else by_name(self.scale_format)

    def replace(self, **changes: Any) -> QuantDescriptor:
        """Return a copy with some fields changed."""
        return dataclasses.replace(self, **changes)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults, as JSON and YAML data."""
        out = {}
        for name, value in self._changed_fields():
            out[name] = dict(value) if name == "calib_options" else tuples_to_lists(value)
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> QuantDescriptor:
        """Return the descriptor that :meth:`to_dict` was called on.

        Raises:
            ConfigError: not a mapping, an unknown key, or an invalid value.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        return cls(**check_fields(data, "QuantDescriptor", known=known))

    def to_json(self) -> str:
        """Return :meth:`to_dict` as JSON text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> QuantDescriptor:
        """Return the descriptor that :meth:`to_json` was called on.

        Raises:
            ConfigError: not JSON, or see :meth:`from_dict`.
        """
        return cls.from_dict(parse_json(text, "QuantDescriptor"))

    def _changed_fields(self) -> list[tuple[str, Any]]:
        """Return the names and values of the fields that differ from their defaults."""
        pairs = [(field, getattr(self, field.name)) for field in dataclasses.fields(self)]
        return [(field.name, value) for field, value in pairs if value != field.default]

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in self._changed_fields())
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

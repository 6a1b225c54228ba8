"""``QuantDescriptor`` of pytorch-quantization, with the keywords and errors of the original.

:class:`torchq.QuantDescriptor` is the frozen successor. The ``descriptor`` of a
:class:`~torchq.compat.pytorch_quantization.nn.TensorQuantizer` is one of those.
"""

from __future__ import annotations

import builtins
import operator
from typing import Any

import torch

from torchq.compat.errors import LegacyTypeError
from torchq.errors import ConfigError
from torchq.utils.optional import import_optional

NumBits = int | tuple[int, int]

_DEFAULTS: builtins.dict[str, object] = {
    "fake_quant": True,
    "axis": None,
    "amax": None,
    "learn_amax": False,
    "scale_amax": None,
    "calib_method": "max",
    "unsigned": False,
    "narrow_range": False,
}


def check_num_bits(num_bits: Any) -> NumBits:
    """Return ``num_bits`` as an integer >= 0 or ``(4, 3)``."""
    if isinstance(num_bits, (tuple, list)) and tuple(num_bits) == (4, 3):
        return (4, 3)
    try:
        bits = operator.index(num_bits)
    except TypeError:
        raise LegacyTypeError(
            f"num_bits: got {num_bits!r}; expected an integer >= 0, or (4, 3) for FP8"
        ) from None
    if bits < 0:
        raise ConfigError(
            f"num_bits: got {bits}; expected an integer >= 0, or (4, 3) for FP8"
        )
    return bits


def _as_array(amax: Any) -> object:
    """Return a float or a list as a float32 ndarray, which the original keeps."""
    is_array = hasattr(amax, "__array__") and not isinstance(amax, torch.Tensor)
    if isinstance(amax, (float, list)) or is_array:
        return torch.tensor(
            amax.tolist() if is_array else amax, dtype=torch.float32
        ).numpy()
    raise LegacyTypeError(
        f"amax must be float, list or ndarray: got {amax!r} ({type(amax).__name__})"
    )


def field(name: str, doc: str, assignable: bool = False) -> Any:
    """Return a property for a private attribute."""

    def assign(self: Any, value: object) -> None:
        setattr(self, name, value)

    return property(
        lambda self: getattr(self, name), assign if assignable else None, doc=doc
    )


class ScaledQuantDescriptor:
    """How a tensor is quantized, with the keywords of pytorch-quantization.

    Args:
        num_bits: an integer, or ``(4, 3)`` for FP8 E4M3. 0 quantizes everything to 0.
        name: a label.
        fake_quant: False returns integer codes instead of dequantized values.
        axis: None, an integer or a tuple: the axes that keep their own range.
        amax: a fixed range: a float, list or ndarray; kept as a float32 ndarray.
        learn_amax: clip to a learned range first.
        scale_amax: multiplies the range whenever it is used.
        calib_method: "max" or "histogram".
        unsigned: codes from 0 up.
        narrow_range: leave out the lowest code of a signed format.

    Raises:
        LegacyTypeError: a wrong type, ``learn_amax`` with an axis, or an unknown keyword.
        ConfigError: a negative ``num_bits``.

    Example:
        >>> from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor
        >>> QuantDescriptor(num_bits=4, axis=(0,)).dict()
        {'num_bits': 4, 'name': None, 'axis': (0,)}
    """

    def __init__(
        self, num_bits: Any = 8, name: str | None = None, **kwargs: Any
    ) -> None:
        if unused := sorted(set(kwargs) - set(_DEFAULTS)):
            raise LegacyTypeError(
                f"Unused keys: got {unused}; expected some of {sorted(_DEFAULTS)}"
            )
        if name is not None and not isinstance(name, str):
            raise LegacyTypeError(f"name must be a string or None: got {name!r}")
        values = {**_DEFAULTS, **kwargs}
        if values["learn_amax"] and values["axis"] is not None:
            raise LegacyTypeError(
                f"axis is ignored and must be None when learn_amax is true: got {values['axis']!r}"
            )
        if values["amax"] is not None:
            values["amax"] = _as_array(values["amax"])
        values |= {"num_bits": check_num_bits(num_bits), "name": name}
        for key, value in values.items():
            setattr(self, f"_{key}", value)

    num_bits = field("_num_bits", "Integer width, or (4, 3).")
    name = field("_name", "The label.")
    fake_quant = field("_fake_quant", "Whether dequantized values come out.")
    axis = field("_axis", "The axes that keep their own range, as given.")
    amax = field("_amax", "The fixed range, a float32 ndarray, or None.")
    learn_amax = field("_learn_amax", "Whether the range is learned.")
    scale_amax = field("_scale_amax", "The multiplier of the range, or None.")
    calib_method = field("_calib_method", '"max" or "histogram".')
    unsigned = field("_unsigned", "Whether codes start at 0.")
    narrow_range = field("_narrow_range", "Whether the lowest signed code is left out.")

    def dict(self) -> builtins.dict[str, Any]:
        """Return ``num_bits``, ``name`` and all fields that differ from their defaults.

        They are the keywords of an equal descriptor.
        """
        out: builtins.dict[str, Any] = {"num_bits": self.num_bits, "name": self.name}
        for key, default in _DEFAULTS.items():
            value = getattr(self, key)
            if key == "amax" and value is not None:
                value = value.tolist()
            if value != default:
                out[key] = value
        return out

    def to_yaml(self) -> str:
        """Return :meth:`dict` as YAML, with lists in place of tuples."""
        data = {
            k: list(v) if isinstance(v, tuple) else v for k, v in self.dict().items()
        }
        return _yaml().dump(data, width=120)

    @classmethod
    def from_yaml(cls, yaml_str: str) -> ScaledQuantDescriptor:
        """Return the descriptor of a YAML text of :meth:`to_yaml` or of pytorch-quantization."""
        data = _yaml().safe_load(yaml_str)
        for key in ("axis", "num_bits"):
            if isinstance(data.get(key), list):
                data[key] = tuple(data[key])
        return cls(**data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ScaledQuantDescriptor) and self.dict() == other.dict()

    # Scripts change the private attributes, so there is no hash.
    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        parts = [
            f"{'unsigned ' if self.unsigned else ''}{self.num_bits}bit",
            "fake" if self.fake_quant else "real",
            "per-tensor" if self.axis is None else f"axis={self.axis}",
        ]
        if self.amax is not None:
            parts.append(f"amax={self.amax.tolist()}")
        parts += ["narrow"] * self.narrow_range + ["learn_amax"] * self.learn_amax
        if self.scale_amax is not None:
            parts.append(f"scale_amax={self.scale_amax}")
        label = "QuantDescriptor" if self.name is None else f"{self.name}: "
        return f"{label}({' '.join(parts)})"

    __repr__ = __str__


def _yaml() -> Any:
    """Return the yaml module."""
    return import_optional("yaml", "QuantDescriptor YAML", extra="yaml")

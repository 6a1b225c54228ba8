"""The flags of a legacy quantizer, and torchq's two switches and descriptor read from them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.compat.pytorch_quantization.descriptor import NumBits
from torchq.compat.pytorch_quantization.legacy_scale import live_range
from torchq.compat.pytorch_quantization.nn.modules.clip import Clip
from torchq.descriptor import QuantDescriptor as CoreDescriptor
from torchq.errors import CalibrationError, ConfigError
from torchq.formats import Granularity, PerAxis, PerTensor
from torchq.functional import scale_from_amax

__all__ = ["LegacySwitches"]


class LegacySwitches:
    """Mixin with ``disable()``, ``enable_calib()``, ... and the fields of the descriptor."""

    _num_bits: NumBits
    _fake_quant: bool
    _axis: int | tuple[int, ...] | list[int] | None
    _scale_amax: float | None
    _learn_amax: bool
    _unsigned: bool
    _narrow_range: bool
    _scale: Any
    _disabled: bool
    _if_quant: bool
    _if_clip: bool
    _if_calib: bool
    _calibrator: Any
    amax: Tensor | None
    clip: Clip

    def disable(self) -> None:
        """Pass the input through."""
        self._disabled = True

    def enable(self) -> None:
        """Undo :meth:`disable`."""
        self._disabled = False

    def disable_quant(self) -> None:
        """Do not quantize."""
        self._if_quant = False

    def enable_quant(self) -> None:
        """Quantize."""
        self._if_quant = True

    def disable_calib(self) -> None:
        """Do not feed the calibrator."""
        self._if_calib = False

    def enable_calib(self) -> None:
        """Feed the calibrator.

        Raises:
            ConfigError: there is none.
        """
        if self._calibrator is None:
            raise ConfigError(
                "enable_calib: Calibrator was not created; expected one. "
                "Assign quantizer._calibrator"
            )
        self._if_calib = True

    def disable_clip(self) -> None:
        """Do not clip, and do not learn the range."""
        self._switch_clip(False)

    def enable_clip(self) -> None:
        """Clip to the learned range, and learn it.

        Raises:
            ConfigError: the descriptor has no ``learn_amax``.
        """
        self._switch_clip(True)

    def _switch_clip(self, on: bool) -> None:
        """Turn clipping and the gradients of its bounds on or off."""
        if not self._learn_amax:
            raise ConfigError(
                "clip: learn_amax is False; expected a descriptor with learn_amax=True"
            )
        self._if_clip = on
        self.clip.clip_value_min.requires_grad = on
        self.clip.clip_value_max.requires_grad = on

    @property
    def num_bits(self) -> NumBits:
        """Integer width, or (4, 3); assignable."""
        return self._num_bits

    @num_bits.setter
    def num_bits(self, value: NumBits) -> None:
        self._num_bits = value

    @property
    def unsigned(self) -> bool:
        """True if codes start at 0; assignable."""
        return self._unsigned

    @unsigned.setter
    def unsigned(self, value: bool) -> None:
        self._unsigned = value

    @property
    def narrow_range(self) -> bool:
        """True if the lowest signed code is left out; assignable."""
        return self._narrow_range

    @narrow_range.setter
    def narrow_range(self, value: bool) -> None:
        self._narrow_range = value

    axis = property(lambda self: self._axis, doc="The axes that keep their own range, as given.")
    fake_quant = property(lambda self: self._fake_quant, doc="Whether dequantized values come out.")
    learn_amax = property(lambda self: self._learn_amax, doc="Whether the range is learned.")
    scale = property(
        lambda self: self._scale,
        doc="qmax / amax of the last call without fake_quant, None before it; 1 with.",
    )

    @property
    def maxbound(self) -> float:
        """The largest code."""
        if isinstance(self._num_bits, tuple):
            return 448.0
        return (1 << (self._num_bits - 1 + int(self._unsigned))) - 1

    @property
    def step_size(self) -> Tensor | None:
        """The quotient amax / :attr:`maxbound`; None while the range is not known."""
        return None if self.amax is None else self.amax / self.maxbound

    # The interface of torchq.nn.TensorQuantizer follows.

    @property
    def granularity(self) -> Granularity:
        """The elements that share a range."""
        if self._axis is None:
            return PerTensor()
        return PerAxis((self._axis,) if isinstance(self._axis, int) else tuple(self._axis))

    @property
    def descriptor(self) -> CoreDescriptor:
        """These settings as a :class:`torchq.QuantDescriptor`.

        Raises:
            ConfigError: ``num_bits`` is 0, which has none.
        """
        is_float = isinstance(self._num_bits, tuple)
        return CoreDescriptor(
            self._num_bits,
            axis=tuple(self._axis) if isinstance(self._axis, list) else self._axis,
            fake_quant=self._fake_quant,
            learn_amax=self._learn_amax,
            scale_amax=self._scale_amax,
            unsigned=self._unsigned and not is_float,
            narrow_range=self._narrow_range and not is_float,
        )

    @property
    def calibrated(self) -> bool:
        """True if the range is known."""
        return self._learn_amax or self.amax is not None

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the scale amax / qmax of the range in use, as torchq computes it, and zeros."""
        amax = self._learned_amax() if self._learn_amax else self.amax  # type: ignore[attr-defined]
        if amax is None:
            raise CalibrationError(
                "TensorQuantizer: the scale is not known; expected a calibrated amax. "
                "Run load_calib_amax()"
            )
        if self._scale_amax is not None and not self._learn_amax:
            amax = amax * self._scale_amax
        scale = scale_from_amax(live_range(amax.detach()), self.descriptor.format)
        return scale, torch.zeros_like(scale, dtype=torch.int32)

    def range_for(self, x: Tensor) -> Tensor:
        """Return the range that a call on ``x`` quantizes with."""
        if self._learn_amax:
            return self._learned_amax()  # type: ignore[attr-defined]
        return self._get_amax(x)  # type: ignore[attr-defined]

    @property
    def observing(self) -> bool:
        """True if calls feed the calibrator."""
        return self._if_calib and not self._disabled

    @observing.setter
    def observing(self, on: bool) -> None:
        self._switch("_if_calib", self.observing, on)

    @property
    def quantizing(self) -> bool:
        """True if calls quantize."""
        return self._if_quant and not self._disabled

    @quantizing.setter
    def quantizing(self, on: bool) -> None:
        self._switch("_if_quant", self.quantizing, on)

    def _switch(self, flag: str, before: bool, on: bool) -> None:
        """Set one of the two switches and leave the other as it is.

        A disabled quantizer has both off, whatever its flags say.
        """
        if before == on:
            return
        if self._disabled:
            self._disabled = self._if_quant = self._if_calib = False
        setattr(self, flag, on)

    def set_amax(self, value: Any) -> None:
        """Set the range, of any shape."""
        amax = torch.as_tensor(value).detach().to(dtype=torch.float32, copy=True)
        self._adopt(amax)  # type: ignore[attr-defined]

"""The range of a quantizer: its buffers, how it is set, loaded and moved, and the scale of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchq.descriptor import QuantDescriptor
from torchq.errors import CalibrationError, ConfigError, ExportError
from torchq.functional import (
    is_dead,
    is_dead_range,
    range_gradient_scale,
    reduce_amax,
    reduce_range,
    scale_and_zero_point,
    scale_from_amax,
    scale_gradient,
)
from torchq.nn.sign_choice import SignChoice
from torchq.utils import constant_while_tracing

__all__ = ["QuantizerRange"]

# Keeps these calls whole when a model is traced with torch.fx.
torch.fx.wrap("reduce_amax")
torch.fx.wrap("reduce_range")

_CALIBRATE = "Run torchq.calibrate(model, batches), or set_amax(...)"
_LEGACY_KEYS = {"_amax": "amax", "_pre_quant_scale": "pre_quant_scale"}


class QuantizerRange(SignChoice):
    """Mixin of a quantizer: its range, symmetric or with two ends, in buffers or parameters."""

    descriptor: QuantDescriptor
    name: str
    amax: Tensor
    amin: Tensor | None
    pre_quant_scale: Tensor | None

    @property
    def _label(self) -> str:
        """The path for error texts."""
        return self.name or "TensorQuantizer"

    @property
    def _ends(self) -> tuple[str, ...]:
        """The names of the buffers or parameters of the range."""
        return ("amax",) if self.descriptor.symmetric else ("amin", "amax")

    def _prepare_range(self, device: torch.device | None) -> None:
        """Add the buffers or parameters of the range, as the descriptor fixes them or empty."""
        self.register_buffer("amin", None)
        for end in self._ends:
            given = getattr(self.descriptor, end)
            values = [] if given is None else given
            initial = torch.tensor(values, dtype=torch.float32, device=device)
            if self.descriptor.learn_amax:
                self._buffers.pop(end, None)
                self.register_parameter(end, nn.Parameter(initial))
            else:
                self.register_buffer(end, initial)

    def range_for(self, x: Tensor) -> Tensor:
        """Return the amax that a call on ``x`` quantizes with; see :meth:`ends_for`."""
        return self.ends_for(x)[1]

    def ends_for(self, x: Tensor) -> tuple[Tensor | None, Tensor]:
        """Return amin (None for a symmetric range) and amax that a call on ``x`` quantizes with.

        They are the calibrated ones, or those of ``x``, times ``scale_amax``.
        """
        d = self.descriptor
        amin = None
        if self.calibrated and not d.dynamic:
            amax = self._with_scaled_gradient(self.amax, x)
            if not d.symmetric:
                assert self.amin is not None
                amin = self._with_scaled_gradient(self.amin, x)
        elif torch.onnx.is_in_onnx_export():
            raise ExportError(
                f"{self._label}: has no calibrated range to export; expected a fixed amax. "
                f"{_CALIBRATE}"
            )
        elif d.symmetric:
            amax = reduce_amax(x, d.granularity)
        else:
            amin, amax = reduce_range(x, d.granularity)
        if d.scale_amax is None:
            return amin, amax
        return None if amin is None else amin * d.scale_amax, amax * d.scale_amax

    def _with_scaled_gradient(self, end: Tensor, x: Tensor) -> Tensor:
        """Return an end of the range, whose gradient is scaled in training if that is wanted."""
        is_training = torch.is_grad_enabled() and not torch.onnx.is_in_onnx_export()
        if not (self.descriptor.scale_range_grad and is_training):
            return end
        with constant_while_tracing():
            factor = range_gradient_scale(x.numel(), end.numel(), self.descriptor.format)
        return scale_gradient(end, factor)

    @property
    def calibrated(self) -> bool:
        """True if amax is known; the host does not wait."""
        with constant_while_tracing():
            return bool(self.amax.numel())

    @property
    def scale(self) -> Tensor:
        """The first of :meth:`calculate_qparams`."""
        return self.calculate_qparams()[0]

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the scale and the zero point that calls quantize with.

        Returns:
            scale: amax / qmax, or the length of an asymmetric range over the number of steps of its
                codes; float32, > 0, the shape of amax.
            zero_point: int32 of the same shape; zeros for symmetric ranges.

        Raises:
            CalibrationError: amax is not known yet.
        """
        if not self.calibrated:
            raise CalibrationError(
                f"{self._label}: the scale is not known; expected a calibrated amax. {_CALIBRATE}"
            )
        d, factor = self.descriptor, self.descriptor.scale_amax or 1.0
        amax = self.amax.detach() * factor
        if d.symmetric:
            scale = scale_from_amax(amax, d.format, d.block_scale_format)
            return scale, torch.zeros_like(scale, dtype=torch.int32)
        assert self.amin is not None
        amin = self.amin.detach() * factor
        scale, zero_point = scale_and_zero_point(amin, amax, d.format, d.block_scale_format)
        return scale, zero_point.to(torch.int32)

    def dead_ranges(self) -> Tensor:
        """Return where the known range quantizes everything to 0: bool, the shape of amax."""
        d, factor = self.descriptor, self.descriptor.scale_amax or 1.0
        amax = self.amax.detach() * factor
        if d.symmetric:
            return is_dead(amax, d.format)
        assert self.amin is not None
        return is_dead_range(self.amin.detach() * factor, amax, d.format)

    def set_amax(self, value: Any) -> None:
        """Set the range. The host waits for the device, so this is not for the hot path.

        A range so small that its scale is no normal float32 number quantizes everything to 0; a
        warning says so, unless the range is 0.

        Args:
            value: A number, nested sequence, array or tensor of finite numbers >= 0; it is copied
                to the device of amax as float32.

        Raises:
            ConfigError: Not such numbers, none at all, or too large for float32; or the range is
                asymmetric. The range stays as it was.
        """
        if not self.descriptor.symmetric:
            raise ConfigError(
                f"{self._label}: got set_amax for {self.descriptor}; expected both ends. "
                "Use set_range(amin, amax)"
            )
        with torch.inference_mode(False), torch.no_grad():
            new = self._as_end("amax", value)
            self._warn_of_lost(new, is_dead(new, self.descriptor.format))
            self._adopt(new)

    def set_range(self, amin: Any, amax: Any) -> None:
        """Set both ends of an asymmetric range; see :meth:`set_amax`.

        Args:
            amin: Finite numbers <= 0, of the shape of ``amax``.
            amax: Finite numbers >= 0.

        Raises:
            ConfigError: Not such numbers, different shapes, or a symmetric range; the range stays
                as it was.
        """
        if self.descriptor.symmetric:
            raise ConfigError(
                f"{self._label}: got set_range for {self.descriptor}; expected a descriptor with "
                "symmetric=False. Use set_amax(amax)"
            )
        with torch.inference_mode(False), torch.no_grad():
            low, high = self._as_end("amin", amin), self._as_end("amax", amax)
            if low.shape != high.shape:
                raise ConfigError(
                    f"{self._label}: got amin of shape {tuple(low.shape)} and amax of shape "
                    f"{tuple(high.shape)}; expected equal shapes"
                )
            self._warn_of_lost(high - low, is_dead_range(low, high, self.descriptor.format))
            self._adopt(low, "amin")
            self._adopt(high)

    def ends(self) -> tuple[Tensor, ...]:
        """Return copies of the ends of the range, for :meth:`set_ends`; empty ones if unknown."""
        return tuple(getattr(self, end).detach().clone() for end in self._ends)

    def set_ends(self, ends: tuple[Tensor, ...]) -> None:
        """Set the range to what :meth:`ends` returned."""
        with torch.inference_mode(False), torch.no_grad():
            for name, value in zip(self._ends, ends, strict=True):
                self._adopt(value.to(getattr(self, name).device), name)

    def _warn_of_lost(self, length: Tensor, dead: Tensor) -> None:
        lost = 0 if length.is_meta else int((dead & (length > 0)).sum())
        if lost:
            warnings.warn(
                f"{self._label}: got {lost} ranges as small as {float(length.min()):.3g}; "
                "their scales are no normal float32 numbers, so their values become 0",
                stacklevel=3,
            )

    def _as_end(self, end: str, value: Any) -> Tensor:
        """Return ``value`` as the end of a range, checked."""
        sign = ">=" if end == "amax" else "<="
        expected = f"expected finite numbers {sign} 0 that fit float32"
        try:
            given = _as_tensor(value).detach()
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"{self._label}: got an {end} of which {error}; {expected}") from None
        if given.is_complex() or given.numel() == 0:
            shown = f"{end} of dtype {given.dtype} and shape {tuple(given.shape)}"
            raise ConfigError(f"{self._label}: got {shown}; {expected}")
        new = given.to(device=self.amax.device, dtype=torch.float32, copy=True)
        outward = new if end == "amax" else -new
        if not new.is_meta and not bool(((outward >= 0) & (outward < torch.inf)).all()):
            raise ConfigError(f"{self._label}: got {end} {value}; {expected}")
        return new

    def _adopt(self, new: Tensor, end: str = "amax") -> None:
        if new.is_inference():  # Nothing could be trained through an inference tensor.
            with torch.inference_mode(False):
                new = new.clone()
        known = getattr(self, end)
        if isinstance(known, nn.Parameter):
            # The parameter object stays, so an optimizer that holds it keeps training it.
            known.data = new
        else:
            nn.Module.__setattr__(self, end, new)  # A check would wait for the device.

    def forget_amax(self) -> None:
        """Make the range unknown again, and the sign if calibration chooses it."""
        for end in self._ends:
            self._adopt(self.amax.new_empty(0), end)
        if self._chooses_sign:
            self.set_unsigned("auto")

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # .half() and .to(bfloat16) must not round the range: only the device of the result is
        # taken over.
        before = {end: getattr(self, end).detach() for end in self._ends}
        super()._apply(fn, recurse)
        for end, value in before.items():
            now = getattr(self, end)
            if now.dtype is not torch.float32:
                self._adopt(value.to(device=now.device), end)
                if now.grad is not None:
                    now.grad = now.grad.to(torch.float32)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for old, new in _LEGACY_KEYS.items():
            if prefix + old in state_dict:
                state_dict[prefix + new] = state_dict.pop(prefix + old)
        for end in self._ends:
            key = prefix + end
            if key in state_dict:
                state_dict[key] = state_dict[key].to(torch.float32)
                if state_dict[key].shape != getattr(self, end).shape:
                    self._adopt(torch.empty_like(state_dict[key], device=self.amax.device), end)
        factors, present = state_dict.get(prefix + "pre_quant_scale"), self.pre_quant_scale
        if factors is not None and (present is None or present.shape != factors.shape):
            self.pre_quant_scale = torch.empty_like(factors, device=self.amax.device)
        missing, own = args[2], {prefix + "amax", prefix + "amin", prefix + "unsigned"}
        before = list(missing)  # The layer may have named this range, which it knows to be lost.
        super()._load_from_state_dict(state_dict, prefix, *args)
        if prefix + "amax" not in state_dict:  # A float checkpoint leaves the range as it is.
            added = missing[len(before) :]
            missing[:] = before + [name for name in added if name not in own]
        if prefix + "unsigned" in state_dict:
            self._adopt_loaded_sign(prefix, args[4])

    def range_text(self) -> str:
        """Return the range in a few characters, for tables."""
        if self.descriptor.dynamic:
            return "dynamic"
        if not self.calibrated:
            return "unknown"
        if self.amax.is_meta:
            return f"meta{tuple(self.amax.shape)}"
        low, high = torch.aminmax(self.amax.detach())
        if not self.descriptor.symmetric:
            assert self.amin is not None
            low = self.amin.detach().min()
            several = f" ({self.amax.numel()})" if self.amax.numel() > 1 else ""
            return f"[{low:.4g}, {high:.4g}]{several}"
        several = f"..{high:.4g} ({self.amax.numel()})" if self.amax.numel() > 1 else ""
        return f"{low:.4g}{several}"


def _as_tensor(value: Any) -> Tensor:
    """Return a value as a tensor, whatever the default dtype and device of torch are.

    Python's numbers keep their float64.
    """
    if isinstance(value, Tensor):
        return value
    found = torch.as_tensor(value, device="cpu")
    if hasattr(value, "__array__") or not found.is_floating_point():
        return found
    return torch.as_tensor(value, device="cpu", dtype=torch.float64)

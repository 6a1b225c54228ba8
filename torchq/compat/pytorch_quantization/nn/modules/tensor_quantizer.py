"""The quantizer module of pytorch-quantization."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchq import nn as core
from torchq.calib import Calibrator
from torchq.compat.pytorch_quantization import calib
from torchq.compat.pytorch_quantization.nn.modules.clip import Clip
from torchq.compat.pytorch_quantization.nn.modules.quantize import quantize_dequantize
from torchq.compat.pytorch_quantization.nn.modules.switches import LegacySwitches
from torchq.compat.pytorch_quantization.tensor_quant import QuantDescriptor, tensor_quant
from torchq.errors import CalibrationError, ConfigError, ExportError
from torchq.functional import reduce_amax
from torchq.nn.quantizer_range import QuantizerRange

__all__ = ["TensorQuantizer"]

torch.fx.wrap("quantize_dequantize")
torch.fx.wrap("tensor_quant")
torch.fx.wrap("reduce_amax")

_SAVED = {"amax": "_amax", "pre_quant_scale": "_pre_quant_scale"}


class TensorQuantizer(LegacySwitches, core.TensorQuantizer):  # type: ignore[override]
    """A :class:`torchq.nn.TensorQuantizer` with the interface of pytorch-quantization.

    State dict keys and arithmetic are also those of the original. All functions of torchq that
    take its own quantizers take this one.

    The range is the buffer ``_amax``. It does not exist until it is known: given by the
    descriptor, loaded from the calibrator or a state dict, or set. Until then each call uses the
    range of its own data. It stays float32 for every dtype of the model, and may be on another
    device than the input.

    Args:
        quant_desc: how to quantize.
        disabled: pass the input through (times ``pre_quant_scale``).
        if_quant: quantize.
        if_clip: clip to the learned range; needs ``learn_amax``.
        if_calib: feed the calibrator.

    Raises:
        ConfigError: a ``calib_method`` other than "max" and "histogram", or ``if_clip`` without
            ``learn_amax``.
    """

    #: Accepted without effect: both exporters write QuantizeLinear and DequantizeLinear anyway.
    use_fb_fake_quant = False
    #: Set by enable_onnx_export(), which makes an unknown range an error. Exporting works without.
    _enable_onnx_export = False
    # Defaults of the class serve objects that the original pickled.
    name = ""
    calibrator: Calibrator | None = None

    def __init__(
        self,
        quant_desc: QuantDescriptor = QuantDescriptor(),  # noqa: B008  # Nothing changes it.
        disabled: bool = False,
        if_quant: bool = True,
        if_clip: bool = False,
        if_calib: bool = False,
    ) -> None:
        super(core.TensorQuantizer, self).__init__()
        self._num_bits = quant_desc.num_bits
        self._fake_quant = quant_desc.fake_quant
        self._axis = quant_desc.axis
        self._scale_amax = quant_desc.scale_amax
        self._learn_amax = quant_desc.learn_amax
        self._unsigned = quant_desc.unsigned
        self._narrow_range = quant_desc.narrow_range
        self._scale: Any = 1.0 if quant_desc.fake_quant else None
        self._disabled = disabled
        self._if_quant = if_quant
        self._if_clip = False
        self._if_calib = if_calib
        if quant_desc.amax is not None:
            self.amax = quant_desc.amax
        if self._learn_amax:
            bound = 1.0 if quant_desc.amax is None else quant_desc.amax
            self.clip = Clip(-bound, bound, learn_min=True, learn_max=True)
        if self._learn_amax or if_clip:
            self.enable_clip()
        self._calibrator = self._legacy_calibrator(quant_desc.calib_method)

    def _legacy_calibrator(self, method: str) -> Any:
        """Return a new calibrator of the original."""
        makers = {"max": calib.MaxCalibrator, "histogram": calib.HistogramCalibrator}
        if method not in makers:
            raise ConfigError(f"calib_method: got {method!r}; expected 'max' or 'histogram'")
        return makers[method](self._num_bits, self._axis, self._unsigned)

    @property  # type: ignore[override]
    def amax(self) -> Tensor | None:
        """The range, or None; assignable from a number, list, array or tensor of its shape."""
        return getattr(self, "_amax", None)

    @amax.setter
    def amax(self, value: Any) -> None:
        self._set("_amax", value)

    @property
    def pre_quant_scale(self) -> Tensor | None:
        """The factor on the input, used also when disabled; or None."""
        return getattr(self, "_pre_quant_scale", None)

    @pre_quant_scale.setter
    def pre_quant_scale(self, value: Any) -> None:
        self._set("_pre_quant_scale", value)

    def _set(self, name: str, value: Any) -> None:
        """Copy ``value`` into the buffer ``name``, or create the buffer."""
        if value is None:
            raise ConfigError(
                f"{name[1:]}: got None; expected a number or an array. "
                f"Use del quantizer.{name} to forget it"
            )
        with torch.inference_mode(False), torch.no_grad():
            known = getattr(self, name, None)
            new = torch.as_tensor(value).detach().to(dtype=torch.float32, copy=True)
            if bool((new < 0).any()) and name == "_amax":
                raise ConfigError(
                    f"amax: got {value}; expected no negative values. Take the absolute maximum"
                )
            if known is None:
                self.register_buffer(name, new)
            elif known.shape != new.shape:
                raise CalibrationError(
                    f"{name[1:]}: Changing shape when setting it is not allowed: "
                    f"got {tuple(new.shape)}; expected {tuple(known.shape)}. "
                    f"Use del quantizer.{name} first"
                )
            else:
                known.copy_(new)

    def __setattr__(self, name: str, value: Any) -> None:
        # Scripts assign the private range of a quantizer that has none yet. It must become a
        # buffer, so that it is saved and moved with the module.
        if name in _SAVED.values() and type(value) is Tensor and name not in self._buffers:
            self.register_buffer(name, value)
        else:
            super().__setattr__(name, value)

    def load_calib_amax(self, *args: Any, strict: bool = True, **kwargs: Any) -> None:
        """Set the range to ``_calibrator.compute_amax(*args, **kwargs)``, of any shape.

        Args:
            *args: positional arguments of ``compute_amax``.
            strict: False warns and sets NaN if nothing was collected.
            **kwargs: keyword arguments of ``compute_amax``.

        Raises:
            CalibrationError: nothing was collected, or there is no calibrator.
        """
        if self._calibrator is None:
            raise CalibrationError(
                f"{self._where()}: Calibrator not created; expected one. "
                "Assign quantizer._calibrator"
            )
        amax = self._calibrator.compute_amax(*args, **kwargs)
        if amax is None:
            text = (
                f"{self._where()}: Calibrator returned None: it has not seen any tensor; "
                "expected a batch with calibration enabled."
            )
            if strict:
                raise CalibrationError(f"{text} Pass strict=False to set NaN")
            warnings.warn(f"{text} The range is NaN now", stacklevel=2)
            amax = torch.tensor(math.nan)
        self._adopt(amax.detach().to(dtype=torch.float32, copy=True))

    def _adopt(self, new: Tensor, end: str = "amax") -> None:
        known = self.amax
        if known is not None and known.shape == new.shape:
            known.copy_(new)
        else:
            self._buffers.pop("_amax", None)
            self.register_buffer("_amax", new if known is None else new.to(known.device))

    def forget_amax(self) -> None:
        """Remove the range; from now on each call uses the range of its own data."""
        self._buffers.pop("_amax", None)

    def init_learn_amax(self) -> None:
        """Start the learned range at the known one (its largest element).

        Raises:
            CalibrationError: without ``learn_amax``, or without a known range.
        """
        if not self._learn_amax or self.amax is None:
            lacks = "learn_amax=True" if not self._learn_amax else "a range"
            raise CalibrationError(
                f"{self._where()}: Called init_learn_amax without {lacks}; "
                "expected a calibrated quantizer that learns"
            )
        bound = self.amax.max()
        self.clip.clip_value_min.data.copy_(-bound)
        self.clip.clip_value_max.data.copy_(bound)

    def _get_amax(self, inputs: Tensor) -> Tensor:
        """Return the known range, or that of ``inputs``, times ``scale_amax``, as float32."""
        if self._enable_onnx_export:
            self._check_onnx_readiness(inputs)
        amax = self.amax
        if amax is None:
            amax = reduce_amax(inputs, self.granularity)
        elif amax.dtype in (torch.float16, torch.bfloat16):  # assigned by a script
            amax = amax.float()
        return amax.detach() if self._scale_amax is None else amax.detach() * self._scale_amax

    def _check_onnx_readiness(self, inputs: Tensor) -> None:
        """Raise an error unless the range is known, under ``enable_onnx_export()``.

        Outside of it an uncalibrated quantizer is exported with the range of the example, which
        scripts do to read the graph before they calibrate.

        Raises:
            ExportError: the range is not known, or FP8 has more than one range.
        """
        if self.amax is None:
            raise ExportError(
                f"{self._where()}: Quantizer has not been calibrated; "
                "expected a fixed range to export. Run load_calib_amax() first"
            )
        if self._if_calib:
            warnings.warn(
                f"{self._where()}: got calibration enabled during an export; "
                "expected disable_calib() before it",
                stacklevel=2,
            )
        if isinstance(self._num_bits, tuple) and self.amax.numel() != 1:
            raise ExportError(
                f"{self._where()}: got amax of shape {tuple(self.amax.shape)} for FP8; "
                "expected a scalar. Quantize per tensor"
            )

    def _learned_amax(self) -> Tensor:
        """Return the learned range as float32 without gradient."""
        return torch.maximum(-self.clip.clip_value_min, self.clip.clip_value_max).detach().float()

    def _quant_forward(self, inputs: Tensor) -> Tensor:
        """Quantize ``inputs``."""
        if self._learn_amax:
            inputs, amax = self.clip(inputs), self._learned_amax()
        else:
            amax = self._get_amax(inputs)
        if self._fake_quant or isinstance(self._num_bits, tuple):
            return quantize_dequantize(
                inputs, amax, self._num_bits, self._unsigned, self._narrow_range, self.granularity
            )
        codes, self._scale = tensor_quant(
            inputs, amax, self._num_bits, self._unsigned, self._narrow_range
        )
        return codes

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``inputs``, calibrated on, clipped or quantized according to the switches."""
        if self.pre_quant_scale is not None:
            inputs = inputs * self.pre_quant_scale.to(inputs)
        if self._disabled:
            return inputs
        if self._if_calib:
            self.observe(inputs)
        if self._if_quant:
            return self._quant_forward(inputs)
        return self.clip(inputs) if self._if_clip else inputs

    def observe(self, x: Tensor) -> None:
        """Give ``x`` to the calibrator; to torchq's own while :func:`torchq.calibrate` runs."""
        calibrator = self._calibrator if self.calibrator is None else self.calibrator
        if calibrator is None:
            raise CalibrationError(
                f"{self._where()}: Calibrator was not created; expected one. "
                "Assign quantizer._calibrator"
            )
        calibrator.collect(x.detach())

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TensorQuantizer:
        # .half() must not round the range; only the device of the result is taken over.
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super(QuantizerRange, self)._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype is not buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for new, old in _SAVED.items():
            value = state_dict.pop(prefix + new, None)  # the key in torchq's own modules
            value = state_dict.pop(prefix + old, value)
            if value is None or not value.numel():
                continue
            mine = self._buffers.get(old)
            if mine is None or mine.shape != value.shape:
                device = value.device if mine is None else mine.device
                self._buffers.pop(old, None)
                self.register_buffer(
                    old, torch.empty(value.shape, dtype=torch.float32, device=device)
                )
            state_dict[prefix + old] = value.float()
        super(QuantizerRange, self)._load_from_state_dict(state_dict, prefix, *args)
        missing = args[2]
        for key in [prefix + old for old in _SAVED.values() if prefix + old in missing]:
            missing.remove(key)  # a float checkpoint leaves the range as it is

    def _where(self) -> str:
        """Return the start of error texts."""
        return self.name or "TensorQuantizer"

    def _short_amax(self, fmt: str = ".4f") -> str:
        """Return the range as text: "dynamic", one number, or the extremes and the number.

        Args:
            fmt: the format of a number.
        """
        amax = self.amax
        if amax is None:
            return "dynamic"
        if amax.numel() == 1:
            return format(amax.item(), fmt)
        extremes = f"{amax.min().item():{fmt}}, {amax.max().item():{fmt}}"
        return f"[{extremes}]({amax.numel()})"

    def extra_repr(self) -> str:
        """Return the settings and the range for ``print``."""
        if self._disabled:
            return "disabled"
        known = self._short_amax()
        parts = [f"{'unsigned ' if self._unsigned else ''}{self._num_bits}bit"]
        parts += [
            flag for flag, on in (("narrow", self._narrow_range), ("fake", self._fake_quant)) if on
        ]
        parts += ["per-tensor" if self._axis is None else f"axis={self._axis}", f"amax={known}"]
        parts += [f"*{self._scale_amax}"] if self._scale_amax is not None else []
        parts += [
            flag
            for flag, on in (
                ("pre_quant_scale", self.pre_quant_scale is not None),
                ("learned", self._learn_amax),
            )
            if on
        ]
        parts += (
            [f"calibrator={type(self._calibrator).__name__}"]
            if self._calibrator is not None
            else []
        )
        parts += [
            flag
            for flag, on in (
                ("quant", self._if_quant),
                ("clip", self._if_clip),
                ("calib", self._if_calib),
            )
            if on
        ]
        return " ".join(parts)

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
from torchq.compat import traces
from torchq.compat.errors import LegacyTypeError, UnsupportedError
from torchq.compat.pytorch_quantization import calib
from torchq.compat.pytorch_quantization.clip import Clip
from torchq.compat.pytorch_quantization.descriptor import field
from torchq.compat.pytorch_quantization.tensor_quant import (
    NumBits,
    QuantDescriptor,
    fake_tensor_quant,
    live_range,
    scaled_e4m3,
    tensor_quant,
)
from torchq.descriptor import QuantDescriptor as CoreDescriptor
from torchq.errors import CalibrationError, ConfigError, ExportError
from torchq.formats import Granularity, IntFormat, PerAxis, PerTensor, integer_format
from torchq.functional import QParams, Range, reduce_amax
from torchq.utils import constant_while_tracing

torch.fx.wrap("quantize_dequantize")
torch.fx.wrap("tensor_quant")
torch.fx.wrap("reduce_amax")

_NO_CALIBRATOR = (
    "Calibrator was not created; expected one. Assign quantizer._calibrator"
)
_SAVED = {"amax": "_amax", "pre_quant_scale": "_pre_quant_scale"}


def quantize_dequantize(
    inputs: Tensor,
    amax: Tensor,
    num_bits: NumBits,
    unsigned: bool,
    narrow_range: bool,
    granularity: Granularity,
) -> Tensor:
    """Return ``inputs`` quantized and dequantized, in its dtype.

    ``amax`` broadcasts, or has one element for each index of the axis of ``granularity``.
    """
    amax = _aligned(inputs, amax, granularity)
    if isinstance(num_bits, tuple):
        return scaled_e4m3(inputs, amax, *num_bits)
    return fake_tensor_quant(inputs, amax, num_bits, unsigned, narrow_range)


def _aligned(inputs: Tensor, amax: Tensor, granularity: Granularity) -> Tensor:
    """Return ``amax`` without dimensions, or with those of ``inputs``."""
    with constant_while_tracing():
        if amax.numel() == 1:
            return amax.reshape(())
        if isinstance(granularity, PerAxis):
            return granularity.align(amax, inputs.shape)
    return amax


def _setter(flag: str, value: bool, doc: str) -> Callable[[Any], None]:
    """Return a method that sets one flag."""

    def method(self: Any) -> None:
        setattr(self, flag, value)

    method.__doc__ = doc
    return method


class TensorQuantizer(core.TensorQuantizer):
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

    #: Traces of torch.jit hold torch's own operators then, which Torch-TensorRT reads. Exports hold
    #: QuantizeLinear and DequantizeLinear anyway.
    use_fb_fake_quant = False
    #: Set by enable_onnx_export(), which makes an unknown range an error. Exporting works without.
    _enable_onnx_export = False
    # Defaults of the class serve objects that the original pickled.
    name = ""
    calibrator: Calibrator | None = None
    clip: Clip

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
            raise ConfigError(
                f"calib_method: got {method!r}; expected 'max' or 'histogram'"
            )
        return makers[method](self._num_bits, self._axis, self._unsigned)

    disable = _setter("_disabled", True, "Pass the input through.")
    enable = _setter("_disabled", False, "Undo :meth:`disable`.")
    disable_quant = _setter("_if_quant", False, "Do not quantize.")
    enable_quant = _setter("_if_quant", True, "Quantize.")
    disable_calib = _setter("_if_calib", False, "Do not feed the calibrator.")

    def enable_calib(self) -> None:
        """Feed the calibrator."""
        if self._calibrator is None:
            raise ConfigError(f"enable_calib: {_NO_CALIBRATOR}")
        self._if_calib = True

    def disable_clip(self) -> None:
        """Do not clip, and do not learn the range."""
        self._switch_clip(False)

    def enable_clip(self) -> None:
        """Clip to the learned range, and learn it."""
        self._switch_clip(True)

    def _switch_clip(self, on: bool) -> None:
        """Turn clipping and the gradients of its bounds on or off."""
        if not self._learn_amax:
            raise ConfigError(
                "clip: learn_amax is False; expected a descriptor that learns"
            )
        self._if_clip = on
        self.clip.clip_value_min.requires_grad = on
        self.clip.clip_value_max.requires_grad = on

    num_bits = field(
        "_num_bits", "Integer width, or (4, 3); assignable.", assignable=True
    )
    unsigned = field(
        "_unsigned", "True if codes start at 0; assignable.", assignable=True
    )
    narrow_range = field(
        "_narrow_range", "True without the lowest signed code.", assignable=True
    )
    axis = field("_axis", "The axes that keep their own range, as given.")
    fake_quant = field("_fake_quant", "Whether dequantized values come out.")
    learn_amax = field("_learn_amax", "Whether the range is learned.")
    scale = field(
        "_scale", "qmax / amax of the last call without fake_quant, else None or 1."
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

    @property  # type: ignore[override]
    def amax(self) -> Tensor | None:
        """The range, or None; assignable from a number, list, array or tensor of its shape."""
        return getattr(self, "_amax", None)

    @amax.setter
    def amax(self, value: object) -> None:
        self._set("_amax", value)

    def expect_range(self, shape: torch.Size) -> None:
        """Do nothing: ``_amax`` does not exist until it is known."""

    @property
    def pre_quant_scale(self) -> Tensor | None:
        """The factor on the input, used also when disabled; or None."""
        return getattr(self, "_pre_quant_scale", None)

    @pre_quant_scale.setter
    def pre_quant_scale(self, value: object) -> None:
        self._set("_pre_quant_scale", value)

    def _set(self, name: str, value: object) -> None:
        """Copy ``value`` into the buffer ``name``, or create the buffer."""
        if value is None:
            raise ConfigError(
                f"{name[1:]}: got None; expected a number or an array. "
                f"Use del quantizer.{name} to forget it"
            )
        with torch.inference_mode(False), torch.no_grad():
            tensor = getattr(self, name, None)
            new = torch.as_tensor(value).detach().to(dtype=torch.float32, copy=True)
            if bool((new < 0).any()) and name == "_amax":
                raise ConfigError(
                    f"amax: got {value}; expected no negative values. Take the absolute maximum"
                )
            if tensor is None:
                self.register_buffer(name, new)
            elif tensor.shape != new.shape:
                raise LegacyTypeError(
                    f"{name[1:]}: Changing shape when setting it is not allowed: "
                    f"got {tuple(new.shape)}; expected {tuple(tensor.shape)}. "
                    f"Use del quantizer.{name} first"
                )
            else:
                tensor.copy_(new)

    def __setattr__(self, name: str, value: object) -> None:
        # Scripts assign the private range of a quantizer that has none yet. It must become a
        # buffer, so that it is saved and moved with the module.
        if (
            name in _SAVED.values()
            and type(value) is Tensor
            and name not in self._buffers
        ):
            self.register_buffer(name, value)
        else:
            super().__setattr__(name, value)

    def load_calib_amax(
        self, *args: object, strict: bool = True, **kwargs: object
    ) -> None:
        """Set the range to ``_calibrator.compute_amax(*args, **kwargs)``, of any shape.

        Where nothing was collected that is an error, or with ``strict=False`` a warning and NaN.
        """
        if self._calibrator is None:
            raise CalibrationError(
                f"{self._where()}: {_NO_CALIBRATOR.replace('was ', '')}"
            )
        amax = self._calibrator.compute_amax(*args, **kwargs)
        if amax is None:
            text = (
                f"{self._where()}: Calibrator returned None: it has not seen any tensor; "
                "expected a batch with calibration enabled."
            )
            if strict:
                raise CalibrationError(
                    f"{text} Layers that a forward never calls see none, as in blocks that are not "
                    "fused: fuse them before quantizing, or pass strict=False to set NaN"
                )
            warnings.warn(f"{text} The range is NaN now", stacklevel=2)
            amax = torch.tensor(math.nan)
        self._adopt(amax.detach().to(dtype=torch.float32, copy=True))

    def _adopt(self, new: Tensor, end: str = "amax") -> None:
        amax = self.amax
        if amax is not None and amax.shape == new.shape:
            amax.copy_(new)
        else:
            self._buffers.pop("_amax", None)
            self.register_buffer("_amax", new if amax is None else new.to(amax.device))

    def forget_amax(self) -> None:
        """Remove the range; from now on each call uses the range of its own data."""
        self._buffers.pop("_amax", None)

    def init_learn_amax(self) -> None:
        """Start the learned range at the known one (its largest element)."""
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
        return (
            amax.detach()
            if self._scale_amax is None
            else amax.detach() * self._scale_amax
        )

    def _check_onnx_readiness(self, inputs: Tensor) -> None:
        """Raise an error unless the range is known, under ``enable_onnx_export()`` alone."""
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
        return (
            torch.maximum(-self.clip.clip_value_min, self.clip.clip_value_max)
            .detach()
            .float()
        )

    def _quant_forward(self, inputs: Tensor) -> Tensor:
        """Quantize ``inputs``."""
        if self._learn_amax:
            inputs, amax = self.clip(inputs), self._learned_amax()
        else:
            amax = self._get_amax(inputs)
        options: tuple[Any, Any, Any] = (
            self._num_bits,
            self._unsigned,
            self._narrow_range,
        )
        format = self._format_in_traces()
        if format is not None:
            aligned = _aligned(inputs, live_range(amax), self.granularity)
            return traces.fake_quantize(inputs, aligned, format)
        if self._fake_quant or isinstance(self._num_bits, tuple):
            return quantize_dequantize(inputs, amax, *options, self.granularity)
        codes, self._scale = tensor_quant(inputs, amax, *options)
        return codes

    def _format_in_traces(self) -> IntFormat | None:
        """Return the format that a trace holds torch's own operators of; None for anything else."""
        is_wanted = self.use_fb_fake_quant and self._fake_quant and traces.is_traced()
        if not is_wanted or isinstance(self._num_bits, tuple) or not self._num_bits:
            return None
        return integer_format(
            self._num_bits, unsigned=self._unsigned, narrow=self._narrow_range
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Return ``inputs``, calibrated on, clipped or quantized according to the switches."""
        if self.pre_quant_scale is not None:
            inputs = inputs * self.pre_quant_scale.to(inputs)
        if self._disabled:
            return inputs
        if self._if_calib:
            self.observe(inputs)
        if self._if_quant:
            if self.delegate is not None:
                return self.delegate(inputs, self)
            return self._quant_forward(inputs)
        return self.clip(inputs) if self._if_clip else inputs

    def observe(self, x: Tensor) -> None:
        """Give ``x`` to the calibrator; to torchq's own while :func:`torchq.calibrate` runs."""
        calibrator = self._calibrator if self.calibrator is None else self.calibrator
        if calibrator is None:
            raise CalibrationError(f"{self._where()}: {_NO_CALIBRATOR}")
        calibrator.collect(x.detach())

    def _apply(
        self, fn: Callable[[Tensor], Tensor], recurse: bool = True
    ) -> TensorQuantizer:
        # .half() must not round the range; only the device of the result is taken over.
        before = {
            name: buffer for name, buffer in self._buffers.items() if buffer is not None
        }
        super(core.TensorQuantizer, self)._apply(fn, recurse)
        for name, buffer in before.items():
            moved = self._buffers[name]
            if moved is not None and moved.dtype is not buffer.dtype:
                self._buffers[name] = buffer.to(moved.device)
        return self

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        for new, old in _SAVED.items():
            # The key in torchq's own modules.
            value = state_dict.pop(prefix + new, None)
            value = state_dict.pop(prefix + old, value)
            if value is None or not value.numel():
                continue
            mine = self._buffers.get(old)
            if mine is None or mine.shape != value.shape:
                device = value.device if mine is None else mine.device
                self._buffers.pop(old, None)
                empty = torch.empty(value.shape, dtype=torch.float32, device=device)
                self.register_buffer(old, empty)
            state_dict[prefix + old] = value.float()
        super(core.TensorQuantizer, self)._load_from_state_dict(
            state_dict, prefix, *args
        )
        missing = args[2]
        for key in [prefix + old for old in _SAVED.values() if prefix + old in missing]:
            missing.remove(key)  # a float checkpoint leaves the range as it is

    def _where(self) -> str:
        """Return the start of error texts."""
        return self.name or "TensorQuantizer"

    def _short_amax(self, fmt: str = ".4f") -> str:
        """Return the range as text: "dynamic", one number, or the extremes and the number."""
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
        parts = {
            f"{'unsigned ' if self._unsigned else ''}{self._num_bits}bit": True,
            "narrow": self._narrow_range,
            "fake": self._fake_quant,
            "per-tensor" if self._axis is None else f"axis={self._axis}": True,
            f"amax={self._short_amax()}": True,
            f"*{self._scale_amax}": self._scale_amax is not None,
            "pre_quant_scale": self.pre_quant_scale is not None,
            "learned": self._learn_amax,
            f"calibrator={type(self._calibrator).__name__}": self._calibrator
            is not None,
            "quant": self._if_quant,
            "clip": self._if_clip,
            "calib": self._if_calib,
        }
        return " ".join(part for part, shown in parts.items() if shown)

    # The interface of torchq.nn.TensorQuantizer follows.

    @property
    def granularity(self) -> Granularity:
        """The elements that share a range."""
        if self._axis is None:
            return PerTensor()
        return PerAxis(
            (self._axis,) if isinstance(self._axis, int) else tuple(self._axis)
        )

    @property
    def descriptor(self) -> CoreDescriptor:  # type: ignore[override]
        """These settings as a :class:`torchq.QuantDescriptor`."""
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

    def qparams(self, x: Tensor | None = None) -> QParams:
        """Return the scale amax / qmax of the range in use, as torchq computes it, and zeros."""
        if x is None and not self.calibrated:
            raise CalibrationError(
                "TensorQuantizer: the scale is not known; expected a calibrated amax. "
                "Run load_calib_amax()"
            )
        range_now = self.range_for(torch.empty(0, device="cpu") if x is None else x)
        return self._placed(range_now.map(live_range).qparams(self.descriptor.format))

    def set_qparams(self, scale: object, zero_point: object = None) -> None:
        """Raise an error: the arithmetic of pytorch-quantization starts from amax."""
        raise UnsupportedError(
            f"{self._where()}: got set_qparams; expected a quantizer of torchq. Use set_amax"
        )

    def range_for(self, x: Tensor) -> Range:
        """Return the range that a call on ``x`` quantizes with."""
        return Range(self._learned_amax() if self._learn_amax else self._get_amax(x))

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
        """Set one of two switches and leave the other; a disabled quantizer has both off."""
        if before == on:
            return
        if self._disabled:
            self._disabled = self._if_quant = self._if_calib = False
        setattr(self, flag, on)

    def set_amax(self, value: object) -> None:
        """Set the range, of any shape."""
        self._adopt(torch.as_tensor(value).detach().to(dtype=torch.float32, copy=True))

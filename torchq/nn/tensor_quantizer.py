"""The module that quantizes a tensor: a descriptor, a range, and two switches."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from torchq.calib import Calibrator, find_search, make_calibrator
from torchq.descriptor import QuantDescriptor
from torchq.errors import CalibrationError, ConfigError, ExportError
from torchq.functional import (
    fake_quantize,
    is_dead,
    learned_fake_quantize,
    quantize,
    range_gradient_scale,
    reduce_amax,
    scale_from_amax,
    scale_gradient,
)
from torchq.nn.sign_choice import SignChoice
from torchq.utils import constant_while_tracing

__all__ = ["TensorQuantizer"]

# Keeps these calls whole when a model is traced with torch.fx.
torch.fx.wrap("fake_quantize")
torch.fx.wrap("learned_fake_quantize")
torch.fx.wrap("quantize")
torch.fx.wrap("reduce_amax")

_MODES = {
    "off": (False, False),
    "observe": (True, False),
    "quantize": (False, True),
    "observe+quantize": (True, True),
}
_CALIBRATE = "Run torchq.calibrate(model, batches), or set_amax(...)"
_LEGACY_KEYS = {"_amax": "amax", "_pre_quant_scale": "pre_quant_scale"}


class TensorQuantizer(SignChoice, nn.Module):
    """Quantizes its input as a :class:`~torchq.QuantDescriptor` says.

    Args:
        descriptor: how to quantize.
        mode: ``"off"`` (pass through), ``"observe"`` (feed the calibrator), ``"quantize"`` or
            ``"observe+quantize"``.
        device: where amax lives.

    Attributes:
        amax: the range, a float32 buffer whatever the model's dtype (a parameter with
            ``learn_amax``), of the granularity's :meth:`~torchq.formats.Granularity.amax_shape`.
            It exists from construction and holds no element until it is known; loading a state
            dict adopts the shape found there. As long as it is empty, and always with
            ``descriptor.dynamic``, each call takes the range of its own data.
        unsigned: with ``QuantDescriptor(unsigned="auto")`` a 0-d int8 buffer: -1 while calibration
            has not chosen the sign, then 0 or 1. :attr:`descriptor` holds the choice.
        pre_quant_scale: optional buffer that multiplies the input first, also when the mode is off
            (SmoothQuant).
        quantizing, observing: the two switches that :attr:`mode` names.
        name: the dotted path in the model, for error texts; set by :func:`torchq.quantize_`.

    Shape:
        any floating-point tensor -> same shape, dtype and memory format.

    Example:
        >>> q = TensorQuantizer(torchq.QuantDescriptor(num_bits=4, amax=1.0))
        >>> q(torch.tensor([0.26, 1.2, -3.0]))
        tensor([ 0.2857,  1.0000, -1.1429])
    """

    amax: Tensor
    pre_quant_scale: Tensor | None

    def __init__(
        self,
        descriptor: QuantDescriptor | None = None,
        *,
        mode: str = "quantize",
        device: torch.device | None = None,
    ) -> None:
        super().__init__()
        self.descriptor = descriptor or QuantDescriptor()
        self.name = ""
        self.mode = mode
        self.calibrator: Calibrator | None = None
        initial = (
            torch.empty(0) if self.descriptor.amax is None else torch.tensor(self.descriptor.amax)
        )
        initial = initial.to(device=device, dtype=torch.float32)
        if self.descriptor.learn_amax:
            self.amax = nn.Parameter(initial)
        else:
            self.register_buffer("amax", initial)
        self.register_buffer("pre_quant_scale", None)
        self._prepare_sign(device)
        if self._search is None:
            self._make_calibrator()  # An unknown calib_method is an error at once.

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` scaled, observed and quantized, as the switches say."""
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        if self.observing:
            self.observe(x)
        if not self.quantizing:
            return x
        d = self.descriptor
        function: Callable[..., Tensor] = learned_fake_quantize if d.learn_amax else fake_quantize
        if not d.fake_quant:
            function = quantize
        return function(x, self.range_for(x), d.format, d.granularity, d.block_scale_format)

    def range_for(self, x: Tensor) -> Tensor:
        """Return the amax that a call on ``x`` quantizes with.

        It is the calibrated one, or that of ``x``, times ``scale_amax``.
        """
        d = self.descriptor
        if self.calibrated and not d.dynamic:
            is_training = torch.is_grad_enabled() and not torch.onnx.is_in_onnx_export()
            scaled = d.scale_range_grad and is_training
            amax = scale_gradient(self.amax, self._range_gradient_scale(x)) if scaled else self.amax
        elif torch.onnx.is_in_onnx_export():
            raise ExportError(
                f"{self._label}: has no calibrated range to export; expected a fixed amax. "
                f"{_CALIBRATE}"
            )
        else:
            amax = reduce_amax(x, d.granularity)
        return amax if d.scale_amax is None else amax * d.scale_amax

    def _range_gradient_scale(self, x: Tensor) -> float:
        with constant_while_tracing():
            return range_gradient_scale(x.numel(), self.amax.numel(), self.descriptor.format)

    @property
    def _label(self) -> str:
        """The path for error texts."""
        return self.name or "TensorQuantizer"

    @property
    def mode(self) -> str:
        """``"off"``, ``"observe"``, ``"quantize"`` or ``"observe+quantize"``; assignable."""
        switches = (self.observing, self.quantizing)
        return next(name for name, known in _MODES.items() if known == switches)

    @mode.setter
    def mode(self, mode: str) -> None:
        if mode not in _MODES:
            raise ConfigError(
                f"{self._label}: got mode {mode!r}; expected one of {', '.join(_MODES)}"
            )
        self.observing, self.quantizing = _MODES[mode]

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
            scale: amax / qmax, float32, > 0, the shape of amax.
            zero_point: int32 zeros of the same shape; every format here is symmetric.

        Raises:
            CalibrationError: amax is not known yet.
        """
        if not self.calibrated:
            raise CalibrationError(
                f"{self._label}: the scale is not known; expected a calibrated amax. {_CALIBRATE}"
            )
        d = self.descriptor
        amax = self.amax.detach() if d.scale_amax is None else self.amax.detach() * d.scale_amax
        scale = scale_from_amax(amax, d.format, d.block_scale_format)
        return scale, torch.zeros_like(scale, dtype=torch.int32)

    def set_amax(self, value: Any) -> None:
        """Set the range. The host waits for the device, so this is not for the hot path.

        A range so small that its scale is no normal float32 number quantizes everything to 0; a
        warning says so, unless the range is 0.

        Args:
            value: A number, nested sequence, array or tensor of finite numbers >= 0; it is copied
                to the device of amax as float32.

        Raises:
            ConfigError: Not such numbers, none at all, or too large for float32; the range stays
                as it was.
        """
        with torch.inference_mode(False), torch.no_grad():
            new = self._as_amax(value)
            if not new.is_meta:
                lost = int((is_dead(new, self.descriptor.format) & (new > 0)).sum())
                if lost:
                    warnings.warn(
                        f"{self._label}: got {lost} ranges as small as {float(new.min()):.3g}; "
                        "their scales are no normal float32 numbers, so their values become 0",
                        stacklevel=2,
                    )
            self._adopt(new)

    def _as_amax(self, value: Any) -> Tensor:
        expected = "expected finite numbers >= 0 that fit float32"
        try:
            given = torch.as_tensor(value).detach()
        except (TypeError, ValueError, OverflowError, RuntimeError) as error:
            raise ConfigError(f"{self._label}: got an amax of which {error}; {expected}") from None
        if given.is_complex() or given.numel() == 0:
            shown = f"amax of dtype {given.dtype} and shape {tuple(given.shape)}"
            raise ConfigError(f"{self._label}: got {shown}; {expected}")
        new = given.to(device=self.amax.device, dtype=torch.float32, copy=True)
        if not new.is_meta and not bool(((new >= 0) & (new < torch.inf)).all()):
            raise ConfigError(f"{self._label}: got amax {value}; {expected}")
        return new

    def _adopt(self, new: Tensor) -> None:
        if new.is_inference():  # Nothing could be trained through an inference tensor.
            with torch.inference_mode(False):
                new = new.clone()
        if isinstance(self.amax, nn.Parameter):
            # The parameter object stays, so an optimizer that holds it keeps training it.
            self.amax.data = new
        else:
            self.amax = new

    def forget_amax(self) -> None:
        """Make the range unknown again, and the sign if calibration chooses it."""
        self._adopt(torch.empty(0, device=self.amax.device))
        if self._chooses_sign:
            self.set_unsigned("auto")

    def observe(self, x: Tensor) -> None:
        """Give ``x`` to the calibrator.

        Raises:
            CalibrationError: x is not floating point, or its amax has another shape than before.
        """
        if self.calibrator is None:
            self.calibrator = self._make_calibrator()
        try:
            self.calibrator.collect(x.detach())
        except CalibrationError as error:
            raise CalibrationError(f"{self._label}: {error}") from None

    def _make_calibrator(self, method: str | None = None, **options: Any) -> Calibrator:
        d = self.given_descriptor
        if method in (None, d.calib_method):
            options = {**dict(d.calib_options), **options}
        try:
            calibrator = make_calibrator(
                method or d.calib_method, format=d.format, granularity=d.granularity, **options
            )
            if self._chooses_sign:
                calibrator.track_negative()
            return calibrator
        except ConfigError as error:
            raise ConfigError(f"{self._label}: {error}") from None

    @property
    def _search(self) -> Callable[..., Tensor] | None:
        """The range search for tensors that exist as a whole, or None for a calibrator."""
        return find_search(self.descriptor.calib_method, self.descriptor.calib_options)

    def start_calibration(self, method: str | None = None, **options: Any) -> None:
        """Observe from now on, with a fresh calibrator; ``method`` None is the descriptor's."""
        self.calibrator = self._make_calibrator(method, **options)
        self.observing = True

    def finish_calibration(self, **options: Any) -> None:
        """Set amax from the statistics, and drop the calibrator.

        Args:
            options: go to ``compute_amax``.

        Raises:
            CalibrationError: nothing was observed, or NaN or infinite values were; amax stays as
                it was.
        """
        where = self._label
        if self.calibrator is None or not self.calibrator.seen:
            raise CalibrationError(
                f"{where}: has not seen any tensor; expected at least one batch in mode 'observe'"
            )
        unsigned = self.calibrator.negative_batches == 0
        if self._chooses_sign:
            self.calibrator.format = self.given_descriptor.replace(unsigned=unsigned).format
        try:
            amax = self.calibrator.compute_amax(**options)
        except CalibrationError as error:
            raise CalibrationError(f"{where}: {error}") from None
        self.set_amax(amax)
        if self._chooses_sign:
            self.set_unsigned(unsigned)
        else:
            self._warn_of_negatives(where, self.calibrator)
        self.calibrator, self.observing = None, False

    def _warn_of_negatives(self, where: str, calibrator: Calibrator) -> None:
        seen = calibrator.negative_batches
        if seen:
            warnings.warn(
                f"{where}: got negative values in {seen} of {calibrator.batches} batches; "
                f"{self.descriptor.format} makes them 0. "
                "Use unsigned=False or 'auto', or leave it if that is meant",
                stacklevel=3,
            )

    def calibrate_on(self, x: Tensor) -> None:
        """Set amax from one tensor, such as a weight, by the descriptor's method.

        A method with a search, such as ``"mse"``, tries ranges on the tensor itself.

        Raises:
            CalibrationError: NaN or infinite values; amax stays as it was.
        """
        d = self.descriptor
        if self._search is not None:
            try:
                self.set_amax(
                    self._search(x, d.format, d.granularity, scale_format=d.block_scale_format)
                )
            except CalibrationError as error:
                raise CalibrationError(f"{self._label}: {error}") from None
            return
        observing, pending = self.observing, self.calibrator
        self.start_calibration()
        try:
            self.observe(x)
            self.finish_calibration()
        finally:
            self.observing, self.calibrator = observing, pending

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> TensorQuantizer:
        # .half() and .to(bfloat16) must not round the range: only the device of the result is
        # taken over.
        before = self.amax.detach()
        super()._apply(fn, recurse)
        if self.amax.dtype is not torch.float32:
            self._adopt(before.to(device=self.amax.device))
            if self.amax.grad is not None:
                self.amax.grad = self.amax.grad.to(torch.float32)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for old, new in _LEGACY_KEYS.items():
            if prefix + old in state_dict:
                state_dict[prefix + new] = state_dict.pop(prefix + old)
        key = prefix + "amax"
        if key in state_dict:
            state_dict[key] = state_dict[key].to(torch.float32)
            if state_dict[key].shape != self.amax.shape:
                self._adopt(torch.empty_like(state_dict[key], device=self.amax.device))
        if prefix + "pre_quant_scale" in state_dict and self.pre_quant_scale is None:
            self.pre_quant_scale = torch.empty_like(
                state_dict[prefix + "pre_quant_scale"], device=self.amax.device
            )
        super()._load_from_state_dict(state_dict, prefix, *args)
        missing = args[2]
        if key in missing:  # A float checkpoint leaves the range as it is.
            missing[:] = [name for name in missing if name not in (key, prefix + "unsigned")]
        if prefix + "unsigned" in state_dict:
            self._adopt_loaded_sign(prefix, args[4])

    def _get_name(self) -> str:
        return "TensorQuantizer"

    def extra_repr(self) -> str:
        """Return the descriptor, the range and the mode."""
        if self.descriptor.dynamic:
            known = "amax=dynamic"
        elif not self.calibrated:
            known = "amax=unknown"
        elif self.amax.is_meta:
            known = f"amax=meta{tuple(self.amax.shape)}"
        else:
            low, high = torch.aminmax(self.amax.detach())
            several = f"..{high:.4g} ({self.amax.numel()})" if self.amax.numel() > 1 else ""
            known = f"amax={low:.4g}{several}"
        return f"{self.descriptor}, {known}, {self.mode}"


# Trainers that know NVIDIA ModelOpt recognise its quantizers by the name of their class, and ask
# them for ModelOpt's state (Ultralytics 8.4). The qualified name, which pickle uses, stays.
TensorQuantizer.__name__ = "TorchqQuantizer"

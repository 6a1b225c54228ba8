"""The module that quantizes a tensor: a descriptor, a range, a calibrator, and two switches."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.calib import (
    SEARCHES,
    Calibrator,
    RangeCalibrator,
    make_calibrator,
)
from torchq.descriptor import QuantDescriptor
from torchq.errors import CalibrationError, ConfigError, ExportError
from torchq.functional import (
    fake_quantize,
    is_dead,
    is_dead_range,
    learned_fake_quantize,
    quantize,
    range_gradient_scale,
    reduce_amax,
    reduce_range,
    scale_and_zero_point,
    scale_from_amax,
    scale_gradient,
)
from torchq.utils import constant_while_tracing, short_repr

# Keeps these calls whole when a model is traced with torch.fx.
torch.fx.wrap("fake_quantize")
torch.fx.wrap("learned_fake_quantize")
torch.fx.wrap("quantize")
torch.fx.wrap("reduce_amax")
torch.fx.wrap("reduce_range")

_MODES = {
    "off": (False, False),
    "observe": (True, False),
    "quantize": (False, True),
    "observe+quantize": (True, True),
}

_CALIBRATE = "Run torchq.calibrate(model, batches), or set_amax(...)"
_LEGACY_KEYS = {"_amax": "amax", "_pre_quant_scale": "pre_quant_scale"}
# The value of the buffer ``unsigned`` while calibration has not chosen; then it is 0 or 1.
_UNDECIDED = -1

#: ``delegate(x, quantizer) -> Tensor``: what a quantizer computes in place of its own function.
Delegate = Callable[[Tensor, Any], Tensor]


class TensorQuantizer(nn.Module):
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
        amin: with ``QuantDescriptor(symmetric=False)`` the lower end of the range [amin, amax], a
            buffer or parameter like ``amax``; None for symmetric ranges.
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

    descriptor: QuantDescriptor
    name: str
    amax: Tensor
    amin: Tensor | None
    pre_quant_scale: Tensor | None
    calibrator: Calibrator | RangeCalibrator | None
    observing: bool

    #: A call stays one node in every trace of :func:`torchq.graph.trace`.
    keeps_tensor_type = True
    # torch.jit.trace reads every attribute of the class and of the object, but for these. There may
    # be no scale yet; see also __dir__.
    __jit_ignored_attributes__ = ("scale",)
    # A quantizer from before there were delegates has none.
    _delegate: Delegate | None = None

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
        self.calibrator = None
        self._prepare_range(device)
        self.register_buffer("pre_quant_scale", None)
        self._prepare_sign(device)
        if self._search() is None:
            self._make_calibrator()  # An unknown calib_method is an error at once.

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

    def _prepare_sign(self, device: torch.device | None) -> None:
        """Add the buffer ``unsigned`` if the descriptor leaves the sign to calibration."""
        if self.descriptor.unsigned == "auto":
            undecided = torch.tensor(_UNDECIDED, dtype=torch.int8, device=device)
            self.register_buffer("unsigned", undecided)

    @property
    def _label(self) -> str:
        """The path for error texts."""
        return self.name or "TensorQuantizer"

    @property
    def _ends(self) -> tuple[str, ...]:
        """The names of the buffers or parameters of the range."""
        return ("amax",) if self.descriptor.symmetric else ("amin", "amax")

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute; a switch or an end of the range is checked, as by :meth:`set_amax`."""
        if name in ("observing", "quantizing") and not isinstance(value, bool):
            raise ConfigError(
                f"{self._label}: got {name}={short_repr(value)}; expected True or False"
            )
        if name in ("amax", "amin") and name in self._buffers and isinstance(value, Tensor):
            if value.numel():
                self._as_end(name, value)
            value = value.to(torch.float32)
        super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        """Return the names of all attributes, without the scale where there is none yet."""
        return [name for name in super().__dir__() if name != "scale" or self.calibrated]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` scaled, observed and quantized, as the switches say."""
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        if self.observing:
            self.observe(x)
        if not self.quantizing:
            return x
        return self.apply_own(x) if self._delegate is None else self._delegate(x, self)

    def apply_own(self, x: Tensor) -> Tensor:
        """Return ``x`` quantized by the quantizer's own function, whatever the delegate does."""
        d = self.descriptor
        function: Callable[..., Tensor] = learned_fake_quantize if d.learn_amax else fake_quantize
        if not d.fake_quant:
            function = quantize
        amin, amax = self.ends_for(x)
        arguments = (amax, d.format, d.granularity, d.block_scale_format)
        return function(x, *arguments) if amin is None else function(x, *arguments, amin=amin)

    @property
    def delegate(self) -> Delegate | None:
        """A function ``delegate(x, quantizer)`` that replaces the quantizer's own; assignable.

        It is called only while the quantizer quantizes, with the input that calibration sees. It
        goes with the quantizer into copies and pickles, but not into state dicts or files.
        """
        return self._delegate

    @delegate.setter
    def delegate(self, function: Delegate | None) -> None:
        if function is not None and not callable(function):
            raise ConfigError(
                f"{self._label}: got the delegate {function!r}; expected a function of a tensor "
                "and the quantizer, or None"
            )
        self._delegate = function

    @property
    def mode(self) -> str:
        """``"off"``, ``"observe"``, ``"quantize"`` or ``"observe+quantize"``; assignable."""
        switches = (self.observing, self.quantizing)
        return next(name for name, known in _MODES.items() if known == switches)

    @mode.setter
    def mode(self, mode: str) -> None:
        if not isinstance(mode, str) or mode not in _MODES:
            raise ConfigError(
                f"{self._label}: got mode {mode!r}; expected one of {', '.join(_MODES)}"
            )
        self.observing, self.quantizing = _MODES[mode]

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

    @property
    def calibrators(self) -> tuple[Calibrator, ...]:
        """The calibrators at work, one or one for each side of zero; none if it does not observe.

        :func:`torchq.calib.sync` gives them the statistics of all ranks.
        """
        if isinstance(self.calibrator, RangeCalibrator):
            return self.calibrator.sides
        return () if self.calibrator is None else (self.calibrator,)

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

    def _make_calibrator(
        self, method: str | None = None, **options: Any
    ) -> Calibrator | RangeCalibrator:
        d = self.given_descriptor
        if method in (None, d.calib_method):
            options = {**dict(d.calib_options), **options}
        make = make_calibrator if d.symmetric else RangeCalibrator
        try:
            calibrator = make(
                method or d.calib_method, format=d.format, granularity=d.granularity, **options
            )
        except ConfigError as error:
            raise ConfigError(f"{self._label}: {error}") from None
        calibrator.scale_format = d.block_scale_format
        if self._chooses_sign and isinstance(calibrator, Calibrator):
            calibrator.track_negative()
        return calibrator

    def _search(self, method: str | None = None) -> Callable[..., Any] | None:
        """Return the range search for tensors that exist as a whole, or None for a calibrator."""
        d = self.descriptor
        if method in (None, d.calib_method) and d.calib_options:  # They configure a calibrator.
            return None
        found = SEARCHES.get(method or d.calib_method)
        return None if found is None else found[0 if d.symmetric else 1]

    def start_calibration(self, method: str | None = None, **options: Any) -> None:
        """Observe from now on, with a fresh calibrator; ``method`` None is the descriptor's."""
        self.calibrator = self._make_calibrator(method, **options)
        self.observing = True

    def finish_calibration(self, **options: Any) -> None:
        """Set the range from the statistics, and drop the calibrator.

        Args:
            options: go to ``compute_amax`` or ``compute_range``.

        Raises:
            CalibrationError: nothing was observed, or NaN or infinite values were; the range stays
                as it was.
        """
        where, calibrator = self._label, self.calibrator
        if calibrator is None or not calibrator.seen:
            raise CalibrationError(
                f"{where}: has not seen any tensor; expected at least one batch in mode 'observe'"
            )
        try:
            if isinstance(calibrator, RangeCalibrator):
                self.set_range(*calibrator.compute_range(**options))
            else:
                self._finish_symmetric(calibrator, options)
        except CalibrationError as error:
            raise CalibrationError(f"{where}: {error}") from None
        self.calibrator, self.observing = None, False

    def _finish_symmetric(self, calibrator: Calibrator, options: dict[str, Any]) -> None:
        """Set amax, and the sign if calibration chooses it."""
        unsigned = calibrator.negative_batches == 0
        if self._chooses_sign:
            calibrator.format = self.given_descriptor.replace(unsigned=unsigned).format
        self.set_amax(calibrator.compute_amax(**options))
        if self._chooses_sign:
            self.set_unsigned(unsigned)
        else:
            self._warn_of_negatives(calibrator)

    def _warn_of_negatives(self, calibrator: Calibrator) -> None:
        seen = calibrator.negative_batches
        if seen:
            warnings.warn(
                f"{self._label}: got negative values in {seen} of {calibrator.batches} batches; "
                f"{self.descriptor.format} makes them 0. "
                "Use unsigned=False or 'auto', or leave it if that is meant",
                stacklevel=4,
            )

    def calibrate_on(self, x: Tensor, method: str | None = None) -> None:
        """Set the range from one tensor, such as a weight.

        A method with a search, such as ``"mse"``, tries ranges on the tensor itself.

        Args:
            x: the tensor.
            method: in place of the descriptor's.

        Raises:
            CalibrationError: NaN or infinite values; the range stays as it was.
        """
        d = self.descriptor
        search = self._search(method)
        if search is not None:
            try:
                found = search(x, d.format, d.granularity, scale_format=d.block_scale_format)
            except CalibrationError as error:
                raise CalibrationError(f"{self._label}: {error}") from None
            if d.symmetric:
                self.set_amax(found)
            else:
                self.set_range(*found)
            return
        observing, pending = self.observing, self.calibrator
        self.start_calibration(method)
        try:
            self.observe(x)
            self.finish_calibration()
        finally:
            self.observing, self.calibrator = observing, pending

    @property
    def given_descriptor(self) -> QuantDescriptor:
        """The descriptor that the quantizer was made with, without the choice of the sign."""
        return self.descriptor.replace(unsigned="auto") if self._chooses_sign else self.descriptor

    def set_unsigned(self, unsigned: bool | Literal["auto"]) -> None:
        """Choose the sign of the codes, for a descriptor with ``unsigned="auto"``.

        Args:
            unsigned: the choice; "auto" leaves it to the next calibration.

        Raises:
            ConfigError: the descriptor fixes the sign.
        """
        if not self._chooses_sign:
            raise ConfigError(
                f"{self._label}: got set_unsigned for {self.descriptor}; "
                "expected a descriptor with unsigned='auto'"
            )
        value = _UNDECIDED if unsigned == "auto" else int(unsigned)
        with torch.inference_mode(False), torch.no_grad():
            buffer = torch.full_like(self.get_buffer("unsigned"), value)
            self.register_buffer("unsigned", buffer)
        self.descriptor = self.descriptor.replace(unsigned=unsigned)

    @property
    def _chooses_sign(self) -> bool:
        return "unsigned" in self._buffers

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

    def _adopt_loaded_sign(self, prefix: str, errors: list[str]) -> None:
        """Make the descriptor agree with the loaded buffer ``unsigned``; a problem is appended."""
        if not self._chooses_sign or self.get_buffer("unsigned").is_meta:
            return
        value = int(self.get_buffer("unsigned"))
        if value not in (_UNDECIDED, 0, 1):
            errors.append(f"{prefix}unsigned: got {value}; expected -1, 0 or 1")
        else:
            self.set_unsigned("auto" if value == _UNDECIDED else bool(value))

    def range_text(self) -> str:
        """Return the range in a few characters, for tables."""
        if self.descriptor.dynamic:
            return "dynamic"
        if not self.calibrated:
            return "unknown"
        if self.amax.is_meta:
            shape = tuple(self.amax.shape)
            return f"meta{shape}" if shape else "meta"
        low, high = torch.aminmax(self.amax.detach())
        if not self.descriptor.symmetric:
            assert self.amin is not None
            low = self.amin.detach().min()
            several = f" ({self.amax.numel()})" if self.amax.numel() > 1 else ""
            return f"[{low:.4g}, {high:.4g}]{several}"
        several = f" .. {high:.4g} ({self.amax.numel()})" if self.amax.numel() > 1 else ""
        return f"{low:.4g}{several}"

    def _get_name(self) -> str:
        return "TensorQuantizer"

    def extra_repr(self) -> str:
        """Return the descriptor, the range and the mode."""
        end = "amax" if self.descriptor.symmetric else "range"
        delegated = "" if self._delegate is None else ", delegated"
        return f"{self.descriptor}, {end}={self.range_text()}, {self.mode}{delegated}"


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


# Trainers that know NVIDIA ModelOpt recognise its quantizers by the name of their class, and ask
# them for ModelOpt's state (Ultralytics 8.4). The qualified name, which pickle uses, stays.
TensorQuantizer.__name__ = "TorchqQuantizer"


@contextmanager
def quantizing_only(
    known: Iterable[TensorQuantizer], chosen: Iterable[TensorQuantizer] = ()
) -> Iterator[None]:
    """Let only the chosen ones of some quantizers quantize, and none observe.

    At the end all do what they did before. Without ``chosen`` it turns all of them off.
    """
    before = [(quantizer, quantizer.mode) for quantizer in known]
    wanted = {id(quantizer) for quantizer in chosen}
    try:
        for quantizer, _ in before:
            quantizer.mode = "quantize" if id(quantizer) in wanted else "off"
        yield
    finally:
        for quantizer, mode in before:
            quantizer.mode = mode

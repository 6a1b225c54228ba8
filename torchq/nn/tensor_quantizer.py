"""The module that quantizes a tensor: a descriptor, a range, a calibrator, and two switches."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from torchq.calib import SEARCHES, Calibrator, methods
from torchq.descriptor import QuantDescriptor
from torchq.errors import CalibrationError, ConfigError, ExportError
from torchq.formats import IntFormat, PerTensor
from torchq.functional import (
    CodeGrid,
    FixedFakeQuantize,
    QParams,
    Range,
    compute_dtype,
    fake_quantize,
    fake_quantize_affine,
    learned_fake_quantize,
    quantize,
    quantize_affine,
    range_gradient_scale,
    scale_gradient,
)
from torchq.functional.kernels.dispatch import takes_tiles
from torchq.nn import optional_buffers
from torchq.nn.given_numbers import checked_numbers, checked_qparams
from torchq.nn.kept_numbers import KeptNumbers, are_plain_numbers
from torchq.nn.optional_buffers import FACTORS, HELD
from torchq.utils import constant_while_tracing, short_repr

# Keeps these calls whole when a model is traced with torch.fx.
for _name in ("fake_quantize", "fake_quantize_affine", "quantize", "quantize_affine"):
    torch.fx.wrap(_name)
torch.fx.wrap("learned_fake_quantize")

_MODES = {
    "off": (False, False),
    "observe": (True, False),
    "quantize": (False, True),
    "observe+quantize": (True, True),
}

#: The dtypes that are quantized in float32.
_IN_FLOAT32 = (torch.float32, torch.float16, torch.bfloat16)
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
        held_scale, held_zero_point: float32 and int32 buffers of the shape of ``amax`` that exist
            after :meth:`set_qparams` alone; the zero point only with ``symmetric=False``.
        unsigned: with ``QuantDescriptor(unsigned="auto")`` a 0-d int8 buffer: -1 while calibration
            has not chosen the sign, then 0 or 1. :attr:`descriptor` holds the choice.
        keeps_sign: the codes are unsigned, or signed, whatever calibration sees; see
            :meth:`keep_unsigned` and :meth:`keep_signed`.
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
    calibrator: Calibrator | None
    held_scale: Tensor
    held_zero_point: Tensor
    observing: bool

    #: A call stays one node in every trace of :func:`torchq.graph.trace`.
    keeps_tensor_type = True
    # torch.jit.trace reads every attribute of the class and of the object, but for these. There may
    # be no scale yet; see also __dir__.
    __jit_ignored_attributes__ = ("scale", "range")
    # A quantizer from before there were delegates has none, nor kept numbers.
    _delegate: Delegate | None = None
    _kept_grid: KeptNumbers[CodeGrid | None] | None = None
    _kept_function: KeptNumbers[FixedFakeQuantize] | None = None
    _kept_scale: KeptNumbers[Tensor] | None = None
    keeps_sign: bool = False
    #: It stands in several slots, by :func:`torchq.nn.share_quantizers_`.
    shared: bool = False

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
        self._kept_grid = KeptNumbers()
        self._kept_function = KeptNumbers()
        self._kept_scale = KeptNumbers()
        self._prepare_range(device)
        self.register_buffer("pre_quant_scale", None)
        if self.descriptor.unsigned == "auto":
            undecided = torch.tensor(_UNDECIDED, dtype=torch.int8, device=device)
            self.register_buffer("unsigned", undecided)
        if self._search() is None:
            self._make_calibrator()  # An unknown calib_method is an error at once.

    def _prepare_range(self, device: torch.device | None) -> None:
        """Add the buffers or parameters of the range, as the descriptor fixes them or empty."""
        self.register_buffer("amin", None)
        for end in self._ends:
            fixed = getattr(self.descriptor, end)
            values = [] if fixed is None else fixed
            initial = torch.tensor(values, dtype=torch.float32, device=device)
            if self.descriptor.learn_amax:
                self._buffers.pop(end, None)
                self.register_parameter(end, nn.Parameter(initial))
            else:
                self.register_buffer(end, initial)

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
        if (
            name in ("amax", "amin")
            and name in self._buffers
            and isinstance(value, (int, float))
        ):
            raise ConfigError(
                f"{self._label}: got {name}={value}; expected a tensor. Call set_amax(number)"
            )
        if name in ("amax", "amin") and self._takes_numbers(name, value):
            if value.numel():
                checked_numbers(self._label, name, value, self.amax.device)
            value = value.to(torch.float32)
            self.drop_qparams()
            if name in self._parameters:
                self._adopt(value.detach(), name)
                return
        super().__setattr__(name, value)

    def _takes_numbers(self, name: str, value: object) -> bool:
        """Return whether an end of the range gets new numbers; a learned one stays a parameter."""
        if not isinstance(value, Tensor):
            return False
        return name in self._buffers or (
            name in self._parameters and not isinstance(value, nn.Parameter)
        )

    def __dir__(self) -> list[str]:
        """Return the names of all attributes, without the scale where there is none yet."""
        return [
            name
            for name in super().__dir__()  # type: ignore[no-untyped-call]
            if name != "scale" or self.calibrated
        ]

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x`` scaled, observed and quantized, as the switches say."""
        x = self.scaled(x)
        if self._kept_grid is not None and are_plain_numbers(x):
            grid = self.fixed_grid()
            if grid is not None:
                return grid.values(x)
        if self.observing:
            self.observe(x)
        if not self.quantizing:
            return x
        try:
            return (
                self.apply_own(x) if self._delegate is None else self._delegate(x, self)
            )
        except ConfigError as error:  # the range does not fit the tensor
            raise ConfigError(f"{self._label}: {error}") from error

    def apply_own(self, x: Tensor) -> Tensor:
        """Return ``x`` quantized by the quantizer's own function, whatever the delegate does."""
        d = self.descriptor
        if not d.fake_quant:
            return self.codes(x)
        fixed = self._fixed_function(x)
        if fixed is not None:
            return fixed(x)
        if "held_scale" in self._buffers:
            return fake_quantize_affine(x, *self._held(), d.format, d.granularity)
        function = learned_fake_quantize if d.learn_amax else fake_quantize
        high, low = self.range_for(x)
        return function(x, high, d.format, d.granularity, d.block_scale_format, low)

    def _fixed_function(self, x: Tensor) -> FixedFakeQuantize | None:
        """Return what a call on ``x`` computes, kept as long as the range stays the same.

        None where the range is that of the call, gets a gradient or is not on a CPU, and while
        something records the call.
        """
        kept = self._kept_function
        ends = self._ends_to_keep()
        if kept is None or ends is None:
            return None
        if not takes_tiles(x) or x.dtype not in _IN_FLOAT32:
            return None
        make = partial(self._made_function, x.shape)
        fixed = kept.get((self.descriptor,), ends, make)
        return fixed if fixed.shape in (None, x.shape) else None

    def _made_function(self, shape: torch.Size) -> FixedFakeQuantize:
        d = self.descriptor
        settings = d.format, d.granularity, d.block_scale_format
        with torch.inference_mode(False), torch.no_grad():
            return FixedFakeQuantize.of(self._scaled_range(), shape, *settings)

    def _ends_to_keep(self) -> tuple[Tensor, Tensor | None] | None:
        """Return the ends of a known range that numbers may be kept for; None if there is none."""
        d = self.descriptor
        if d.learn_amax or d.dynamic or d.block_size is not None:
            return None
        buffers = self._buffers
        # Quantizers of pytorch-quantization have a buffer of another name.
        amax = buffers.get("amax")
        if amax is None or "held_scale" in buffers:
            return None
        # Its size is no number while something records the call.
        return (amax, buffers["amin"]) if takes_tiles(amax) and amax.numel() else None

    def kept_scale(self) -> Tensor:
        """Return :attr:`scale`, kept as long as the range stays the same; nobody may write to it.

        Raises:
            CalibrationError: see :meth:`qparams`.
        """
        kept = self._kept_scale
        ends = self._ends_to_keep()
        if kept is None or ends is None:
            return self.scale
        return kept.get((self.descriptor,), ends, self._made_scale)

    def _made_scale(self) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            return self.scale

    def fixed_grid(self) -> CodeGrid | None:
        """Return what every call rounds its input to, one object as long as that stays the same.

        None where that depends on the call, or is no one scale of integer codes that a CPU knows:
        the quantizer is off, observes, has a delegate, no range, several ranges or a dead one.
        """
        kept = self._kept_grid
        if (
            kept is None
            or not self.quantizing
            or self.observing
            or self._delegate is not None
        ):
            return None
        # Without the look-up of torch's modules: this runs in each call.
        buffers = self._buffers
        amax = buffers["amax"] if "amax" in buffers else self._parameters["amax"]
        if amax is None or amax.device.type != "cpu":
            return None
        amin = buffers["amin"] if "amin" in buffers else self._parameters["amin"]
        held = buffers.get("held_scale"), buffers.get("held_zero_point")
        return kept.get((self.descriptor,), (amax, amin, *held), self._made_grid)

    @property
    def _computes_codes(self) -> bool:
        """True if calls are this class's own, with one known scale of integer codes."""
        d = self.descriptor
        is_own = type(self) is TensorQuantizer and d.fake_quant and not d.dynamic
        is_whole = isinstance(d.format, IntFormat) and d.format.rounding == "half_even"
        return is_own and is_whole and d.granularity == PerTensor()

    def _made_grid(self) -> CodeGrid | None:
        """Return the grid of the known range; None if there is none, or a dead or poisoned one."""
        if not (self._computes_codes and self.amax.numel() == 1):
            return None
        with torch.inference_mode(False), torch.no_grad():
            qparams = self.qparams()
            is_held = "held_scale" in self._buffers
            is_dead = not is_held and bool(self.dead_ranges().any())
            if is_dead or not bool(qparams.scale.isfinite().all()):
                return None
            return CodeGrid.of(replace(qparams, scale=qparams.scale.clone()))

    def codes(self, x: Tensor) -> Tensor:
        """Return the codes that a call rounds ``x`` to, with the zero point, without gradient.

        Args:
            x: floating point, multiplied by ``pre_quant_scale`` already.

        Returns:
            float32 (float64 for float64) of the shape of ``x``; for float formats the grid values.
        """
        d = self.descriptor
        if "held_scale" in self._buffers:
            return quantize_affine(x, *self._held(), d.format, d.granularity)
        high, low = self.range_for(x)
        return quantize(x, high, d.format, d.granularity, d.block_scale_format, low)

    def _held(self) -> tuple[Tensor, Tensor | None]:
        """Return the scale and the zero point that are held; None for a symmetric range."""
        return (
            self.held_scale,
            None if self.descriptor.symmetric else self.held_zero_point,
        )

    @contextmanager
    def range_hidden(self, but: str) -> Iterator[None]:
        """Let the range be plain attributes inside the ``with`` block: no buffer, no parameter.

        What traces a model makes an input of each buffer and parameter, also of those that nothing
        reads. ``pre_quant_scale``, and the buffer named ``but``, stay what they are.
        """
        registries: tuple[dict[str, Any], ...] = (self._buffers, self._parameters)
        before = [dict(registry) for registry in registries]
        kept = ("pre_quant_scale", but)
        try:
            for registry in registries:
                for name, tensor in list(registry.items()):
                    if tensor is not None and name not in kept:
                        vars(self)[name] = registry.pop(name)
            yield
        finally:
            for registry, content in zip(registries, before, strict=True):
                for name in content.keys() - registry.keys():
                    vars(self).pop(name, None)
                registry.clear()
                registry.update(content)

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
        return next(name for name, states in _MODES.items() if states == switches)

    @mode.setter
    def mode(self, mode: str) -> None:
        if not isinstance(mode, str) or mode not in _MODES:
            raise ConfigError(
                f"{self._label}: got mode {mode!r}; expected one of {', '.join(_MODES)}"
            )
        self.observing, self.quantizing = _MODES[mode]

    @property
    def range(self) -> Range:
        """The known range, whose ends are the buffers or parameters; without elements if unknown.

        Assigning one of the same kind checks nothing, so the host need not wait.
        """
        return Range(self.amax, None if self.descriptor.symmetric else self.amin)

    @range.setter
    def range(self, new: Range) -> None:
        self.drop_qparams()
        with torch.inference_mode(False), torch.no_grad():
            for end, value in new.ends():
                self._adopt(value.detach().to(getattr(self, end).device), end)

    def range_for(self, x: Tensor) -> Range:
        """Return the range that a call on ``x`` quantizes with, times ``scale_amax``.

        It is the calibrated one, or that of ``x``.
        """
        d = self.descriptor
        if self.calibrated and not d.dynamic:
            current = self.range.map(lambda end: self._with_scaled_gradient(end, x))
        elif torch.onnx.is_in_onnx_export():
            raise ExportError(
                f"{self._label}: has no calibrated range to export; expected a fixed amax. "
                f"{_CALIBRATE}"
            )
        else:
            current = Range.of(x, d.granularity, symmetric=d.symmetric)
        factor = d.scale_amax
        return current if factor is None else current.map(lambda end: end * factor)

    def _with_scaled_gradient(self, end: Tensor, x: Tensor) -> Tensor:
        """Return an end of the range, whose gradient is scaled in training if that is wanted."""
        is_training = torch.is_grad_enabled() and not torch.onnx.is_in_onnx_export()
        if not (self.descriptor.scale_range_grad and is_training):
            return end
        with constant_while_tracing():
            factor = range_gradient_scale(
                x.numel(), end.numel(), self.descriptor.format
            )
        return scale_gradient(end, factor)

    @property
    def calibrated(self) -> bool:
        """True if amax is known; the host does not wait."""
        with constant_while_tracing():
            return bool(self.amax.numel())

    @property
    def scale(self) -> Tensor:
        """The first of :meth:`calculate_qparams`."""
        return self.qparams().scale

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:
        """Return the scale and the zero point of :meth:`qparams`.

        Returns:
            scale: float32, > 0, the shape of amax.
            zero_point: int32 of the same shape; zeros for symmetric ranges.

        Raises:
            CalibrationError: amax is not known yet.
        """
        parameters = self.qparams()
        return parameters.scale, parameters.zero_point

    def qparams(self, x: Tensor | None = None) -> QParams:
        """Return the quantization parameters that calls quantize with, without gradient.

        Args:
            x: take those of a call on this tensor, in the dtype that it computes in.

        Raises:
            CalibrationError: amax is not known yet, and there is no ``x``.
        """
        d = self.descriptor
        dtype = torch.float32 if x is None else compute_dtype(x.dtype)
        if "held_scale" in self._buffers:
            scale, point = self._held()
            zeros = torch.zeros_like(scale, dtype=torch.int32)
            parameters = QParams(
                scale.to(dtype), zeros if point is None else point, d.format
            )
        elif x is not None:
            ends = self.range_for(x).map(lambda end: end.detach().to(dtype))
            parameters = ends.qparams(d.format, d.block_scale_format)
        elif self.calibrated:
            parameters = self._scaled_range().qparams(d.format, d.block_scale_format)
        else:
            raise CalibrationError(
                f"{self._label}: the scale is not known; expected a calibrated amax. {_CALIBRATE}"
            )
        return self._placed(parameters)

    def _placed(self, found: QParams) -> QParams:
        """Return quantization parameters with the axis and the blocks that they belong to."""
        d = self.descriptor
        if d.block_size is not None:
            return replace(found, axis=d.block_axis, block=d.block_size)
        return replace(found, axis=d.axis[0]) if isinstance(d.axis, tuple) else found

    def _scaled_range(self) -> Range:
        """Return the known range times ``scale_amax``, without gradient."""
        factor = self.descriptor.scale_amax or 1.0
        return self.range.map(lambda end: end.detach() * factor)

    def dead_ranges(self) -> Tensor:
        """Return where the known range quantizes everything to 0: bool, the shape of amax."""
        return self._scaled_range().dead(self.descriptor.format)

    def widen_dead_channels(self) -> None:
        """Give channels of which calibration saw zeros alone the range of all others.

        The simulation would give 0 there whatever comes, and files, which have no scale for that,
        whole numbers. Where no channel has a range, none gets one.
        """
        if isinstance(self.descriptor.axis, tuple) and self.calibrated:
            self._take(self.range.without_dead(self.descriptor.format))

    def set_amax(self, value: object) -> None:
        """Set the range. The host waits for the device, so this is not for the hot path.

        A range whose scale is no normal float32 number quantizes everything to 0, with a warning.

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
        self._set_checked(amax=value)

    def set_range(self, amin: object, amax: object) -> None:
        """Set both ends of an asymmetric range, of equal shapes; see :meth:`set_amax`.

        Args:
            amin: Finite numbers <= 0.
            amax: Finite numbers >= 0.

        Raises:
            ConfigError: Other numbers or a symmetric range; the range stays as it was.
        """
        if self.descriptor.symmetric:
            raise ConfigError(
                f"{self._label}: got set_range for {self.descriptor}; expected a descriptor with "
                "symmetric=False. Use set_amax(amax)"
            )
        self._set_checked(amax=amax, amin=amin)

    def _set_checked(self, **ends: object) -> None:
        """Set the range to ends by name; where a scale is too small, a warning says so."""
        with torch.inference_mode(False), torch.no_grad():
            device = self.amax.device
            numbers = [
                checked_numbers(self._label, *pair, device) for pair in ends.items()
            ]
            if numbers[0].shape != numbers[-1].shape:
                raise ConfigError(
                    f"{self._label}: got amin of shape {tuple(numbers[-1].shape)} and amax of "
                    f"shape {tuple(numbers[0].shape)}; expected equal shapes"
                )
            new = Range(*numbers)
            length = new.high if new.low is None else new.high - new.low
            if not length.is_meta and bool(length.isinf().any()):
                raise ConfigError(
                    f"{self._label}: got a range from {float(numbers[-1].min()):.3g} to "
                    f"{float(numbers[0].max()):.3g}; expected ends whose distance fits float32"
                )
            dead = new.dead(self.descriptor.format) & (length > 0)
            lost = 0 if length.is_meta else int(dead.sum())
            if lost:
                warnings.warn(
                    f"{self._label}: got {lost} ranges as small as {float(length.min()):.3g}; "
                    "their scales are no normal float32 numbers, so their values become 0",
                    stacklevel=3,
                )
            self.range = new

    def set_qparams(self, scale: object, zero_point: object = None) -> None:
        """Hold a scale and a zero point as they are, such as those of a checkpoint of others.

        ``amax`` and ``amin`` become the values of the outermost codes. Setting the range, or a new
        calibration, ends it.

        Args:
            scale: finite numbers > 0 of the shape of an amax, as for :meth:`set_amax`; one number
                for a range per tensor.
            zero_point: whole numbers of the same shape, in the codes of the format; None is 0.
                For a symmetric range they are 0.

        Raises:
            ConfigError: not such numbers or shapes; or the range is learned, taken from each call,
                multiplied by ``scale_amax``, or its scales are rounded. The quantizer stays as it
                was.

        Example:
            >>> q = TensorQuantizer(torchq.QuantDescriptor(unsigned=True, symmetric=False))
            >>> q.set_qparams(0.5, 2)
            >>> q(torch.tensor([-9.0, 0.3, 200.0]))
            tensor([ -1.0000,   0.5000, 126.5000])
        """
        d = self.descriptor
        point = 0 if zero_point is None else zero_point
        with torch.inference_mode(False), torch.no_grad():
            checked = checked_qparams(self._label, d, scale, point, self.amax.device)
            self.range = Range.of_qparams(checked, symmetric=d.symmetric)
            values = (
                (checked.scale,) if d.symmetric else (checked.scale, checked.zero_point)
            )
            for buffer, value in zip(HELD, values, strict=False):
                self.register_buffer(buffer.name, value)

    def drop_qparams(self) -> None:
        """Let the scale and the zero point follow from the range again."""
        for buffer in HELD:
            buffer.drop(self, self.amax)

    def _adopt(self, new: Tensor, end: str = "amax") -> None:
        if new.is_inference():  # Nothing could be trained through an inference tensor.
            with torch.inference_mode(False):
                new = new.clone()
        current = getattr(self, end)
        if isinstance(current, nn.Parameter):
            # The parameter object stays, so an optimizer that holds it keeps training it.
            current.data = new
        else:
            nn.Module.__setattr__(self, end, new)  # A check would wait for the device.

    def expect_range(self, shape: torch.Size) -> None:
        """Let an unknown range have no element, but dimensions that a known one broadcasts to.

        What averages parameters and buffers copies those of a calibrated model into those of a
        copy that may have been made earlier. Into ``(0, 16, 1)`` torch copies ``(16, 1)`` and
        changes nothing; ``(0,)`` it would refuse. The range of the copy stays unknown.

        Args:
            shape: that of the tensor which is quantized; one that the granularity does not fit
                changes nothing.
        """
        if self.calibrated:
            return
        try:
            expected = self.descriptor.granularity.amax_shape(shape)
        except ConfigError:  # The first call says so, with the path of the module.
            return
        self.range = self.range.map(lambda end: end.new_empty(0, *expected))

    def forget_amax(self) -> None:
        """Make the range unknown again, and the sign if calibration chooses it."""
        if self.calibrated:
            self.range = self.range.map(lambda end: end.new_empty(0, *end.shape))
        else:
            self.drop_qparams()
        if self._chooses_sign:
            self.set_unsigned("auto")

    def observe(self, x: Tensor) -> None:
        """Give ``x`` to the calibrator; CalibrationError for no floats or another shape."""
        if self.calibrator is None:
            self.calibrator = self._make_calibrator()
        try:
            self.calibrator.collect(x.detach())
        except CalibrationError as error:
            raise CalibrationError(f"{self._label}: {error}") from None

    def _make_calibrator(
        self, method: str | None = None, **options: object
    ) -> Calibrator:
        d = self.given_descriptor if self._chooses_sign else self.descriptor
        if method in (None, d.calib_method):
            options = {**dict(d.calib_options), **options}
        name = method or d.calib_method
        if name in SEARCHES and name not in methods():
            # It searches weights that exist as a whole: of computed ones the whole range is taken.
            name = "max"
        try:
            calibrator = Calibrator(
                name,
                format=d.format,
                granularity=d.granularity,
                symmetric=d.symmetric,
                **options,
            )
        except ConfigError as error:
            raise ConfigError(f"{self._label}: {error}") from None
        calibrator.scale_format = d.block_scale_format
        if self._chooses_sign:
            calibrator.track_negative()
        return calibrator

    def _search(self, method: str | None = None) -> Callable[..., Range] | None:
        """Return the range search for tensors that exist as a whole, or None for a calibrator."""
        d = self.descriptor
        # Options configure a calibrator, which a search replaces.
        if method in (None, d.calib_method) and d.calib_options:
            return None
        return SEARCHES.get(method or d.calib_method)

    def start_calibration(self, method: str | None = None, **options: object) -> None:
        """Observe from now on, with a fresh calibrator; ``method`` None is the descriptor's."""
        self.calibrator = self._make_calibrator(method, **options)
        self.observing = True

    def finish_calibration(self, **options: Any) -> None:
        """Set the range from the statistics, and drop the calibrator.

        Args:
            options: go to :meth:`torchq.calib.Calibrator.range`.

        Raises:
            CalibrationError: nothing was observed, or NaN or infinite values were; the range stays
                as it was.
        """
        where, calibrator = self._label, self.calibrator
        if calibrator is None or not calibrator.seen:
            raise CalibrationError(
                f"{where}: has not seen any tensor; expected at least one batch in mode 'observe'"
            )
        unsigned = self._chooses_sign and calibrator.negative_batches == 0
        if self._chooses_sign:
            calibrator.format = self.given_descriptor.replace(unsigned=unsigned).format
        try:
            calibrated = calibrator.range(**options)
        except CalibrationError as error:
            raise CalibrationError(f"{where}: {error}") from None
        self._take(calibrated.off_ties(self.descriptor.format))
        if self._chooses_sign:
            self.set_unsigned(unsigned)
        elif self.descriptor.symmetric:
            self._warn_of_negatives(calibrator)
        self.calibrator, self.observing = None, False

    def _take(self, found: Range) -> None:
        """Set the range to one that was found, by the method of its kind."""
        if found.low is None:
            self.set_amax(found.high)
        else:
            self.set_range(found.low, found.high)

    def _warn_of_negatives(self, calibrator: Calibrator) -> None:
        if negative_batches := calibrator.negative_batches:
            warnings.warn(
                f"{self._label}: got negative values in {negative_batches} of {calibrator.batches} "
                "batches; "
                f"{self.descriptor.format} makes them 0. "
                "Use unsigned=False or 'auto', or leave it if that is meant",
                stacklevel=3,
            )

    def scaled(self, x: Tensor) -> Tensor:
        """Return a tensor times ``pre_quant_scale``, as it is quantized."""
        factors = self.pre_quant_scale
        return x if factors is None else x * factors.to(x.dtype)

    def calibrate_on(self, x: Tensor, method: str | None = None) -> None:
        """Set the range from one tensor, such as a weight, which a method may search.

        Args:
            x: the tensor.
            method: in place of the descriptor's.

        Raises:
            CalibrationError: NaN or infinite values.
        """
        d = self.descriptor
        search = self._search(method)
        if search is not None:
            options = {"symmetric": d.symmetric, "scale_format": d.block_scale_format}
            try:
                searched = search(x, d.format, d.granularity, **options)
            except CalibrationError as error:
                raise CalibrationError(f"{self._label}: {error}") from None
            self._take(searched)
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
        """The descriptor that the quantizer was made with, whatever its codes are now."""
        if "unsigned" in self._buffers:
            return self.descriptor.replace(unsigned="auto")
        if self.keeps_sign:
            return self.descriptor.replace(unsigned=True, symmetric=False)
        return self.descriptor

    def keep_unsigned(self) -> None:
        """Let the codes be unsigned for good, as a plan says; calibration warns of other data."""
        if self.descriptor.symmetric:
            self.set_unsigned(True)
        else:  # The zero point would be 0.
            self.descriptor = self.descriptor.replace(symmetric=True, unsigned=True)
            self.amin = None
        self.keeps_sign = True

    def keep_signed(self) -> None:
        """Let codes that a class wants unsigned, or with a zero point, be signed for good."""
        if self.descriptor.symmetric:
            self.descriptor = self.descriptor.replace(unsigned=False)
        else:
            self.descriptor = self.descriptor.replace(symmetric=True, unsigned=False)
            self.amin = None
            self.keeps_sign = True

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
        return "unsigned" in self._buffers and not self.keeps_sign

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> object:
        # .half() must not round the range: only the device of the result is taken over.
        held = ["held_scale"] if "held_scale" in self._buffers else []
        before = {name: getattr(self, name).detach() for name in (*self._ends, *held)}
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for end, value in before.items():
            now = getattr(self, end)
            if now.dtype is not torch.float32:
                self._adopt(value.to(device=now.device), end)
                if now.grad is not None:
                    now.grad = now.grad.to(torch.float32)
        return self

    def _save_to_state_dict(
        self, destination: Any, prefix: str, keep_vars: bool
    ) -> None:
        """Save the tensors; a shared quantizer owns them by its first path, others have copies.

        Libraries that write safetensors refuse, or remove, names that share memory.
        """
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if not self.shared or keep_vars:
            return
        for name in (*self._parameters, *self._buffers):
            key = prefix + name
            tensor = destination.get(key)
            if tensor is not None and _stands_elsewhere(tensor, key, name, destination):
                destination[key] = tensor.clone()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any
    ) -> None:
        for old, new in _LEGACY_KEYS.items():
            if prefix + old in state_dict:
                state_dict[prefix + new] = state_dict.pop(prefix + old)
        # A float checkpoint leaves all as it is.
        describes = prefix + "amax" in state_dict
        held = HELD[:1] if self.descriptor.symmetric else HELD
        if describes:
            optional_buffers.follow_keys(
                self, (*FACTORS, *HELD), state_dict, prefix, self.amax
            )
        for end in self._ends:
            key = prefix + end
            if key in state_dict:
                value = state_dict[key].to(torch.float32)
                current = getattr(self, end)
                if not value.numel():  # Unknown, in whatever form: see expect_range.
                    dims = (0, *current.shape) if current.numel() else current.shape
                    value = value.new_empty(dims)
                if value.shape != current.shape:
                    self._adopt(torch.empty_like(value, device=current.device), end)
                state_dict[key] = value
        missing = args[2]
        # The layer may have named this range, which it knows to be lost.
        before = list(missing)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if describes:
            # The range was set too, and a range that is set drops what is held.
            optional_buffers.register_assigned(self, HELD, state_dict, prefix)
            missing += optional_buffers.lacking_keys(held, state_dict, prefix)
        else:
            optional = [buffer.name for buffer in (*FACTORS, *HELD)]
            optional_keys = {
                prefix + name for name in ("amax", "amin", "unsigned", *optional)
            }
            added = missing[len(before) :]
            missing[:] = before + [name for name in added if name not in optional_keys]
        if prefix + "unsigned" in state_dict and "unsigned" in self._buffers:
            self._adopt_loaded_sign(prefix, args[4])

    def _adopt_loaded_sign(self, prefix: str, errors: list[str]) -> None:
        """Make the descriptor agree with the loaded buffer ``unsigned``; a problem is appended."""
        if self.get_buffer("unsigned").is_meta:
            return
        value = int(self.get_buffer("unsigned"))
        if self.keeps_sign:
            self.get_buffer("unsigned").fill_(1)
            if value == 0:
                errors.append(
                    f"{prefix}unsigned: got 0; expected 1, which the plan has fixed"
                )
        elif value not in (_UNDECIDED, 0, 1):
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
            return f"meta{tuple(self.amax.shape) or ''}"
        low, high = torch.aminmax(self.amax.detach())
        several = f" ({self.amax.numel()})" if self.amax.numel() > 1 else ""
        if self.range.low is not None:
            return f"[{self.range.low.detach().min():.4g}, {high:.4g}]{several}"
        return f"{low:.4g} .. {high:.4g}{several}" if several else f"{low:.4g}"

    def _get_name(self) -> str:
        return "TensorQuantizer"

    def extra_repr(self) -> str:
        """Return the descriptor, the range and the mode."""
        end = "amax" if self.descriptor.symmetric else "range"
        description = f"{self.descriptor}, {end}={self.range_text()}, {self.mode}"
        return description if self._delegate is None else f"{description}, delegated"


def _stands_elsewhere(
    tensor: Tensor, key: str, name: str, state: Mapping[str, Tensor]
) -> bool:
    """Return whether a state dict holds the tensor of ``key`` under another path too."""
    return any(
        other != key and other.endswith(name) and value.data_ptr() == tensor.data_ptr()
        for other, value in state.items()
    )


# Trainers that know NVIDIA ModelOpt recognise its quantizers by the name of their class, and ask
# them for ModelOpt's state (Ultralytics 8.4). The qualified name, which pickle uses, stays.
TensorQuantizer.__name__ = "TorchqQuantizer"

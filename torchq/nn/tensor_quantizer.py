"""The module that quantizes a tensor: a descriptor, a range, and two switches."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from torchq.descriptor import QuantDescriptor
from torchq.errors import ConfigError
from torchq.functional import fake_quantize, learned_fake_quantize, quantize
from torchq.nn.quantizer_calibration import QuantizerCalibration
from torchq.utils import short_repr

__all__ = ["Delegate", "TensorQuantizer", "modes_kept"]

# Keeps these calls whole when a model is traced with torch.fx.
torch.fx.wrap("fake_quantize")
torch.fx.wrap("learned_fake_quantize")
torch.fx.wrap("quantize")

_MODES = {
    "off": (False, False),
    "observe": (True, False),
    "quantize": (False, True),
    "observe+quantize": (True, True),
}

#: ``delegate(x, quantizer) -> Tensor``: what a quantizer computes in place of its own function.
Delegate = Callable[[Tensor, Any], Tensor]


class TensorQuantizer(QuantizerCalibration):
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

    #: A call stays one node in every trace of :func:`torchq.graph.trace`.
    keeps_tensor_type = True
    # torch.jit.trace reads every attribute of the class and of the object, but for these. There may
    # be no scale yet; see also __dir__.
    __jit_ignored_attributes__ = ("scale",)
    scale = QuantizerCalibration.scale
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
        if self._search is None:
            self._make_calibrator()  # An unknown calib_method is an error at once.

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

    def _get_name(self) -> str:
        return "TensorQuantizer"

    def extra_repr(self) -> str:
        """Return the descriptor, the range and the mode."""
        end = "amax" if self.descriptor.symmetric else "range"
        delegated = "" if self._delegate is None else ", delegated"
        return f"{self.descriptor}, {end}={self.range_text()}, {self.mode}{delegated}"


# Trainers that know NVIDIA ModelOpt recognise its quantizers by the name of their class, and ask
# them for ModelOpt's state (Ultralytics 8.4). The qualified name, which pickle uses, stays.
TensorQuantizer.__name__ = "TorchqQuantizer"


@contextmanager
def modes_kept(quantizers: Iterable[TensorQuantizer]) -> Iterator[None]:
    """Let a ``with`` block change the modes of quantizers; give them back at the end."""
    before = [(quantizer, quantizer.mode) for quantizer in quantizers]
    try:
        yield
    finally:
        for quantizer, mode in before:
            quantizer.mode = mode

"""The base of layers that compute on integers."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import astuple
from typing import Any, ClassVar

import torch
from torch import Tensor

from torchq.lowering.modules.float32_params import KeepsFloat32
from torchq.lowering.modules.kernel_cache import KeepsBound
from torchq.lowering.ops import onednn
from torchq.lowering.ops.schemas import kernel
from torchq.lowering.qparams import QParams

__all__ = ["Int8Layer", "dequantized", "eager"]


class Int8Layer(KeepsBound, KeepsFloat32):
    """Base of layers with int8 weights and uint8 activations.

    Takes a floating-point tensor, which it quantizes, or the uint8 codes of its :attr:`input_qparams`. Returns a floating-point
    tensor, or codes where it has an :attr:`output_qparams`. For inference; there is no gradient.

    Args:
        weight: int8, (out, in / groups, ...).
        weight_scale: float32, (out,): real weight = weight * scale.
        bias: floating point (out,) or None.
        input_qparams: how the input is quantized.
        dtype: of floating-point results.

    Attributes:
        activation, arguments: applied to the result, a name in :data:`torchq.lowering.ACTIVATIONS`.
        output_qparams: None for floating-point results.
        residual_qparams: of the second argument of :meth:`forward`, where that is codes.
    """

    #: Which operator runs, for the summary.
    kind: ClassVar[str]
    weight_codes: Tensor
    weight_scale: Tensor
    bias: Tensor | None
    pre_quant_scale: Tensor | None

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        input_qparams: QParams,
        dtype: torch.dtype,
        pre_quant_scale: Tensor | None,
    ) -> None:
        super().__init__()
        self.register_buffer("weight_codes", weight)
        self.register_buffer("weight_scale", weight_scale)
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32))
        self.register_buffer("pre_quant_scale", pre_quant_scale)
        self.input_qparams = input_qparams
        self.output_qparams: QParams | None = None
        self.residual_qparams: QParams | None = None
        self.activation, self.arguments = "none", list[float]()
        self.dtype = dtype

    def _sees_no_negative(self, x: Tensor) -> bool:
        """Whether a signed qparams meets data without negative numbers: then :meth:`_unsigned` is faster, and keeps bits of the bias."""
        return (
            self.input_qparams.zero_point != 0
            and eager(x)
            and x.numel() > 0
            and bool(x.amin() >= 0)
            and self.pre_quant_scale is None
        )

    def _unsigned(self) -> Int8Layer:
        """This layer with codes that start at 0."""

        def make() -> Int8Layer:
            twin = self.variant()
            twin.input_qparams = self.input_qparams.clamped(0.0, math.inf)
            return twin

        twin: Int8Layer = self._bound(_UNSIGNED, make)
        return twin

    @property
    def weight(self) -> Tensor:
        """The weight as floating point, made anew: for code that reads a layer's weight, or its dtype or device."""
        return dequantized(self.weight_codes, self.weight_scale).to(self.dtype)

    def codes(self, x: Tensor) -> Tensor:
        """``x`` as codes of the input qparams."""
        if x.dtype is torch.uint8:
            return x
        return self.input_qparams.quantize(
            x if self.pre_quant_scale is None else x * self.pre_quant_scale.to(x.dtype)
        )

    def output_arguments(self) -> tuple[float, int, torch.dtype, str, Sequence[float]]:
        """Scale, zero, dtype, activation and its arguments, as the operators take them."""
        qparams = self.output_qparams
        if qparams is None:
            return 1.0, 0, torch.float32, self.activation, self.arguments
        return qparams.scale, qparams.zero_point, torch.uint8, self.activation, self.arguments

    @property
    def finished(self) -> bool:
        """Whether results of the kernel have the right dtype and bounds already."""
        qparams = self.output_qparams
        if qparams is None:
            return self.dtype is torch.float32
        return qparams.saturates_by_itself or self._activation_bounds(qparams)

    def finish(self, y: Tensor) -> Tensor:
        """Give floating-point results their dtype, and codes the bounds that a kernel does not know."""
        if self.finished:
            return y
        qparams = self.output_qparams
        return (
            y.to(self.dtype) if qparams is None else y.clamp_(qparams.quant_min, qparams.quant_max)
        )

    def _activation_bounds(self, qparams: QParams) -> bool:
        """Whether the activation keeps results inside the qparams already."""
        if self.activation != "clamp":
            return False
        low, high = qparams.bounds
        return self.arguments[0] >= low and self.arguments[1] <= high

    def variant(self) -> Int8Layer:
        """A second layer on the same tensors, for another place in a model."""
        twin = copy.copy(self)
        twin._buffers = dict(self._buffers)
        return twin

    def get_extra_state(self) -> dict[str, Any]:
        """The numbers that are no tensors, for the state dict."""
        qparams = {
            name: None if (qparams := getattr(self, name)) is None else astuple(qparams)
            for name in _GRIDS
        }
        return {**qparams, "activation": self.activation, "arguments": list(self.arguments)}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Inverse of :meth:`get_extra_state`."""
        for name in _GRIDS:
            setattr(self, name, None if state[name] is None else QParams(*state[name]))
        self.activation, self.arguments = state["activation"], list(state["arguments"])

    def _load_from_state_dict(self, *args: Any) -> None:
        onednn.forget(self.weight_codes)  # copied into in place
        super()._load_from_state_dict(*args)

    def summary_row(self) -> tuple[str, int, str]:
        """Kernel, bytes of the parameters, what is fused, and why it is the reference, for :func:`torchq.summary`."""
        size = sum(b.numel() * b.element_size() for b in self.buffers())
        fused = [] if self.activation == "none" else [self.activation]
        fused += ["add"] if self.residual_qparams is not None else []
        out = "uint8" if self.output_qparams is not None else str(self.dtype).removeprefix("torch.")
        name, problem = kernel(self.weight_codes.device, self.kind)
        return (
            f"{name} uint8 x int8 -> {out}",
            size,
            "; ".join(filter(None, (" + ".join(fused), problem))),
        )

    def extra_repr(self) -> str:
        shape = "x".join(map(str, self.weight_codes.shape))
        out = self.dtype if self.output_qparams is None else self.output_qparams
        return f"weight={shape}, input={self.input_qparams}, output={out}, activation={self.activation}{self.arguments or ''}"


def dequantized(codes: Tensor, scale: Tensor) -> Tensor:
    """Integer weights times the scale of each output, float32."""
    return codes * scale.view(-1, *[1] * (codes.dim() - 1))


_GRIDS = ("input_qparams", "output_qparams", "residual_qparams")
#: Where a layer keeps its twin with codes from 0.
_UNSIGNED = "unsigned"


def eager(x: Tensor) -> bool:
    """Whether the kernel may be called directly, past torch's dispatcher and with its arguments bound: half of a small layer's time."""
    return not torch.compiler.is_compiling() and type(x) is Tensor and x.is_cpu

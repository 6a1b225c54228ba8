"""The integer layers: convolution, linear layer, and linear layer with a range of each call."""

from __future__ import annotations

import math
from typing import Any, cast

import torch
from torch import Tensor

from torchq.descriptor import QuantDescriptor
from torchq.errors import ExportError
from torchq.functional import reduce_amax, scale_from_amax
from torchq.functional.scale import divisor
from torchq.lowering.codes import (
    CodesModule,
    has_kernels,
    require_dtype,
    require_numbers,
)
from torchq.lowering.kernel import (
    ConvParams,
    Epilogue,
    Int8Weights,
    Kernel,
    Run,
    available,
    reference,
)
from torchq.lowering.qparams import SIGNED_ZERO_POINT, ByteQParams
from torchq.utils import twin_of


class DeployedLayer(CodesModule):
    """Base of layers with an integer weight, which their :class:`Kernel` holds.

    Attributes:
        kernel: the weight, int8, (out, in / groups, ...).
        weight_scale: float32, (out,): real weight = code * scale.
        bias: float32 (out,) or None.
        params: the numbers of a convolution.
    """

    weight_scale: Tensor
    bias: Tensor | None
    dtype: torch.dtype
    params = ConvParams()

    def __init__(
        self, codes: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.register_buffer("weight_scale", scale)
        self.register_buffer(
            "bias", None if bias is None else bias.detach().to(torch.float32)
        )
        self.kernel = Kernel(codes)
        self.dtype = dtype

    @property
    def weight_codes(self) -> Tensor:
        """The weight as integers; a new tensor where the kernel has dropped the plain one."""
        return self.kernel.codes

    @weight_codes.setter
    def weight_codes(self, codes: Tensor) -> None:
        self.kernel = Kernel(codes)

    @property
    def weight(self) -> Tensor:
        """A new tensor with the weight as floating point, for code that reads a layer's weight."""
        codes = self.weight_codes
        scale = self.weight_scale.view(-1, *[1] * (codes.dim() - 1))
        return (codes * scale).to(self.dtype)

    def epilogue(self) -> Epilogue:
        """Return what kernels do with their sums."""
        return Epilogue()

    def _grid(self) -> tuple[Tensor | None, float, int]:
        """Return the bias that kernels add, and scale and zero point of the codes they read."""
        raise NotImplementedError

    def _product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return the product for codes, by a kernel that is bound once for their shape."""
        key: Any = x.shape if self.params.stride else x.numel()
        if residual is None:
            return (self._runs.get(key) or self._keep(key, self._bind(x)))(x)
        key = key, residual.shape, residual.dtype
        return (self._runs.get(key) or self._keep(key, self._bind(x, residual)))(
            x, residual
        )

    def _bind(self, x: Tensor, residual: Tensor | None = None) -> Run:
        """Return the product as a function of codes, and residuals, like these."""
        weights = Int8Weights(self.weight_codes, self.weight_scale, *self._grid())
        settings = self.params, self.epilogue()
        if x.numel() and has_kernels(x) and available():
            return self.kernel.bind(x.shape, weights, *settings, residual)
        return lambda x, residual=None: reference(x, weights, *settings, residual)

    def _save_to_state_dict(
        self, destination: Any, prefix: str, keep_vars: bool
    ) -> None:
        destination[f"{prefix}weight_codes"] = self.weight_codes
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *args: object) -> None:
        # A buffer while torch loads it, so that it is checked like the other tensors.
        buffers = vars(self)["_buffers"]
        buffers["weight_codes"] = self.weight_codes.clone()
        try:
            super()._load_from_state_dict(*args)
        finally:
            self.weight_codes = buffers.pop("weight_codes")

    def _apply(self, fn: Any, recurse: bool = True) -> object:
        self.kernel.move_(fn)
        return super()._apply(fn, recurse)

    def _summary_row(self, out: str, note: str) -> tuple[str, int, str]:
        tensors = [b for b in (self.weight_scale, self.bias) if b is not None]
        size = math.prod(self.kernel.shape) + sum(
            b.numel() * b.element_size() for b in tensors
        )
        name, problem = "onednn", ""
        if self.kernel.device.type != "cpu":
            name = "reference"
            problem = f"integer kernels run on CPUs, not on {self.kernel.device.type}"
        elif not available():
            name, problem = "reference", "this torch has no oneDNN operators"
        note = "; ".join(filter(None, (note, problem)))
        return f"{name} uint8 x int8 -> {out}", size, note


class Int8Layer(DeployedLayer):
    """Base of layers with int8 weights and uint8 activations, for inference.

    The input is a floating-point tensor, which the layer quantizes, or uint8 codes where
    :attr:`reads_codes` says so. The result is a floating-point tensor, or codes where the layer has
    :attr:`output_qparams`.

    Args:
        codes: int8, (out, in / groups, ...).
        scale: float32, (out,): real weight = code * scale.
        bias: floating point (out,) or None.
        input_qparams: how the input is quantized.
        dtype: of floating-point results.
        pre_quant_scale: multiplies the input before it is quantized, or None.

    Attributes:
        activation: the name of the activation that is applied to the result, one of
            :data:`~torchq.lowering.kernel.ACTIVATIONS`.
        arguments: the arguments of the activation.
        reads_codes: True where the input is codes of :attr:`input_qparams`. Without it uint8 is
            refused like any other integer dtype: it could be an image.
        output_qparams: None for floating-point results.
        residual_qparams: of the second argument of :meth:`forward`, where that is codes.
    """

    qparams_names = ("input_qparams", "output_qparams", "residual_qparams")
    pre_quant_scale: Tensor | None

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        input_qparams: ByteQParams,
        dtype: torch.dtype,
        pre_quant_scale: Tensor | None = None,
    ) -> None:
        super().__init__(codes, scale, bias, dtype)
        self.register_buffer("pre_quant_scale", pre_quant_scale)
        self.input_qparams = input_qparams
        self.reads_codes = False
        self.output_qparams: ByteQParams | None = None
        self.residual_qparams: ByteQParams | None = None
        self.activation = "none"
        self.arguments = list[float]()

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """Return ``activation(product + bias + residual)``; convolutions alone take a residual.

        Raises:
            TypeError: ``x`` has another dtype than the layer; the simulation refuses it too.
            QuantizationError: ``x`` holds NaN.
        """
        if not (x.dtype is torch.uint8 and self.reads_codes):
            require_numbers(x, self.dtype, type(self).__name__)
            x = self.input_codes(x)
        y = self._product(x, residual)
        is_done = self.dtype is torch.float32 or self.output_qparams is not None
        return y if is_done else y.to(self.dtype)

    def input_codes(self, x: Tensor) -> Tensor:
        """Return the codes that the layer reads of a floating-point tensor."""
        if self.pre_quant_scale is not None:
            x = x * self.pre_quant_scale.to(x.dtype)
        return self.input_qparams.quantize(x)

    def _grid(self) -> tuple[Tensor | None, float, int]:
        return self.bias, self.input_qparams.scale, self.input_qparams.zero_point

    def epilogue(self) -> Epilogue:
        """See :meth:`DeployedLayer.epilogue`."""
        arguments = tuple(self.arguments)
        return Epilogue(
            self.output_qparams, self.activation, arguments, self.residual_qparams
        )

    def variant(self) -> Int8Layer:
        """Return a second layer on the same tensors, for another place in a model."""
        # It has buffers and hooks of its own.
        return cast(Int8Layer, twin_of(self))

    def get_extra_state(self) -> dict[str, Any]:
        """Return the settings that are no tensors, for the state dict."""
        activation = {"activation": self.activation, "arguments": list(self.arguments)}
        return super().get_extra_state() | activation

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`get_extra_state` returned."""
        super().set_extra_state(state)
        self.activation = state["activation"]
        self.arguments = list(state["arguments"])

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes, and what is fused, for :func:`torchq.summary`."""
        fused = [] if self.activation == "none" else [self.activation]
        if self.residual_qparams is not None:
            fused.append("add")
        out = (
            "uint8"
            if self.output_qparams is not None
            else str(self.dtype).removeprefix("torch.")
        )
        return self._summary_row(out, " + ".join(fused))

    def extra_repr(self) -> str:
        """Return the settings that ``repr`` shows."""
        shape = "x".join(map(str, self.kernel.shape))
        out = self.dtype if self.output_qparams is None else self.output_qparams
        activation = f"{self.activation}{self.arguments or ''}"
        return f"weight={shape}, input={self.input_qparams}, output={out}, activation={activation}"


class Int8Linear(Int8Layer):
    """An integer linear layer; the arguments are those of :class:`Int8Layer`.

    Shape:
        (..., in), float or uint8 codes -> (..., out).
    """


class Int8Conv(Int8Layer):
    """An integer convolution in 1, 2 or 3 dimensions, padded by zeros alike on both sides.

    Args:
        params: the numbers of the convolution.
        args: the arguments of :class:`Int8Layer`.

    Shape:
        (N, C, ...) or (C, ...), float or uint8 codes -> (N, out, ...) or (out, ...), channels last
        in memory for 2 and 3 dimensions.
    """

    def __init__(self, params: ConvParams, *args: Any) -> None:
        super().__init__(*args)
        self.params = params

    def _product(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        if x.dim() == len(self.params.stride) + 1:
            return super()._product(x.unsqueeze(0), residual).squeeze(0)
        return super()._product(x, residual)


class DynamicInt8Linear(DeployedLayer):
    """An integer linear layer whose input scales are found in each call.

    Args:
        codes: int8, (out, in).
        scale: float32, (out,).
        bias: (out,) or None.
        descriptor: of the input: dynamic, one range per tensor or per slice of leading axes (a
            token).
        dtype: of :attr:`weight`.

    Shape:
        (..., in) floating point -> (..., out), same dtype.
    """

    def __init__(
        self,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None,
        descriptor: QuantDescriptor,
        dtype: torch.dtype,
    ) -> None:
        super().__init__(codes, scale, bias, dtype)
        self.descriptor = descriptor

    def forward(self, x: Tensor) -> Tensor:
        """Return ``x @ weight.T + bias`` with ``x`` rounded by its own range.

        Raises:
            ExportError: the ranges run along the features.
            TypeError: ``x`` has another dtype than the layer.
        """
        require_dtype(x, self.dtype, "DynamicInt8Linear")
        format = self.descriptor.format
        amax = self._range(x)
        scale = scale_from_amax(amax, format)
        numbers = format.snap_(x.to(torch.float32) / divisor(amax, scale))
        codes = numbers.add_(self._grid()[2]).to(torch.uint8)
        y = self._product(codes)
        # The scale of the input multiplies the result, since it may differ for each token.
        y = y.mul_(scale)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

    def _grid(self) -> tuple[Tensor | None, float, int]:
        return None, 1.0, SIGNED_ZERO_POINT if self.descriptor.format.signed else 0

    def _range(self, x: Tensor) -> Tensor:
        """Return the range of each token of ``x``, (..., 1), or of all of it; float32."""
        amax = reduce_amax(x, self.descriptor.granularity).to(torch.float32)
        if amax.dim() and amax.shape[-1] != 1:
            raise ExportError(
                f"DynamicInt8Linear: got ranges along the features of {tuple(x.shape)}; "
                "expected one per token or tensor"
            )
        factor = self.descriptor.scale_amax
        return amax if factor is None else amax * factor

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`."""
        return self._summary_row("float", "the input's range is that of each call")

"""The integer linear layers: with a fixed range of the input, and with that of each call."""

from __future__ import annotations

import torch
from torch import Tensor

from torchq.descriptor import QuantDescriptor
from torchq.errors import ExportError
from torchq.functional import reduce_amax, scale_from_amax
from torchq.functional.scale import divisor
from torchq.lowering import onednn
from torchq.lowering.definition import Epilogue, Int8Weights
from torchq.lowering.layer import DeployedLayer, Int8Layer, eager, guarded, require_dtype
from torchq.lowering.onednn import Run
from torchq.lowering.operators import int8_linear, kernel
from torchq.lowering.qparams import SIGNED_ZERO_POINT


class Int8Linear(Int8Layer):
    """An integer linear layer; the arguments are those of :class:`Int8Layer`.

    Shape:
        (..., in), float or uint8 codes -> (..., out).
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return ``activation(x @ weight.T + bias)``.

        Raises:
            TypeError: see :meth:`Int8Layer.input_codes`.
            QuantizationError: see :meth:`Int8Layer.input_codes`.
        """
        if x.dtype is torch.uint8 and self.reads_codes:
            return self._compute(x)
        layer, codes = self.input_codes(x)
        assert isinstance(layer, Int8Linear)
        return layer._compute(codes)  # noqa: SLF001

    def _compute(self, codes: Tensor) -> Tensor:
        return self._run(codes)(codes) if eager(codes) else self._dispatched(codes)

    def _run(self, codes: Tensor) -> Run:
        empty = not codes.numel()
        run: Run | None = self._kernels.get(empty)
        return run or self._kernel(empty, lambda: self._bind(empty))

    def bound(self, *inputs: Tensor) -> Run | None:
        """See :meth:`KernelCacheMixin.bound`; only codes are read without a check."""
        if inputs[0].dtype is not torch.uint8 or not self.reads_codes:
            return None
        return guarded(self._run(inputs[0]), self, inputs)

    def _bind(self, empty: bool) -> Run:
        if empty or not onednn.available():
            return self._dispatched
        return self._bound(onednn.bind_linear(self.int8_weights(), self.epilogue()))

    def _dispatched(self, x: Tensor) -> Tensor:
        return self.finish(int8_linear(x, self.int8_weights(), self.epilogue()))


class DynamicInt8Linear(DeployedLayer):
    """An integer linear layer whose input scales are found in each call.

    Args:
        weight: int8, (out, in).
        weight_scale: float32, (out,).
        bias: (out,) or None.
        descriptor: of the input: dynamic, one range per tensor or per slice of leading axes (a
            token).
        dtype: of :attr:`weight`.

    Shape:
        (..., in) floating point -> (..., out), same dtype.
    """

    def __init__(
        self,
        weight: Tensor,
        weight_scale: Tensor,
        bias: Tensor | None,
        descriptor: QuantDescriptor,
        dtype: torch.dtype,
    ) -> None:
        bias = None if bias is None else bias.detach().to(torch.float32)
        super().__init__(weight, weight_scale, bias, dtype)
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
        zero_point = SIGNED_ZERO_POINT if format.signed else 0
        numbers = format.snap_(x.to(torch.float32) / divisor(amax, scale))
        # The scale of the input multiplies the result, since it may differ for each token.
        y = self._product(numbers.add_(zero_point).to(torch.uint8)).mul_(scale)
        return (y if self.bias is None else y.add_(self.bias)).to(x.dtype)

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

    def _product(self, codes: Tensor) -> Tensor:
        """Return the product of codes, as if their scale were 1."""
        if not eager(codes) or not codes.numel() or not onednn.available():
            return int8_linear(codes, self._weights(), Epilogue())
        run: Run = self._kernel("product", lambda: onednn.bind_linear(self._weights(), Epilogue()))
        return run(codes)

    def _weights(self) -> Int8Weights:
        zero_point = SIGNED_ZERO_POINT if self.descriptor.format.signed else 0
        return Int8Weights(self.weight_codes, self.weight_scale, None, 1.0, zero_point)

    def summary_row(self) -> tuple[str, int, str]:
        """Return kernel, bytes and a note for :func:`torchq.summary`."""
        name, problem = kernel(self.weight_codes.device)
        note = "; ".join(filter(None, ("the input's range is that of each call", problem)))
        return f"{name} uint8 x int8 -> float", self._size(), note

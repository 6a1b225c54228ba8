"""What a quantizer does to the tensors that it sees: clipping, codes in use, lost channels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchq.analysis.noise import Noise
from torchq.nn import TensorQuantizer

__all__ = ["QuantizerRow", "QuantizerStatistics"]

#: Elements of one call whose codes are counted; more of them change little.
_COUNTED = 1 << 16


@dataclass(frozen=True)
class QuantizerRow:
    """What one quantizer did to the values that it saw.

    Attributes:
        name: its dotted path.
        descriptor: format, granularity and method, as text.
        amax: the smallest and the largest amax; None where each call has a range of its own.
        sqnr: signal to noise ratio of the quantized tensor itself, in dB.
        clipped: share of the elements beyond the largest or smallest value of the format, 0 to 1.
        used_codes: distinct codes that occurred, counted on a sample of large tensors.
        codes: codes that the format has; 0 where they cannot be counted.
        dead_channels: channels that hold nothing but 0 after quantization, though not before.
        channels: channels in all.
    """

    name: str
    descriptor: str
    amax: tuple[float, float] | None
    sqnr: float
    clipped: float
    used_codes: int
    codes: int
    dead_channels: int
    channels: int


class QuantizerStatistics:
    """Statistics of one quantizer over the calls that it sees.

    Args:
        name: its dotted path.
        quantizer: calibrated or dynamic.
        channel_axis: the axis of the channels in its tensors.
    """

    def __init__(self, name: str, quantizer: TensorQuantizer, channel_axis: int) -> None:
        self._name, self._quantizer, self._axis = name, quantizer, channel_axis
        self._noise = Noise()
        self._elements = self._clipped = 0
        self._codes: set[float] = set()
        self._lost: Tensor | None = None
        self._silent: Tensor | None = None

    def add(self, x: Tensor, quantized: Tensor) -> None:
        """Add one call.

        Args:
            x: what the quantizer was given.
            quantized: what it returned, of the same shape.
        """
        if not x.numel():
            return
        if self._quantizer.pre_quant_scale is not None:
            x = x * self._quantizer.pre_quant_scale.to(x.dtype)
        self._noise.add(quantized, x)
        self._elements += x.numel()
        scale = self._scale(x)
        if scale is not None:
            self._clipped += self._count_clipped(x, quantized, scale)
            self._codes.update(self._sample_codes(quantized, scale))
        self._note_channels(x, quantized)

    def _scale(self, x: Tensor) -> Tensor | None:
        """Return the scale in a shape that broadcasts against ``x``; None where it is not fixed."""
        quantizer = self._quantizer
        descriptor = quantizer.descriptor
        if descriptor.dynamic or descriptor.block_size is not None or not quantizer.calibrated:
            return None
        scale = quantizer.calculate_qparams()[0]
        return descriptor.granularity.align(scale, x.shape).to(x.dtype)

    def _count_clipped(self, x: Tensor, quantized: Tensor, scale: Tensor) -> int:
        """Return how many values lie beyond the grid.

        Rounding moves a value by half a scale at most, on an even grid, so what moved further was
        clipped.
        """
        format = self._quantizer.descriptor.format
        if format.is_integer:
            return int(((x - quantized).abs_() > scale * 0.51).sum())
        return int((x.abs() > scale * format.qmax).sum())

    def _sample_codes(self, quantized: Tensor, scale: Tensor) -> list[float]:
        codes = (quantized / scale).reshape(-1)
        codes = codes[:: max(1, codes.numel() // _COUNTED)].float()
        if not self._quantizer.descriptor.format.is_integer:
            return torch.unique(codes).tolist()
        codes = codes.nan_to_num().round_().int()
        lowest = int(codes.min())
        return (torch.bincount(codes - lowest).nonzero().flatten() + lowest).tolist()

    def _note_channels(self, x: Tensor, quantized: Tensor) -> None:
        if x.dim() < 2:
            return
        lost = _only_zeros(quantized, self._axis % x.dim())
        if self._lost is not None and self._lost.shape == lost.shape:
            lost &= self._lost
        self._lost = lost
        if bool(lost.any()):
            silent = _only_zeros(x, self._axis % x.dim())
            if self._silent is not None and self._silent.shape == silent.shape:
                silent &= self._silent
            self._silent = silent

    def row(self) -> QuantizerRow:
        """Return what was seen."""
        descriptor = self._quantizer.descriptor
        lost, silent = self._lost, self._silent
        dead = 0 if lost is None or silent is None else int((lost & ~silent).sum())
        amax = None
        if self._quantizer.calibrated and not descriptor.dynamic:
            smallest, largest = torch.aminmax(self._quantizer.amax.detach())
            amax = (float(smallest), float(largest))
        return QuantizerRow(
            name=self._name,
            descriptor=str(descriptor),
            amax=amax,
            sqnr=self._noise.sqnr,
            clipped=self._clipped / self._elements if self._elements else 0.0,
            used_codes=len(self._codes),
            codes=len(descriptor.format.values) if self._codes else 0,
            dead_channels=dead,
            channels=0 if lost is None else lost.numel(),
        )


def _only_zeros(x: Tensor, axis: int) -> Tensor:
    """Return for each index of ``axis`` whether all of its elements are 0."""
    dims = tuple(d for d in range(x.dim()) if d != axis)
    return (x.amax(dims) == 0) & (x.amin(dims) == 0)

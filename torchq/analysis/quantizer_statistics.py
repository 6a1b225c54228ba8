"""What a quantizer does to the tensors that it sees: clipping, codes in use, lost channels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchq.analysis.noise import Noise
from torchq.nn import TensorQuantizer

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


@dataclass
class Counts:
    """What was counted.

    Attributes:
        noise: of the quantized tensors beside what they were made of.
        elements: how many there were.
        clipped: those beyond the range.
        codes: distinct codes.
        lost: for each channel, whether all of its values became 0; None before the first call.
        silent: for each channel, whether all of its values were 0; None where none was lost.
    """

    noise: Noise = field(default_factory=Noise)
    elements: int = 0
    clipped: int = 0
    codes: set[float] = field(default_factory=set)
    lost: Tensor | None = None
    silent: Tensor | None = None


class QuantizerStatistics:
    """Statistics of one quantizer over the calls that it sees.

    Args:
        name: its dotted path.
        quantizer: calibrated or dynamic.
        channel_axis: the axis of the channels in its tensors.
    """

    def __init__(self, name: str, quantizer: TensorQuantizer, channel_axis: int) -> None:
        self._name, self._quantizer, self._axis = name, quantizer, channel_axis
        self.counts = Counts()

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
        self.counts.noise.add(quantized, x)
        self.counts.elements += x.numel()
        scale = self._scale(x)
        if scale is not None:
            self.counts.clipped += self._count_clipped(x, quantized, scale)
            self.counts.codes.update(self._sample_codes(quantized, scale))
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
        axis = self._axis % x.dim()
        self.counts.lost = _both(self.counts.lost, _only_zeros(quantized, axis))
        if bool(self.counts.lost.any()):
            self.counts.silent = _both(self.counts.silent, _only_zeros(x, axis))

    def row(self) -> QuantizerRow:
        """Return what was seen."""
        descriptor, counts = self._quantizer.descriptor, self.counts
        lost, silent = counts.lost, counts.silent
        dead = 0 if lost is None or silent is None else int((lost & ~silent).sum())
        amax = None
        if self._quantizer.calibrated and not descriptor.dynamic:
            smallest, largest = torch.aminmax(self._quantizer.amax.detach())
            amax = (float(smallest), float(largest))
        return QuantizerRow(
            name=self._name,
            descriptor=str(descriptor),
            amax=amax,
            sqnr=counts.noise.sqnr,
            clipped=counts.clipped / counts.elements if counts.elements else 0.0,
            used_codes=len(counts.codes),
            codes=len(descriptor.format.values) if counts.codes else 0,
            dead_channels=dead,
            channels=0 if lost is None else lost.numel(),
        )


def _both(known: Tensor | None, new: Tensor) -> Tensor:
    """Return what holds in both; a tensor of another shape begins anew."""
    return new if known is None or known.shape != new.shape else known & new


def _only_zeros(x: Tensor, axis: int) -> Tensor:
    """Return for each index of ``axis`` whether all of its elements are 0."""
    dims = tuple(d for d in range(x.dim()) if d != axis)
    return (x.amax(dims) == 0) & (x.amin(dims) == 0)

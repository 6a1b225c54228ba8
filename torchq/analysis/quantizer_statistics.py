"""What a quantizer does to the tensors that it sees: clipping, codes in use, lost channels."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from torchq.analysis.metrics import Noise
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
class QuantizerStatistics:
    """Statistics of one quantizer over the calls that it sees; tensors have channels on an axis.

    ``lost`` marks channels of which only zeros are left, ``silent`` those that were zeros before;
    ``silent`` is None until a channel is lost.
    """

    name: str
    quantizer: TensorQuantizer
    channel_axis: int
    noise: Noise = field(default_factory=Noise)
    elements: int = 0
    clipped: int = 0
    codes: set[float] = field(default_factory=set)
    lost: Tensor | None = None
    silent: Tensor | None = None

    def add(self, x: Tensor, quantized: Tensor) -> None:
        """Add one call: what the quantizer was given, and what it returned."""
        if not x.numel():
            return
        if self.quantizer.pre_quant_scale is not None:
            x = x * self.quantizer.pre_quant_scale.to(x.dtype)
        self.noise.add(quantized, x)
        self.elements += x.numel()
        descriptor = self.quantizer.descriptor
        has_grid = not descriptor.dynamic and descriptor.block_size is None
        if has_grid and self.quantizer.calibrated:
            scale = self.quantizer.calculate_qparams()[0]
            scale = descriptor.granularity.align(scale, x.shape).to(x.dtype)
            self.clipped += self._count_clipped(x, quantized, scale)
            self.codes.update(self._sample_codes(quantized, scale))
        if x.dim() > 1:
            axis = self.channel_axis % x.dim()
            self.lost = _both(self.lost, _only_zeros(quantized, axis))
            if bool(self.lost.any()):
                self.silent = _both(self.silent, _only_zeros(x, axis))

    def _count_clipped(self, x: Tensor, quantized: Tensor, scale: Tensor) -> int:
        """Return how many values lie beyond the grid.

        Rounding moves a value by half a scale at most, on an even grid, so what moved further was
        clipped.
        """
        format = self.quantizer.descriptor.format
        if format.is_integer:
            return int(((x - quantized).abs_() > scale * 0.51).sum())
        return int((x.abs() > scale * format.qmax).sum())

    def _sample_codes(self, quantized: Tensor, scale: Tensor) -> list[float]:
        codes = (quantized / scale).reshape(-1)
        codes = codes[:: max(1, codes.numel() // _COUNTED)].float()
        if not self.quantizer.descriptor.format.is_integer:
            return torch.unique(codes).tolist()
        codes = codes.nan_to_num().round_().int()
        lowest = int(codes.min())
        return (torch.bincount(codes - lowest).nonzero().flatten() + lowest).tolist()

    def row(self) -> QuantizerRow:
        """Return what was seen."""
        descriptor, lost, silent = self.quantizer.descriptor, self.lost, self.silent
        amax = None
        if self.quantizer.calibrated and not descriptor.dynamic:
            smallest, largest = torch.aminmax(self.quantizer.amax.detach())
            amax = (float(smallest), float(largest))
        return QuantizerRow(
            name=self.name,
            descriptor=str(descriptor),
            amax=amax,
            sqnr=self.noise.sqnr,
            clipped=self.clipped / self.elements if self.elements else 0.0,
            used_codes=len(self.codes),
            codes=len(descriptor.format.values) if self.codes else 0,
            dead_channels=0 if lost is None or silent is None else int((lost & ~silent).sum()),
            channels=0 if lost is None else lost.numel(),
        )


def _both(known: Tensor | None, new: Tensor) -> Tensor:
    """Return what holds in both; a tensor of another shape begins anew."""
    return new if known is None or known.shape != new.shape else known & new


def _only_zeros(x: Tensor, axis: int) -> Tensor:
    """Return for each index of ``axis`` whether all of its elements are 0."""
    dims = tuple(d for d in range(x.dim()) if d != axis)
    return (x.amax(dims) == 0) & (x.amin(dims) == 0)

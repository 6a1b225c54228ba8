"""Quantization parameters: what the codes of a tensor stand for."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchq.formats import Format, IntFormat, integer_format, round_


@dataclass(frozen=True, eq=False)
class QParams:
    """The scale and the zero point of codes: ``value = (code - zero_point) * scale``.

    One type serves the simulation, files and kernels.

    Attributes:
        scale: floating point, > 0: without dimensions for one scale, of the shape of an amax, with
            one dimension for a scale per index of ``axis``, or with as many as the tensor for
            blocks.
        zero_point: whole numbers of the shape of ``scale``: the codes of 0.0.
        format: the codes.
        axis: the axis of several scales or of blocks; None for one scale.
        block: the number of elements of one block; 0 without blocks.

    Example:
        >>> from torchq.formats import UINT8
        >>> qparams = QParams(torch.tensor(0.5), torch.tensor(2), UINT8)
        >>> qparams.codes(torch.tensor([-9.0, 0.26, 3.0]) / 0.5)
        tensor([0., 3., 8.])
        >>> qparams.stored(signed=True).zero_point
        tensor(-126)
    """

    scale: Tensor
    zero_point: Tensor
    format: Format
    axis: int | None = None
    block: int = 0

    @property
    def quant_min(self) -> float:
        """The smallest code."""
        return self.format.quant_min

    @property
    def quant_max(self) -> float:
        """The largest code."""
        return self.format.quant_max

    def has_zero_point(self, code: float) -> bool:
        """Return True if all zero points are ``code``."""
        return bool((self.zero_point == code).all())

    def stored(self, signed: bool) -> QParams:
        """Return the parameters of the same values as signed or unsigned codes of equal width.

        The codes move by half their number, so no value changes; a narrow format becomes the whole
        one. Float formats stay as they are.
        """
        if not isinstance(self.format, IntFormat) or self.format.signed == signed:
            return self
        half = 1 << (self.format.width - 1)
        format = integer_format(
            self.format.width, unsigned=not signed, rounding=self.format.rounding
        )
        moved = self.zero_point - half if signed else self.zero_point + half
        return replace(self, zero_point=moved, format=format)

    def scaled(self, x: Tensor) -> Tensor:
        """Return ``x / scale`` in float32, not rounded."""
        return x.to(torch.float32) / self.aligned(self.scale, x)

    def round(self, scaled: Tensor) -> Tensor:
        """Return scaled values rounded and saturated to codes, less the zero point."""
        if not self.format.is_integer:
            return self.format.snap_(scaled.clone())
        zero_point = self.aligned(self.zero_point, scaled)
        rounded = round_(scaled.clone(), self.format.rounding)
        return rounded.clamp(self.quant_min - zero_point, self.quant_max - zero_point)

    def codes(self, scaled: Tensor) -> Tensor:
        """Return scaled values rounded and saturated to codes."""
        if self.has_zero_point(0):
            return self.format.snap_(scaled.clone())
        return self.round(scaled) + self.aligned(self.zero_point, scaled)

    def centered(self, codes: Tensor) -> Tensor:
        """Return codes as float32, less the zero point."""
        return codes.to(torch.float32) - self.aligned(self.zero_point, codes)

    def dequantize(self, centered: Tensor) -> Tensor:
        """Return the values of codes from which the zero point was subtracted."""
        return centered * self.aligned(self.scale, centered)

    def aligned(self, parameter: Tensor, x: Tensor) -> Tensor:
        """Return the scale or the zero point in a shape that broadcasts against ``x``."""
        parameter = parameter.to(x.device)
        if self.block:
            assert self.axis is not None
            repeated = parameter.repeat_interleave(self.block, dim=self.axis)
            return repeated.narrow(self.axis, 0, x.shape[self.axis])
        if parameter.numel() == 1:
            return parameter.reshape(())
        if self.axis is None or parameter.dim() == x.dim():
            return parameter
        return parameter.reshape(
            [-1 if d == self.axis % x.dim() else 1 for d in range(x.dim())]
        )

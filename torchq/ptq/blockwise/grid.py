"""The grid of a weight quantizer, column by column of the weight matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.errors import QuantizationError
from torchq.formats import Format
from torchq.functional import scale_from_amax
from torchq.functional.scale import divisor
from torchq.ptq.blockwise.layers import weight_quantizer
from torchq.workflow.layer_matrices import weight_matrix

__all__ = ["Grid", "check_on_grid", "grid_of"]


class Grid:
    """The scale of every entry of a weight matrix, and rounding onto the grid.

    Args:
        scale: (rows, columns), what codes are multiplied by.
        divisor: (rows, columns), what values are divided by; infinite where a range is dead.
        format: the number format.
    """

    def __init__(self, scale: Tensor, divisor: Tensor, format: Format) -> None:
        self.scale, self.divisor, self.format = scale, divisor, format

    def nearest(self, values: Tensor, columns: Tensor | slice | int = slice(None)) -> Tensor:
        """Return ``values`` of some columns rounded to the nearest grid value, in their dtype."""
        scale, divisor = self.scale[..., columns], self.divisor[..., columns]
        codes = self.format.snap_(values.to(scale.dtype) / divisor)
        return (codes * scale).to(values.dtype)

    def groups(self) -> list[Grid]:
        """Return the grid of each group, for a grid with a first dimension of groups."""
        pairs = zip(self.scale, self.divisor, strict=True)
        return [Grid(scale, divisor, self.format) for scale, divisor in pairs]


def grid_of(layer: Any, amax: Tensor | None = None, rows: slice | None = None) -> Grid:
    """Return the grid of the weight of ``layer``, as (groups, outputs, inputs) matrices.

    Args:
        layer: a quantized Linear or Conv layer.
        amax: the range in place of that of its weight quantizer, of the same shape.
        rows: some output channels of a layer with one group; ``amax`` is theirs.
    """
    quantizer, weight = weight_quantizer(layer), layer.weight.detach()
    if rows is not None:
        weight = weight[rows]
    d = quantizer.descriptor
    amax = quantizer.range_for(weight) if amax is None else amax
    compute = torch.float64 if weight.dtype is torch.float64 else torch.float32
    aligned = d.granularity.align(amax.to(compute), weight.shape)
    scale = scale_from_amax(aligned, d.format, d.block_scale_format)
    split = d.granularity.split(weight)
    whole = [
        weight_matrix(layer, d.granularity.join(t.expand_as(split), weight.shape))
        for t in (scale, divisor(aligned, scale))
    ]
    return Grid(whole[0], whole[1], d.format)


def check_on_grid(where: str, name: str, layer: Any, weight: Tensor) -> None:
    """Raise an error unless the quantizer of ``layer`` returns ``weight`` bit for bit."""
    if not torch.equal(weight_quantizer(layer)(weight), weight):
        raise QuantizationError(
            f"{where}: {name}: got rounded weights that {weight_quantizer(layer).descriptor} "
            f"changes in {weight.dtype}; expected values of its grid. Use a wider dtype"
        )

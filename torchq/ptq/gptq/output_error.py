"""The error that the rounding of a weight makes at the output of its layer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torchq.ptq.gptq.solver import quadratic_error
from torchq.ptq.gptq.statistics import Moments, row_parts
from torchq.workflow.layer_matrices import weight_matrix

__all__ = ["OutputError"]

Rows = Callable[[slice], Tensor]


class OutputError:
    """The power of the error of the output, over the variance of the target.

    The target is that of the moments. Where they have none, it is the output of the float weight on
    the same inputs. The weight is read in parts of its rows.

    Args:
        layer: with the float weight and bias.
        moments: of its inputs and targets, before any damping.
    """

    def __init__(self, layer: Any, moments: Moments) -> None:
        self._weight = weight_matrix(layer, layer.weight.detach())
        self._bias = None if layer.bias is None else layer.bias.detach().view(len(moments.x), -1)
        self._moments = moments
        self.variance = sum(float(self._variance(part)) for part in self._parts())

    def _parts(self) -> list[slice]:
        groups, rows, columns = self._weight.shape
        return row_parts(rows, groups * columns * 8)

    def _variance(self, part: slice) -> Tensor:
        """Return the sum of the variances of some outputs."""
        m = self._moments
        if m.tt is None or m.t is None:
            weight = self._weight[:, part].to(m.xx.dtype)
            mean = (weight @ m.x.unsqueeze(2)).squeeze(2)
            return (quadratic_error(weight, m.xx) - mean.square()).sum()
        tt, t = m.tt[:, part], m.t[:, part]
        return (tt if m.centred else tt - t.square()).sum()

    def of(self, rows: Rows, bias: Tensor | None = None) -> float:
        """Return the relative error of other weights.

        Args:
            rows: from a slice of the rows of the weight matrix to these rows.
            bias: in place of that of the layer.
        """
        bias = self._bias if bias is None else bias.view(len(self._weight), -1)
        power = sum(float(self._power(rows(part), part, bias).sum()) for part in self._parts())
        return power / max(self.variance, 1e-30)

    def _power(self, weight: Tensor, part: slice, bias: Tensor | None) -> Tensor:
        """Return the mean squared error of some outputs."""
        m = self._moments
        weight = weight.to(m.xx.dtype)
        if m.tx is None or m.tt is None or m.t is None:
            return quadratic_error(weight - self._weight[:, part].to(weight.dtype), m.xx)
        shift = torch.zeros_like(m.t) if bias is None else bias.to(m.t.dtype)
        mean, shift = (weight @ m.x.unsqueeze(2)).squeeze(2), shift[:, part]
        power = m.tt[:, part] - 2 * (weight * m.tx[:, part]).sum(2) + quadratic_error(weight, m.xx)
        if m.centred:
            return power.clamp(min=0) + (m.t[:, part] - mean - shift).square()
        return (power - 2 * shift * (m.t[:, part] - mean) + shift.square()).clamp(min=0)

"""The error that the rounding of a weight makes at the output of its layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torchq.ptq.gptq.solver import quadratic_error
from torchq.ptq.gptq.statistics import Moments
from torchq.workflow.layer_matrices import weight_matrix

__all__ = ["OutputError"]


class OutputError:
    """The power of the error of the output, over the variance of the target.

    The target is that of the moments. Where they have none, it is the output of the float weight on
    the same inputs.

    Args:
        layer: with the float weight and bias.
        moments: of its inputs and targets, before any damping.
    """

    def __init__(self, layer: Any, moments: Moments) -> None:
        self._weight = weight_matrix(layer, layer.weight.detach())
        self._bias = None if layer.bias is None else layer.bias.detach().view(len(moments.x), -1)
        self._moments = moments
        self.variance = float(self._variance())

    def _variance(self) -> Tensor:
        """Return the sum of the variances of the outputs."""
        m = self._moments
        if m.tt is None or m.t is None:
            weight = self._weight.to(m.xx.dtype)
            mean = (weight @ m.x.unsqueeze(2)).squeeze(2)
            return (quadratic_error(weight, m.xx) - mean.square()).sum()
        return (m.tt if m.centred else m.tt - m.t.square()).sum()

    def of(self, weight: Tensor, bias: Tensor | None = None) -> float:
        """Return the relative error of another weight matrix, and of a bias in place of its own."""
        bias = self._bias if bias is None else bias.view(len(self._weight), -1)
        return float(self._power(weight, bias).sum()) / max(self.variance, 1e-30)

    def _power(self, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Return the mean squared error of the outputs."""
        m = self._moments
        weight = weight.to(m.xx.dtype)
        if m.tx is None or m.tt is None or m.t is None:
            return quadratic_error(weight - self._weight.to(weight.dtype), m.xx)
        shift = torch.zeros_like(m.t) if bias is None else bias.to(m.t.dtype)
        mean = (weight @ m.x.unsqueeze(2)).squeeze(2)
        power = m.tt - 2 * (weight * m.tx).sum(2) + quadratic_error(weight, m.xx)
        if m.centred:
            return power.clamp(min=0) + (m.t - mean - shift).square()
        return (power - 2 * shift * (m.t - mean) + shift.square()).clamp(min=0)

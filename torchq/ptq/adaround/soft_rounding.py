"""Rounding that can be learned: every weight lies between the grid values below and above it.

Reference: Nagel et al., Up or Down? Adaptive Rounding for Post-Training Quantization (ICML 2020),
section 3.3.
"""

from __future__ import annotations

from torch import Tensor

# The stretch of the sigmoid of the paper, so that it reaches 0 and 1.
_GAMMA, _ZETA = -0.1, 1.1
# How far a start value stays away from 0 and 1, where the gradient would vanish.
_MARGIN = 0.02


def rectified_sigmoid(v: Tensor) -> Tensor:
    """Return ``clip(sigmoid(v) (zeta - gamma) + gamma, 0, 1)`` (equation 23)."""
    return (v.sigmoid() * (_ZETA - _GAMMA) + _GAMMA).clamp(0, 1)


def _inverse(h: Tensor) -> Tensor:
    p = (h - _GAMMA) / (_ZETA - _GAMMA)
    return p.log() - (1 - p).log()


def decision_penalty(h: Tensor, beta: float) -> Tensor:
    """Return the sum of ``1 - |2 h - 1|^beta`` (equation 24), 0 where all h are 0 or 1."""
    return (1 - (2 * h - 1).abs().pow(beta)).sum()


class SoftWeight:
    """A weight ``scale * clip(floor(weight / scale) + h(v), quant_min, quant_max)``.

    Attributes:
        v: what is learned; at the start the soft weight is about ``weight``.
    """

    def __init__(self, weight: Tensor, scale: Tensor, quant_min: float, quant_max: float) -> None:
        self._scale, self._bounds = scale, (quant_min, quant_max)
        codes = (weight / scale).clamp(quant_min, quant_max)
        self._floor = codes.floor()
        rest = (codes - self._floor).clamp(_MARGIN, 1 - _MARGIN)
        self.v = _inverse(rest).requires_grad_()

    def value(self) -> Tensor:
        """Return the soft weight, differentiable by :attr:`v`."""
        return (self._floor + rectified_sigmoid(self.v)).clamp(*self._bounds) * self._scale

    def rounded(self) -> Tensor:
        """Return the weight on the grid, each h rounded to 0 or 1."""
        up = (self.v.detach() >= 0).to(self._scale.dtype)
        return (self._floor + up).clamp(*self._bounds) * self._scale

    def undecided(self) -> int:
        """Return how many weights still lie between 0.05 and 0.95 of the way up."""
        h = rectified_sigmoid(self.v.detach())
        return int(((h > 0.05) & (h < 0.95)).sum())


def start_near(rounded: Tensor, wanted: Tensor, scale: Tensor) -> Tensor:
    """Return a weight that rounds to ``rounded`` and lies as near to ``wanted`` as it can.

    ``rounded`` may be several values of the grid away from ``wanted``, what it was rounded from.
    """
    return rounded + (wanted - rounded).clamp(-0.45 * scale, 0.45 * scale)

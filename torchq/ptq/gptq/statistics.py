"""The statistics of least squares: second moments of the inputs of a layer and of its targets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["MomentSums", "Moments"]


@dataclass(frozen=True)
class Moments:
    """Means over all samples, all in float64.

    Attributes:
        x: (groups, inputs), the mean input.
        t: (groups, outputs), the mean target; None without targets.
        xx: (groups, inputs, inputs), the mean of ``x x^T``, of inputs less their mean if centred.
        tx: (groups, outputs, inputs), the mean of ``t x^T``, the same for both; None without
            targets.
        tt: (groups, outputs), the mean of ``t^2``, the same; None without targets.
        centred: the moments are about the means.
    """

    x: Tensor
    t: Tensor | None
    xx: Tensor
    tx: Tensor | None
    tt: Tensor | None
    centred: bool

    @property
    def finite(self) -> bool:
        """True if no NaN or infinity was seen."""
        return all(bool(m.isfinite().all()) for m in (self.xx, self.tx, self.tt) if m is not None)


class MomentSums:
    """Running sums of products.

    The products of one batch are in float32, their sums in float64.
    """

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.count = 0

    def add(self, x: Tensor, t: Tensor | None = None) -> None:
        """Add samples.

        Args:
            x: (groups, inputs, samples).
            t: (groups, outputs, samples); None, for every call, leaves the targets out.
        """
        x, t = x.float(), None if t is None else t.float()
        self._add(0, x.sum(2, dtype=torch.float64))
        self._add(1, x @ x.mT)
        if t is not None:
            self._add(2, t.sum(2, dtype=torch.float64))
            self._add(3, t.square().sum(2))
            self._add(4, t @ x.mT)
        self.count += x.shape[2]

    def _add(self, number: int, value: Tensor) -> None:
        """Add to one of the sums, or make it."""
        if number == len(self.sums):
            self.sums.append(value.double())
        else:
            self.sums[number] += value

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sum over the processes of ``group``; None leaves everything as it is."""
        if group is None:
            return
        count = torch.tensor([self.count], dtype=torch.float64, device=self.sums[0].device)
        for tensor in (count, *self.sums):
            dist.all_reduce(tensor, group=group)
        self.count = int(count)

    def take_moments(self, *, centred: bool) -> Moments:
        """Return the means, and forget the sums.

        Args:
            centred: take the moments about the mean input and the mean target.
        """
        x, xx, *of_targets = (total.div_(max(self.count, 1)) for total in self.sums)
        self.sums = []
        if centred:
            xx -= x.unsqueeze(2) * x.unsqueeze(1)
        if not of_targets:
            return Moments(x, None, xx, None, None, centred)
        t, tt, tx = of_targets
        if centred:
            tx -= t.unsqueeze(2) * x.unsqueeze(1)
            tt -= t.square()
        return Moments(x, t, xx, tx, tt, centred)

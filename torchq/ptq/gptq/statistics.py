"""The statistics of least squares: second moments of the inputs of a layer and of its targets."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Moments", "MomentSums"]


@dataclass(frozen=True)
class Moments:
    """Means over all samples, in float64.

    Attributes:
        x: (groups, inputs), the mean input; 0 if not centred.
        t: (groups, outputs), the mean target; 0 if not centred.
        xx: (groups, inputs, inputs), the mean of ``(x - mean) (x - mean)^T``.
        tx: (groups, outputs, inputs), the mean of ``(t - mean) (x - mean)^T``.
        tt: (groups, outputs), the mean of ``(t - mean)^2``.
    """

    x: Tensor
    t: Tensor
    xx: Tensor
    tx: Tensor
    tt: Tensor

    @property
    def finite(self) -> bool:
        """True if no NaN or infinity was seen."""
        return all(bool(m.isfinite().all()) for m in (self.xx, self.tx, self.tt))


class MomentSums:
    """Running sums of products, exact enough for float64 however many samples there are."""

    def __init__(self) -> None:
        self.sums: list[Tensor] = []
        self.count = 0

    def add(self, x: Tensor, t: Tensor) -> None:
        """Add samples.

        Args:
            x: (groups, inputs, samples).
            t: (groups, outputs, samples).
        """
        x, t = x.float(), t.float()
        products = [
            *(x.sum(2, dtype=torch.float64), t.sum(2, dtype=torch.float64)),
            *(x @ x.mT, t @ x.mT, t.square().sum(2)),
        ]
        parts = [p.double() for p in products]
        self.sums = [a + b for a, b in zip(self.sums, parts, strict=True)] if self.sums else parts
        self.count += x.shape[2]

    def reduce(self, group: dist.ProcessGroup | None) -> None:
        """Sum over the processes of ``group``; None leaves everything as it is."""
        if group is None:
            return
        count = torch.tensor([self.count], dtype=torch.float64, device=self.sums[0].device)
        for tensor in (count, *self.sums):
            dist.all_reduce(tensor, group=group)
        self.count = int(count)

    def moments(self, *, centred: bool) -> Moments:
        """Return the means; with ``centred`` about the mean input and the mean target."""
        x, t, xx, tx, tt = (s / max(self.count, 1) for s in self.sums)
        if not centred:
            return Moments(torch.zeros_like(x), torch.zeros_like(t), xx, tx, tt)
        return Moments(
            x,
            t,
            xx - x.unsqueeze(2) * x.unsqueeze(1),
            tx - t.unsqueeze(2) * x.unsqueeze(1),
            tt - t.square(),
        )

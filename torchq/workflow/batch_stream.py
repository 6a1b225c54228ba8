"""The batches of one calibration and how they are run."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from torchq.graph import Forward, call_model
from torchq.utils import device_of, progress_bar

__all__ = ["BatchStream"]

# A loader with more batches than this is offered a bound in the progress bar.
_MANY = 64


@dataclass(frozen=True)
class BatchStream:
    """The batches of one calibration and how they are run.

    Attributes:
        batches: each holds the arguments of one call.
        forward: called as ``forward(model, batch)`` in place of the model, or None.
        num_batches: the number of batches to stop after, or None.
        progress: show a bar.
    """

    batches: Iterable[Any]
    forward: Forward | None
    num_batches: int | None
    progress: bool

    def run(self, model: nn.Module, show: bool) -> int:
        """Run ``model`` on every batch and return how many there were."""
        length = len(self.batches) if isinstance(self.batches, Sized) else None
        total = self.num_batches if length is None else length
        if length is not None and self.num_batches is not None:
            total = min(length, self.num_batches)
        device, count = device_of(model), 0
        unbounded = self.num_batches is None and (length is None or length > _MANY)
        text = "calibrate (all batches; num_batches=N stops earlier)" if unbounded else "calibrate"
        shown = progress_bar(
            islice(self.batches, self.num_batches),
            description=text,
            total=total,
            enabled=self.progress and show,
        )
        for batch in shown:
            call_model(model, batch, forward=self.forward, device=device)
            count += 1
        return count

"""Two models side by side in one report."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import nn

from torchq.analysis.batches import checked_batches, gathered
from torchq.analysis.page.collect import collect
from torchq.analysis.page.document import Report, check_path
from torchq.errors import CalibrationError
from torchq.graph import Forward
from torchq.utils import uncompiled

__all__ = ["compare"]

_WHERE = "compare"


@uncompiled()
def compare(
    a: nn.Module,
    b: nn.Module,
    batches: Iterable[Any],
    path: str | os.PathLike[str] | None = None,
    metric: Any = None,
    *,
    labels: tuple[str, str] = ("A", "B"),
    forward: Forward | None = None,
    num_batches: int | None = None,
    group: dist.ProcessGroup | None = None,
    progress: bool = True,
) -> Report:
    """Put two quantized models side by side: two recipes, or two checkpoints.

    Args:
        a: quantized and calibrated; left unchanged.
        b: the other one, with the same inputs.
        batches: as for :func:`torchq.report`.
        path: a file with suffix .html, .json, .txt or .md; None writes none.
        metric: as for :func:`torchq.report`.
        labels: what the two are called.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        group: join the figures of these processes, each with its own batches; the first one
            writes the file, and its batches are those of the doctor.
        progress: show bars.

    Returns:
        One report of both; ``print`` it, or ``save`` it.

    Raises:
        ConfigError: A model has no quantizer that is on, or an argument is invalid.
        CalibrationError: There was no batch.

    Example:
        >>> models = [torch.nn.Sequential(torch.nn.Linear(4, 2)) for _ in range(2)]
        >>> batches = [torch.randn(8, 4)]
        >>> for model, bits in zip(models, (8, 4)):
        ...     swapped = torchq.quantize_(model, torchq.recipes.integer(bits, bits))
        ...     calibrated = torchq.calibrate(model, batches, progress=False)
        >>> found = torchq.compare(*models, batches, labels=("INT8", "INT4"), progress=False)
        >>> [data["label"] for data in found.reports]
        ['INT8', 'INT4']
    """
    if path is not None:
        check_path(path)
    kept = list(islice(checked_batches(_WHERE, batches, num_batches), num_batches))
    if not all(gathered(len(kept), group)):
        raise CalibrationError(f"{_WHERE}: got no batch; expected at least one")
    reports = [
        {**collect(model, kept, metric, False, forward, group, progress), "label": label}
        for model, label in zip((a, b), labels, strict=True)
    ]
    found = Report({"reports": reports})
    if path is not None and (group is None or dist.get_rank(group) == 0):
        found.save(path)
    return found

"""One call for the whole report."""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch.distributed as dist
from torch import nn

from torchq.analysis.batches import checked_batches, gathered
from torchq.analysis.mixed import MixedPrecision
from torchq.analysis.page.collect import collect
from torchq.analysis.page.document import Report, check_path
from torchq.errors import CalibrationError
from torchq.graph import Forward
from torchq.utils import uncompiled

__all__ = ["report"]

_WHERE = "report"


@uncompiled()
def report(
    model: nn.Module,
    batches: Iterable[Any],
    path: str | os.PathLike[str] | None = None,
    metric: Any = None,
    *,
    plan: MixedPrecision | bool = True,
    forward: Forward | None = None,
    num_batches: int | None = None,
    group: dist.ProcessGroup | None = None,
    progress: bool = True,
) -> Report:
    """Measure everything about a quantized model, and write it on one page.

    The page says in one sentence what quantization does to the model, which layers are to blame
    and what to do; then error along the network, ranking, histograms with the range of every
    method, weights per channel, sizes, alternatives and findings. The HTML file needs no network.

    Args:
        model: quantized and calibrated; left unchanged.
        batches: each holds the arguments of one call, perhaps followed by labels; see
            :func:`torchq.graph.call_arguments`. They are kept in memory.
        path: a file with suffix .html, .json, .txt or .md; None writes none.
        metric: ``metric(output, batch)`` or ``metric(model)``, larger for a better model; None
            compares predictions alone.
        plan: a result of :func:`torchq.mixed_precision` to show; True makes one, False does not.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        group: join the figures of these processes, each with its own batches; the first one
            writes the file, and its batches are those of the doctor.
        progress: show bars.

    Returns:
        The report; ``print`` it, show it in a notebook, or ``save`` it under other names.

    Raises:
        ConfigError: The model has no quantizer that is on, or an argument is invalid.
        CalibrationError: There was no batch.
        MissingExtraError: jinja2 is not installed, which HTML needs.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> swapped = torchq.quantize_(model)
        >>> batches = [torch.randn(8, 4)]
        >>> calibrated = torchq.calibrate(model, batches, progress=False)
        >>> found = torchq.report(model, batches, progress=False, plan=False)
        >>> found.data["verdict"]["grade"]
        'good'
    """
    if path is not None:
        check_path(path)
    kept = list(islice(checked_batches(_WHERE, batches, num_batches), num_batches))
    if not all(gathered(len(kept), group)):
        raise CalibrationError(f"{_WHERE}: got no batch; expected at least one")
    found = Report(collect(model, kept, metric, plan, forward, group, progress))
    if path is not None and (group is None or dist.get_rank(group) == 0):
        found.save(path)
    return found

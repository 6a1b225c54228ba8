"""The report of one model, and of two side by side."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

from torch import nn

from torchq.analysis.mixed_precision import MixedPrecision
from torchq.analysis.page.collect import collect
from torchq.analysis.page.document import Report, check_path
from torchq.graph import Forward
from torchq.utils import kept_batches, uncompiled


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
        progress: show bars.

    Returns:
        The report; ``print`` it, or ``save`` it under other names.

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
    kept = _checked("report", batches, num_batches, path)
    return _saved(Report(collect(model, kept, metric, plan, forward, progress)), path)


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
        >>> labels = ("INT8", "INT4")
        >>> found = torchq.analysis.compare(*models, batches, labels=labels, progress=False)
        >>> [data["label"] for data in found.reports]
        ['INT8', 'INT4']
    """
    kept = _checked("compare", batches, num_batches, path)
    reports = [
        {**collect(model, kept, metric, False, forward, progress), "label": label}
        for model, label in zip((a, b), labels, strict=True)
    ]
    return _saved(Report({"reports": reports}), path)


def _saved(found: Report, path: str | os.PathLike[str] | None) -> Report:
    if path is not None:
        found.save(path)
    return found


def _checked(where: str, batches: Iterable[Any], num_batches: int | None, path: Any) -> list[Any]:
    """Return the batches after the checks that come before any work."""
    if path is not None:
        check_path(path)
    return kept_batches(where, batches, num_batches)

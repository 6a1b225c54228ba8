"""The measurement: every group alone, on every batch."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from typing import Any, Literal

import torch.distributed as dist
from torch import nn

from torchq.analysis.batches import checked_batches
from torchq.analysis.layers import quantized_layers
from torchq.analysis.ranking.groups import Group, Scope, find_groups
from torchq.analysis.ranking.measurement import Measured, Measurement
from torchq.analysis.ranking.metrics import Evaluate, Evaluation, find_metric
from torchq.analysis.ranking.report import SensitivityReport, SensitivityRow
from torchq.errors import ConfigError
from torchq.graph import Forward, state_kept
from torchq.utils import evaluating, uncompiled, unwrapped

__all__ = ["sensitivity"]

Mode = Literal["only", "all_but"]
_WHERE = "sensitivity"


@uncompiled()
def sensitivity(
    model: nn.Module,
    batches: Iterable[Any],
    metric: str | Evaluate = "sqnr",
    *,
    scope: Scope = "layer",
    mode: Mode = "only",
    forward: Forward | None = None,
    num_batches: int | None = None,
    resume: str | os.PathLike[str] | None = None,
    group: dist.ProcessGroup | None = None,
    progress: bool = True,
) -> SensitivityReport:
    """Rank the layers of a quantized model by what they cost at its output.

    Each run starts at the layer that is switched: blocks and layers before it return what they
    returned in one whole run. So all layers together take about half as many passes as there are
    layers. The model is left as it was, also after Ctrl-C.

    Args:
        model: quantized and calibrated.
        batches: each holds the arguments of one call, perhaps followed by labels; see
            :func:`torchq.graph.call_arguments`. A function ``metric(output, batch)`` gets them
            whole.
        metric: what is compared with the float model: ``"sqnr"`` (signal to noise ratio of the
            outputs), ``"kl"`` (divergence of class probabilities). Or a function that returns a
            number which is larger for a better model: ``metric(output, batch)``, or
            ``metric(model)``, which runs the model itself. Or ``"fisher"``: an estimate of the
            divergence from four backward passes for each batch, whatever the number of layers.
        scope: ``"layer"`` switches the quantizers of a layer together, ``"input"`` and
            ``"weight"`` a part of them; a list of patterns, or a mapping of names to patterns,
            makes each a group.
        mode: ``"only"`` quantizes one group and nothing else; ``"all_but"`` everything else.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        resume: a file that keeps results as they come. A call that finds it goes on from there.
        group: join the results of these processes, each with its own batches.
        progress: show a bar with the time left.

    Returns:
        The ranking. ``exclude=report.worst(2)`` leaves out the layers of its first two rows.

    Raises:
        ConfigError: The model has no quantizer that is on; an argument is invalid; or the file to
            resume from is of another run.
        CalibrationError: There was no batch.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> swapped = torchq.quantize_(model)
        >>> found = torchq.sensitivity(model, [torch.randn(8, 4)], progress=False)
        >>> sorted(found.worst(2))
        ['0', '1']
    """
    if mode not in ("only", "all_but"):
        raise ConfigError(f"{_WHERE}: got mode {mode!r}; expected 'only' or 'all_but'")
    model = unwrapped(model)
    stream = checked_batches(_WHERE, batches, num_batches)
    layers = quantized_layers(model, _WHERE)
    groups = find_groups(model, layers, scope)
    run = Measurement(model, layers, groups, mode, forward, num_batches, progress)
    with evaluating(model), state_kept(model):
        if metric == "fisher":
            found = run.estimate(stream, group)
        else:
            chosen = find_metric(_WHERE, metric)
            if isinstance(chosen, Evaluation):
                found = run.evaluate(chosen, resume)
            else:
                found = run.compare(chosen, stream, resume, group)
    return _report(found, groups, mode, scope if isinstance(scope, str) else "groups")


def _report(found: Measured, groups: list[Group], mode: str, scope: str) -> SensitivityReport:
    rows = [
        SensitivityRow(g.name, found.values[g.name], g.layers, tuple(g.quantizers))
        for g in groups
        if g.name in found.values
    ]
    # What hurts alone, or helps by its absence, is to be excluded first.
    largest_first = found.rising == (mode == "all_but")
    rows.sort(key=lambda row: _key(row.value, largest_first))
    return SensitivityReport(
        rows=tuple(rows),
        metric=found.metric,
        unit=found.unit,
        rising=found.rising,
        mode=mode,
        scope=scope,
        baseline=found.baseline,
        reference=found.reference,
        unseen=tuple(g.name for g in groups if g.name not in found.values),
        note=found.note,
    )


def _key(value: float, largest_first: bool) -> float:
    """Return the place of a value; NaN, the output of a broken layer, comes first."""
    if math.isnan(value):
        return -math.inf
    return -value if largest_first else value

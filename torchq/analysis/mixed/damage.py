"""What each format of each layer costs at the output."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch.distributed as dist
from torch import nn

from torchq.analysis.batches import gathered, place_in_group
from torchq.analysis.mixed.formats import Candidate
from torchq.analysis.ranking import sensitivity
from torchq.analysis.ranking.fisher import Disturbance, fisher_sums
from torchq.analysis.ranking.metrics import Evaluate, batch_size
from torchq.graph import Forward, call_model
from torchq.utils import device_of, progress_bar

__all__ = ["Damages", "estimated_damages", "measured_damages"]

#: (path of the layer, name of the format) -> damage.
Damages = dict[tuple[str, str], float]


def estimated_damages(
    model: nn.Module,
    candidates: Sequence[Candidate],
    names: Sequence[str],
    batches: Sequence[Any],
    forward: Forward | None,
    group: dist.ProcessGroup | None,
    progress: bool,
) -> Damages:
    """Return the estimates from gradients, for all layers and formats together.

    Args:
        model: the float model.
        candidates: one copy for each format.
        names: paths of the layers.
        batches: what to run.
        forward: the user's own way to run the model.
        group: processes with batches of their own.
        progress: show a bar.

    Raises:
        ConfigError: The output of the model has no classes.
    """
    disturbances = [
        Disturbance((name, candidate.name), model.get_submodule(name), _alone(candidate, name))
        for name in names
        for candidate in candidates
        if name in candidate.decisions
    ]
    device, first = device_of(model), place_in_group(len(batches), group)
    own: dict[Any, list[float]] = {}
    shown = progress_bar(batches, description="estimate damage", enabled=progress)
    for number, batch in enumerate(shown, first):
        call = partial(call_model, model, batch, forward=forward, device=device)
        _add(own, fisher_sums(call, disturbances, batch_size(batch), number))
    total: dict[Any, list[float]] = {}
    for part in gathered(own, group):
        _add(total, part)
    return {key: value / max(count, 1.0) for key, (value, count) in total.items()}


def _add(total: dict[Any, list[float]], new: dict[Any, list[float]]) -> None:
    for key, sums in new.items():
        total[key] = [a + b for a, b in zip(total.get(key, [0.0, 0.0]), sums, strict=True)]


def _alone(candidate: Candidate, name: str) -> Callable[[Any, Any], Any]:
    module = candidate.model.get_submodule(name)
    return lambda args, kwargs: module.forward(*args, **kwargs)


def measured_damages(
    candidates: Sequence[Candidate],
    batches: Iterable[Any],
    metric: str | Evaluate,
    forward: Forward | None,
    group: dist.ProcessGroup | None,
    progress: bool,
) -> Damages:
    """Return the damage that each layer does when it alone is quantized.

    Signal to noise ratios become shares of noise, which add up over layers, and the user's
    figures become losses.
    """
    found: Damages = {}
    for candidate in candidates:
        report = sensitivity(
            candidate.model, batches, metric, forward=forward, group=group, progress=progress
        )
        for row in report.rows:
            if report.unit == "dB":
                damage = 10 ** (-row.value / 10)
            elif report.rising:
                damage = max((report.reference or 0.0) - row.value, 0.0)
            else:
                damage = row.value
            found[row.name, candidate.name] = math.inf if math.isnan(damage) else damage
    return found

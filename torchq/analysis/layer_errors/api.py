"""The call: every batch in float and quantized, layer by layer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from torchq.analysis.batches import checked_batches
from torchq.analysis.layer_errors.measurement import Measurement
from torchq.analysis.layer_errors.report import LayerErrors
from torchq.analysis.layer_errors.sampling import SAMPLE
from torchq.analysis.layers import active_quantizers, quantized_layers
from torchq.graph import Forward, call_model, state_kept
from torchq.utils import device_of, evaluating, progress_bar, uncompiled, unwrapped

__all__ = ["layer_errors"]


@uncompiled()
def layer_errors(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    forward: Forward | None = None,
    num_batches: int | None = None,
    sample: int | None = SAMPLE,
    group: dist.ProcessGroup | None = None,
    progress: bool = True,
) -> LayerErrors:
    """Measure the error of every quantized layer, alone and with all that came before it.

    Each batch runs twice, once with all quantizers off and once with all on. During the first run
    each layer is also called by itself with its quantizers on. So the work is that of three passes
    at most; convolutions and linear layers with large outputs are called on a part of the batch.

    Args:
        model: quantized and calibrated; left unchanged. Without calibration the ranges are those
            of each call.
        batches: each holds the arguments of one call; see :func:`torchq.graph.call_arguments`.
        forward: called as ``forward(model, batch)`` instead of the model itself.
        num_batches: the number of batches to stop after; None reads all of them.
        sample: about how many elements of each output are compared in one batch, those of the
            first images or sequences, at least four of these. None compares all.
        group: join the results of these processes, each with its own batches.
        progress: show a bar.

    Returns:
        A row for each layer; ``print`` it.

    Raises:
        ConfigError: The model has no quantizer that is on, or ``batches`` is no iterable of them.
        CalibrationError: There was no batch, or no layer was called.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 2))
        >>> report = torchq.quantize_(model)
        >>> errors = torchq.layer_errors(model, [torch.ones(1, 4)], progress=False)
        >>> [row.name for row in errors.rows]
        ['0', '1']
    """
    where, model = "layer_errors", unwrapped(model)
    stream = checked_batches(where, batches, num_batches)
    layers = quantized_layers(model, where)
    measurement = Measurement(layers, active_quantizers(model), sample)
    device = device_of(model)
    first = group is None or dist.get_rank(group) == 0
    with torch.no_grad(), evaluating(model), state_kept(model):
        shown = progress_bar(
            islice(stream, num_batches),
            description=where,
            total=stream.total,
            enabled=progress and first,
        )
        for batch in shown:
            measurement.run(partial(call_model, model, batch, forward=forward, device=device))
    measurement.join(group)
    return measurement.report()

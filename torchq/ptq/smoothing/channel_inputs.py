"""What layers read: the size of each channel, and some samples."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import CalibrationError
from torchq.graph import call_model
from torchq.ptq.blockwise import RunOptions
from torchq.ptq.ranks import Group, all_largest, all_rows, all_sums
from torchq.ptq.smoothing.groups import ChannelGroup
from torchq.utils import device_of, progress_bar

__all__ = ["Inputs", "observe_inputs"]

# Rows of the input of a layer that are kept in all.
_ROWS = 1024


@dataclass
class Inputs:
    """The inputs of one group.

    Attributes:
        largest: the largest magnitude of each channel.
        count: how many values of a channel that are.
        samples: some rows of the input, (rows, inputs).
    """

    largest: Tensor
    count: int
    samples: Tensor

    def over_ranks(self, group: Group) -> Inputs:
        """Return the inputs of all processes of ``group``."""
        count = torch.tensor(self.count, dtype=torch.float64, device=self.largest.device)
        (number,) = all_sums([count], group)
        largest = all_largest(self.largest, group)
        return Inputs(largest, int(number), all_rows(self.samples, group))

    def add(self, other: Inputs) -> Inputs:
        """Return the inputs of both."""
        return Inputs(
            torch.maximum(self.largest, other.largest),
            self.count + other.count,
            torch.cat([self.samples, other.samples]),
        )


def observe_inputs(
    where: str,
    model: nn.Module,
    groups: list[ChannelGroup],
    batches: list[Any],
    run: RunOptions,
    progress: bool,
) -> dict[str, Inputs]:
    """Run the float model and return what the first layer of each group reads.

    Args:
        where: the start of error texts.
        model: in float, without gradients.
        groups: of layers.
        batches: each holds the arguments of one call.
        run: how the model is run.
        progress: show a progress bar.

    Raises:
        CalibrationError: an input is NaN or infinite.
    """
    found: dict[str, Inputs] = {}

    def hook_for(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            x = (args[0] if args else kwargs["input"]).detach().float()
            inputs = _inputs(x, len(batches))
            found[name] = found[name].add(inputs) if name in found else inputs

        return hook

    with ExitStack() as stack:
        for group in groups:
            name, layer = group.layers[0]
            hook = layer.register_forward_pre_hook(hook_for(name), with_kwargs=True)
            stack.callback(hook.remove)
        for batch in progress_bar(batches, description=where, enabled=progress):
            call_model(model, batch, forward=run.forward, device=device_of(model))
    found = {name: inputs.over_ranks(run.group) for name, inputs in found.items()}
    for name, inputs in found.items():
        if not inputs.count:
            raise CalibrationError(
                f"{where}: {name}: got batches without rows; expected at least one row"
            )
        if not bool(inputs.largest.isfinite().all()):
            raise CalibrationError(
                f"{where}: {name}: got NaN or infinite inputs; expected finite ones. Check the "
                "batches and the layers before"
            )
    return found


def _inputs(x: Tensor, batches: int) -> Inputs:
    """Return the inputs of one call."""
    rows = x.flatten(0, -2) if x.dim() > 1 else x.unsqueeze(0)
    each = max(1, _ROWS // batches)
    samples = rows[:: max(1, len(rows) // each)][:each].clone()
    nothing = rows.new_zeros(1, rows.shape[1])
    largest = torch.cat([rows.abs(), nothing]).amax(0)  # also without a row
    return Inputs(largest, len(rows), samples)

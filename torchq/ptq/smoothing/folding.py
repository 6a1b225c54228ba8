"""The course of a call that folds factors of channels: find, observe, fold, verify."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import nn

from torchq.errors import ConfigError, QuantizationError
from torchq.ptq.blockwise import RunOptions
from torchq.ptq.channels import largest_change
from torchq.ptq.modes import quantizers_off
from torchq.ptq.smoothing.channel_inputs import Inputs, observe_inputs
from torchq.ptq.smoothing.factors import model_outputs, relative_error, restored_on_error
from torchq.ptq.smoothing.groups import ChannelGroup, find_groups
from torchq.utils import evaluating, kept_batches
from torchq.workflow import quantizers

__all__ = ["check_not_calibrated", "fold_all"]

# The change of a float32 output that is accepted without being asked for.
_TOLERANCE = 1e-4

Result = TypeVar("Result")


def check_not_calibrated(where: str, model: nn.Module) -> None:
    """Raise an error for a calibrated model."""
    known = [name for name, q in quantizers(model).items() if q.calibrated]
    if known:
        raise ConfigError(
            f"{where}: got a calibrated model ({known[0]} has a range), whose ranges would be "
            "wrong afterwards; expected a call before torchq.calibrate"
        )


def fold_all(
    where: str,
    model: nn.Module,
    batches: Iterable[Any],
    fold: Callable[[ChannelGroup, Inputs], Result],
    *,
    tolerance: float | None,
    run: RunOptions,
    progress: bool,
) -> tuple[tuple[Result, ...], dict[str, str], float]:
    """Fold factors into all groups of layers of one input, and verify the output; or do nothing.

    Args:
        where: the start of error texts.
        model: quantized and not calibrated.
        batches: each holds the arguments of one call.
        fold: changes one group in place, in float.
        tolerance: the largest relative change of the float output; None chooses it by the dtype.
        run: how the model is run.
        progress: show progress bars.

    Returns:
        What ``fold`` returned, in running order; the reasons for layers that were left alone; and
        the change of the output.
    """
    kept = kept_batches(where, batches, run.num_batches)
    with torch.no_grad(), evaluating(model), quantizers_off(model):
        groups, skipped = find_groups(model, kept[0])
        if not groups:
            reasons = "; ".join(f"{name}: {text}" for name, text in list(skipped.items())[:3])
            raise ConfigError(
                f"{where}: got no layer to treat ({reasons or 'none is quantized'}); expected "
                "quantized Linear layers whose input channels can take factors. Run "
                "torchq.quantize_ first, or leave this algorithm out"
            )
        seen = observe_inputs(where, model, groups, kept, run, progress)
        expected = model_outputs(model, kept[0], run)
        most = _largest_change(groups) if tolerance is None else tolerance
        with restored_on_error(groups):
            folded = [fold(group, seen[group.names[0]]) for group in groups]
            error = relative_error(model_outputs(model, kept[0], run), expected, run.group)
            if not error <= most:
                raise QuantizationError(
                    f"{where}: the float output changed by {error:.1e}, relative; expected at most "
                    f"{most:.1e}. The model is as before. A norm may use its weight in "
                    "another way than as a factor"
                )
    return tuple(folded), skipped, error


def _largest_change(groups: list[ChannelGroup]) -> float:
    """Return the change of the float output that is accepted without being asked for."""
    return largest_change(_TOLERANCE, groups[0].layers[0][1].weight.dtype)

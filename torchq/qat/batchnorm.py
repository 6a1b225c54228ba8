"""BatchNorm during quantization-aware training: freeze its statistics, or estimate them again."""

from collections.abc import Iterable

import torch
from torch import nn

from torchq.errors import ConfigError
from torchq.graph import Forward, call_model
from torchq.graph.operators import BATCH_NORMS
from torchq.nn import freeze_norm_, unfreeze_norm_
from torchq.utils import (
    check_batches,
    device_of,
    evaluating,
    network_of,
    progress_bar,
    undone_on_error,
)

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


def freeze_bn_(model: nn.Module) -> tuple[str, ...]:
    """Fix the statistics of every BatchNorm of ``model`` for good, in place.

    The statistics are used, do not move, and stay fixed after ``model.train()``. The affine
    parameters keep learning. :func:`unfreeze_bn_` undoes it.

    Args:
        model: any module; changed in place.

    Returns:
        The paths of the layers that it froze.
    """
    model = network_of(model)
    return tuple(
        name for name, module in list(model.named_modules()) if freeze_norm_(module)
    )


def unfreeze_bn_(model: nn.Module) -> tuple[str, ...]:
    """Undo :func:`freeze_bn_`, in place; each layer takes the mode of ``model``.

    Args:
        model: any module; changed in place.

    Returns:
        The paths of the layers that are free again.
    """
    model = network_of(model)
    modules = list(model.named_modules())
    training = model.training
    return tuple(name for name, module in modules if unfreeze_norm_(module, training))


def freeze_bn_from_(model: nn.Module, step: int, start: int) -> tuple[str, ...]:
    """Let the statistics of every BatchNorm move before step ``start``, and stay from then on.

    The BatchNorms stay frozen after ``model.train()``; see :func:`torchq.qat.freeze_bn_`.

    Args:
        model: any module; changed in place.
        step: the number of the step that comes now.
        start: the first step with fixed statistics.

    Returns:
        The paths of the layers that were frozen or freed.
    """
    return freeze_bn_(model) if step >= start else unfreeze_bn_(model)


def reestimate_bn_(
    model: nn.Module,
    batches: Iterable[object],
    *,
    forward: Forward | None = None,
    num_batches: int | None = None,
    progress: bool = True,
) -> int:
    """Replace the running statistics of every BatchNorm by the average over ``batches``, in place.

    Quantization shifts the activations that a BatchNorm sees, so its statistics from float
    training do not fit any more. The quantizers do what they do in training.

    Args:
        model: a model with BatchNorm layers; changed in place. Its other layers run in eval mode.
        batches: as for :func:`torchq.calibrate`.
        forward: as for :func:`torchq.calibrate`.
        num_batches: the number of batches to stop after; None reads all of them.
        progress: show a bar.

    Returns:
        How many batches the new statistics are the average of.

    Raises:
        ConfigError: The model has no BatchNorm with statistics, or there was no batch.

    Reference: Nagel et al., A White Paper on Neural Network Quantization (2021), section 4.2.1.
    """
    model = network_of(model)
    check_batches("reestimate_bn_", batches, num_batches)
    norms = [
        m
        for m in model.modules()
        if isinstance(m, BATCH_NORMS) and m.running_mean is not None
    ]
    if not norms:
        raise ConfigError(
            f"reestimate_bn_: {type(model).__name__} has no BatchNorm with running statistics; "
            "expected at least one"
        )
    statistics = [
        b for m in norms for n, b in m.named_buffers(recurse=False) if n in _STATISTICS
    ]
    momenta = [m.momentum for m in norms]
    count = 0
    try:
        with undone_on_error(written=statistics), torch.no_grad(), evaluating(model):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = (
                    None  # torch takes this for the plain average over all batches
                )
                norm.training = True
            for batch in progress_bar(
                batches, description="batch norm", most=num_batches, enabled=progress
            ):
                call_model(model, batch, forward=forward, device=device_of(model))
                count += 1
            if not count:
                raise ConfigError("reestimate_bn_: got no batch; expected at least one")
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    return count

"""BatchNorm during quantization-aware training: freeze its statistics, or estimate them anew."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from torchq.errors import ConfigError
from torchq.graph import call_model
from torchq.nn import freeze_norm_, unfreeze_norm_
from torchq.utils import device_of, evaluating, progress_bar

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)

__all__ = ["freeze_bn_", "unfreeze_bn_", "reestimate_bn", "Reestimate"]


def freeze_bn_(model: nn.Module) -> nn.Module:
    """Fix the statistics of every BatchNorm of ``model`` for good: they are used, do not move, and survive ``model.train()``.

    In place, returns the model. The affine parameters keep learning. :func:`unfreeze_bn_` undoes it.
    """
    for module in model.modules():
        freeze_norm_(module)
    return model


def unfreeze_bn_(model: nn.Module) -> nn.Module:
    """Inverse of :func:`freeze_bn_`; each layer takes the mode of the model."""
    for module in list(model.modules()):
        unfreeze_norm_(module, model.training)
    return model


class Reestimate:
    """What :func:`reestimate_bn` returns; :meth:`remove` puts the old statistics back."""

    def __init__(self, saved: Sequence[tuple[nn.Module, dict[str, Tensor]]]) -> None:
        self._saved = saved

    def remove(self) -> None:
        """Restore the statistics from before."""
        for module, state in self._saved:
            module.load_state_dict(state, strict=False)


def reestimate_bn(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    num_batches: int | None = None,
    progress: bool = True,
) -> Reestimate:
    """Replace the running statistics of every BatchNorm by the average over ``batches``, with quantization as it is.

    Quantization shifts the activations that a BatchNorm sees; its statistics from float training do not fit them any more.

    Args:
        model: a model with BatchNorm layers; the rest of it runs in eval mode.
        batches, num_batches: as for :func:`torchq.calibrate`.

    Returns:
        a handle whose ``remove()`` undoes it.

    Raises:
        ConfigError: the model has no BatchNorm with statistics, or there was no batch.

    Reference: Nagel et al., A White Paper on Neural Network Quantization (2021), section 4.2.1.
    """
    norms = [m for m in model.modules() if isinstance(m, _NORMS) and m.running_mean is not None]
    if not norms:
        raise ConfigError(
            f"reestimate_bn: {type(model).__name__} has no BatchNorm with running statistics; expected at least one"
        )
    statistics = ("running_mean", "running_var", "num_batches_tracked")
    saved = [
        (m, {k: v.clone() for k, v in m.state_dict().items() if k in statistics}) for m in norms
    ]
    momenta = [m.momentum for m in norms]
    device = device_of(model)
    count = 0
    try:
        with torch.no_grad(), evaluating(model):
            for norm in norms:
                norm.reset_running_stats()
                norm.momentum = None  # torch: the plain average over all batches
                norm.training = True
            for batch in progress_bar(
                islice(batches, num_batches),
                description="batch norm",
                total=num_batches,
                enabled=progress,
            ):
                call_model(model, batch, device=device)
                count += 1
    finally:
        for norm, momentum in zip(norms, momenta, strict=True):
            norm.momentum = momentum
    handle = Reestimate(saved)
    if not count:
        handle.remove()
        raise ConfigError("reestimate_bn: got no batch; expected at least one")
    return handle

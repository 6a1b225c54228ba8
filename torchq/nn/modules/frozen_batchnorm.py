"""BatchNorm that stays in eval mode whatever ``model.train()`` says."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

from torchq.nn.convert import change_class

__all__ = [
    "FROZEN_NORMS",
    "FrozenBatchNorm1d",
    "FrozenBatchNorm2d",
    "FrozenBatchNorm3d",
    "FrozenSyncBatchNorm",
    "freeze_norm_",
    "unfreeze_norm_",
]

M = TypeVar("M", bound="_Frozen")


class _Frozen(nn.Module):
    def train(self: M, mode: bool = True) -> M:
        """Stay in eval mode: running statistics are used and do not move."""
        return super().train(False)


class FrozenBatchNorm1d(_Frozen, nn.BatchNorm1d):
    """A :class:`torch.nn.BatchNorm1d` with fixed statistics; made by :func:`freeze_norm_`."""


class FrozenBatchNorm2d(_Frozen, nn.BatchNorm2d):
    """A :class:`torch.nn.BatchNorm2d` with fixed statistics; made by :func:`freeze_norm_`."""


class FrozenBatchNorm3d(_Frozen, nn.BatchNorm3d):
    """A :class:`torch.nn.BatchNorm3d` with fixed statistics; made by :func:`freeze_norm_`."""


class FrozenSyncBatchNorm(_Frozen, nn.SyncBatchNorm):
    """A :class:`torch.nn.SyncBatchNorm` with fixed statistics; made by :func:`freeze_norm_`."""


#: Float class -> frozen class; exact types only.
FROZEN_NORMS: dict[type[nn.Module], type[nn.Module]] = {
    nn.BatchNorm1d: FrozenBatchNorm1d,
    nn.BatchNorm2d: FrozenBatchNorm2d,
    nn.BatchNorm3d: FrozenBatchNorm3d,
    nn.SyncBatchNorm: FrozenSyncBatchNorm,
}
_THAWED = {frozen: norm for norm, frozen in FROZEN_NORMS.items()}


def freeze_norm_(module: nn.Module) -> bool:
    """Freeze one normalisation layer in place; False where ``module`` is none that is known, or is frozen already."""
    frozen = FROZEN_NORMS.get(type(module))
    if frozen is None:
        return False
    change_class(module, frozen)
    module.train(False)
    return True


def unfreeze_norm_(module: nn.Module, training: bool) -> bool:
    """Inverse of :func:`freeze_norm_`; ``training`` is the mode afterwards."""
    norm = _THAWED.get(type(module))
    if norm is None:
        return False
    change_class(module, norm)
    module.train(training)
    return True
